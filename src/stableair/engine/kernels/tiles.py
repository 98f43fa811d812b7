"""The sides of a tile, and the mask of its valid rows or columns."""

# The parameters of a @triton.jit function are pointers and compile-time constants, which have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


def tile_side(length: int, max_side: int) -> int:
    """Return the side of a tile: a power of two, at least 16 and at most `max_side`."""
    return min(max_side, max(16, triton.next_power_of_2(length)))


@triton.jit
def in_range(i, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """i < LIMIT; a constant if LIMIT is a multiple of BLOCK, which allows wide loads."""
    if LIMIT % BLOCK == 0:
        return tl.full((BLOCK,), True, tl.int1)
    else:
        return i < LIMIT
