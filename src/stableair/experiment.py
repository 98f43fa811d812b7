"""An experiment is one flat frozen value: numbers, and spec strings such as noise="sas(alpha=1.5, tau=0.1)"."""

import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from stableair.baseline import BASELINE_ARGUMENTS, BASELINE_SETTINGS
from stableair.checks import InputError, choice, fraction, nearest, number, place, positive, shown, whole
from stableair.choices import AUGMENTS, BLOCKS, ENGINES, NORM_STATS, PAYLOADS, PRECISIONS, SNR_BLOCKS, SPLITS
from stableair.spec import Call, Registry, equal, literal, parse_words, spell, written

HOMES = {  # which registry a spec is looked up in; a component's module is imported when it is asked for
    "data": ("stableair.data.sets", "dataset"),
    "partition": ("stableair.data.partitions", "partition"),
    "model": ("stableair.models", "model"),
    "participation": ("stableair.participants", "participation"),
    "power": ("stableair.channels.kinds", "power"),
    "channel": ("stableair.channels.kinds", "channel"),
    "fading": ("stableair.channels.kinds", "fading"),
    "noise": ("stableair.channels.kinds", "noise"),
    "receiver": ("stableair.receivers.rules", "receiver"),
    "server": ("stableair.servers", "server"),
}
PARTS = {  # likewise for the specs that stand within another's
    "basis": ("stableair.channels.kinds", "basis"),
    "quantizer": ("stableair.channels.kinds", "quantizer"),
    "aggregator": ("stableair.channels.kinds", "aggregator"),
}
EXECUTION = "rounds", "device", "engine", "precision", "chunk"  # how far and on what it runs: no part of what it is
MOST = 10**9  # clients, rounds, epochs, samples in a batch: no honest number is larger
LARGEST_LR = 1e38  # what float32 holds
ARGUMENTS = "arguments"  # in experiment.json: what every component was called with, defaults included
FIRST = (  # the settings that every record has; the others came later
    "data", "partition", "model", "clients", "rounds", "seed", "local_epochs", "batch_size", "lr", "payload", "blocks",
    "fading", "noise", "receiver", "server", "evaluate", "device", "engine", "chunk",
)  # fmt: skip
MOVED = {"noise_on": "channel.noise_on={}"}  # settings of 0.1 and what they are now

T = TypeVar("T")

IDEAL = {"fading": "unit()", "noise": "none()", "receiver": "none()"}  # the paper's upper bound
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits"},
    "digits-noniid": {"partition": "dirichlet(beta=0.3)"},
    "demo": {"rounds": 60, "noise": "sas(alpha=1.5, tau=0.5)"},
    # The paper's set-ups; C is this project's, 1.3 tau, since the paper names none.
    "cifar10": {"data": "cifar10", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated"},
    "cifar10-noniid": {
        "data": "cifar10", "partition": "dirichlet(beta=0.3)", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated",
    },
    "cifar100": {"data": "cifar100", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated"},
    "femnist": {"data": "femnist", "partition": "by_writer()", "receiver": "mac(C=0.13)"},
}  # fmt: skip


def _strict(cls: type[T]) -> type[T]:
    """A misspelt field is an InputError with a suggestion, as everywhere else, and not Python's TypeError."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def strict(self: T, *args: Any, **settings: Any) -> None:
        if args:
            raise InputError(f"settings are given by name, such as data={args[0]!r}")
        check_known(settings)
        init(self, **settings)

    cls.__init__ = strict  # type: ignore[method-assign, assignment]
    return cls


def check_known(settings: dict[str, Any], *others: str) -> None:
    """Refuse settings that are no fields of an experiment, nor one of the others."""
    for key, value in settings.items():
        if key in MOVED:
            raise InputError(f"setting {key!r} is now {MOVED[key].format(value)}")
        if key not in (allowed := [*TYPES, *others]):
            raise InputError(f"setting {key!r} is unknown; {nearest(key, allowed)}")


def registry(field: str) -> Registry:
    """The registry in which the specs of a field, or of a part of one, are looked up."""
    module, name = (HOMES | PARTS)[field]
    found = getattr(import_module(module), name)
    assert isinstance(found, Registry)
    return found


@_strict
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The paper's set-up on the embedded data, until a field says otherwise.

    The paper names neither a number of rounds nor a threshold: rounds=100 and C=1 are this project's choices.
    """

    data: str = "digits"
    partition: str = "iid()"
    model: str = "auto"  # the data set's own
    clients: int = 50
    rounds: int = 100
    seed: int = 0
    local_epochs: int = 5
    batch_size: int = 10
    lr: float = 0.03
    augment: str = "none"  # or "crop_flip": each image of a local batch is moved by up to 4 pixels and may be mirrored
    payload: str = "gradient"  # what a client sends: (w_k - w_{k,n}) / lr, or with "delta" w_k - w_{k,n}
    blocks: str = "tensor"  # what an entry-wise receiver works on: each tensor, each layer, or the whole model
    participation: str = "all()"  # who takes part in a round
    power: str = "none()"  # what a client does to its payload before it sends it
    channel: str = "flat()"  # Eq. (3)
    fading: str = "rayleigh(mean=1)"
    noise: str = "sas(alpha=1.5, tau=0.1)"
    receiver: str = "mac(C=1)"
    server: str = "sgd()"
    evaluate: str = "test"  # or "validation": a fifth of the training data is held out and the test data stay unseen
    norm_stats: str = "clients"  # batch norm's statistics in the evaluation: the "clients'", "recalibrated", or "batch"
    average: float = 0.0  # of the model over the rounds, for the evaluation alone: 0.8 keeps so much of the old one
    snr_blocks: str = "none"  # or "tensor", "layer": record the SNR of each of them too
    device: str = "auto"  # a GPU where there is one
    engine: str = "auto"  # or "reference", or "fast"
    precision: str = "auto"  # or "fp32", "tf32", "bf16", with the fast engine
    chunk: int = 0  # clients whose updates are in memory at once; 0 for as many as fit

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "local_epochs", "batch_size"):
            self._set(name, whole(name, getattr(self, name), 1, MOST))
        self._set("chunk", whole("chunk", self.chunk, 0, MOST))
        self._set("seed", whole("seed", self.seed))
        self._set("lr", number("lr", positive("lr", self.lr), high=LARGEST_LR))
        choice("payload", self.payload, PAYLOADS)
        choice("augment", self.augment, AUGMENTS)
        choice("blocks", self.blocks, BLOCKS)
        choice("evaluate", self.evaluate, SPLITS)
        choice("norm_stats", self.norm_stats, NORM_STATS)
        self._set("average", fraction("average", self.average))
        choice("snr_blocks", self.snr_blocks, SNR_BLOCKS)
        choice("engine", self.engine, ENGINES)
        choice("precision", self.precision, ["auto", *PRECISIONS])
        if not isinstance(self.device, str):
            raise InputError(f"device must be a name such as 'cpu' or 'cuda:0': got {self.device!r}")
        for name in HOMES:
            for call in (calls := self._calls(name)):
                if name != "data":  # a data set is made when it is needed
                    call()
            self._set(name, " | ".join(map(str, calls)) or "auto")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _calls(self, name: str) -> tuple[Call, ...]:
        text = getattr(self, name)
        if name == "model" and text == "auto":
            return ()
        return registry(name).parse(text) if name == "receiver" else (registry(name).one(text),)

    def with_(self, **settings: Any) -> "Experiment":
        """The experiment with other settings; a dotted key changes one argument: with_(**{"receiver.C": 0.3}).

        >>> Experiment().with_(clients=10, **{"noise.tau": 0.5}).noise
        'sas(alpha=1.5, tau=0.5)'
        """
        plain = {key: value for key, value in settings.items() if "." not in key}
        dotted = {tuple(key.split(".", 1)): value for key, value in settings.items() if "." in key}
        check_known(plain)
        bare = {name: v for name, v in plain.items() if name in HOMES and isinstance(v, str) and v.isidentifier()}
        for name in bare:
            mine = {argument: value for (owner, argument), value in dotted.items() if owner == name}
            if mine:  # noise=gaussian noise.std=1: a bare name gets its arguments first
                plain[name] += f"({', '.join(f'{argument}={written(value)}' for argument, value in mine.items())})"
                dotted = {key: value for key, value in dotted.items() if key[0] != name}
        changed = replace(self, **plain)
        for (name, argument), value in dotted.items():
            changed = changed._with_argument(name, argument, value)
        return changed

    def _with_argument(self, name: str, argument: str, value: Any) -> "Experiment":
        choice("setting", name, HOMES)
        calls = self._calls(name)
        takers = [argument in call.parameters or call.entry.open for call in calls]
        if not any(takers):
            there = [p for call in calls for p in call.parameters]
            hint = nearest(argument, there) if there else f"it takes none; set {name}= first"
            raise InputError(f"setting {name}.{argument}: {getattr(self, name)} has no argument {argument!r}; {hint}")
        changed = [call.with_(argument, value) if takes else call for call, takes in zip(calls, takers, strict=True)]
        settings: dict[str, Any] = {name: " | ".join(map(str, changed))}
        return replace(self, **settings)

    def id(self) -> str:
        """Twelve hex digits of what the experiment is; how far it runs and on what leaves them unchanged.

        They are a hash of what differs from the frozen baseline: a setting or an argument that is new, and at the value
        that means "as before", moves no id; a default that changes does.
        """
        plain = {key: value for key, value in asdict(self).items() if key not in (*EXECUTION, *HOMES)}
        different: dict[str, Any] = {key: v for key, v in plain.items() if not equal(v, BASELINE_SETTINGS.get(key))}
        for name in HOMES:
            calls = [(call.entry.name, call.full().arguments) for call in self._calls(name)]
            if (mine := _beyond_baseline(name, calls)) != _beyond_baseline(name, _baseline_calls(name)):
                different[name] = mine
        return hashlib.blake2b(json.dumps(different, sort_keys=True).encode(), digest_size=6).hexdigest()

    @property
    def name(self) -> str:
        """What its folder is called unless somebody says otherwise."""
        data, rule = (text.partition("(")[0] for text in (self.data, self.receiver))
        return f"{data}-{rule}-seed{self.seed}-{self.id()}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_record(self) -> dict[str, Any]:
        """What a run folder keeps of it: the settings as they were given, and every argument of every component."""
        calls = {name: [_for_json(call.full().arguments) for call in self._calls(name)] for name in HOMES}
        return self.to_dict() | {ARGUMENTS: calls}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Experiment":
        """The experiment of a record, of this version or an older one: whatever it lacks is as it was then."""
        if not isinstance(record, dict):
            raise InputError(f"a record must be a dict of settings: got {shown(record)}")
        settings, found = settings_of_record(record), {}
        for name, components in components_of_record(record).items():
            given = _written_out(name, settings[name])
            texts = []
            for (component, every), (_, written_out) in zip(components, given, strict=True):
                call = registry(name).one(spell(component, every))
                call = call.without({key: v for key, v in every.items() if key not in written_out})
                texts.append(str(replace(call, bare="(" not in settings[name])))
            found[name] = " | ".join(texts) or "auto"
        return cls(**settings | found)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_toml(self) -> str:
        # The settings are flat and of types that JSON and TOML write alike.
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(self).items())

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        return cls._from(text, functools.partial(json.loads, object_pairs_hook=_once), "JSON")

    @classmethod
    def from_toml(cls, text: str) -> "Experiment":
        return cls._from(text, tomllib.loads, "TOML")

    @classmethod
    def _from(cls, text: str, loads: Any, language: str) -> "Experiment":
        if not isinstance(text, str):
            raise InputError(f"{language} must be a text: got {shown(text)}")
        try:
            settings = loads(text)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"not {language}: {error}") from None
        except RecursionError:
            raise InputError(f"not {language} of settings: it is nested too deeply") from None
        if not isinstance(settings, dict):
            raise InputError(f"not an experiment: {type(settings).__name__} instead of a table of settings")
        if ARGUMENTS in settings:  # the record of a run
            return cls.from_record({key: value for key, value in settings.items() if key != "checksum"})
        flat: dict[str, Any] = {}
        for key, value in settings.items():  # noise.tau = 0.3 in TOML is a table of its own
            flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        return cls().with_(**flat)

    @classmethod
    def read(cls, path: str | Path) -> "Experiment":
        """An experiment from a .toml or .json file that holds any of its settings."""
        path = place("path", path)
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
        try:
            return cls.from_json(text) if path.suffix == ".json" else cls.from_toml(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


TYPES: dict[str, type] = {field.name: field.type for field in fields(Experiment)}  # type: ignore[misc]


def settings_of_record(record: dict[str, Any]) -> dict[str, Any]:
    """The settings of a record by name, as they were given; what it lacks has the value that means "as before"."""
    if lost := [key for key in FIRST if not isinstance(record.get(key), str | int | float)]:
        raise InputError(f"no {', '.join(lost)}")
    check_known({key: value for key, value in record.items() if key not in (ARGUMENTS, *MOVED)})
    settings = BASELINE_SETTINGS | {key: value for key, value in record.items() if key in TYPES}
    for key, value in settings.items():
        if type(value) is not TYPES[key] and (type(value), TYPES[key]) != (int, float):
            raise InputError(f"{key} must be of type {TYPES[key].__name__}: got {shown(value)}")
    if "noise_on" in record:  # 0.1
        settings["channel"] = "flat()" if record["noise_on"] == "mean" else f"flat(noise_on={record['noise_on']})"
    if "norm_stats" not in record:  # 0.1: its ResNets started from He's initialisation
        own = {"cifar10": "resnet18", "cifar100": "resnet34"}.get(str(settings["data"]).partition("(")[0], "auto")
        text = own if settings["model"] == "auto" else str(settings["model"])
        for component, arguments in _written_out("model", text):
            if component in ("resnet18", "resnet34"):
                settings["model"] = spell(component, arguments | {"init": "he"})
    return settings


def _written_out(name: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The components of a setting, with the arguments that were given."""
    return [] if text == "auto" else parse_words(name, text)


def components_of_record(record: dict[str, Any]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The components of a record by setting, with every argument: as recorded, else as it was when ids began."""
    settings = settings_of_record(record)
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name in HOMES:
        given = _written_out(name, settings[name])
        every_setting = record.get(ARGUMENTS, {})
        kept = (every_setting.get(name) if isinstance(every_setting, dict) else [None]) or [{} for _ in given]
        if not isinstance(kept, list) or len(kept) != len(given) or not all(isinstance(one, dict) for one in kept):
            raise InputError(f"its {ARGUMENTS} are not those of {name}={settings[name]}")
        found[name] = []
        for (component, written_out), every in zip(given, kept, strict=True):
            recorded = _from_json(every)
            if any(key in recorded and not equal(recorded[key], value) for key, value in written_out.items()):
                raise InputError(f"its {ARGUMENTS} are not those of {name}={settings[name]}")
            usual = BASELINE_ARGUMENTS.get(name, {}).get(component, {})
            found[name].append((component, usual | recorded | written_out))
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise InputError(f"{twice} is given twice")
    return found


def _for_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: C=inf is recorded as {"float": "inf"}."""
    odd = {k: v for k, v in arguments.items() if isinstance(v, float) and not math.isfinite(v)}
    return arguments | {key: {"float": str(value)} for key, value in odd.items()}


def _from_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists alone, and no infinity."""

    def value(one: Any) -> Any:
        if isinstance(one, dict) and one.get("float") in ("inf", "-inf", "nan"):
            return float(one["float"])
        return tuple(one) if isinstance(one, list) else one

    return {key: value(one) for key, one in arguments.items()}


def _baseline_calls(name: str) -> list[tuple[str, dict[str, Any]]]:
    return _written_out(name, str(BASELINE_SETTINGS[name]))


def _beyond_baseline(name: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Components with the arguments that are not the baseline's, also of the specs within a spec."""
    found = []
    for component, arguments in calls:
        usual = BASELINE_ARGUMENTS.get(name, {}).get(component, {})
        specs = registry(name).entries[component].specs
        mine, theirs = ({key: _told(v, specs.get(key)) for key, v in some.items()} for some in (arguments, usual))
        own = {key: v for key, v in mine.items() if key not in theirs or v != theirs[key]}
        found.append([component, dict(sorted(own.items()))])
    return found


def _told(value: Any, specs: Registry | None) -> Any:
    """An argument as the hash sees it: as it is written, or of a spec what is not the baseline's."""
    if specs is None:
        return written(value)
    inner = specs.one(value)
    return _beyond_baseline(inner.kind, [(inner.entry.name, inner.full().arguments)])


def from_words(words: list[str]) -> Experiment:
    """An experiment from the words of a command line: a preset or a file first, then key=value."""
    base = Experiment()
    if words and "=" not in words[0]:
        first, *words = words
        if first in PRESETS:
            base = Experiment(**PRESETS[first])
        elif Path(first).is_file() or Path(first).suffix in (".toml", ".json"):
            base = Experiment.read(first)
        else:
            raise InputError(f"{first!r} is neither a preset, a file nor key=value; {nearest(first, PRESETS)}")
    return base.with_(**settings_of(words))


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings that words of the form key=value stand for."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"{word!r} is not key=value; a preset or a file comes first, and only one of them")
        if key in settings:
            raise InputError(f"{key} is given twice: {settings[key]} and {text}")
        settings[key] = _typed(key, text)
    return settings


def _typed(key: str, text: str) -> Any:
    if "." in key:
        return literal(text)
    kind = TYPES.get(key, str)
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise InputError(f"{key} must be {wanted}: got {text!r}") from None
