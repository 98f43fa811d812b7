"""The best checkpoint of a run: the state after the round with the best value of a metric."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from stableair.contracts import Round
from stableair.errors import CorruptRunError, InputError
from stableair.results.checkpoint import Checkpoint, read_best, save_checkpoint
from stableair.results.checksums import BEST
from stableair.results.lock import LockedFolder
from stableair.results.metrics import Row
from stableair.results.resume import ResumePoint
from stableair.results.stopping import check_recorded, is_better


def keep_best(
    rounds: Iterable[Round], folder: LockedFolder | None, metric: str, previous: ResumePoint
) -> Iterator[Round]:
    """Keep the state after the best round in `checkpoint.best.pt`, and yield the rounds unchanged.

    Args:
        rounds: The recorded rounds, from `recorded`.
        folder: The run folder; None on processes that do not write.
        metric: The metric by which rounds are compared.
        previous: The resume point of the run. Only its best and its last round have a stored state, so only these two
            can still be the best round.
    """
    best: float | None = None
    if folder:
        for checkpoint in _stored_checkpoints(folder.path, previous):
            best = _keep_if_better(folder, checkpoint, previous.rows[checkpoint.rounds - 1], metric, best)
    for k, state, row in rounds:
        if folder and not row.get("diverged"):
            check_recorded(metric, [row])
            best = _keep_if_better(folder, Checkpoint(k + 1, state), row, metric, best)
        yield Round(k, state, row)


def _stored_checkpoints(folder: Path, previous: ResumePoint) -> list[Checkpoint]:
    """Return the best checkpoint of a folder, if its round is complete, and the last checkpoint."""
    stored = []
    with suppress(InputError, CorruptRunError):  # a damaged or missing file is replaced later
        stored.append(read_best(folder))
    if previous.checkpoint:
        stored.append(previous.checkpoint)
    return [each for each in stored if each.rounds <= previous.rounds]


def _keep_if_better(
    folder: LockedFolder, checkpoint: Checkpoint, row: Row, metric: str, best: float | None
) -> float | None:
    """Write a checkpoint if its round is the best so far, and return the best value of the metric."""
    if not is_better(metric, row.get(metric), best):
        return best
    save_checkpoint(folder, checkpoint, keep=False, name=BEST)
    return row[metric]
