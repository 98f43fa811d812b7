"""Trackers: TensorBoard, Weights & Biases, MLflow. Each is a context that gives a function of a round's numbers.

None is imported unless it is asked for, and none is started before there is a round to tell of.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stableair.checks import InputError, Note, choice
from stableair.experiment import Experiment

Log = Callable[[dict[str, float], int], object]  # (metrics, round)
Tracker = Callable[[Experiment, Path], AbstractContextManager[Log]]


@contextmanager
def tensorboard(experiment: Experiment, folder: Path) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard")
    writer.add_text("experiment", f"```\n{experiment.to_toml()}```")

    def log(metrics: dict[str, float], k: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, k)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def wandb(experiment: Experiment, folder: Path) -> Iterator[Log]:
    import wandb

    with wandb.init(
        project="stableair", name=experiment.name, id=_identity(experiment, folder), resume="allow",
        config=experiment.to_dict(), dir=folder,
    ) as run:  # fmt: skip
        yield lambda metrics, k: run.log(metrics, step=k)


@contextmanager
def mlflow(experiment: Experiment, folder: Path) -> Iterator[Log]:
    import mlflow

    mlflow.set_experiment("stableair")
    tag = {"stableair": _identity(experiment, folder)}
    past = mlflow.search_runs(filter_string=f"tags.stableair = '{tag['stableair']}'", output_format="list")
    with mlflow.start_run(past[0].info.run_id if past else None, run_name=experiment.name, tags=tag):
        if not past:
            mlflow.log_params(experiment.to_dict())
        yield lambda metrics, k: mlflow.log_metrics(metrics, step=k)


def _identity(experiment: Experiment, folder: Path) -> str:
    """The same for a run and its resumption, another for the same experiment in another folder."""
    return f"{experiment.name}-{hashlib.blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()}"


TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


@contextmanager
def track(kind: str | None, experiment: Experiment, folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function to show each round's row to; with no kind it does nothing."""
    if kind is None:
        yield lambda row: None
        return
    tracker = TRACKERS[choice("tracker", kind, TRACKERS)]
    with ExitStack() as stack:
        logs: list[Log] = []

        def on_round(row: dict[str, Any]) -> None:
            numbers = {key: float(v) for key, v in row.items() if v is not None and key not in ("round", "diverged")}
            try:
                if not logs:
                    logs.append(stack.enter_context(tracker(experiment, folder)))
                logs[0](numbers, row["round"])
            except Exception as error:  # whatever a service or its client comes up with: the run is worth more
                what = str(error).partition("\n")[0]
                text = f"tracker {kind} failed in round {row['round']}: {what}; the run goes on without it"
                warnings.warn(text, Note, stacklevel=2)
                logs[:] = [lambda metrics, k: None]

        yield on_round


def check_installed(kind: str | None) -> None:
    """Refuse a tracker that is unknown or not installed, before anything is computed."""
    from importlib.util import find_spec

    if kind and not find_spec(choice("tracker", kind, TRACKERS)):
        raise InputError(f"tracker {kind} is not installed: pip install 'stableair[{kind}]'")
