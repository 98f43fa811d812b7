"""Build the channel of an experiment from its settings; a channel declares the settings that it uses."""

from collections.abc import Mapping
from typing import Any

from stableair.channels.power import Power
from stableair.contracts import Channel
from stableair.errors import InputError
from stableair.spec import Call
from stableair.vector import Layout

PARTS = "fading", "noise", "power"
USABLE = *PARTS, "pilots"
ABSENT = {"fading": "unit()", "noise": "none()", "power": "none()"}  # specs of parts without effect


def assemble(calls: Mapping[str, Call], pilots: int, norms: Layout, divisor: float | None) -> Channel:
    """Make a channel from the parts that it uses.

    A channel declares the settings that it uses: `@channel("digital", uses=())`. Without a declaration it uses all of
    `fading`, `noise`, `power` and `pilots`. Its factory receives these settings, `norms` and `divisor`.

    Args:
        calls: Parsed specs of `channel`, `fading`, `noise` and `power`.
        pilots: Noise-only symbols per round that the receiver asks for.
        norms: Layout of the norm buffers.
        divisor: Divisor of the sum; None for the number of senders.

    Raises:
        InputError: The channel ignores one of the settings ("unused-setting"), or a component breaks its contract.
    """
    call = calls["channel"]
    uses = used_settings(call)
    _check_unused(calls, uses, pilots)
    parts: dict[str, Any] = {name: calls[name]() for name in PARTS if name in uses}
    if "power" in uses and not isinstance(parts["power"], Power):
        actual = type(parts["power"]).__name__
        text = f"power {calls['power']} must return a Power: got {actual}"
        raise InputError(text, code="wrong-type", setting="power", expected="Power", actual=actual)
    if "pilots" in uses:
        parts["pilots"] = pilots
    channel: Channel = call()(**parts, norms=norms, divisor=divisor)
    if not all(callable(getattr(channel, method, None)) for method in ("draw", "superpose")):
        actual = type(channel).__name__
        text = f"channel {call} must return an object with the methods draw and superpose: got {actual}"
        raise InputError(text, code="wrong-type", setting="channel", expected="Channel", actual=actual)
    return channel


def used_settings(call: Call) -> tuple[str, ...]:
    """Settings that a channel declares to use; all of them without a declaration."""
    uses = call.entry.declared.get("uses", USABLE)
    if unknown := [name for name in uses if name not in USABLE]:
        text = f"channel {call.entry.name} declares uses={unknown[0]!r}; allowed: {', '.join(USABLE)}"
        raise InputError(text, code="unknown-setting", setting="channel", name=unknown[0], allowed=USABLE)
    return tuple(uses)


def is_absent(setting: str, call: Call) -> bool:
    """Whether a component changes nothing: `unit()`, `none()`, or a noise whose scale is 0.

    A noise declares the argument that scales it: `@noise("gaussian", scale="std")`.
    """
    complete = call.full()
    return str(complete) == ABSENT[setting] or complete.arguments.get(call.entry.declared.get("scale", "")) == 0


def _check_unused(calls: Mapping[str, Call], uses: tuple[str, ...], pilots: int) -> None:
    """Refuse settings that the channel would ignore, unless the part is absent."""
    unused = {name: str(calls[name]) for name in PARTS if name not in uses and not is_absent(name, calls[name])}
    name = calls["channel"].entry.name
    if unused:
        ignored = " and ".join(f"{setting}={text}" for setting, text in unused.items())
        instead = " and ".join(f"{setting}={ABSENT[setting]}" for setting in unused)
        also = " (a noise of scale 0 counts as absent, too)" if "noise" in unused else ""
        text = f"channel {name} does not use {ignored}; set {instead}{also}, or choose another channel"
        raise InputError(text, code="unused-setting", channel=name, unused=unused)
    if pilots and "pilots" not in uses:
        text = f"channel {name} has no pilots, and the receiver asks for {pilots}; choose a receiver without pilots"
        raise InputError(text, code="unused-setting", channel=name, unused={"pilots": pilots})
