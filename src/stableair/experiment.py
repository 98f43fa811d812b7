"""An experiment is one flat frozen value: numbers, and spec strings such as noise="sas(alpha=1.5, tau=0.1)"."""

import copy
import functools
import hashlib
import json
import tomllib
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stableair import vector
from stableair.channel import NOISE_ON, Channel, fading, noise
from stableair.checks import InputError, Note, choice, nearest, positive, whole
from stableair.data import AUGMENTS, Dataset, dataset, hold_out
from stableair.evaluation import NORM_STATS, Evaluate, calibration_sample, norm_layers
from stableair.local import CHUNK, PAYLOADS, Reference
from stableair.models import model
from stableair.partition import divide, labels, partition
from stableair.receiver import assemble, receiver
from stableair.server import server
from stableair.simulate import Simulation
from stableair.spec import Call, Registry, literal, written
from stableair.streams import generator

SPECS: dict[str, Registry] = {
    "data": dataset, "partition": partition, "model": model, "fading": fading, "noise": noise,
    "receiver": receiver, "server": server,
}  # fmt: skip
HOW = "rounds", "device", "engine", "precision", "chunk"  # how far and on what it is computed: no part of what it is
VALIDATION = 0.2  # share of the training data that evaluate="validation" holds out

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


def _strict(cls: type) -> type:
    """A misspelt field is an InputError with a suggestion, as everywhere else, and not Python's TypeError."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self, *args: Any, **settings: Any) -> None:
        if args:
            raise InputError(f"settings are given by name, such as data={args[0]!r}")
        known(settings)
        init(self, **settings)

    cls.__init__ = __init__
    return cls


def known(settings: dict[str, Any]) -> None:
    """Refuse settings that are no fields of an experiment."""
    for key in settings:
        if key not in TYPES:
            raise InputError(f"setting {key!r} is unknown; {nearest(key, TYPES)}")


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
    fading: str = "rayleigh(mean=1)"
    noise: str = "sas(alpha=1.5, tau=0.1)"
    noise_on: str = "mean"  # of the clients' payloads, as in Eq. (3), or their "sum", before the division by N
    receiver: str = "mac(C=1)"
    server: str = "sgd()"
    evaluate: str = "test"  # or "validation": a fifth of the training data is held out and the test data stay unseen
    norm_stats: str = "clients"  # batch norm's statistics in the evaluation: the "clients'", "recalibrated", or "batch"
    device: str = "auto"  # a GPU where there is one
    engine: str = "auto"  # or "reference", or "fast"
    precision: str = "auto"  # or "fp32", "tf32", "bf16", with the fast engine
    chunk: int = 0  # clients whose updates are in memory at once; 0 for as many as fit

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "local_epochs", "batch_size"):
            self._set(name, whole(name, getattr(self, name), least=1))
        self._set("chunk", whole("chunk", self.chunk, least=0))
        self._set("seed", whole("seed", self.seed))
        self._set("lr", positive("lr", self.lr))
        choice("payload", self.payload, PAYLOADS)
        choice("augment", self.augment, AUGMENTS)
        choice("blocks", self.blocks, vector.BLOCKS)
        choice("noise_on", self.noise_on, NOISE_ON)
        choice("evaluate", self.evaluate, ["test", "validation"])
        choice("norm_stats", self.norm_stats, NORM_STATS)
        choice("engine", self.engine, ["auto", "reference", "fast"])
        choice("precision", self.precision, ["auto", "fp32", "tf32", "bf16"])
        if not isinstance(self.device, str):
            raise InputError(f"device must be a name such as 'cpu' or 'cuda:0': got {self.device!r}")
        for name in SPECS:
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
        return SPECS[name].parse(text) if name == "receiver" else (SPECS[name].one(text),)

    def with_(self, **settings: Any) -> "Experiment":
        """The experiment with other settings; a dotted key changes one argument: with_(**{"receiver.C": 0.3}).

        >>> Experiment().with_(clients=10, **{"noise.tau": 0.5}).noise
        'sas(alpha=1.5, tau=0.5)'
        """
        plain = {key: value for key, value in settings.items() if "." not in key}
        dotted = {tuple(key.split(".", 1)): value for key, value in settings.items() if "." in key}
        known(plain)
        for name in [name for name, text in plain.items() if name in SPECS and str(text).isidentifier()]:
            mine = {argument: value for (owner, argument), value in dotted.items() if owner == name}
            if mine:  # noise=gaussian noise.std=1: a bare name gets its arguments first
                plain[name] += f"({', '.join(f'{argument}={written(value)}' for argument, value in mine.items())})"
                dotted = {key: value for key, value in dotted.items() if key[0] != name}
        changed = replace(self, **plain)
        for (name, argument), value in dotted.items():
            changed = changed._with_argument(name, argument, value)
        return changed

    def _with_argument(self, name: str, argument: str, value: Any) -> "Experiment":
        choice("setting", name, SPECS)
        calls = self._calls(name)
        takers = [argument in call.parameters or call.entry.open for call in calls]
        if not any(takers):
            there = [p for call in calls for p in call.parameters]
            hint = nearest(argument, there) if there else f"it takes none; set {name}= first"
            raise InputError(f"setting {name}.{argument}: {getattr(self, name)} has no argument {argument!r}; {hint}")
        calls = [call.with_(argument, value) if takes else call for call, takes in zip(calls, takers, strict=True)]
        return replace(self, **{name: " | ".join(map(str, calls))})

    def id(self) -> str:
        """Twelve hex digits of what the experiment is; how far it runs and on what leaves them unchanged."""
        what = {key: value for key, value in asdict(self).items() if key not in HOW}
        what |= {name: [str(call.short()) for call in self._calls(name)] for name in SPECS}
        return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=6).hexdigest()

    @property
    def name(self) -> str:
        """What its folder is called unless somebody says otherwise."""
        data, rule = (text.partition("(")[0] for text in (self.data, self.receiver))
        return f"{data}-{rule}-seed{self.seed}-{self.id()}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_toml(self) -> str:
        # The settings are flat and of types that JSON and TOML write alike.
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(self).items())

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        return cls._from(text, json.loads, "JSON")

    @classmethod
    def from_toml(cls, text: str) -> "Experiment":
        return cls._from(text, tomllib.loads, "TOML")

    @classmethod
    def _from(cls, text: str, loads: Any, language: str) -> "Experiment":
        try:
            settings = loads(text)
        except ValueError as error:
            raise InputError(f"not {language}: {error}") from None
        if not isinstance(settings, dict):
            raise InputError(f"not an experiment: {type(settings).__name__} instead of a table of settings")
        flat = {}
        for key, value in settings.items():  # noise.tau = 0.3 in TOML is a table of its own
            flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        return cls().with_(**flat)

    @classmethod
    def read(cls, path: str | Path) -> "Experiment":
        """An experiment from a .toml or .json file that holds any of its settings."""
        path = Path(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
        try:
            return cls.from_json(text) if path.suffix == ".json" else cls.from_toml(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


TYPES: dict[str, type] = {field.name: field.type for field in fields(Experiment)}


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
    settings = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"{word!r} is not key=value; a preset or a file comes first, and only one of them")
        settings[key] = _typed(key, text)
    return settings


def _typed(key: str, text: str) -> Any:
    if "." in key:
        return literal(text)
    kind = TYPES.get(key, str)
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{key} must be a {'whole ' * (kind is int)}number: got {text!r}") from None


def device(name: str) -> torch.device:
    """The device of that name, which must be there; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.zeros(1, device=found, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        there = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError(f"device {name!r} is not there; {nearest(name, there)}") from None
    return found


@torch.no_grad()
def _check_model(module: Any, data: Dataset) -> None:
    """Refuse a model that cannot tell the classes of these data apart, or has nothing to learn."""
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module: got {type(module).__name__}")
    x = data.inputs(data.train.x[:2])
    try:
        out = copy.deepcopy(module).eval()(x)
    except Exception as error:  # whatever the model's own code raises
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the model cannot take inputs of shape {tuple(x.shape)}: {type(error).__name__}: {said}"
        ) from error
    wanted = len(x), data.classes
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
        found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InputError(f"the model must give a tensor of shape {wanted}, a logit for each class: got {found}")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameter that learns")


def build(experiment: Experiment) -> Simulation:
    """Make every part of the experiment: data, clients, model, channel, receiver, server."""
    e, place = experiment, device(experiment.device)
    data = dataset.one(e.data)()
    if e.evaluate == "validation":
        data = hold_out(data, VALIDATION, e.seed)
    parts = divide(partition.one(e.partition)(), data.train, e.clients, generator(e.seed, "partition").numpy())

    with torch.random.fork_rng(devices=[]):  # torch's own initialisation, on the CPU: the same w_0 on every device
        torch.manual_seed(generator(e.seed, "init").key[0])
        module = model.one(data.model if e.model == "auto" else e.model)()(tuple(data.train.x.shape[1:]), data.classes)
        _check_model(module, data)
    module, data = module.to(place), data.to(place)

    if e.norm_stats != "clients" and not norm_layers(module):
        warnings.warn(
            f"norm_stats={e.norm_stats} changes nothing: the model keeps no norm statistics", Note, stacklevel=2
        )
    layout = vector.parameters(module)
    samples = [torch.from_numpy(part) for part in parts]
    pilots = max(call.arguments.get("pilot", 0) for call in receiver.parse(e.receiver))
    update = server.one(e.server)
    if "lr" in update.parameters and update.arguments.get("lr", update.parameters["lr"].default) is None:
        update = update.with_("lr", e.lr if e.payload == "gradient" else 1.0)
    return Simulation(
        n=e.clients,
        seed=e.seed,
        start=vector.state(module),
        layout=layout,
        train=Reference(
            module,
            data,
            [part.to(place) for part in samples],
            epochs=e.local_epochs,
            batch_size=e.batch_size,
            lr=e.lr,
            payload=e.payload,
            seed=e.seed,
            chunk=e.chunk or CHUNK,
            augment=e.augment,
        ),
        channel=Channel(fading.one(e.fading)(), noise.one(e.noise)(), pilots, e.noise_on, vector.buffers(module)),
        receive=assemble(e.receiver, layout, e.blocks),
        update=update(),
        evaluate=Evaluate(module, data, e.evaluate, e.norm_stats, calibration_sample(samples, e.seed).to(place)),
        labels=labels(parts, data.train, data.classes),
        files=dict(data.files),
    )
