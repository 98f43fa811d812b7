"""What an unlucky or a hostile user does. Slow: `make test-all` runs it. Each test prints how often it tried."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "hostile" in item.path.parts:
            item.add_marker(pytest.mark.slow)
