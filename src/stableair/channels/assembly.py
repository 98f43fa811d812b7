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
RENAMED = {"gains": "transmissions", "noise": "noise_scale"}  # methods of a power rule in version 0.2
ABSENT = {"fading": "unit()", "noise": "none()", "power": "none()"}  # specs without effect


def assemble(calls: Mapping[str, Call], pilots: int, norms: Layout, divisor: float | None) -> Channel:
    """Build a channel from the parts that it uses.

    A channel declares the settings that it uses: `@channel("digital", uses=("power",))`. Without a declaration it uses
    `fading`, `noise`, `power` and `pilots`. A channel that uses a power rule also uses the fading if the rule adapts to
    the fading. The arguments of the channel's factory are the used settings, `norms` and `divisor`.

    Args:
        calls: Parsed specs of `channel`, `fading`, `noise` and `power`.
        pilots: Noise-only symbols per round that the receiver needs.
        norms: Layout of the norm buffers.
        divisor: Divisor of the sum; None for the number of senders.

    Returns:
        The channel.

    Raises:
        InputError: The channel ignores one of the settings ("unused-setting"); the parts do not work together
            ("noise-not-on-sum", "unsupported-noise", "unsupported-fading", "unsupported-power", "unbounded-power"); or
            a component breaks its contract ("wrong-type", "renamed-method").
    """
    call = calls["channel"]
    uses = used_settings(call)
    parts: dict[str, Any] = {"power": _power(calls["power"])} if "power" in uses else {}
    if parts and parts["power"].adapts_to_fading and "fading" not in uses:
        uses += ("fading",)
    _check_unused(calls, uses, pilots)
    parts |= {name: calls[name]() for name in PARTS if name in uses and name not in parts}
    if "pilots" in uses:
        parts["pilots"] = pilots
    try:
        channel: Channel = call()(**parts, norms=norms, divisor=divisor)
    except InputError as error:
        if error.code != "noise-not-on-sum":
            raise
        raise error.with_message(f"power {calls['power']}: {error}") from None  # the channel does not know the spec
    if not all(callable(getattr(channel, method, None)) for method in ("draw", "superpose")):
        actual = type(channel).__name__
        text = f"channel {call} must return an object with the methods draw and superpose: got {actual}"
        raise InputError(text, code="wrong-type", setting="channel", expected="Channel", actual=actual)
    return channel


def _power(call: Call) -> Power:
    """Build the power rule of a spec, and check its type."""
    rule = call()
    if not isinstance(rule, Power):
        actual = type(rule).__name__
        text = f"power {call} must return a Power: got {actual}"
        raise InputError(text, code="wrong-type", setting="power", expected="Power", actual=actual)
    for old, new in RENAMED.items():
        if hasattr(rule, old):
            text = f"power {call} has the method {old} of version 0.2, which is not called; define {new} instead"
            raise InputError(text, code="renamed-method", setting="power", name=old, allowed=new)
    return rule


def used_settings(call: Call) -> tuple[str, ...]:
    """Return the settings that a channel declares; without a declaration, all settings."""
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
        also = " (a noise of scale 0 is also allowed)" if "noise" in unused else ""
        text = f"channel {name} does not use {ignored}; set {instead}{also}, or choose another channel"
        raise InputError(text, code="unused-setting", channel=name, unused=unused)
    if pilots and "pilots" not in uses:
        text = f"channel {name} has no pilots, and the receiver needs {pilots}; choose a receiver without pilots"
        raise InputError(text, code="unused-setting", channel=name, unused={"pilots": pilots})
