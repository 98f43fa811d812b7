"""Progress bar for runs that are started from Python, on a terminal or in a notebook."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stableair.errors import StableairError
from stableair.results.callbacks import Callback

if TYPE_CHECKING:
    from stableair.experiment import Experiment
    from stableair.results.metrics import Row
    from stableair.results.run import Run

REFRESH = 0.2  # seconds between two updates in a notebook


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def is_interactive() -> bool:
    """Return whether the output is a terminal, or this process is the kernel of a notebook."""
    return is_notebook() or bool(sys.stdout and sys.stdout.isatty())


class ProgressBar(Callback):
    """Show the progress of experiments as a bar, which disappears at the end.

    Args:
        experiments: Number of experiments. With more than one, a second bar counts the finished experiments.
    """

    shows_progress = True

    def __init__(self, experiments: int = 1):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.fields[text]}")
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text,
            console=Console(), transient=True,
        )  # fmt: skip
        self.experiments = experiments
        self.total = self.bars.add_task("experiments", total=experiments, text="") if experiments > 1 else None
        self.task = self.bars.add_task("", total=1, text="", visible=False)
        self.handle: Any = None
        self.shown_at = 0.0

    def __enter__(self) -> Self:
        if is_notebook():
            from IPython.display import display  # always installed with a notebook

            self.handle = display(self.bars, display_id=True)
        else:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handle:
            from IPython.display import HTML

            self.handle.update(HTML(""))
        else:
            self.bars.stop()

    def start(self, experiment: "Experiment", engine: dict[str, Any]) -> None:
        self.bars.reset(self.task, total=experiment.rounds, description=experiment.name, visible=True, text="")
        self._show()

    def round(self, experiment: "Experiment", row: "Row") -> None:
        accuracy = row.get(f"{experiment.evaluate}/accuracy")
        text = "" if accuracy is None else f"{experiment.evaluate} accuracy {accuracy:.4f}"
        self.bars.update(self.task, completed=row["round"] + 1, text=text)
        self._show()

    def end(self, experiment: "Experiment", outcome: "Run | StableairError") -> None:
        if self.total is not None:
            self.bars.advance(self.total)
            self._show()

    def _show(self) -> None:
        """Update the bar in a notebook. On a terminal, a thread of rich updates it."""
        if self.handle and time.monotonic() - self.shown_at > REFRESH:
            self.handle.update(self.bars)
            self.shown_at = time.monotonic()
