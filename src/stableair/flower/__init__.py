"""Real clients: the air under any strategy of Flower, and a ready app for our own models and data."""

from stableair.checks import InputError

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flwr":
        raise
    raise InputError("stableair.flower needs Flower: pip install 'stableair[flower]'") from None

from stableair.flower.app import client_app, server_app
from stableair.flower.mods import limited
from stableair.flower.strategy import OverTheAir

__all__ = ["OverTheAir", "client_app", "limited", "server_app"]
