"""Search settings of an experiment on a validation split; the test data stay unseen."""

from stableair.searches.result import Result, Trial, draw
from stableair.searches.spaces import OneOf, Range, Space, space
from stableair.searches.study import METRIC, RESULT, search

__all__ = ["METRIC", "RESULT", "OneOf", "Range", "Result", "Space", "Trial", "draw", "search", "space"]
