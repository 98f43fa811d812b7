"""Real clients: the air under any strategy of Flower, and a ready app for our own models and data."""

from stableair.checks import InputError

try:
    from stableair.flower.app import client_app, server_app
    from stableair.flower.mods import limited
    from stableair.flower.strategy import OverTheAir
except ImportError as error:  # no Flower, or one that lacks what is asked of it
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise InputError("stableair.flower needs Flower 1.41: pip install 'stableair[flower]'") from None

__all__ = ["OverTheAir", "client_app", "limited", "server_app"]
