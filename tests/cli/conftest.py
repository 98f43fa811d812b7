"""Settings as words of the command line."""

import pytest


@pytest.fixture
def small(tiny):
    return [f"{key}={value}" for key, value in tiny.to_dict().items()]
