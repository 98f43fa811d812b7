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
    """Write the state after the best round so far to `checkpoint.best.pt`, and yield the rounds.

    Args:
        rounds: Recorded rounds, as from `recorded`.
        folder: The run folder; None on processes that do not write.
        metric: The metric that decides.
        previous: Where the run continues. Of its rounds, those with a known state compete: the best and the last one.
    """
    best: float | None = None
    if folder:
        for checkpoint in _known(folder.path, previous):
            best = _keep_if_better(folder, checkpoint, previous.rows[checkpoint.rounds - 1], metric, best)
    for k, state, row in rounds:
        if folder and not row.get("diverged"):
            check_recorded(metric, [row])
            best = _keep_if_better(folder, Checkpoint(k + 1, state), row, metric, best)
        yield Round(k, state, row)


def _known(folder: Path, previous: ResumePoint) -> list[Checkpoint]:
    """The best checkpoint in the folder if its round is complete, and the last checkpoint."""
    known = []
    with suppress(InputError, CorruptRunError):  # a damaged or missing file is written anew
        known.append(read_best(folder))
    if previous.checkpoint:
        known.append(previous.checkpoint)
    return [each for each in known if each.rounds <= previous.rounds]


def _keep_if_better(
    folder: LockedFolder, checkpoint: Checkpoint, row: Row, metric: str, best: float | None
) -> float | None:
    """Write a checkpoint if its round is the best so far; returns the best value."""
    if not is_better(metric, row.get(metric), best):
        return best
    save_checkpoint(folder, checkpoint, keep=False, name=BEST)
    return row[metric]
