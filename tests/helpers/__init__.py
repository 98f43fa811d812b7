"""Helpers that several test modules share."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers.channels", "helpers.engine", "helpers.errors", "helpers.sweeps")

ROOT = Path(__file__).parents[2]  # of the project
