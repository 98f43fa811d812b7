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
from stableair.spec import Call, format_call
from stableair.validation import boolean, choice, fraction, integer, number, positive, short_repr, suggest

MAX_COUNT = 10**9  # limit of clients, rounds, epochs and samples in a batch
LR_RANGE = 1e-38, 1e38  # the rate and its inverse, which scales the payload, are within the range of float32

T = TypeVar("T")


class Allowed(NamedTuple):
    """The values that a setting may take.

    Args:
        words: The allowed values in words.
        check: (name, value) -> the value in the type of the setting; raises InputError if it is not allowed.
    """

    words: str
    check: Callable[[str, Any], float | bool]


COUNT = Allowed("at least 1", lambda name, value: integer(name, value, 1, MAX_COUNT))
COUNT_OR_ZERO = Allowed("at least 0", lambda name, value: integer(name, value, 0, MAX_COUNT))
ANY_INTEGER = Allowed("any integer", integer)
RATE = Allowed("positive", lambda name, value: number(name, positive(name, value), *LR_RANGE))
POSITIVE = Allowed("positive", positive)
DECAY = Allowed("at least 0 and below 1", fraction)
TRUE_OR_FALSE = Allowed("true or false", boolean)


def _setting(default: T, help: str, allowed: Allowed | None = None) -> T:
    """A field of the experiment with its line in `stableair list settings`."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


def _named_settings_only(cls: type[T]) -> type[T]:
    """Make __init__ raise an InputError with a suggestion, instead of a TypeError, for an unknown setting."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **settings: Any) -> None:
        if args:
            text = f"settings must have a name, such as data={args[0]!r}"
            raise InputError(text, code="positional-setting", value=args[0])
        check_known(settings)
        init(self, **settings)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls


@_named_settings_only
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The settings of an experiment; the defaults are the paper's set-up on the embedded data.

    The paper names neither a number of rounds nor a threshold: rounds=100 and C=1 are this project's choices.

    Every setting is checked when the experiment is made: each spec is parsed, and each component except the data set
    is built once, which checks its arguments. The parsed specs are kept, see `call` and `calls`.

    Raises:
        InputError: A setting is unknown or invalid.
    """

    data: str = _setting("digits", "Data set.")
    partition: str = _setting("iid()", "How the training samples are divided among the clients.")
    model: str = _setting("auto", "Model; auto: the model that the data set names.")
    clients: int = _setting(50, "Number of clients N.", COUNT)
    rounds: int = _setting(100, "Number of communication rounds K.", COUNT)
    seed: int = _setting(0, "Seed of all random streams.", ANY_INTEGER)
    local_epochs: int = _setting(5, "Local epochs E per round.", COUNT)
    batch_size: int = _setting(10, "Samples in a local batch.", COUNT)
    lr: float = _setting(0.03, "Learning rate eta of the clients.", RATE)
    lr_decay: str = _setting("constant()", "Schedule of the learning rate over the rounds.")
    local: str = _setting("sgd()", "Optimiser of the local training.")
    label_smoothing: float = _setting(0.0, "Label smoothing of the training loss, in [0, 1).", DECAY)
    augment: Literal["none", "crop_flip"] = _setting(
        "none", "Augmentation of local batches: random crop by up to 4 pixels and horizontal flip."
    )
    payload: Literal["gradient", "delta"] = _setting(
        "gradient", "What a client transmits: (w_k - w_{k,n}) / lr of the round, or w_k - w_{k,n}."
    )
    blocks: Blocks = _setting("tensor", "Blocks on which an entry-wise receiver works.")  # noqa: RUF009
    participation: str = _setting("all()", "Clients that take part in a round.")
    power: str = _setting("none()", "Transmit power control of the clients.")
    channel: str = _setting("flat()", "Channel, Eq. (3).")
    fading: str = _setting("rayleigh(mean=1)", "Fading h_{n,k}.")
    noise: str = _setting("sas(alpha=1.5, tau=0.1)", "Interference xi_k.")
    bandwidth: float = _setting(1e6, "Bandwidth of the uplink in Hz, for the recorded time on the air.", POSITIVE)
    symbol_energy: float = _setting(
        1.0, "Energy in J of a transmitted symbol of modulus 1, for the recorded energy.", POSITIVE
    )
    receiver: str = _setting("mac(C=1)", "Receiver, Eqs. (5)-(8); chain several with |.")
    server: str = _setting("sgd()", "Server's step, Eq. (4).")
    evaluate: Literal["test", "validation"] = _setting(
        "test", "Data for the evaluation; validation: a held-out fifth of the training data."
    )
    evaluate_clients: bool = _setting(
        False, "Whether to record the mean, 10th percentile and worst client accuracy.", TRUE_OR_FALSE
    )
    norm_stats: NormStats = _setting("clients", "Batch norm statistics of the evaluation.")  # noqa: RUF009
    average: float = _setting(0.0, "Decay of the model average for the evaluation; 0: no average.", DECAY)
    snr_blocks: Literal["none", "tensor", "layer"] = _setting("none", "Blocks for which the SNR is recorded too.")
    device: str = _setting("auto", "Device, such as cpu or cuda:0; auto: a GPU if there is one.")
    engine: Literal["auto", "reference", "fast"] = _setting("auto", "Engine for the local training.")
    precision: Literal["auto", Precision] = _setting("auto", "Precision of matrix products in the fast engine.")
    chunk: int = _setting(0, "Clients whose updates are in memory at once; 0: as many as fit.", COUNT_OR_ZERO)

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
                if name != "data" and not call.is_object:  # a data set is read when it is needed
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
        return self.to_dict()  # parsed specs refer to factories, which may not be picklable: they are parsed again

    def calls(self, setting: str) -> tuple[Call, ...]:
        """Return the parsed components of a setting: several for a chain, none for model="auto".

        >>> [call.name for call in Experiment(receiver="mac(C=1) | gnc(10)").calls("receiver")]
        ['mac', 'gnc']
        """
        return self._calls[choice("setting", setting, COMPONENT_SETTINGS)]

    def call(self, setting: str) -> Call:
        """Return the parsed component of a setting that has exactly one; calling it builds the component.

        >>> Experiment().call("noise").arguments
        {'alpha': 1.5, 'tau': 0.1}
        """
        calls = self.calls(setting)
        if len(calls) != 1:
            text = f"{setting}={getattr(self, setting)} is not a single component: use calls({setting!r})"
            raise InputError(text, code="not-one-component", name=setting)
        return calls[0]

    def with_(self, **settings: Any) -> "Experiment":
        """Return a copy with other settings; a dotted key changes one argument of a component.

        >>> Experiment().with_(clients=10, **{"noise.tau": 0.5}).noise
        'sas(alpha=1.5, tau=0.5)'
        """
        plain = {key: value for key, value in settings.items() if "." not in key}
        check_known(plain)
        arguments: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            if "." in key:
                name, _, argument = key.partition(".")
                arguments.setdefault(choice("setting", name, COMPONENT_SETTINGS), {})[argument] = value
        for name, values in arguments.items():
            text = plain.get(name)
            if isinstance(text, str) and text.isidentifier():  # noise=gaussian noise.std=1
                plain[name] = format_call(text, values)
            else:
                calls = self.calls(name) if name not in plain else _parse(name, text)
                plain[name] = _with_arguments(name, calls, values)
        return replace(self, **plain)

    def id(self) -> str:
        """Return twelve hex digits that identify the experiment.

        Execution settings (rounds, device, engine, precision, chunk) do not change the id.
        """
        return records.experiment_id(self.to_dict(), self._calls)

    @property
    def name(self) -> str:
        """Default name of the run folder."""
        return f"{self.call('data').title}-{self.calls('receiver')[0].title}-seed{self.seed}-{self.id()}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name."""
        return asdict(self)

    def to_record(self) -> dict[str, Any]:
        """Return the record that a run folder keeps: the settings, and every argument of every component."""
        return records.to_record(self.to_dict(), self._calls)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Experiment":
        """Make the experiment of a record, of this version or an older one."""
        return cls(**records.from_record(record))

    def to_json(self) -> str:
        """Write the settings as JSON."""
        return records.to_json(self.to_dict())

    def to_toml(self) -> str:
        """Write the settings as TOML."""
        return records.to_toml(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """Make an experiment from JSON with any of its settings, or from a record."""
        return cls().with_(**records.parse_json(text))

    @classmethod
    def from_toml(cls, text: str) -> "Experiment":
        """Make an experiment from TOML with any of its settings."""
        return cls().with_(**records.parse_toml(text))

    @classmethod
    def read(cls, path: str | Path) -> "Experiment":
        """Make an experiment from a .toml or .json file with any of its settings."""
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
    """Return the values that a setting may take; empty if they are not a fixed set.

    >>> allowed_values("payload"), allowed_values("clients")
    (('gradient', 'delta'), ())
    """
    return get_args(SETTING_FIELDS[setting].type)


def _parse(name: str, text: Any) -> tuple[Call, ...]:
    if name == "model" and text == "auto":
        return ()
    return registry(name).parse(text) if name == "receiver" else (registry(name).one(text),)


def _with_arguments(name: str, calls: tuple[Call, ...], values: dict[str, Any]) -> str:
    """The spec of a setting with some arguments changed in every component that takes them."""
    spec = " | ".join(map(str, calls)) or "auto"
    for argument, value in values.items():
        takers = [argument in call.parameters or call.entry.open for call in calls]
        if not any(takers):
            allowed = [parameter for call in calls for parameter in call.parameters]
            advice = suggest(argument, allowed) if allowed else f"it takes none; set {name}= first"
            text = f"setting {name}.{argument}: {spec} has no argument {argument!r}; {advice}"
            raise InputError(text, code="unknown-argument", name=argument, allowed=allowed)
        pairs = zip(calls, takers, strict=True)
        calls = tuple(call.with_(argument, value) if takes else call for call, takes in pairs)
    return " | ".join(map(str, calls))
