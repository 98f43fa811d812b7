"""Undo what a test registers or sets up in this process."""

import logging
from contextlib import contextmanager

from stableair.spec import PLUGINS, REGISTRIES


@contextmanager
def restored_registries():
    """Remove the components and plug-ins that are registered within the context at its end."""
    before = {plural: dict(registry.entries) for plural, registry in REGISTRIES.items()}
    plugins = list(PLUGINS)
    try:
        yield REGISTRIES
    finally:
        for plural, entries in before.items():
            REGISTRIES[plural].entries = entries
        PLUGINS[:] = plugins


def reset_logger():
    """Undo the changes of main() to the logger."""
    log = logging.getLogger("stableair")
    log.setLevel(logging.NOTSET)
    log.handlers.clear()
