"""Small pieces of HTML for notebooks: a table, and a line of a metric over the rounds."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 160, 32, 2  # of a line, in pixels

_STYLE = 'style="text-align:left"'


def html_table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), caption: str = "") -> str:
    """Write a table; texts are escaped, SVG drawings are not.

    >>> html_table([("C", "<1")])
    '<table><tr><td style="text-align:left">C</td><td style="text-align:left">&lt;1</td></tr></table>'
    """
    title = f"<caption {_STYLE}>{escape(caption)}</caption>" if caption else ""
    lines = [_line("th", head)] if head else []
    return f"<table>{title}{''.join([*lines, *(_line('td', row) for row in rows)])}</table>"


def sparkline(values: Sequence[float | None]) -> str:
    """Draw values over their positions as an inline SVG, in the colour of the text; None leaves a gap in the line."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (HEIGHT - 2 * MARGIN) / (high - low or 1)
    step = (WIDTH - 2 * MARGIN) / max(1, len(values) - 1)
    points = [None if v is None else (MARGIN + i * step, MARGIN + (high - v) * scale) for i, v in enumerate(values)]
    commands = [
        f"{'L' if i and points[i - 1] else 'M'}{point[0]:.1f} {point[1]:.1f}"
        for i, point in enumerate(points) if point
    ]  # fmt: skip
    path = f'<path d="{"".join(commands)}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{path}</svg>'


def _line(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag} {_STYLE}>{_cell(cell)}</{tag}>' for cell in cells)}</tr>"


def _cell(content: object) -> str:
    text = str(content)
    return text if text.startswith("<svg ") else escape(text)
