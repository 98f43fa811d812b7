"""Data types and protocols shared by the pipeline stages.

data -> partition -> participation -> local training -> transmit power -> channel -> receiver -> server -> evaluation
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from stableair.streams import Generator
from stableair.vector import Layout, ModelState

Metrics = dict[str, float | None]


# ---------------------------------------------------------------------------------------------------------------- data


class Split(NamedTuple):
    """Stored samples; `Dataset.inputs` converts them to the inputs of a model."""

    x: Tensor  # (m, ...): images (m, c, h, w), tables (m, f); uint8, float32, or int64 for token ids (m, t)
    y: Tensor  # (m,) int64
    writer: Tensor | None = None  # (m,) int64, the author of each sample, if known

    def take(self, index: Tensor) -> "Split":
        """Select samples by their indices, (k,) int64, or by a mask, (m,) bool."""
        return Split(self.x[index], self.y[index], None if self.writer is None else self.writer[index])

    def to(self, device: torch.device | str) -> "Split":
        """Copy the samples to a device."""
        return Split(self.x.to(device), self.y.to(device), None if self.writer is None else self.writer.to(device))


class Dataset(NamedTuple):
    """A data set: training and test split, number of classes, scaling of the inputs, and default model."""

    train: Split  # samples of the clients
    test: Split  # samples for the evaluation
    classes: int  # number of classes
    model: str | None  # spec of the default model; None: the experiment must name a model
    mean: float | tuple[float, ...] = 0.0  # subtracted from the inputs: a number, or one for each channel or column
    std: float | tuple[float, ...] = 1.0  # divides the inputs: a number, or one for each channel or column
    files: tuple[tuple[str, str], ...] = ()  # names and SHA-256 of the files that were read

    def scaling(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel or column, on a device: (c, 1, 1) or (f,) each."""
        shape = -1, *[1] * (self.train.x.ndim - 2)
        mean, std = (torch.tensor(t, device=device).reshape(shape) for t in (self.mean, self.std))
        return mean, std

    def inputs(
        self, x: Tensor, dtype: torch.dtype = torch.float32, scaling: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Convert stored samples to inputs of a model, normalised per channel or column.

        Args:
            x: Stored samples, (m, ...). Token ids are returned unchanged.
            dtype: Dtype of normalised inputs.
            scaling: Result of `scaling(x.device)`, to avoid a copy to the device in each call; None computes it.

        Returns:
            The inputs, of the shape of x.
        """
        if holds_tokens(x):
            return x
        mean, std = scaling or self.scaling(x.device)
        return ((x.float() - mean) / std).to(dtype)

    def to(self, device: torch.device | str) -> "Dataset":
        """Copy the samples to a device."""
        return self._replace(train=self.train.to(device), test=self.test.to(device))


def holds_tokens(x: Tensor) -> bool:
    """Whether stored samples are token ids: integers that a model embeds, and that are not normalised.

    Args:
        x: Stored samples, (m, ...).

    Returns:
        Whether the dtype is int64.

    >>> holds_tokens(torch.tensor([[3, 17, 2]])), holds_tokens(torch.tensor([[3.0, 17.0, 2.0]]))
    (True, False)
    """
    return x.dtype == torch.int64


# ------------------------------------------------------------------------------------------------------ local training


class Upload(NamedTuple):
    """Uploads of m clients in a round."""

    clients: Tensor  # (m,) int64
    update: Tensor  # (m, d), the payload that goes over the air
    stats: Tensor  # (m, b) float64, the `moments` of the norm buffers, on the noiseless side link
    loss: Tensor  # (m,), mean loss over the client's local steps
    norm: Tensor | None = None  # (m,) float64, norms of the whole payloads, if known; `update` may hold a slice of them

    def norms(self) -> Tensor:
        """Norms of the payloads: (m,) float64."""
        return torch.linalg.vector_norm(self.update, dim=1, dtype=torch.float64) if self.norm is None else self.norm


Train = Callable[[ModelState, int, Tensor], Iterable[Upload]]  # (model, round k, clients (m,)) -> chunks of uploads


# ------------------------------------------------------------------------------------------------------------- channel


# Amplitudes h_{n,k} of all n clients in a round: (n, source) -> (n,) float64; see also `FadingLaw`.
Fading = Callable[[int, Generator], Tensor]

# Interference xi_k of a round: (d, source) -> (d,) float32, on the source's device.
Noise = Callable[[int, Generator], Tensor]

# Complex samples first ... last - 1 of an interference in time: (first, last) -> (last - first,) complex128.
Samples = Callable[[int, int], Tensor]

# Clients of a round: (n, source) -> (m,) int64, from 0 ... n-1, each at most once. A rule may have a method
# divisor(n), the divisor of the sum; otherwise the sum is divided by the number of senders.
Participation = Callable[[int, Generator], Tensor]


@dataclass(frozen=True)
class FadingLaw:
    """A fading with known properties of its law; called like any other fading."""

    draw: Fading  # (n, source) -> amplitudes (n,)
    mean_inverse_square: Callable[[float], float] | None = None  # t -> E[1/h^2; h^2 >= t]; inf where it diverges
    complex_gaussian: bool = False  # whether h with a uniform phase is complex Gaussian
    block_length: int | None = None  # entries of the vector that share one amplitude; None: all of them
    mean_square: float | None = None  # E h^2
    support: tuple[float, float] = 0.0, math.inf  # smallest and largest amplitude

    def __call__(self, n: int, source: Generator) -> Tensor:
        return self.draw(n, source)


@dataclass(frozen=True)
class NoiseLaw:
    """An interference with complex samples in time, for the waveform channel.

    It is called like any other noise. The samples are isotropic. With one sample per unit of time, their real parts
    have the law of the entries.

    Args:
        draw: Real entries of a round, (d, source) -> (d,).
        samples: (source, oversampling, scale) -> the complex samples of a round with `oversampling` samples per unit of
            time, times `scale`; None if they are not defined.
        combined_scale: (source, weights (M,)) -> c, such that the weighted sum of M independent copies of the samples
            has the law of c times the samples; None if there is no such c.
    """

    draw: Noise
    samples: Callable[[Generator, int, float], Samples] | None = None
    combined_scale: Callable[[Generator, Tensor], float] | None = None

    def __call__(self, d: int, source: Generator) -> Tensor:
        return self.draw(d, source)


# Effective gain of a payload: one number, or a function (d, device) with one real gain per entry, (d,), or with one
# complex gain per complex symbol, (ceil(d / 2),). It multiplies u_2i + j u_2i+1: the two entries leak into each other.
Gain = complex | Callable[[int, torch.device], Tensor]


class Transmission(NamedTuple):
    """The link of a client that transmits in a round."""

    gain: Gain  # effective gain of the payload
    energy: float = 1.0  # energy of the signal per energy of the payload; before the common scaling of all payloads


class Accumulated(NamedTuple):
    """Sums over the senders of a round, in float64."""

    faded: Tensor  # (d,), sum of gain times payload; a slice of it until the reduction over processes
    clean: Tensor  # (d,), sum of the payloads; likewise
    stats: Tensor  # (b,), sum of the moments of the norm buffers
    loss: Tensor  # (), sum of the training losses
    max_norm: float  # largest norm of a payload; a waveform: of a modulated payload, see `Waveform`
    senders: int  # number of clients that were received
    dtype: torch.dtype  # dtype of the payloads
    energies: Mapping[int, float] = {}  # by client, sum_t |x_t|^2 before the scaling of all payloads


class Resources(NamedTuple):
    """Resources of the uplink in one round.

    An experiment's bandwidth and symbol energy convert them to physical units. The side link (losses, norm buffers) and
    the downlink are not included.
    """

    symbols: float = 0.0  # complex symbols: the product of bandwidth and time, for all clients together
    energies: Mapping[int, float] = {}  # by client, sum_t |x_t|^2; a symbol of modulus 1 has the energy 1
    bits: float = 0.0  # bits of all clients together; an analog channel sends none


class PowerRule(Protocol):
    """Transmit power: the links of the clients, and a common factor sqrt(p_k) of all payloads.

    The server divides by this factor, which scales the interference.
    Derive from `stableair.channels.power.Power`, which implements the protocol and changes nothing.
    """

    needs_noise_on_sum: bool  # whether the interference must be on the sum of the payloads, not on their mean

    @property
    def rotations(self) -> tuple[str, ...]:
        """Arguments of the rule that rotate a client's signal: "phase" by one angle, "cfo" along the vector."""

    @property
    def adapts_to_fading(self) -> bool:
        """Whether a client's transmission depends on its fading."""

    def for_fading(self, fading: Fading) -> "PowerRule":
        """Return the rule for clients with this fading; raise an InputError if the rule does not support it."""

    def transmissions(self, h: Tensor, clients: Tensor, seed: int, k: int) -> dict[int, Transmission]:
        """Links of the `clients` (m,) that transmit in round k, given the amplitudes h (n,) of all n clients."""

    def gain(self, h: Tensor) -> Tensor:
        """Effective gain of a client with amplitude h: (m,) -> (m,)."""

    def noise_scale(self, max_norm: float, d: int) -> float:
        """Scale of the interference relative to the payloads, 1 / sqrt(p_k).

        Args:
            max_norm: Largest norm of a payload in the round; on a waveform of a modulated payload, see `Waveform`.
            d: Number of entries of a payload.

        Returns:
            The factor by which the interference is multiplied.
        """


class Modulation(Protocol):
    """An orthonormal basis phi that carries two real entries per complex symbol.

        c_i = u_2i + j u_2i+1,    x_t = sum_i c_i phi_i(t),    y_i = sum_t conj(phi_i(t)) r_t

    Derive from `stableair.channels.modulation.Basis`, which implements everything except `modulate` and `demodulate`.
    """

    @property
    def n(self) -> int:
        """Complex symbols per block."""

    @property
    def hop(self) -> int:
        """Samples from the start of a block to the start of the next one."""

    @property
    def max_delay(self) -> int:
        """Largest delay of a client in samples."""

    @property
    def uses(self) -> float:
        """Complex channel uses per block."""

    @property
    def taps(self) -> int:
        """Propagation paths per client, one sample apart."""

    @property
    def oversampling(self) -> int:
        """Samples per unit of time. The interference, delays and carrier offsets are given per unit of time."""

    @property
    def symbol_time(self) -> float:
        """Units of time per complex symbol."""

    def blocks(self, entries: int) -> int:
        """Number of blocks that carry `entries` real entries."""

    def samples(self, blocks: int) -> int:
        """Number of samples of `blocks` blocks."""

    def precode(self, c: Tensor, impulse_response: Tensor) -> Tensor:
        """Symbols that a client with this impulse response transmits: (blocks, n), (taps,) -> (blocks, n)."""

    def modulate(self, c: Tensor) -> Tensor:
        """Convert symbols to samples: (blocks, n) -> (samples,)."""

    def demodulate(self, r: Tensor) -> Tensor:
        """Convert samples to the outputs of the matched filters: (samples,) -> (blocks, n)."""


class Message(NamedTuple):
    """A quantised update: scale * levels."""

    scale: float  # factor of the levels
    levels: Tensor  # (d,), small integers if the update is quantised
    bits: float  # length of the message


@dataclass(frozen=True)
class Quantizer:
    """Encoder of a digital client's update."""

    quantize: Callable[[Tensor, Generator], Message]  # u (d,), source -> message
    dtype: torch.dtype  # dtype of the levels


@dataclass(frozen=True)
class Aggregator:
    """Aggregation of individual updates, by entries or by client weights; the default is the mean."""

    per_entry: Callable[[Tensor], Tensor] | None = None  # (N, s) -> (s,), on a slice of the vector
    weights: Callable[[Tensor], Tensor] | None = None  # squared distances (N, N) float64 -> (N,) float64 of sum 1
    min_clients: int = 1  # smallest number of clients
    reason: str = ""  # explanation of min_clients for error messages

    @property
    def keeps_updates(self) -> bool:
        """Whether the aggregation needs the individual updates, not only their sum."""
        return bool(self.per_entry or self.weights)


class FlatDraw(NamedTuple):
    """Random state of the flat channel in round k."""

    k: int  # zero-based index of the round
    clients: Tensor  # (m,) int64, the participants
    h: Tensor  # (m,) float64, amplitudes of the participants, on the host
    xi: Tensor  # (d,), the interference
    pilot: Tensor | None = None  # (p,), noise-only symbols, if the receiver needs them
    transmissions: dict[int, Transmission] | None = None  # link of each transmitting client; None: the gain is h


class Received(NamedTuple):
    """Reception of one round, with the noise-free reference."""

    g: Tensor  # (d,), faded sum and interference: Eq. (3)
    stats: Tensor  # (b,), norm buffers pooled over the senders
    clean: Tensor  # (d,) float64, mean of the unfaded payloads
    loss: Tensor  # (), mean training loss of the senders
    noise: Tensor  # (d,), the interference in g
    senders: int  # number of clients that were received
    divisor: float  # divisor of the sum
    pilot: Tensor | None = None  # (p,), noise-only symbols, if the receiver needs them
    resources: Resources = Resources()  # symbols, energies and bits of the round


class Channel(Protocol):
    """A channel draws its random state first and applies it later.

    A draw is a function of (seed, k): it is the same for every receiver.
    """

    def draw(self, n: int, clients: Tensor, d: int, seed: int, k: int, device: torch.device | str) -> Any:
        """Draw the random state of round k.

        Args:
            n: Number of clients.
            clients: Participants, (m,) int64.
            d: Number of entries of the payload.
            seed: Seed of the experiment.
            k: Zero-based index of the round.
            device: Device of the payloads.

        Returns:
            The draw, for `superpose`.
        """

    def superpose(self, uploads: Iterable[Upload], draw: Any) -> Received:
        """Apply a draw to the uploads. If no client is received, the result has senders=0."""


# Creates a channel from the settings that it declares (fading, noise, power, pilots), `norms` and `divisor`.
ChannelFactory = Callable[..., Channel]


class Reduction(Protocol):
    """Distribution of the sum over the clients: each process sums one slice of the payloads."""

    def slice(self, d: int) -> slice:
        """Return the entries of a vector of length d that this process sums.

        The slice starts at an even entry, so that both entries of a complex symbol stay in one process.
        """

    def assemble(self, *parts: Tensor, d: int) -> tuple[Tensor, ...]:
        """Assemble vectors of length d from the slices of all processes."""


@runtime_checkable
class ReducibleChannel(Channel, Protocol):
    """A channel that supports slices of the payloads.

    Other channels receive whole payloads on every process.
    """

    def with_reduction(self, reduction: Reduction) -> Channel:
        """Return the same channel, with the sums distributed over processes."""


# ------------------------------------------------------------------------------------------------ receivers and servers


# State of a component between rounds: (), or a tree of tensors, numbers, text, None, tuples, lists and dicts.
Memory = Any


def no_memory(like: Tensor) -> Memory:
    """Return the memory of a component that keeps no state.

    It is a named function because a lambda cannot be sent to another process.

    Args:
        like: A vector of the model's length, dtype and device.

    Returns:
        The empty tuple.

    >>> no_memory(torch.zeros(3))
    ()
    """
    return ()


class Reception(NamedTuple):
    """Input of a receiver in one round.

    >>> from stableair.receivers import mac
    >>> from stableair.vector import make_layout
    >>> reception = Reception(torch.tensor([0.0, 1.0, 90.0]), make_layout([("weight", (3,))]), k=7)
    >>> reception.blocks.map(mac(1.0), reception.g).tolist()
    [0.0, 1.0, 2.0]
    """

    g: Tensor  # (d,), the received sum: Eq. (3)
    blocks: Layout  # the blocks on which an entry-wise rule works
    pilot: Tensor | None = None  # (p,), noise-only symbols, if the receiver needs them
    k: int = 0  # zero-based round index


@dataclass(frozen=True)
class Rule:
    """A receiver: a pure function of a round's reception and the receiver's memory.

    A call `rule(g)` outside a run starts from fresh memory and returns the output.

    Args:
        apply: (Reception, Memory) -> (g (d,), Memory, Metrics). It changes none of its arguments in place. The metrics
            are recorded as `receiver/...`. A metric named `clipped` is recorded as `clip/fraction`: a rule that also
            scales the unclipped entries returns the share of clipped entries under this name.
        init: A vector of the model's length, dtype and device -> the memory before the first round.
        pilots: Number of noise-only symbols per round that the rule needs.
        blocks: The blocks that are bound to this rule; None for the blocks of the reception.
        parts: The rules of a chain, in order; None for a single rule.

    >>> def average_of_rounds(received, memory):  # exponential moving average with factor 1/2
    ...     memory = (memory + received.g) / 2
    ...     return memory, memory, {"norm": memory.norm()}
    >>> Rule(average_of_rounds, init=torch.zeros_like)(torch.tensor([2.0, 6.0])).tolist()
    [1.0, 3.0]
    """

    apply: Callable[[Reception, Memory], tuple[Tensor, Memory, Metrics]]
    init: Callable[[Tensor], Memory] = no_memory
    pilots: int = 0
    blocks: Layout | None = None
    parts: tuple["Rule", ...] | None = None

    def __call__(self, g: Tensor) -> Tensor:
        """Apply the rule to a vector (d,), from fresh memory."""
        whole = Layout(("g",), ((g.shape[-1],),), (0, g.shape[-1]))
        return self.apply(Reception(g, whole), self.init(g))[0]


@dataclass(frozen=True)
class ServerRule:
    """The server's step, Eq. (4): a pure function of the model, the repaired sum and the server's memory.

    A call `rule(w, g)` outside a run starts from fresh memory and returns the new model.

    Args:
        apply: (w (d,), g (d,), Memory) -> (w (d,), Memory, Metrics). It changes none of its arguments in place. The
            metrics are recorded as `server/...`.
        init: A vector of the model's length, dtype and device -> the memory before the first round.

    >>> half_step = ServerRule(lambda w, g, memory: (w - g / 2, memory, {}))
    >>> half_step(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.0])).tolist()
    [0.0, 2.0]
    """

    apply: Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory, Metrics]]
    init: Callable[[Tensor], Memory] = no_memory

    def __call__(self, w: Tensor, g: Tensor) -> Tensor:
        """Take one step from the model w (d,) with the sum g (d,), from fresh memory."""
        return self.apply(w, g, self.init(w))[0]


# One local step of one client: (w (d,), gradient (d,), Memory, lr) -> (w (d,), Memory).
LocalStep = Callable[[Tensor, Tensor, Memory, float], tuple[Tensor, Memory]]


@dataclass(frozen=True)
class LocalRule:
    """An optimiser of the local training: a pure function of a client's parameters, gradient and memory.

    The vectors hold the trained parameters in the order of the model; d is their number.

    Args:
        step: (w (d,), gradient (d,), Memory, lr) -> (w (d,), Memory), one local step. It changes none of its arguments
            in place. To run in a fast engine, it must not branch on the values of tensors, and the memory must hold
            only tensors.
        init: The parameters w_k at the start of the round (d,) -> the memory before the first local step.
        entrywise: Whether an entry of the new parameters and memory depends only on the same entry of the arguments.
            Then an engine may apply the rule to one parameter tensor after the other, as flat vectors.

    >>> def signed_step(w, gradient, memory, lr):
    ...     return w - lr * gradient.sign(), memory
    >>> rule, w = LocalRule(signed_step, entrywise=True), torch.tensor([1.0, 2.0])
    >>> rule.step(w, torch.tensor([90.0, -3.0]), rule.init(w), 0.5)[0].tolist()
    [0.5, 2.5]
    """

    step: LocalStep
    init: Callable[[Tensor], Memory] = no_memory
    entrywise: bool = False


# Plain functions are components too: `as_receiver`, `as_server_rule` and `as_local_rule` convert them to rules.
ReceiverLike = Rule | Callable[[Tensor], Tensor]
ServerRuleLike = ServerRule | Callable[[Tensor, Tensor], Tensor]
LocalRuleLike = LocalRule | LocalStep


# ---------------------------------------------------------------------------------------------------------- simulation


class State(NamedTuple):
    """The state that one round passes to the next; a checkpoint is a State and a round number.

    >>> model = ModelState(w=torch.zeros(3), stats=torch.zeros(0))
    >>> State(model)._replace(server=torch.ones(3)).server.tolist()  # for example the velocity of momentum
    [1.0, 1.0, 1.0]
    """

    model: ModelState  # parameters and norm buffers
    receiver: Memory = ()  # memory of the receiver
    server: Memory = ()  # memory of the server rule
    average: Memory = ()  # memory of the averaged model
    clients: Memory = ()  # memory of the clients, passed on unchanged
    energies: Memory = ()  # (n,) float64, energy in J that each client has transmitted; (): none; None: not recorded


# (memory, the new model) -> (memory, the averaged model), for the evaluation
Average = Callable[[Memory, ModelState], tuple[Memory, ModelState]]


class Round(NamedTuple):
    """One finished round."""

    k: int  # zero-based index
    state: State  # state after the round
    metrics: Metrics  # metrics by name
