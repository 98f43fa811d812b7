"""Integration with Flower: a strategy whose clients transmit over the air, and an app that runs an experiment."""

from stableair.optional import require

require("flwr.serverapp.strategy", extra="flower")  # older versions of flwr lack this module

from stableair.flower.app import client_app, server_app  # noqa: E402
from stableair.flower.mods import limited  # noqa: E402
from stableair.flower.strategy import OverTheAir  # noqa: E402

__all__ = ["OverTheAir", "client_app", "limited", "server_app"]
