"""Registries of the channels and of their components."""

from typing import Any, TypeVar

from stableair.errors import InputError
from stableair.spec import Registry

fading = Registry("fading", "fadings")
noise = Registry("noise", "noises")  # @noise("name", scale="tau"): tau=0 means no noise
power = Registry("power", "powers")
channel = Registry("channel", "channels")  # @channel("name", uses=("noise", ...)): see `channels.assembly`

# Parts of a channel, named in the channel's spec.
basis = Registry("basis", "bases")
quantizer = Registry("quantizer", "quantizers")
aggregator = Registry("aggregator", "aggregators")

Part = TypeVar("Part")


def make_nested(registry: Registry, text: str, excluded: tuple[str, ...] = ()) -> Any:
    """Build the component of a nested spec.

    Args:
        registry: Registry of the component.
        text: Its spec.
        excluded: Names of components that cannot be nested.

    Returns:
        The component.

    Raises:
        InputError: The spec is invalid, or its component is excluded ("not-nestable").

    >>> from stableair.channels.fading import unit
    >>> make_nested(fading, "unit()").mean_square
    1.0
    """
    call = registry.one(text)
    if call.entry.name in excluded:
        name = call.entry.name
        text = f"{name} cannot be nested in another {registry.kind}; choose a {registry.kind} without memory"
        raise InputError(text, code="not-nestable", name=name)
    return call()


def make_part(registry: Registry, text: str, kind: type[Part]) -> Part:
    """Build a part of a channel from a nested spec, and check its type.

    Args:
        registry: Registry of the part.
        text: Its spec.
        kind: Class of the part.

    Returns:
        The part.

    Raises:
        InputError: The spec is invalid, or the component is of another class ("wrong-type").

    >>> from stableair.channels.modulation import Basis
    >>> make_part(basis, "hadamard(n=8)", Basis).n
    8
    """
    part = make_nested(registry, text)
    if not isinstance(part, kind):
        actual = type(part).__name__
        message = f"{registry.kind} {text} must return {kind.__name__}: got {actual}"
        raise InputError(message, code="wrong-type", expected=kind.__name__, actual=actual)
    return part
