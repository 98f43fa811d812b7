"""Trackers for TensorBoard, Weights & Biases and MLflow, as callbacks. Packages are imported when needed."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from stableair.errors import StableairError
from stableair.experiment import Experiment
from stableair.optional import require
from stableair.results.callbacks import Callback
from stableair.results.metrics import NO_METRICS, Row
from stableair.results.run import Run
from stableair.validation import as_path, choice

log = logging.getLogger("stableair")

Metrics = dict[str, float]


class Tracker(Callback):
    """Base class of trackers: send the metrics of every round to a tracking service.

    If the service fails, a warning is logged and the run continues without the tracker. Subclasses implement `_open`,
    `_log` and `_close`.

    Args:
        folder: Folder for the files of the tracker. With the same folder and experiment, the tracked run continues.

    Raises:
        MissingExtraError: The package of the service is not installed.
    """

    name: ClassVar[str]  # the package, and the extra that installs it

    def __init__(self, folder: str | Path):
        self.folder = as_path("folder", folder)
        self.active = False
        require(self.name, extra=self.name)

    def _open(self, experiment: Experiment) -> None:
        raise NotImplementedError

    def _log(self, metrics: Metrics, k: int) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def start(self, experiment: Experiment, engine: dict[str, Any]) -> None:
        """Open the tracked run."""
        self.close()  # still open if an exception stopped the previous run
        self.active = True
        self._attempt(lambda: self._open(experiment))

    def round(self, experiment: Experiment, row: Row) -> None:
        """Log the metrics of a round."""
        metrics = {key: float(v) for key, v in row.items() if v is not None and key not in NO_METRICS}
        self._attempt(lambda: self._log(metrics, row["round"]))

    def end(self, experiment: Experiment, outcome: Run | StableairError) -> None:
        """Close the tracked run."""
        self.close()

    def close(self) -> None:
        """Close the tracked run, if one is open."""
        self._attempt(self._close)
        self.active = False

    def _attempt(self, call: Callable[[], object]) -> None:
        if not self.active:
            return
        try:
            call()
        except Exception as error:  # no error of a tracking service may stop the run
            self.active = False
            reason = str(error).partition("\n")[0]
            log.warning("tracker %s failed: %s; the run continues without it", self.name, reason)

    def _identity(self, experiment: Experiment) -> str:
        """Return the id of a tracked run. It depends on the folder, and stays the same when a run is resumed."""
        digest = hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=4).hexdigest()
        return f"{experiment.name}-{digest}"


class TensorBoard(Tracker):
    """Callback that writes TensorBoard files to `folder`/tensorboard, with one subfolder per experiment.

    `track="tensorboard"` creates this callback. [Trackers](../observe.md#trackers) describes the extras to install.

    Args:
        folder: Folder for the files, usually the folder of the runs.

    Raises:
        MissingExtraError: The package tensorboard is not installed.

    ```python
    sa.run(experiment, "runs/x", callbacks=[sa.TensorBoard("runs")])
    ```
    """

    name = "tensorboard"

    def _open(self, experiment: Experiment) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder / "tensorboard" / experiment.name)
        self.writer.add_text("experiment", f"```\n{experiment.to_toml()}```")

    def _log(self, metrics: Metrics, k: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, k)
        self.writer.flush()

    def _close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """Callback that logs to the Weights & Biases project "stableair".

    `track="wandb"` creates this callback.

    Args:
        folder: Folder for local files. With the same folder and experiment, the tracked run continues.

    Raises:
        MissingExtraError: The package wandb is not installed.

    ```python
    sa.run(experiment, "runs/x", callbacks=[sa.WandB("runs")])
    ```
    """

    name = "wandb"

    def _open(self, experiment: Experiment) -> None:
        import wandb

        self.run = wandb.init(
            project="stableair", name=experiment.name, id=self._identity(experiment), resume="allow",
            config=experiment.to_dict(), dir=self.folder,
        )  # fmt: skip

    def _log(self, metrics: Metrics, k: int) -> None:
        self.run.log(metrics, step=k)

    def _close(self) -> None:
        self.run.finish()


class MLflow(Tracker):
    """Callback that logs to the MLflow experiment "stableair".

    `track="mlflow"` creates this callback.

    Args:
        folder: Folder of the runs. With the same folder and experiment, the tracked run continues.

    Raises:
        MissingExtraError: The package mlflow is not installed.

    ```python
    sa.run(experiment, "runs/x", callbacks=[sa.MLflow("runs")])
    ```
    """

    name = "mlflow"

    def _open(self, experiment: Experiment) -> None:
        import mlflow

        mlflow.set_experiment("stableair")
        tag = {"stableair": self._identity(experiment)}
        past = mlflow.search_runs(filter_string=f"tags.stableair = '{tag['stableair']}'", output_format="list")
        mlflow.start_run(past[0].info.run_id if past else None, run_name=experiment.name, tags=tag)
        if not past:
            mlflow.log_params(experiment.to_dict())

    def _log(self, metrics: Metrics, k: int) -> None:
        import mlflow

        mlflow.log_metrics(metrics, step=k)

    def _close(self) -> None:
        import mlflow

        mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {one.name: one for one in (TensorBoard, WandB, MLflow)}


def tracker(name: str, folder: str | Path) -> Tracker:
    """Return the tracker with a name.

    Args:
        name: "tensorboard", "wandb" or "mlflow".
        folder: Folder for the files of the tracker.

    Raises:
        InputError: The tracker is unknown (`unknown-value`).
        MissingExtraError: The package of the tracker is not installed.
    """
    return TRACKERS[choice("tracker", name, TRACKERS)](folder)
