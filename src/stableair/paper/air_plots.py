"""Pictures of the air: one of each part that drops an assumption of Eq. (3)."""

from collections.abc import Callable

from matplotlib.figure import Figure

PICTURES: dict[str, Callable[[], Figure]] = {}  # by the name of the component
