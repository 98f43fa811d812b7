"""Random experiments under every engine, stopped and resumed, in one process and in two ranks.

    PYTHONPATH=tests python -m hostile.random_experiments --minutes 15
    PYTHONPATH=tests python -m hostile.random_experiments --only 17

For each experiment and both engines:
- a run that is stopped after a random round and resumed gives the bits of an uninterrupted run;
- two ranks of torchrun that resume the stopped run give these bits, too, and so does a whole run in two ranks;
- the fast engine trains every round of the reference run as the reference does, up to rounding;
- an experiment that is refused is refused with the same code by every engine and for every number of processes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

import stableair as sa
from helpers.callbacks import Hooks
from helpers.random_experiments import draw, register
from helpers.ranked import digest
from helpers.runs import Stop, stop_after
from stableair.builder import build
from stableair.contracts import Upload
from stableair.engine import accelerate, choose
from stableair.training.reference import threads

ENGINES = "auto", "reference"
BATCH = 25  # number of experiments that one start of torchrun checks
SAME = 1e-4  # relative distance of the updates of two engines, beyond the effect of rounding the model
RANK = int(os.environ.get("RANK", 0))


class Failure(AssertionError):
    """An experiment for which a property does not hold."""


def check(holds, *message):
    if not holds:
        raise Failure(" ".join(map(str, message)))


def outcome(experiment, *folder, **options):
    """The digest of a run, or the code with which it is refused."""
    try:
        return digest(sa.run(experiment, *folder, **options))
    except sa.InputError as error:
        return f"refused: {error.code}"


def start_and_stop(drawn, engine, folder):
    """Start a run in a folder and stop it; an experiment that is refused leaves no rounds."""
    experiment = drawn.experiment(engine)
    options = {"checkpoint_every": drawn.checkpoint_every}
    try:
        if drawn.by_error:
            sa.run(experiment, folder, callbacks=[Hooks(round=stop_after(drawn.stop - 1))], **options)
        else:
            sa.run(experiment.with_(rounds=drawn.stop), folder, **options)
    except (Stop, sa.InputError):
        pass


def check_in_one_process(number, folder):
    """Check an experiment in this process, and leave copies of the stopped runs for the ranks.

    Returns:
        The outcome of the whole run by engine, and the engine of `engine=auto` as recorded; {} if it was refused.
    """
    drawn = draw(number)
    outcomes, started = {}, []
    for engine in ENGINES:
        experiment, stopped = drawn.experiment(engine), folder / f"{number}-{engine}"
        whole = outcome(experiment, callbacks=[Hooks(start=started.append)])
        again = outcome(experiment)
        check(whole == again, engine, "is not repeatable:", whole, again)
        start_and_stop(drawn, engine, stopped)
        if stopped.exists():
            shutil.copytree(stopped, for_ranks(folder, number, engine))
        resumed = outcome(experiment, stopped, resume=True)
        check(resumed == whole, engine, "stopped and resumed:", resumed, "instead of", whole)
        outcomes[engine] = whole
    refused = [one.startswith("refused") for one in outcomes.values()]
    if any(refused) or started[0]["engine"] == "reference":
        check(len(set(outcomes.values())) == 1, "the engines differ:", outcomes)
    else:
        check_engines(drawn)
    return outcomes, {} if any(refused) else started[0]


def for_ranks(folder, number, engine):
    """The folder of a stopped run that two ranks resume."""
    return folder / f"{number}-{engine}-for-ranks"


def check_engines(drawn):
    """Compare the training of both engines in every round of the reference run.

    The reference also trains from a model with its last bit changed: where this changes an update, so may the engine.
    Adam is left out: it turns the rounding error of a gradient that is zero into a step of the length lr.
    """
    if drawn.settings["local"].startswith("adam"):
        return
    slow = build(drawn.experiment("reference"))
    fast = accelerate(slow, choose(slow, "auto", chunk=drawn.settings["chunk"]))
    model = slow.start.model
    rounds = sa.simulate(slow, slow.start, drawn.settings["rounds"])
    for k in range(drawn.settings["rounds"]):
        clients = slow.participants(k)
        if len(clients):
            flips = 1 + 2.0**-23 * torch.randint(-1, 2, model.w.shape, generator=torch.Generator().manual_seed(k))
            perturbed = model._replace(w=model.w * flips)
            a, b, p = (
                _uploads(train(m, k, clients))
                for train, m in ((slow.train, model), (fast.train, model), (slow.train, perturbed))
            )
            for part in ("update", "stats", "loss"):
                _agree(part, k, *(getattr(one, part).double().reshape(len(clients), -1) for one in (a, b, p)))
        model = next(rounds).state.model


def _uploads(chunks):
    """All uploads of a round as one."""
    return Upload(*(torch.cat(parts) for parts in zip(*(chunk[:4] for chunk in chunks), strict=True)))


def _agree(part, k, slow, fast, perturbed):
    allowed = SAME * slow.norm(dim=1) + 20 * (perturbed - slow).norm(dim=1) + 1e-6
    distance = (fast - slow).norm(dim=1)
    check((distance <= allowed).all(), f"round {k}: the {part} of the engines is", distance.max().item(), "apart")


def check_in_ranks(in_one_process, folder):
    """Compare two ranks of torchrun with the outcomes of one process by number; yields (number, description)."""
    (folder / "chunks.json").write_text(
        json.dumps({n: engine.get("chunk", 0) for n, (_, engine) in in_one_process.items()})
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, __file__, "--in-ranks", folder], capture_output=True, text=True, env=environment)
    lines = (folder / "ranks.jsonl").read_text().splitlines() if (folder / "ranks.jsonl").exists() else []
    in_ranks = dict(map(json.loads, lines))
    for number, (expected, _) in in_one_process.items():
        if number not in in_ranks:
            yield number, f"two ranks exited: {done.stderr[-3000:]}"
            return
        for run, (engine, result) in in_ranks[number].items():
            if result != expected[engine]:
                yield number, f"two ranks, {run}: {result} instead of {expected[engine]}"


def compute_in_ranks(folder):
    """The computation of each rank: resume the stopped runs, and compute one engine's run from the start."""
    for number, chunk in json.loads((folder / "chunks.json").read_text()).items():
        number, drawn, outcomes = int(number), draw(int(number)), {}
        for engine in ENGINES:
            stopped = for_ranks(folder, number, engine)
            outcomes[f"{engine}, resumed"] = engine, outcome(drawn.experiment(engine), stopped, resume=True)
        engine = ENGINES[number % 2]
        outcomes[f"{engine}, whole"] = engine, outcome(drawn.experiment(engine).with_(chunk=chunk))
        if RANK == 0:
            with (folder / "ranks.jsonl").open("a") as file:
                print(json.dumps([number, outcomes]), file=file)


def failures(numbers, counts):
    """Check some experiments; yields (number, description) of each failure, and counts outcomes and engines."""
    with tempfile.TemporaryDirectory() as name:
        folder, in_one_process = Path(name), {}
        for number in numbers:
            counts["experiments"] += 1
            try:
                with threads(1):  # as many as torchrun gives to a rank
                    in_one_process[number] = outcomes, engine = check_in_one_process(number, folder)
            except Exception:
                yield number, traceback.format_exc()
                continue
            counts[f"engine {engine['engine']}" if engine else outcomes["auto"]] += 1
        yield from check_in_ranks(in_one_process, folder)


def command(number):
    """The command that repeats an experiment."""
    return f"PYTHONPATH=tests python -m hostile.random_experiments --only {number}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15, help="time after which no new batch starts")
    parser.add_argument("--first", type=int, default=0, help="number of the first experiment")
    parser.add_argument("--only", type=int, help="number of the only experiment")
    parser.add_argument("--in-ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    register()
    if options.in_ranks:
        return compute_in_ranks(options.in_ranks)
    if options.only is not None:
        print(draw(options.only))
    first, size = (options.first, BATCH) if options.only is None else (options.only, 1)
    counts, end = Counter(), time.monotonic() + 60 * options.minutes
    while not counts or (options.only is None and time.monotonic() < end):
        for number, failure in failures(range(first, first + size), counts):
            counts["failures"] += 1
            print(f"\nexperiment {number} failed: {failure}\n{command(number)}\n", flush=True)
        first += size
        print(dict(counts), flush=True)
    sys.exit(bool(counts["failures"]))


if __name__ == "__main__":
    main()
