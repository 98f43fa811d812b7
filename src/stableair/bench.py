"""The benchmark: each engine mode is compared with the reference, then timed, all in one process."""

import contextlib
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from stableair.algorithm import Simulation, simulate
from stableair.builder import build
from stableair.contracts import Upload
from stableair.engine import EngineChoice, Unsupported, accelerate, choose, reference_trainer
from stableair.errors import InputError
from stableair.experiment import IDEAL, Experiment
from stableair.literals import Precision
from stableair.results.callbacks import Callback
from stableair.results.environment import commit
from stableair.results.outputs import check_no_run_file
from stableair.runner import run
from stableair.spec import passed_objects
from stableair.training import reference as local
from stableair.vector import ModelState
from stableair.workloads import OBJECTS, WORKLOADS

SIZES = {"mlp(width=200)": (1, 8, 8), "mlp(width=2000)": (1, 8, 8)}  # image shapes of the scaling benchmark, by model
SIZES_ON_GPU = SIZES | {"resnet18()": (3, 32, 32)}
PEERS = "plain", "flower", "pfl_research"
TOLERANCES = {  # relative distance to the reference: of the first updates, and of norm buffers and losses
    "fp32": (1e-2, 1e-5),  # rounding may move an entry across the kink of a relu, and the gradient jumps
    "tf32": (0.2, 1e-3),
    "bf16": (0.5, 1e-2),
}

Report = Callable[[str], None]  # receives one line per finished row


class Row(NamedTuple):
    """The timings of one engine mode, or of another simulator."""

    name: str
    seconds: list[float]  # per timed round
    training: list[float] | None = None  # seconds of local training per timed round
    steps: int = 1  # local steps per round of the client with the most samples
    memory: float | None = None  # peak memory of the GPU, GiB

    @property
    def median(self) -> float:
        """Median seconds per round."""
        return statistics.median(self.seconds)


def modes(sim: Simulation) -> Iterator[EngineChoice]:
    """Yield the engine modes to try for this model on this device; the reference first."""
    n, cpu = sim.n, sim.start.model.w.device.type == "cpu"
    yield EngineChoice("reference", "fp32", reference_trainer(sim).chunk, "")
    for precision in ("fp32",) if cpu else get_args(Precision):
        yield EngineChoice("stacked", precision, min(n, 50), "")
    yield EngineChoice("vmapped", "fp32", min(n, 50), "")
    if not cpu:
        yield EngineChoice("kernels", "bf16", min(n, 50), "")
    if cpu:
        yield EngineChoice("processes", "fp32", min(n, 10), "")


@passed_objects(OBJECTS)
def measure(experiment: Experiment, rounds: int, report: Report, only: Sequence[str] = ("",)) -> list[Row]:
    """Compare the engine modes in their first steps on one experiment, then time them.

    Args:
        experiment: The experiment.
        rounds: Number of timed rounds, after one warm-up round.
        report: Called with a line for each timed mode.
        only: Prefixes of the names of the modes to time. The reference always runs, for the comparison.

    Returns:
        The timings; modes that cannot compute the model are left out.

    Raises:
        InputError: A mode does not match the reference (`mode-differs`).
    """
    rows: list[Row] = []
    first: list[Tensor] = []
    whole = build(experiment)
    steps = max(map(reference_trainer(whole).work.steps, range(whole.n)))
    for mode in modes(whole):
        name = f"{mode.engine}, {mode.precision}"
        wanted = name.startswith(tuple(only))
        if mode.engine != "reference" and not wanted:
            continue
        try:
            short = accelerate(_shorten(build(experiment)), mode)
        except Unsupported:
            continue
        uploads = _round_uploads(short)
        first = first or uploads
        update, *others = (_distance(a, b) for a, b in zip(uploads, first, strict=True))
        rest = max(others)
        update_tolerance, rest_tolerance = TOLERANCES[mode.precision]
        if update > update_tolerance or rest > rest_tolerance:
            far = f"relative distance {update:.2g} of the first updates, {rest:.2g} of norm buffers and losses"
            raise InputError(f"{name} does not match the reference: {far}", code="mode-differs", mode=name)
        if not wanted:
            continue
        del short, uploads
        sim = accelerate(build(experiment), mode)
        peak = _PeakMemory(sim)
        seconds, training = timed(sim, rounds)
        memory = peak.gib() if sim.start.model.w.is_cuda else None
        rows.append(Row(name, seconds, training, steps, memory))
        near = f"distance to the reference: {update:.1g} of the first updates, {rest:.1g} of norm buffers and losses"
        report(f"{name}: {rows[-1].median:.4f} s per round, {near}")
    return rows


def _shorten(sim: Simulation) -> Simulation:
    """Reduce a simulation to the first batch of three clients, before rounding errors can grow."""
    work = reference_trainer(sim).work
    few = replace(work, parts=[part[: work.batch_size] for part in work.parts[:3]], epochs=1)
    return replace(sim, train=local.Reference(few), n=len(few.parts))


def _round_uploads(sim: Simulation) -> list[Tensor]:
    """Return the updates, norm buffers and losses of a round, in the order of the clients."""
    sent = (upload[:4] for upload in sim.train(sim.start.model, 0, torch.arange(sim.n)))  # without the norm
    clients, *rest = map(torch.cat, zip(*sent, strict=True))
    return [column[clients.argsort().to(column.device)] for column in rest]


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item() if b.numel() else 0.0


def timed(sim: Simulation, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round and of its local training, after a warm-up round."""
    seconds: list[float] = []
    training: list[float] = []

    def train(state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        training.append(0.0)
        uploads = iter(sim.train(state, k, clients))
        while True:
            start = _synchronised_time(sim)
            upload = next(uploads, None)
            training[-1] += _synchronised_time(sim) - start
            if upload is None:
                return
            yield upload

    start = _synchronised_time(sim)
    for _ in simulate(replace(sim, train=train), sim.start, rounds + 1):
        seconds.append(_synchronised_time(sim) - start)
        start = _synchronised_time(sim)
    return seconds[1:], training[1:]


def recorded(experiment: Experiment, rounds: int) -> Row:
    """Time whole rounds of `stableair run`, including records and checkpoints."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment.with_(rounds=rounds + 1), Path(folder) / "run", callbacks=[clock])
    seconds = [after - before for before, after in itertools.pairwise(clock.times)]
    return Row(f"{clock.engine['engine']}, {clock.engine['precision']}, recorded in a folder", seconds)


class _Clock(Callback):
    """Records the engine of a run and the time at the end of each round."""

    def start(self, experiment: Experiment, engine: dict[str, Any]) -> None:
        self.engine = engine
        self.times: list[float] = []

    def round(self, experiment: Experiment, row: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())


class _PeakMemory:
    """Peak memory since this object was created: of the GPU, or of this process on Linux."""

    def __init__(self, sim: Simulation):
        self.cuda = sim.start.model.w.is_cuda
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak

    def gib(self) -> float:
        """Return the peak in GiB; NaN if the system does not report it."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 2**30
        peaks = [line.split()[1] for line in _read_lines("/proc/self/status") if line.startswith("VmHWM")]
        return int(peaks[0]) / 2**20 if peaks else math.nan


def _synchronised_time(sim: Simulation) -> float:
    if sim.start.model.w.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def peers(folder: Path, rounds: int, report: Report) -> list[Row]:
    """Time the other simulators that are installed, on the digits, with the same clients, data and initial model."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        work = _export_work(WORKLOADS["digits"], Path(temporary) / "work.npz")
        for peer in PEERS:
            python = folder / ".env" / peer / "bin" / "python" if peer != "plain" else Path(sys.executable)
            if not python.exists():
                report(f"{peer}: not installed; {folder / 'install.sh'} installs it")
                continue
            words = [str(python.absolute()), str(folder / f"{peer}.py"), str(work), str(rounds)]
            env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
            try:
                result = json.loads(done.stdout.strip().splitlines()[-1])
            except (ValueError, IndexError):
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise InputError(f"{peer} failed: {last}", code="peer-failed", peer=peer) from None
            rows.append(Row(peer.replace("_", "-"), result["seconds"]))
            report(f"{rows[-1].name}: {rows[-1].median:.4f} s per round, accuracy {result['accuracy']:.3f}")
    return rows


def _export_work(experiment: Experiment, path: Path) -> Path:
    """Write the data, partition and initial model of an experiment as arrays, for other simulators."""
    sim = build(experiment.with_(device="cpu"))
    work = reference_trainer(sim).work
    data = work.data
    x, test_x = (data.inputs(split.x).flatten(1).numpy() for split in (data.train, data.test))
    order = np.concatenate([part.numpy() for part in work.parts])
    np.savez(
        path, x=x, test_x=test_x, y=data.train.y.numpy(), test_y=data.test.y.numpy(), order=order,
        sizes=work.sizes, start=sim.start.model.w.numpy(),
        epochs=work.epochs, batch=work.batch_size, lr=work.lr,
    )  # fmt: skip
    return path


def table(workload: str, rows: list[Row]) -> str:
    """Return the rows as a Markdown table; ratios refer to the first row."""
    base = rows[0].median
    lines = [
        f"{_provenance()}. {workload}: {WORKLOADS[workload].clients} clients, {rows[0].steps} local steps, "
        "whole rounds with evaluation.",
        "",
        f"| mode | n | seconds per round, median | range | speed-up over {rows[0].name} "
        "| training, ms per step of all clients | rest of the round | GPU memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        least, most = min(row.seconds), max(row.seconds)
        figures = f"{len(row.seconds)} | {row.median:.4f} | {least:.4f} to {most:.4f} | {base / row.median:.2f}"
        training = statistics.median(row.training) if row.training else None
        alone = " | " if training is None else f"{1000 * training / row.steps:.2f} | {1 - training / row.median:.1%}"
        lines.append(f"| {row.name} | {figures} | {alone} | {'' if row.memory is None else f'{row.memory:.1f} GiB'} |")
    return "\n".join(lines)


def scaling(counts: Sequence[int], models: Mapping[str, tuple[int, ...]], rounds: int, report: Report) -> str:
    """Time a round, and measure its peak memory, over the number of clients and the size of the model."""
    lines = [
        f"{_provenance()}. Scaling: 20 samples per client, one local epoch, ideal channel.",
        "",
        "| model | entries | clients | engine | n | seconds per round, median | range | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, shape in models.items():
        for n in counts:
            data = f"synthetic(samples={20 * n}, shape={shape})"
            settings: dict[str, Any] = IDEAL | {"data": data, "model": model, "clients": n, "local_epochs": 1}
            e = Experiment(**settings)
            sim = build(e)
            mode = choose(sim, "auto", rounds=rounds)
            peak = _PeakMemory(sim)
            seconds, _ = timed(accelerate(sim, mode), rounds)
            spread = f"{min(seconds):.4f} to {max(seconds):.4f}"
            figures = f"{rounds} | {statistics.median(seconds):.4f} | {spread} | {peak.gib():.1f} GiB"
            engine = f"{mode.engine}, {mode.chunk} at a time"
            lines.append(f"| {model} | {len(sim.start.model.w):,} | {n} | {engine} | {figures} |")
            report(lines[-1])
    return "\n".join(lines)


def _provenance() -> str:
    """Return the date, the commit, the device and the version of torch."""
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit() or 'unknown'}, {_device_name()}, torch {torch.__version__}"


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    named = [line.partition(":")[2].strip() for line in _read_lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{len(named) or os.cpu_count()} cores, {named[0] if named else platform.processor()}"


def _read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def check_record(path: Path) -> None:
    """Refuse a file for the records that cannot be written, before the benchmark runs."""
    check_no_run_file(path)
    try:
        exists = path.exists()
        with open(path, "a", encoding="utf-8"):
            pass
        if not exists:
            path.unlink()
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write {path}: {getattr(error, 'strerror', error)}", hint="record", code="not-writable", path=path
        ) from None


def append(path: Path, text: str) -> Path:
    """Append a table to the records."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", code="not-writable", path=path) from None
    return path
