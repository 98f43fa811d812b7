"""The experiment: one flat immutable value of numbers, words and specs such as noise="sas(alpha=1.5, tau=0.1)"."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from stableair.errors import InputError, StableairError
from stableair.experiment import records
from stableair.experiment.settings import COMPONENT_SETTINGS, check_known, registry
from stableair.literals import Blocks, NormStats, Precision
from stableair.markup import html_table
from stableair.spec import OBJECT_SETTINGS, Call, format_call
from stableair.validation import boolean, choice, fraction, integer, number, positive, short_repr, suggest

MAX_COUNT = 10**9  # limit of clients, rounds, epochs and samples in a batch
LR_RANGE = 1e-38, 1e38  # float32 can represent the rate and its inverse, which scales the payload

T = TypeVar("T")


class Allowed(NamedTuple):
    """The values that a setting may take.

    Args:
        words: The allowed values in words.
        check: (name, value) -> the value in the type of the setting; raises InputError if the value is not allowed.
    """

    words: str
    check: Callable[[str, Any], float | bool]


COUNT = Allowed("at least 1", lambda name, value: integer(name, value, 1, MAX_COUNT))
COUNT_OR_ZERO = Allowed("at least 0", lambda name, value: integer(name, value, 0, MAX_COUNT))
SEED = Allowed("at least 0", lambda name, value: integer(name, value, 0))
RATE = Allowed("positive", lambda name, value: number(name, positive(name, value), *LR_RANGE))
POSITIVE = Allowed("positive", positive)
DECAY = Allowed("at least 0 and below 1", fraction)
TRUE_OR_FALSE = Allowed("true or false", boolean)


def _setting(default: T, help: str, allowed: Allowed | None = None) -> T:
    """Return a field of the experiment with its description for `stableair list settings`."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


def _named_settings_only(cls: type[T]) -> type[T]:
    """Make __init__ raise an InputError with a suggestion for an unknown setting, instead of a TypeError."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **settings: Any) -> None:
        if args:
            text = f"settings must have a name, such as data={args[0]!r}"
            raise InputError(text, code="positional-setting", value=args[0])
        if any("." in name for name in settings):
            settings = _default().with_(**settings).to_dict()
        check_known(settings)
        init(self, **settings)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls


@_named_settings_only
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The settings of an experiment; the defaults are the paper's set-up on the embedded data.

    An experiment is immutable; `with_` returns a modified copy. The paper gives neither a number of rounds nor a
    threshold: rounds=100 and C=1 are this project's choices.

    The constructor checks every setting. It parses each spec, and builds each component except the data set once, to
    check its arguments. `call` and `calls` return the parsed specs. The settings hold each spec in one form: `none` and
    `mac(1)` become `none()` and `mac(C=1)`. As for `with_`, a dotted key sets one argument: `**{"noise.tau": 0.5}`.

    Raises:
        InputError: A setting is unknown (`unknown-setting`) or its value is invalid (`wrong-type`, `out-of-range`,
            `unknown-value`, ...).

    >>> import stableair as sa
    >>> experiment = sa.Experiment(clients=10, rounds=20, receiver="mac(C=0.5)")
    >>> experiment
    Experiment(clients=10, rounds=20, receiver='mac(C=0.5)')
    >>> experiment.noise  # a default
    'sas(alpha=1.5, tau=0.1)'
    """

    data: str = _setting("digits()", "Data set.")
    partition: str = _setting("iid()", "How the training samples are divided among the clients.")
    model: str = _setting("auto", "Model; auto: the default model of the data set.")
    clients: int = _setting(50, "Number of clients N.", COUNT)
    rounds: int = _setting(100, "Number of communication rounds K.", COUNT)
    seed: int = _setting(0, "Seed of all random streams.", SEED)
    local_epochs: int = _setting(5, "Local epochs E per round.", COUNT)
    batch_size: int = _setting(10, "Samples per local batch.", COUNT)
    lr: float = _setting(0.03, "Learning rate eta of the clients.", RATE)
    lr_decay: str = _setting("constant()", "Schedule of the learning rate over the rounds.")
    local: str = _setting("sgd()", "Optimiser of the local training.")
    label_smoothing: float = _setting(0.0, "Label smoothing of the training loss, in [0, 1).", DECAY)
    augment: Literal["none", "crop_flip"] = _setting(
        "none", "Augmentation of local batches: random crop by up to 4 pixels and horizontal flip."
    )
    payload: Literal["gradient", "delta"] = _setting(
        "gradient", "Payload of a client: (w_k - w_{k,n}) / lr of the round, or w_k - w_{k,n}."
    )
    blocks: Blocks = _setting("tensor", "Part of the vector that the receiver processes at once.")  # noqa: RUF009
    participation: str = _setting("all()", "Clients that take part in a round.")
    power: str = _setting("none()", "Transmit power control of the clients.")
    channel: str = _setting("flat()", "Channel model, Eq. (3).")
    fading: str = _setting("rayleigh(mean=1)", "Law of the fading h_{n,k}.")
    noise: str = _setting("sas(alpha=1.5, tau=0.1)", "Law of the interference xi_k.")
    bandwidth: float = _setting(1e6, "Bandwidth of the uplink in Hz, for the recorded airtime.", POSITIVE)
    symbol_energy: float = _setting(
        1.0, "Energy in J of a transmitted symbol of modulus 1, for the recorded energy.", POSITIVE
    )
    receiver: str = _setting("mac(C=1)", "Receiver, Eqs. (5)-(8); chain several with |.")
    server: str = _setting("sgd()", "Server rule, Eq. (4).")
    evaluate: Literal["test", "validation"] = _setting(
        "test", "Data for the evaluation; validation: a held-out fifth of the training data."
    )
    evaluate_clients: bool = _setting(
        False, "Whether to record the mean, 10th percentile and worst client accuracy.", TRUE_OR_FALSE
    )
    norm_stats: NormStats = _setting(  # noqa: RUF009
        "clients",
        "Batch norm statistics in the evaluation: pooled over clients, recalibrated, or of each test batch.",
    )
    average: float = _setting(0.0, "Decay of the model average for the evaluation; 0: no average.", DECAY)
    snr_blocks: Literal["none", "tensor", "layer"] = _setting(
        "none", "Blocks whose SNR is recorded in addition to the whole vector's."
    )
    device: str = _setting("auto", "Device, such as cpu or cuda:0; auto: a GPU if there is one.")
    engine: Literal["auto", "reference", "fast"] = _setting(
        "auto", "Engine of the local training; auto: the fastest one for this model and device."
    )
    precision: Literal["auto", Precision] = _setting("auto", "Precision of matrix products in the fast engine.")
    chunk: int = _setting(0, "Clients whose updates are in memory at once; 0: chosen by the engine.", COUNT_OR_ZERO)

    def __post_init__(self) -> None:
        for name, each in SETTING_FIELDS.items():
            if restricted := each.metadata["allowed"]:
                self._set(name, restricted.check(name, getattr(self, name)))
            if allowed := allowed_values(name):
                choice(name, getattr(self, name), allowed)
        if not isinstance(self.device, str):
            text = f"device must be a name such as 'cpu' or 'cuda:0': got {short_repr(self.device)}"
            raise InputError(text, code="wrong-type", name="device", value=self.device)
        for name, calls in self._calls.items():
            for call in calls:
                if name != "data" and not call.is_object:  # a data set is read on first use
                    call()
            self._set(name, " | ".join(map(str, calls)) or "auto")

    def __repr__(self) -> str:
        return f"Experiment({', '.join(f'{name}={value!r}' for name, value in self._changed().items())})"

    def _repr_html_(self) -> str:
        rows = [*self._changed().items(), ("other settings", "defaults")]
        return html_table(rows, caption=f"Experiment {self.id()}")

    def _changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        default = _default()
        return {name: value for name, value in self.to_dict().items() if value != getattr(default, name)}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @functools.cached_property
    def _calls(self) -> dict[str, tuple[Call, ...]]:
        return {name: _parse(name, getattr(self, name)) for name in COMPONENT_SETTINGS}

    def __getstate__(self) -> dict[str, Any]:
        return self.to_dict()  # without the parsed specs: they refer to factories, which may not be picklable

    def calls(self, setting: str) -> tuple[Call, ...]:
        """Return the parsed components of a component setting.

        Args:
            setting: Name of a component setting, such as "receiver".

        Returns:
            One component; several for a chain of receivers; none for model="auto".

        Raises:
            InputError: There is no such component setting (`unknown-value`).

        >>> [call.name for call in Experiment(receiver="mac(C=1) | gnc(10)").calls("receiver")]
        ['mac', 'gnc']
        """
        return self._calls[choice("setting", setting, COMPONENT_SETTINGS)]

    def call(self, setting: str) -> Call:
        """Return the parsed component of a component setting that has exactly one.

        Args:
            setting: Name of a component setting, such as "noise".

        Returns:
            The component, with its `name` and `arguments`. Calling it builds the component.

        Raises:
            InputError: There is no such component setting (`unknown-value`), or it has no or several components
                (`not-one-component`).

        >>> Experiment().call("noise").arguments
        {'alpha': 1.5, 'tau': 0.1}
        """
        calls = self.calls(setting)
        if len(calls) != 1:
            text = f"{setting}={getattr(self, setting)} is not a single component: use calls({setting!r})"
            raise InputError(text, code="not-one-component", name=setting)
        return calls[0]

    def with_(self, **settings: Any) -> "Experiment":
        """Return a copy with other settings.

        Args:
            **settings: New values by name. A dotted key changes one argument of a component, such as `"noise.tau"`.

        Returns:
            The modified copy; this experiment stays unchanged.

        Raises:
            InputError: A setting or an argument is unknown (`unknown-setting`, `unknown-argument`) or invalid.

        >>> Experiment().with_(clients=10, **{"noise.tau": 0.5})
        Experiment(clients=10, noise='sas(alpha=1.5, tau=0.5)')
        """
        plain = {key: value for key, value in settings.items() if "." not in key}
        check_known(plain)
        arguments: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            if "." in key:
                name, _, argument = key.partition(".")
                choice("setting", name, COMPONENT_SETTINGS)
                if "." in argument:
                    raise _nested_key(key, value)
                arguments.setdefault(name, {})[argument] = value
        for name, values in arguments.items():
            text = plain.get(name)
            if isinstance(text, str) and text.isidentifier():  # noise=gaussian noise.std=1
                plain[name] = format_call(text, values)
            else:
                calls = self.calls(name) if name not in plain else _parse(name, text)
                plain[name] = _with_arguments(name, calls, values)
        return replace(self, **plain)

    def id(self) -> str:
        """Return twelve hexadecimal digits that identify the experiment.

        The id depends on all settings and all arguments of the components, defaults included. Only the execution
        settings (rounds, device, engine, precision, chunk) do not change it.

        >>> experiment = Experiment(receiver="mac(C=1)")
        >>> experiment.id() == experiment.with_(rounds=5, device="cpu").id()
        True
        >>> experiment.id() == experiment.with_(**{"receiver.C": 2}).id()
        False
        """
        return records.experiment_id(self.to_dict(), self._calls)

    @property
    def name(self) -> str:
        """The default name of the run folder: data, receiver, seed and id."""
        return f"{self.call('data').title}-{self.calls('receiver')[0].title}-seed{self.seed}-{self.id()}"

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name, defaults included; `Experiment(**settings)` is the inverse."""
        return asdict(self)

    def to_record(self) -> dict[str, Any]:
        """Return the content of experiment.json.

        A record holds all settings, and under "arguments" all arguments of every component. It still describes the same
        experiment after a default has changed in a later version.

        >>> Experiment().to_record()["arguments"]["receiver"]
        [{'C': 1, 'gain': None, 'pilot': 0}]
        """
        return records.to_record(self.to_dict(), self._calls)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Experiment":
        """Return the experiment that a record of this version or an older one describes.

        Args:
            record: Content of experiment.json, as from `to_record`.

        Returns:
            The experiment; arguments whose default has changed since are written out.

        Raises:
            InputError: A setting is missing (`missing-setting`), unknown (`unknown-setting`) or of a wrong type
                (`wrong-type`).

        >>> experiment = Experiment(clients=10)
        >>> Experiment.from_record(experiment.to_record()) == experiment
        True
        """
        return cls(**records.from_record(record))

    def to_json(self) -> str:
        """Return the settings as JSON; `from_json` reads it."""
        return records.to_json(self.to_dict())

    def to_toml(self) -> str:
        """Return the settings as TOML; `from_toml` and `stableair run FILE.toml` read it.

        >>> print(Experiment(clients=10).to_toml().splitlines()[3])
        clients = 10
        """
        return records.to_toml(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """Return an experiment from JSON.

        Args:
            text: An object with any of the settings, or a record.

        Returns:
            The experiment; omitted settings have their defaults.

        Raises:
            InputError: The text is not JSON (`not-json`), or a setting is unknown or invalid.

        >>> Experiment.from_json('{"clients": 10, "noise": {"tau": 0.3}}')
        Experiment(clients=10, noise='sas(alpha=1.5, tau=0.3)')
        """
        return cls().with_(**records.parse_json(text))

    @classmethod
    def from_toml(cls, text: str) -> "Experiment":
        r"""Return an experiment from TOML.

        Args:
            text: Any of the settings; `noise.tau = 0.3` sets one argument of a component.

        Returns:
            The experiment; omitted settings have their defaults.

        Raises:
            InputError: The text is not TOML (`not-toml`), or a setting is unknown or invalid.

        >>> Experiment.from_toml("clients = 10\nnoise.tau = 0.3")
        Experiment(clients=10, noise='sas(alpha=1.5, tau=0.3)')
        """
        return cls().with_(**records.parse_toml(text))

    @classmethod
    def read(cls, path: str | Path) -> "Experiment":
        """Return the experiment of a file.

        Args:
            path: A .json file, read as in `from_json`; any other file is read as TOML, as in `from_toml`.

        Returns:
            The experiment; omitted settings have their defaults.

        Raises:
            InputError: The file cannot be read (`unreadable-file`), is not JSON or TOML (`not-json`, `not-toml`), or a
                setting is unknown or invalid.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "ten.toml")
        ...     size = path.write_text("clients = 10")
        ...     print(Experiment.read(path))
        Experiment(clients=10)
        """
        text = records.read_text(path)
        try:
            return cls.from_json(text) if Path(path).suffix == ".json" else cls.from_toml(text)
        except StableairError as error:
            raise error.with_message(f"{path}: {error}") from None


@functools.cache
def _default() -> Experiment:
    return Experiment()


SETTING_FIELDS = {each.name: each for each in fields(Experiment)}


def allowed_values(setting: str) -> tuple[str, ...]:
    """Return the allowed values of a setting; empty if they are not a fixed set.

    Args:
        setting: Name of a setting.

    >>> allowed_values("payload"), allowed_values("clients")
    (('gradient', 'delta'), ())
    """
    return get_args(SETTING_FIELDS[setting].type)


def _parse(name: str, text: Any) -> tuple[Call, ...]:
    if name == "model" and text == "auto":
        return ()
    if name in OBJECT_SETTINGS and not isinstance(text, str):
        message = f"{name} must be a spec such as 'name(argument=1)': got {short_repr(text)}"
        advice = f"pass a Python object to the run: sa.run(experiment, {name}=...)"
        raise InputError(message, code="not-a-spec", advice=advice, name=name, value=text)
    return registry(name).parse(text) if name == "receiver" else (registry(name).one(text),)


def _nested_key(key: str, value: Any) -> InputError:
    """Return the error about a key such as "noise.bad.tau", with the nested spec that sets the argument."""
    name, outer, argument = key.split(".", 2)
    nested = next((entry.specs[outer] for entry in registry(name) if outer in entry.specs), None)
    advice = f"write {name}.ARGUMENT=VALUE"
    if nested:
        component = next((entry.name for entry in nested if argument in entry.parameters), "NAME")
        advice = f"write {name}.{outer}={format_call(component, {argument: value})!r}"
    text = f"setting {key}: a key has one dot, and an argument of a nested spec is part of its text; {advice}"
    return InputError(text, code="unknown-argument", name=key)


def _with_arguments(name: str, calls: tuple[Call, ...], values: dict[str, Any]) -> str:
    """Return the spec of a setting with arguments changed in every component that accepts them."""
    spec = " | ".join(map(str, calls)) or "auto"
    for argument, value in values.items():
        accepts = [argument in call.parameters or call.entry.open for call in calls]
        if not any(accepts):
            allowed = [parameter for call in calls for parameter in call.parameters]
            advice = suggest(argument, allowed) if allowed else f"it takes none; set {name}= first"
            text = f"setting {name}.{argument}: {spec} has no argument {argument!r}; {advice}"
            raise InputError(text, code="unknown-argument", name=argument, allowed=allowed)
        pairs = zip(calls, accepts, strict=True)
        calls = tuple(call.with_(argument, value) if accepted else call for call, accepted in pairs)
    return " | ".join(map(str, calls))
