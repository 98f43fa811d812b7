"""Counter-based random numbers: a pure function of (seed, stream, index, position).

The bits come from a counter-based hash written in integer arithmetic, so they are the same on every device and in any
order of calls. All receivers are therefore compared on the same fading, noise and batches, and a resumed run computes
the same rounds.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from stableair.errors import InputError
from stableair.validation import integer, short_repr, typed

Name = tuple[int, str, tuple[int, ...]]  # (seed, stream, index); the index is the round, then the client


def _signed(x: int) -> int:
    """The int64 with the bits of the unsigned 64-bit number x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


_PIECE = 1 << 17  # positions computed at once on a CPU: the temporaries stay in cache
_PIECE_GPU = 1 << 25
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLY = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _xorshift(z: Tensor, by: int) -> Tensor:
    return z.bitwise_xor_((z >> by).bitwise_and_((1 << (64 - by)) - 1))  # >> is arithmetic: mask the sign bits


def _mix(z: Tensor, key: int | Tensor) -> Tensor:
    """Mix bits in place, with the two multiplications of SplitMix64 and a key between them."""
    z = _xorshift(z, 30).mul_(_MULTIPLY[0]).bitwise_xor_(key)
    return _xorshift(_xorshift(z, 27).mul_(_MULTIPLY[1]), 31)


def open_unit(bits: Tensor) -> Tensor:
    """Convert 64 random bits to a uniform number in the open interval (0, 1).

    The top 52 bits give (bits + 1/2) / 2^52, symmetric about 1/2: with 53 bits, the half step that excludes both end
    points would not be representable in float64.

    Args:
        bits: Random bits, of any shape, int64.

    Returns:
        Uniform numbers of the same shape, float64.

    >>> x = open_unit(torch.tensor([0, -1]))  # the smallest and the largest number
    >>> bool((0 < x).all() and (x < 1).all())
    True
    """
    if not isinstance(bits, Tensor) or bits.dtype != torch.int64:
        text = f"bits must be a tensor of int64: got {short_repr(bits)}"
        raise InputError(text, code="wrong-type", name="bits", value=bits)
    return ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


@typed
def box_muller(uniforms: Tensor) -> Tensor:
    """Convert pairs of uniform numbers to standard normal numbers (Box and Muller, 1958).

        z = sqrt(-2 log u) cos(2 pi v)

    Args:
        uniforms: Pairs (u, v) of numbers in (0, 1), (..., 2).

    Returns:
        Standard normal numbers, (...).

    >>> box_muller(torch.tensor([[0.5, 0.25], [0.5, 0.5]]).double()).numpy().round(4)
    array([ 0.    , -1.1774])
    """
    if uniforms.shape[-1:] != (2,) or not uniforms.is_floating_point():
        text = f"uniforms must be real, of shape (..., 2): got {uniforms.dtype} {tuple(uniforms.shape)}"
        raise InputError(text, code="wrong-shape", name="uniforms", shape=tuple(uniforms.shape))
    u, v = uniforms.unbind(-1)
    return (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()


class Generator:
    """Random numbers from a key, like a `torch.Generator` whose numbers do not depend on the device.

    The hash is SplitMix64 (Steele, Lea and Flood, 2014) of the position, with a second key word between its two
    multiplications, so that streams with overlapping counters differ. Successive calls use successive positions:
    drawing n and then m numbers gives the same numbers as drawing n + m. `generator` creates the generator of a named
    stream.

    Args:
        key: Two 64-bit words of the key.
        device: Device of the random numbers.
        name: Seed, stream and index of a named stream; None for a generator without a name.

    >>> source = Generator((1, 2))
    >>> first, second = source.uniform(2), source.uniform(3)
    >>> torch.cat([first, second]).equal(Generator((1, 2)).uniform(5))
    True
    """

    def __init__(self, key: tuple[int, int], device: torch.device | str = "cpu", name: Name | None = None):
        self.key = _signed(key[0]), _signed(key[1])
        self.device = torch.device(device)
        self.name = name  # (seed, stream, index) of a named stream
        self.position = 0

    @property
    def round(self) -> int:
        """The round of this generator, which is the first index of its stream."""
        return self._named()[2][0]

    def at(self, k: int, stream: str | None = None) -> "Generator":
        """Return a new generator of round k, of the same stream or of another stream with this seed.

        Noise and fading with memory use it to recompute earlier rounds.

        >>> generator(0, "noise", 7).at(3).uniform(2).equal(generator(0, "noise", 3).uniform(2))
        True
        """
        seed, same_stream, (_, *rest) = self._named()
        return generator(seed, stream or same_stream, k, *rest, device=self.device)

    def substream(self, name: str) -> "Generator":
        """Return an independent stream for the same round and client; draws from one do not affect the other.

        >>> source = generator(0, "participation", 7)
        >>> source.substream("dropout").uniform(2).equal(source.uniform(2))
        False
        """
        seed, stream, index = self._named()
        return generator(seed, f"{stream}/{name}", *index, device=self.device)

    def _named(self) -> Name:
        """Return the name of this generator, which must have a round."""
        if self.name is None or not self.name[2]:
            text = "this generator has no round: create it with generator(seed, stream, k)"
            raise InputError(text, code="unnamed-generator")
        return self.name

    def ahead(self, positions: int) -> "Generator":
        """Return a copy of this generator, advanced by a number of positions."""
        copy = Generator(self.key, self.device, self.name)
        copy.position = self.position + positions
        return copy

    def bits(self, n: int) -> Tensor:
        """Draw 64 random bits for each of the next n positions: (n,) int64."""
        z = torch.arange(self.position + 1, self.position + n + 1, device=self.device)
        self.position += n
        return _mix(z.mul_(_GAMMA).add_(self.key[0]), self.key[1])

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers in the open interval (0, 1): (*shape) float64."""
        return open_unit(self.bits(math.prod(shape))).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers (Box and Muller): (*shape) float64. Each entry uses two positions."""
        return box_muller(self.uniform(*shape, 2))

    def permutation(self, n: int) -> Tensor:
        """Draw a random order of 0 ... n-1: (n,) int64."""
        return self.bits(n).sort(stable=True).indices

    def numpy(self) -> np.random.Generator:
        """Return a numpy generator with this key, for computations on the host."""
        return np.random.Generator(np.random.Philox(key=[k % (1 << 64) for k in self.key]))


def generator(seed: int, stream: str, *index: int, device: torch.device | str = "cpu") -> Generator:
    """Create the generator of a named stream.

    `generator(seed, "noise", k)` gives the noise of round k, in every process and on every device.

    Args:
        seed: Seed of the experiment.
        stream: Name of the stream, such as "noise".
        *index: Round of the stream, and the client for a stream of a client.
        device: Device of the random numbers.

    Returns:
        The generator at the start of its stream.

    Raises:
        InputError: An argument has a wrong type (`invalid-stream`).

    >>> generator(0, "noise", 3).permutation(4).equal(generator(0, "noise", 3).permutation(4))
    True
    """
    try:
        seed, index = operator.index(seed), tuple(map(operator.index, index))  # numpy integers give the same stream
        torch_device = torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        got = f"{short_repr((seed, *index))}, {short_repr(device)}"
        text = f"a stream needs an integer seed, integer indices and a device: got {got}"
        raise InputError(text, code="invalid-stream") from None
    if not isinstance(stream, str):
        raise InputError(f"a stream's name must be a string: got {short_repr(stream)}", code="invalid-stream")
    digest = hashlib.blake2b(repr((seed, stream, *index)).encode(), digest_size=16).digest()
    key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return Generator(key, torch_device, (seed, stream, index))


@typed
def first_bits(sources: Sequence[Generator], n: int) -> Tensor:
    """Compute `bits(n)` of N new generators in one operation, on the host.

    Args:
        sources: New generators, at least one.
        n: Number of positions of each generator.

    Returns:
        Random bits, (N, n) int64. The generators are not advanced.

    >>> sources = [generator(0, "batches", 3, client) for client in range(5)]
    >>> first_bits(sources, 2)[4].equal(sources[4].bits(2))
    True
    """
    if not sources or not all(isinstance(source, Generator) for source in sources):
        text = f"sources must be generators, at least one: got {short_repr(sources)}"
        raise InputError(text, code="wrong-type", name="sources", value=sources)
    integer("n", n, 0)
    first, second = torch.tensor([source.key for source in sources]).T.unsqueeze(-1)
    return _mix(torch.arange(1, n + 1).mul_(_GAMMA) + first, second)


@typed
def uniform(shape: tuple[int, ...], source: Generator | torch.Generator | None, device: torch.device | str) -> Tensor:
    """Draw uniform numbers in the open interval (0, 1) from any kind of generator.

    Args:
        shape: Shape of the result.
        source: A generator of this module or of torch; None for torch's global generator.
        device: Device of the result, for a generator of torch.

    Returns:
        Uniform numbers of this shape, float64.

    Raises:
        InputError: torch cannot draw on this device with this generator (`cannot-draw`).

    >>> uniform((2, 3), torch.Generator().manual_seed(0), "cpu").shape
    torch.Size([2, 3])
    """
    for side in shape:
        integer("shape", side, 0)
    if isinstance(source, Generator):
        return source.uniform(*shape)
    try:
        return open_unit(torch.randint(-(1 << 63), (1 << 63) - 1, tuple(shape), generator=source, device=device))
    except (RuntimeError, AssertionError) as error:
        text = f"cannot draw {shape} on {device}: {str(error).partition(chr(10))[0]}"
        raise InputError(text, code="cannot-draw", shape=shape, device=device) from None


@typed
def in_pieces(fill: Callable[[Tensor, int, Generator], None], out: Tensor, each: int, source: Generator) -> Tensor:
    """Fill a vector piece by piece, to save memory; on a CPU, several threads fill pieces at once.

    The numbers do not depend on the size of the pieces. Threads over pieces scale better than the threads within each
    small operation.

    Args:
        fill: Called as fill(piece, start, source); fills the piece of `out` that starts at entry `start`.
        out: The vector to fill, (n,).
        each: Positions of the source per entry.
        source: Source of the random numbers; advanced by n * each positions.

    Returns:
        `out`.

    >>> def fill(piece, start, source):
    ...     piece.copy_(source.uniform(len(piece)))
    >>> x = in_pieces(fill, torch.empty(1_000_000).double(), each=1, source=generator(0, "noise", 3))
    >>> x.equal(generator(0, "noise", 3).uniform(1_000_000))
    True
    """
    if out.ndim != 1:
        text = f"out must be a vector: got a tensor of shape {tuple(out.shape)}"
        raise InputError(text, code="wrong-shape", name="out", shape=tuple(out.shape))
    integer("each", each, 1)
    on_cpu = out.device.type == "cpu"
    pieces = out.split(max((_PIECE if on_cpu else _PIECE_GPU) // each, 1))
    starts = range(0, len(out), len(pieces[0])) if len(out) else ()
    sources = [source.ahead(each * start) for start in starts]
    source.position += each * len(out)
    if not on_cpu or len(pieces) == 1:
        for piece, start, advanced in zip(pieces, starts, sources, strict=False):
            fill(piece, start, advanced)
        return out
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(before, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(fill, pieces, starts, sources))
    finally:
        torch.set_num_threads(before)
    return out
