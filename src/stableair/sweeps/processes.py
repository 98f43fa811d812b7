"""A sweep in one process of this machine or in several, which all do the same: there is no first among them.

A helper is told on its standard input what to take part in. When that ends, so does the helper: it does not outlive
the process that started it, however that one ended.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch

import stableair
from stableair.checks import InputError, Note, place, shown, whole
from stableair.experiment import Experiment
from stableair.results.folder import check_writable, has_locks
from stableair.results.run import Run
from stableair.sweeps.cooperative import Begin, Job, Outcome, all_finished, taken
from stableair.sweeps.plans import Plan, planned

PATIENCE = 20  # seconds that a helper has to end in order


def sweep(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path = "runs",
    *,
    parallel: int = 1,
    begin: Begin = lambda experiment: None,
    done: Callable[[Experiment, Outcome], Any] = lambda experiment, outcome: None,
) -> list[Run]:
    """Run all experiments of a plan, each in a folder of its own below this one; `stableair sweep` is this.

    plan: settings of which any may be a list, such as {"receiver": ["mac(C=1)", "none()"], "seeds": 3}; or the file of
    one; or experiments. Other processes may sweep the same folder, here or on another machine: they share the work.
    parallel: so many processes on this machine. What cannot be computed is said at the end, when the others are done.
    """
    experiments, folder = planned(plan), place("folder", folder)
    whole("parallel", parallel, 1, 1000)
    for name, hook in (("begin", begin), ("done", done)):
        if not callable(hook):
            raise InputError(f"{name} must be a function: got {shown(hook)}")
    check_writable(folder)
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    try:
        with _helpers(min(parallel, len(experiments)) - 1, experiments, folder):
            for one, outcome in taken(experiments, folder, begin):
                outcomes[one.name] = outcome
                done(one, outcome)
    finally:
        if fresh:
            with suppress(OSError):
                folder.rmdir()  # where nothing could be computed nothing is left
    return all_finished(experiments, outcomes)


@contextmanager
def _helpers(number: int, experiments: list[Experiment], folder: Path) -> Iterator[None]:
    """So many processes beside this one that take part, the threads and the GPUs of the machine divided over all."""
    if not number:
        yield
        return
    if "WORLD_SIZE" in os.environ:
        raise InputError("torchrun's processes compute one experiment together: leave out parallel, or torchrun")
    if not has_locks(folder):
        raise InputError(f"{folder} is on a disk without locks: one process alone may work there; leave out parallel")
    threads = torch.get_num_threads()
    share = max(1, threads // (number + 1))
    processes = [_helper(own_gpu(i, experiments) | {"OMP_NUM_THREADS": str(share)}) for i in range(1, number + 1)]
    try:
        torch.set_num_threads(share)
        job = json.dumps(Job.of(experiments, folder)).encode() + b"\n"
        for process in processes:
            with suppress(BrokenPipeError):
                process.stdin.write(job)
                process.stdin.flush()
        yield
    finally:
        torch.set_num_threads(threads)
        _end(processes)


def _helper(environment: dict[str, str]) -> Any:
    package = str(Path(stableair.__file__).absolute().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment | {"PYTHONPATH": path},
    )


def own_gpu(number: int, experiments: list[Experiment]) -> dict[str, str]:
    """The environment in which a helper sees a GPU of its own, where there are several and no experiment names one."""
    gpus = torch.cuda.device_count()
    if gpus < 2 or any(one.device not in ("auto", "cuda") for one in experiments):
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": names[number % gpus]}


def _end(processes: list[Any]) -> None:
    """Have them stop in order, and wait for it; nothing is lost either way."""
    for process in processes:
        with suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            warnings.warn(f"a process that took part has ended with code {code}", Note, stacklevel=4)


def _end_with(parent: Any) -> None:
    """Wait until the process that started this one is gone or has had enough."""
    parent.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """What a helper does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's business
    signal.signal(signal.SIGTERM, _stop)
    with suppress(KeyboardInterrupt, InputError):  # its parent meets the same, and says it
        job = Job(*json.loads(sys.stdin.buffer.readline()))
        Thread(target=_end_with, args=[sys.stdin.buffer], daemon=True).start()
        job()
    os._exit(0)  # the thread may be reading still, which Python would not end with


if __name__ == "__main__":
    main()
