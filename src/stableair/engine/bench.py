"""The bench: each way to compute a round is first compared with the reference, then timed, all in one run."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from stableair.checks import InputError
from stableair.engine import Choice, accelerate, choose, has_kernels
from stableair.engine.stacked import Stacked, Unsupported
from stableair.experiment import IDEAL, Experiment, build
from stableair.simulate import Simulation, simulate

SET_UPS = {
    "digits": {},
    "cnn": {
        "data": "synthetic(samples=1000, shape=(1, 28, 28), classes=62)",
        "model": "cnn()",
        "local_epochs": 1,
        "clients": 10,
    },
    "resnet18": {"data": "synthetic(samples=1000, shape=(3, 32, 32))", "model": "resnet18()", "local_epochs": 1},
}
WORKLOADS = {name: Experiment(**IDEAL, **settings) for name, settings in SET_UPS.items()}
PEERS = "plain", "flower", "pfl_research"
CLOSE = {"fp32": 1e-3, "tf32": 0.1, "bf16": 0.5}  # how near a mode's first uploads must come to the reference's


class Row(NamedTuple):
    """One way to compute a round."""

    name: str
    seconds: list[float]  # of each timed round
    memory: float | None  # GiB on the GPU at most

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def modes(sim: Simulation) -> Iterator[Choice]:
    """Every way there is for this model on this device; the reference first."""
    n, cpu = sim.n, sim.start.w.device.type == "cpu"
    yield Choice("reference", "fp32", sim.train.chunk, "")
    try:
        Stacked(sim.train.module)
    except Unsupported:
        return
    for precision in ("fp32",) if cpu else ("fp32", "tf32", "bf16"):
        yield Choice("stacked", precision, min(n, 50), "")
    for precision in ("tf32", "bf16") if not cpu and has_kernels(sim) else ():
        yield Choice("kernels", precision, min(n, 50), "")
    if cpu:
        yield Choice("processes", "fp32", min(n, 10), "")


def measure(experiment: Experiment, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """The modes on one experiment: compared in their first steps, then timed over rounds after one that warms up."""
    rows, first = [], None
    for how in modes(build(experiment)):
        sim = accelerate(build(experiment), how)
        short = accelerate(_shortened(build(experiment)), how)
        uploads = [torch.cat(column) for column in zip(*short.train(short.start, 0), strict=True)]
        update = uploads[1][uploads[0].argsort().to(uploads[1].device)]
        first = update if first is None else first
        apart = ((update - first).norm() / first.norm()).item()
        if apart > CLOSE[how.precision]:
            what = f"{how.engine}, {how.precision}"
            raise InputError(f"{what} does not do what the reference does: its first uploads are {apart:.2g} apart")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(sim, rounds)
        memory = torch.cuda.max_memory_allocated() / 2**30 if sim.start.w.is_cuda else None
        rows.append(Row(f"{how.engine}, {how.precision}", seconds, memory))
        say(f"{rows[-1].name}: {rows[-1].median:.4f} s a round, first uploads {apart:.1g} from the reference's")
    return rows


def _shortened(sim: Simulation) -> Simulation:
    """The first batch of three clients: enough to compare, and too short for rounding to grow."""
    few = replace(sim.train, parts=[part[: sim.train.batch_size] for part in sim.train.parts[:3]], epochs=1)
    return replace(sim, train=few, n=len(few.parts))


def timed(sim: Simulation, rounds: int) -> list[float]:
    """The seconds of each round, after one that warms up."""
    seconds, begin = [], time.perf_counter()
    for _ in simulate(sim, sim.start, rounds + 1):
        if sim.start.w.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return seconds[1:]


def peers(folder: Path, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """The peers that are installed, on the digits: the same clients, data and start."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        work = _exported(WORKLOADS["digits"], Path(place) / "work.npz")
        for peer in PEERS:
            python = folder / ".env" / peer / "bin" / "python" if peer != "plain" else Path(sys.executable)
            if not python.exists():
                say(f"{peer}: not installed; {folder / 'install.sh'} installs it")
                continue
            words = [str(python.absolute()), str(folder / f"{peer}.py"), str(work), str(rounds)]
            env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
            try:
                told = json.loads(done.stdout.strip().splitlines()[-1])
            except (ValueError, IndexError):
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise InputError(f"{peer} failed: {last}") from None
            rows.append(Row(peer.replace("_", "-"), told["seconds"], None))
            say(f"{rows[-1].name}: {rows[-1].median:.4f} s a round, accuracy {told['accuracy']:.3f}")
    return rows


def _exported(experiment: Experiment, path: Path) -> Path:
    """The work of an experiment as arrays, for programs that know nothing of us."""
    train = build(experiment).train
    data = train.data
    flat = {key: data.inputs(x).flatten(1).numpy() for key, x in (("x", data.train.x), ("test_x", data.test.x))}
    order = np.concatenate([part.numpy() for part in train.parts])
    np.savez(
        path, **flat, y=data.train.y.numpy(), test_y=data.test.y.numpy(), order=order,
        sizes=[len(part) for part in train.parts], start=build(experiment).start.w.numpy(),
        epochs=train.epochs, batch=train.batch_size, lr=train.lr,
    )  # fmt: skip
    return path


def table(workload: str, rows: list[Row]) -> str:
    """The rows as they stand in the records: the ratio is to the reference of the same run."""
    slowest = rows[0].median
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}, {_device()}, torch {torch.__version__}. {workload}: "
        f"{WORKLOADS[workload].clients} clients, whole rounds on an ideal channel with evaluation.",
        "",
        "| what | n | seconds a round, median | least to most | times as fast as the reference | GPU memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        least, most = min(row.seconds), max(row.seconds)
        memory = "" if row.memory is None else f"{row.memory:.1f} GiB"
        figures = f"{len(row.seconds)} | {row.median:.4f} | {least:.4f} to {most:.4f} | {slowest / row.median:.2f}"
        lines.append(f"| {row.name} | {figures} | {memory} |")
    return "\n".join(lines)


def scaling(counts: tuple[int, ...], models: tuple[str, ...], rounds: int, say: Callable[[str], None]) -> str:
    """Seconds a round and peak memory over the number of clients and the model's size, as the engine chooses."""
    import resource

    lines = ["| model | entries | clients | engine | seconds a round | memory at most |", "|---|---|---|---|---|---|"]
    for model in models:
        for n in counts:
            e = Experiment(data=f"synthetic(samples={20 * n})", model=model, clients=n, local_epochs=1, **IDEAL)
            sim = build(e)
            how = choose(sim, "auto", rounds=rounds)
            seconds = timed(accelerate(sim, how), rounds)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kB to GiB
            if sim.start.w.is_cuda:
                most = torch.cuda.max_memory_allocated() / 2**30
            figures = f"{statistics.median(seconds):.3f} | {most:.1f} GiB"
            lines.append(f"| {model} | {len(sim.start.w):,} | {n} | {how.engine}, {how.chunk} at a time | {figures} |")
            say(lines[-1])
    return "\n".join(lines)


def _commit() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    named = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{len(named) or os.cpu_count()} cores, {named[0] if named else platform.processor()}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def append(path: Path, text: str) -> Path:
    """Add a run to the records."""
    try:
        with open(path, "a") as file:
            file.write(f"\n{text}\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path
