"""What passes between the rooms of the house: the values, and the protocols of those who make them.

A round goes data -> who takes part -> local training -> channel -> receiver -> server -> evaluation. Each stage knows
the values of its neighbours, which are here, and not the neighbours themselves.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stableair.checks import InputError
from stableair.streams import first_bits, generator
from stableair.vector import Layout, State, buffers

CROP = 4  # pixels by which a crop moves an image at most

Metrics = dict[str, float | None]


# ---------------------------------------------------------------------------------------------------------------- data


class Split(NamedTuple):
    """Samples as they are stored; `Dataset.inputs` makes them what a model takes."""

    x: Tensor  # (m, c, h, w), uint8 or float32
    y: Tensor  # (m,) int64
    writer: Tensor | None = None  # (m,) int64, where the set knows who made a sample

    def take(self, index: Tensor) -> "Split":
        """The samples of these numbers: (k,) int64, or a mask."""
        return Split(self.x[index], self.y[index], None if self.writer is None else self.writer[index])

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.x.to(device), self.y.to(device), None if self.writer is None else self.writer.to(device))


class Dataset(NamedTuple):
    """Two splits, the number of classes, how to scale an input, and the model the set is usually paired with."""

    train: Split
    test: Split
    classes: int
    model: str
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    files: tuple[tuple[str, str], ...] = ()  # what was read for it: names and SHA-256

    def scaling(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation of each channel, on a device: (c, 1, 1) each."""
        mean, std = (torch.tensor(t, device=device).reshape(-1, 1, 1) for t in (self.mean, self.std))
        return mean, std

    def inputs(self, x: Tensor) -> Tensor:
        """Stored samples (m, c, h, w) as float32, normalised per channel."""
        return normalised(x, *self.scaling(x.device))

    def to(self, device: torch.device | str) -> "Dataset":
        return self._replace(train=self.train.to(device), test=self.test.to(device))


def normalised(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Stored samples as float32 inputs: (..., c, h, w) -> (..., c, h, w)."""
    return (x.float() - mean) / std


# ------------------------------------------------------------------------------------------------------ local training


def payload_scale(payload: str, lr: float) -> float:
    """What a payload is of a difference of weights: 1 / eta times it, or with "delta" the difference itself."""
    return 1 / lr if payload == "gradient" else 1.0


@dataclass(frozen=True)
class Work:
    """What the clients compute in a round, whoever computes it: E epochs of minibatch SGD on their own samples.

    The payload is the accumulated gradient (w_k - w_{k,n}) / eta, or with "delta" the plain difference w_k - w_{k,n}.
    """

    module: nn.Module
    data: Dataset
    parts: list[Tensor]  # the samples of each client
    epochs: int
    batch_size: int
    lr: float
    payload: str
    seed: int
    augment: str = "none"  # or "crop_flip": every image of a batch is moved and mirrored at random

    @property
    def scale(self) -> float:
        """What the payload is of a difference of weights."""
        return payload_scale(self.payload, self.lr)

    @cached_property
    def sizes(self) -> list[int]:
        """How many samples each client holds."""
        return [len(part) for part in self.parts]

    @cached_property
    def largest_batch(self) -> int:
        """The samples in the largest batch of any client."""
        return min(self.batch_size, max(self.sizes))

    @cached_property
    def norms(self) -> Layout:
        """The blocks of the norm buffers."""
        return buffers(self.module)

    def steps(self, client: int) -> int:
        """How many local steps a client takes in a round."""
        return self.epochs * -(-self.sizes[client] // self.batch_size)

    def _bits(self, stream: str, k: int, clients: Sequence[int], each: int = 1) -> Tensor:
        """Random bits for all that clients with m samples each go through in round k, on the host: (N, E, m * each)."""
        shape = len(clients), self.epochs, self.sizes[clients[0]] * each
        sources = [generator(self.seed, stream, k, n) for n in clients]
        return first_bits(sources, math.prod(shape[1:])).view(shape)

    def orders(self, k: int, clients: Sequence[int]) -> Tensor:
        """The orders in which clients with m samples each go through them in round k: (N, E, m)."""
        return self._bits("batches", k, clients).sort(stable=True).indices

    def moves(self, k: int, clients: Sequence[int]) -> Tensor | None:
        """How they move and mirror each of these, if they do: (N, E, m, 3)."""
        if self.augment == "none":
            return None
        bits = self._bits("augment", k, clients, each=3).unflatten(-1, (-1, 3))
        down, right, mirrored = (bits & 0x7FFFFFFF).unbind(-1)
        span = 2 * CROP + 1
        return torch.stack([down % span - CROP, right % span - CROP, mirrored % 2], -1)

    def batches(self, of_epochs: Tensor) -> list[Tensor]:
        """The local steps of a client, from what it goes through in each epoch: (E, m, ...) -> (batch, ...) each."""
        return [batch for epoch in of_epochs for batch in epoch.split(min(self.batch_size, len(epoch)))]


def crop_flip(x: Tensor, moves: Tensor) -> Tensor:
    """Images after random crop and flip: x (..., c, h, w), moves (..., 3) -> as x.

    A move is rows down, columns right and 1 for mirrored; what comes in from outside is black (0).
    """
    h, w = x.shape[-2:]
    down, right, mirrored = moves.unbind(-1)
    rows = torch.arange(h, device=x.device) - down[..., None]  # (..., h), where each pixel comes from
    columns = torch.arange(w, device=x.device)
    columns = torch.where(mirrored[..., None] > 0, w - 1 - columns, columns) - right[..., None]
    inside = ((rows >= 0) & (rows < h))[..., :, None] & ((columns >= 0) & (columns < w))[..., None, :]
    x = x.gather(-2, rows.clamp(0, h - 1)[..., None, :, None].expand(x.shape))
    return x.gather(-1, columns.clamp(0, w - 1)[..., None, None, :].expand(x.shape)) * inside[..., None, :, :]


class Upload(NamedTuple):
    """What m clients send: a chunk of a round."""

    clients: Tensor  # (m,) int64
    update: Tensor  # (m, d), the payload that goes over the air
    stats: Tensor  # (m, b) float64, the `moments` of the norm buffers, on the noiseless side link
    loss: Tensor  # (m,), mean loss over the client's local steps
    norm: Tensor | None = None  # (m,) float64, of the payloads, once it is known; `update` may be but a part of them

    def norms(self) -> Tensor:
        """The norms of the payloads: (m,) float64."""
        return torch.linalg.vector_norm(self.update, dim=1, dtype=torch.float64) if self.norm is None else self.norm


class Trainer(Protocol):
    """How the work of a round is computed: the reference is one, every engine another."""

    work: Work
    chunk: int  # clients whose updates are in memory at once: an N x d matrix need never exist

    def __call__(self, state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        """What these clients make of w_k in round k, chunk by chunk, in the order they are named in."""
        ...


Train = Callable[[State, int, Tensor], Iterable[Upload]]  # all that Algorithm 1 asks of a trainer


# ------------------------------------------------------------------------------------------------------------- channel


# With what a payload is heard: one number for all d entries, or a function (d, device) -> (d,) that makes theirs.
Gain = float | Callable[[int, torch.device], Tensor]


class Fade(NamedTuple):
    """What the channel does in round k."""

    k: int
    clients: Tensor  # (m,) int64, who sends
    h: Tensor  # (m,) float64, on the host: their amplitudes
    xi: Tensor  # (d,), the interference
    pilot: Tensor | None = None  # noise-only symbols, where a receiver asked for them
    gains: dict[int, Gain] | None = None  # with what each client is heard that is; None for all with their amplitudes


class Received(NamedTuple):
    """What reaches the server in one round, and what it would have been."""

    g: Tensor  # (d,), faded sum and interference: Eq. (3)
    stats: Tensor  # (b,), the norm buffers of all senders together
    clean: Tensor  # (d,) float64, the mean of the unfaded payloads
    loss: Tensor  # (), mean of the senders' training losses
    noise: Tensor  # (d,), the interference in g
    senders: int  # how many clients were heard
    divisor: float  # what the sum was divided by
    pilot: Tensor | None = None  # noise-only symbols, where a receiver asked for them
    uses: float = 0.0  # complex symbols that the round took on the air


class Channel(Protocol):
    """Draw first, apply after: a draw is a function of (seed, k), the same for every receiver."""

    def draw(self, n: int, who: Tensor, d: int, seed: int, k: int, device: torch.device | str) -> Any:
        """What the channel does in round k to the clients `who` of n, and to a vector of d entries."""
        ...

    def superpose(self, uploads: Iterable[Upload], fade: Any) -> Received:
        """What the server receives of the uploads; with senders=0 where it heard nobody."""
        ...


class Overflow(InputError):
    """A client's upload of round k was not finite."""

    def __init__(self, k: int, client: int, what: str):
        why = "its data are not finite, or its local training overflowed"
        super().__init__(f"round {k}: client {client} uploaded a non-finite {what}: {why}")
        self.k, self.client, self.what = k, client, what

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        """So that one process can tell another of it."""
        return Overflow, (self.k, self.client, self.what)


def check_finite(upload: Upload, k: int) -> None:
    """Refuse an upload of round k that is not finite; the error names its client."""
    m = len(upload.clients)
    sizes = {"update": upload.norms()}  # float64 has room for the squares of all float32 numbers
    for what, rows in (("norm buffer", upload.stats), ("loss", upload.loss)):
        if rows.numel():
            sizes[what] = torch.linalg.vector_norm(rows.reshape(m, -1), math.inf, dim=1)
    for what, size in sizes.items():
        bad = size.isfinite().logical_not().nonzero()
        if len(bad):
            raise Overflow(k, int(upload.clients[int(bad[0])]), what)


def check_shape(what: str, out: Any, length: int) -> Tensor:
    """What a component returned, held to its contract: one tensor with `length` entries."""
    if not isinstance(out, Tensor) or out.shape != (length,):
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"the {what} must return a tensor of shape ({length},): got {found}", part=what)
    if not out.is_floating_point():
        raise InputError(f"the {what} must return real numbers, such as float32: got {out.dtype}", part=what)
    return out


# ------------------------------------------------------------------------------------------------ receivers and servers


class Rule:
    """What a receiver or a server may do besides its work; by default nothing.

    A rule that keeps something between rounds names its attributes in `remembered`, or returns it from `state_dict`, as
    tensors, numbers, text, lists and dicts.
    """

    pilots: int = 0  # noise-only symbols a round that it wants to hear
    remembered: tuple[str, ...] = ()  # the attributes that it keeps between rounds

    def observe(self, g: Tensor) -> None:
        """See the whole vector of a round, once, before it is applied to blocks of it."""

    def listen(self, pilot: Tensor) -> None:
        """Hear the round's noise-only symbols, before anything else."""

    def metrics(self) -> Metrics:
        """What to record of the round."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember this instead."""
        if set(state) != set(self.remembered):
            mine, given = (", ".join(map(str, names)) or "nothing" for names in (self.remembered, state))
            raise InputError(f"{type(self).__name__} remembers {mine}: got {given}")
        for name, value in state.items():
            setattr(self, name, value)


class Receiver(Rule):
    """What the server does to the sum it received: (..., d) -> (..., d), never in place."""

    def apply(self, g: Tensor) -> Tensor:
        """The rule itself, on a vector or on a block of one."""
        raise NotImplementedError

    def __call__(self, g: Tensor) -> Tensor:
        self.observe(g)
        return self.apply(g)


class Update(Rule):
    """The server's step: (w (d,), g (d,)) -> (d,), never in place."""

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        """The new model."""
        raise NotImplementedError

    def __call__(self, w: Tensor, g: Tensor) -> Tensor:
        self.observe(g)
        return check_shape("server", self.apply(w, g), len(w)).to(w.dtype)


ReceiverLike = Receiver | Callable[[Tensor], Tensor]
UpdateLike = Update | Callable[[Tensor, Tensor], Tensor]


def as_receiver(rule: ReceiverLike) -> Receiver:
    """A receiver as one: a plain function, or an object with any of a Rule's methods, is wrapped."""
    return rule if isinstance(rule, Receiver) else _adopted(Receiver(), rule, "receiver")


def as_update(rule: UpdateLike) -> Update:
    """A server's step as one, likewise."""
    return rule if isinstance(rule, Update) else _adopted(Update(), rule, "server")


R = TypeVar("R", Receiver, Update)


def _adopted(shell: R, rule: Any, kind: str) -> R:
    """A rule with the methods of another object; the one place that asks what an object has."""
    if not callable(rule):
        raise InputError(f"the {kind} must be a function or a Rule: got {type(rule).__name__}", part=kind)
    own = {name: getattr(rule, name) for name in dir(Rule) if not name.startswith("_") and hasattr(rule, name)}
    own["apply"] = rule if isinstance(rule, nn.Module) else getattr(rule, "apply", rule)  # a module's is something else
    for name, method in own.items():
        setattr(shell, name, method)
    return shell


# ---------------------------------------------------------------------------------------------------------- simulation


class Round(NamedTuple):
    """One finished round k: the state after it and what was seen of it."""

    k: int
    state: State
    metrics: Metrics
