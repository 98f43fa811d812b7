"""Launches Triton kernels, or compiles them in parallel before their first launch."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton

from stableair.engine.processes import available_cores

log = logging.getLogger("stableair")

REPORT_INTERVAL = 5.0  # seconds between two lines about the compilation


class Tile(NamedTuple):
    """Tile of a matrix product: rows and columns per program, depth of a partial sum, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, tile: Tile | None = None) -> None:
    """Launch a kernel, whose last arguments are the sides of the tile; in `compile_in_parallel`, only compile it."""
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    arguments += () if tile is None else tile[:3]
    if _compiling.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def compile_in_parallel(launches: Callable[[], object]) -> None:
    """Compile the kernels that a function launches, on all cores; its results are meaningless.

    Triton compiles a kernel at its first launch, one after the other. A network has about 80 kernels of half a second
    each. Older versions of Triton have no parallel compilation.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or triton.knobs.runtime.interpret:
        return
    # The backward pass must run in this thread: other threads would launch the kernels.
    with torch.autograd.set_multithreading_enabled(False), ThreadPoolExecutor(available_cores()) as pool:
        token = _compiling.set(True)
        try:
            with mode(pool) as compilation:
                launches()
                _report(compilation.raw_futures)
        finally:
            _compiling.reset(token)


def _report(futures: Sequence[Future[Any]]) -> None:
    """Wait for compilations, and log their progress if they take longer than a second."""
    _, pending = wait(futures, timeout=1)
    while pending:
        log.info("compiling kernels %d/%d; later runs use Triton's cache", len(futures) - len(pending), len(futures))
        _, pending = wait(futures, timeout=REPORT_INTERVAL)
