"""The width of texts in a figure, and texts that fit into a width."""

import logging
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.cbook import is_math_text
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

log = logging.getLogger("stableair")

LINE = 1.44  # height of a line of text, in font sizes
INDENT = "   "  # of continued lines


def text_width(text: str, size: Any) -> float:
    """Return the width of a text in points: the width of its longest line.

    Args:
        text: The text; formulas are between $ signs.
        size: Font size, such as 8 or "small".
    """
    font = FontProperties(family=rcParams["font.family"], size=size)
    measured = (
        text_to_path.get_text_width_height_descent(line, font, ismath=is_math_text(line)) for line in text.splitlines()
    )
    return max((width for width, _, _ in measured), default=0.0)


def font_size(size: Any) -> float:
    """Return a font size in points; "small" and similar sizes are relative to the size of the style."""
    return FontProperties(size=size).get_size_in_points()


def wrap(text: str, width: float, size: Any, indent: str = INDENT, break_words: bool = True) -> str:
    """Break a text into lines that are at most `width` wide.

    Args:
        text: The text.
        width: Width in points.
        size: Font size, such as 8 or "small".
        indent: Start of the continued lines.
        break_words: Whether to break words that are wider than a line. Otherwise these lines are too wide.

    Returns:
        The text with line breaks. A text that fits is unchanged.
    """
    full = text_width(text, size)
    if full <= width:
        return text
    characters = max(len(indent) + 1, int(1.2 * len(text) * width / full))  # narrow letters may fit more than average
    while True:
        wrapped = textwrap.fill(text, characters, subsequent_indent=indent, break_long_words=break_words)
        if characters <= len(indent) + 1 or text_width(wrapped, size) <= width:
            return wrapped
        characters -= 1


def shorten(text: str, width: float, size: Any) -> str:
    """Replace the middle of a text by an ellipsis, so that the text is at most `width` points wide.

    The end of a label often distinguishes it from other labels, so it is kept.

    Args:
        text: The text.
        width: Width in points.
        size: Font size, such as 8 or "small".
    """
    kept, short = len(text), text
    while kept > 2 and text_width(short, size) > width:
        kept -= 1
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return short


def fit(texts: Sequence[str], width: float, height: float, size: Any) -> list[str]:
    """Break texts into lines; if these are too high, shorten each text to one line and log a warning.

    Args:
        texts: The texts, which are below each other.
        width: Width in points.
        height: Height in points.
        size: Font size, such as 8 or "small".
    """
    wrapped = [wrap(text, width, size) for text in texts]
    lines = sum(text.count("\n") + 1 for text in wrapped)
    if lines == len(texts) or lines * LINE * font_size(size) <= height:
        return wrapped
    log.warning("labels are shortened, since the picture is too small for them; choose a larger size, or other labels")
    return [shorten(text, width, size) for text in texts]
