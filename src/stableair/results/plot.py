"""Plots of recorded runs: metrics against rounds, a resource or an argument; labels over the clients."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stableair.errors import InputError
from stableair.files import write_whole
from stableair.literals import Band, PlotStyle
from stableair.results.arguments import by_argument, in_order
from stableair.results.curves import BANDS, described, draw_curves, finish, line_looks
from stableair.results.grouping import group
from stableair.results.outputs import METADATA, check_output
from stableair.results.points import draw_points
from stableair.results.reading import log_left_out, on_one_split, runs_from, with_metric
from stableair.results.resources import RESOURCES
from stableair.results.run import Run
from stableair.results.styles import TRUETYPE, drawing_style, new_figure, root_figure
from stableair.validation import as_path, positive, texts, typed

MAX_COLOURED_CLASSES = 20  # with more classes the colours would be too similar
DPI: dict[PlotStyle, int] = {"screen": 150, "dark": 150, "paper": 400}  # dots per inch


@typed
def plot(
    runs: Run | str | Path | Iterable[Run | str | Path],
    metric: str | None = None,
    out: str | Path | None = None,
    log: bool = False,
    *,
    x: str = "round",
    band: Band = "std",
    style: PlotStyle = "screen",
    size: tuple[float, float] | None = None,
    labels: list[str] | tuple[str, ...] | None = None,
    ax: Axes | None = None,
    force: bool = False,
) -> Figure:
    """Draw a metric of recorded runs. `stableair plot` calls this function.

    Runs that differ only in the seed form one line, with a band around their mean.

    - `x="round"`: the line is the mean over the seeds in each round.
    - `x` is a resource: at each total, a run has the metric of its last round within this total. The line ends at the
      smallest final total of its seeds.
    - `x` is an argument: each point is the mean of `Run.settled` over the seeds, with an error bar. Here a run that
      diverged has accuracy 0, and no other metric. Runs without a number for the argument become horizontal lines.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        metric: Name of a recorded metric, such as "test/loss", or a resource for its total. None: "test/accuracy", or
            "validation/accuracy" if all runs were evaluated on validation data, as the trials of a search.
        out: File to write; its extension determines the format. None: write no file.
        log: Whether the metric has a logarithmic axis.
        x: "round"; the total of a resource: "symbols", "airtime" (in seconds), "energy" (mean over the clients),
            "energy_max" (largest of a client) or "bits"; or an argument that differs between the runs, such as
            "receiver.C" or "clients".
        band: "std": one standard deviation over the seeds; "sem": one standard error; "ci95": 95 % confidence interval.
        style: "screen"; "paper": one column of an IEEE journal, 3.5 inches wide, font size 8 pt, without title and
            explanations; "dark": for a page with a dark background.
        size: Width and height in inches. None: the size of the style, or matplotlib's `figure.figsize`.
        labels: Names of the lines, in the order of the legend.
        ax: Axes to draw into. None: a new figure.
        force: Whether to replace a file that was not written by stableair.

    Returns:
        The matplotlib figure.

    Raises:
        InputError: No run can be read (`no-run`), no run has the metric (`unknown-metric`), the number of labels is
            wrong (`label-count`), `x` does not differ between the runs (`unknown-x`), or `out` cannot be written
            (`cannot-write`).

    >>> import stableair as sa
    >>> base = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> figure = sa.plot([sa.run(base), sa.run(base.with_(receiver="none()"))])
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['mac(C=1)', 'none()']
    """
    if out is not None:
        check_picture(out, force)
    if size is not None:
        _check_size(size, ax)
    shown, left_out = runs_from(runs)
    if metric is None:
        split, shown = on_one_split(shown)
        metric = f"{split}/accuracy"
    for name in (metric, x) if x in RESOURCES else (metric,):
        shown, others = with_metric(shown, name)
        left_out += [f"{run.folder} has no {name}" for run in others]
    log_left_out(left_out)
    with drawing_style(style, size):
        figure = draw(shown, metric, x, band, labels, ax, log=log, terse=style == "paper")
    if out is not None:
        save(figure, out, force, DPI[style])
    return figure


def _check_size(size: Sequence[float], ax: Axes | None) -> None:
    if ax is not None:
        raise InputError("size and ax exclude each other: leave out size, since ax has a figure", code="size-and-ax")
    if len(size) != 2:
        raise InputError(
            f"size must be a width and a height in inches: got {size}", code="wrong-type", name="size", value=size
        )
    for length in size:
        positive("size", length)


def draw(
    runs: list[Run],
    metric: str,
    x: str = "round",
    band: Band = "std",
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
    *,
    log: bool = False,
    terse: bool = False,
) -> Figure:
    """Draw runs, all of which have recorded the metric.

    Args:
        runs: The runs.
        metric: As for `plot`.
        x: As for `plot`.
        band: As for `plot`.
        labels: As for `plot`.
        ax: As for `plot`.
        log: As for `plot`.
        terse: Whether to omit the number of seeds and the meaning of the band, which a caption then has to explain.

    Returns:
        The matplotlib figure.
    """
    lines = None if x in ("round", *RESOURCES) else by_argument(runs, x)
    groups = in_order(group(runs)) if lines is None else {}
    names = list(groups) if lines is None else [*lines.lines, *lines.references]
    if labels is not None and len(labels) != len(names):
        text = f"labels must have a name for each of {len(names)} lines: got {len(labels)}; lines: {'; '.join(names)}"
        raise InputError(text, code="label-count", labels=list(labels), lines=names)
    new_names = dict(zip(names, texts("labels", labels or ()), strict=False))

    def legend_text(name: str, members: list[Run]) -> str:
        text = new_names.get(name) or (name if terse else described(name, members))
        return f" {text}" if text.startswith("_") else text  # matplotlib hides names that start with an underscore

    axes = new_figure().subplots() if ax is None else ax
    if lines is None:
        draw_curves(axes, groups, metric, legend_text, band, line_looks(groups), x)
    else:
        draw_points(axes, lines, x, metric, legend_text, band)
    kind = "band" if lines is None else "bars"
    finish([axes], metric, log, None if terse else f"{kind}: {BANDS[band]}")
    return root_figure(axes)


def labels(counts: np.ndarray, title: str = "") -> Figure:
    """Draw the label distribution: stacked bars for few classes, a heat map for many.

    Args:
        counts: (clients, classes), number of samples.
        title: Title of the figure.
    """
    counts = np.asarray(counts)
    clients, classes = counts.shape
    figure = Figure(figsize=(max(6.4, min(12, 0.13 * clients + 2)), 4.2), layout="constrained")
    axes = figure.subplots()
    if classes <= MAX_COLOURED_CLASSES:
        colours = colormaps["tab10" if classes <= 10 else "tab20"](range(classes))
        base = np.zeros(clients)
        for c in range(classes):
            axes.bar(np.arange(clients), counts[:, c], 1.0, bottom=base, color=colours[c], label=str(c), linewidth=0)
            base += counts[:, c]
        axes.set(ylabel="samples", xlim=(-0.5, clients - 0.5))
        figure.legend(title="class", fontsize="small", loc="outside right center", reverse=True)
    else:
        image = axes.imshow(counts.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        axes.set(ylabel="class")
        figure.colorbar(image, label="samples")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", title=title)
    return figure


def check_picture(path: str | Path, force: bool = False) -> Path:
    """Check that a picture can be written to a path, and return the path.

    Raises:
        InputError: Matplotlib cannot write the format of the extension (`unknown-format`), or the file may not be
            written, as for `check_output`.
    """
    path = as_path("the picture", path)
    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        text = f"cannot write {path}: its extension must be a picture format, such as .png, .pdf or .svg"
        raise InputError(text, code="unknown-format", path=path)
    return check_output(path, force)


def save(figure: Figure, path: str | Path, force: bool = False, dpi: int = DPI["screen"]) -> Path:
    """Write a figure to a file; its extension determines the format. Missing folders are created.

    Args:
        figure: The figure.
        path: The file.
        force: Whether to replace a file that was not written by stableair.
        dpi: Dots per inch.

    Returns:
        The path.

    Raises:
        InputError: The format is unknown, or the file cannot be written.
    """
    path = check_picture(path, force)
    ending = path.suffix[1:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context(TRUETYPE):
            write_whole(
                path, lambda file: figure.savefig(file, dpi=dpi, format=ending, metadata=METADATA.get(ending.lower()))
            )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {path}: {reason}", code="cannot-write", path=path) from None
    return path
