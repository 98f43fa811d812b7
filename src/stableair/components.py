"""Convert components that are plain functions or small classes to the rules that Algorithm 1 calls."""

from collections.abc import Callable
from typing import Any, TypeVar

from stableair.contracts import LocalRule, Rule, ServerRule
from stableair.errors import InputError
from stableair.validation import short_repr

AnyRule = TypeVar("AnyRule", Rule, ServerRule, LocalRule)
METHODS: dict[type, tuple[str, ...]] = {
    Rule: ("apply", "init"),
    ServerRule: ("apply", "init"),
    LocalRule: ("step", "init"),
}
OPTIONS: dict[type, tuple[str, ...]] = {Rule: ("pilots",), ServerRule: (), LocalRule: ("entrywise",)}


def as_rule(
    setting: str, component: Any, rule_class: type[AnyRule], from_function: Callable[[Callable[..., Any]], AnyRule]
) -> AnyRule:
    """Convert a component to a rule.

    Args:
        setting: The experiment's setting of the component, for the error.
        component: A rule of this class; an object with its `METHODS`, and optionally its `OPTIONS`; or a function.
        rule_class: `Rule`, `ServerRule` or `LocalRule`.
        from_function: Converts a plain function to a rule.

    Raises:
        InputError: The component has another type.
    """
    if isinstance(component, rule_class):
        return component
    methods: list[Any] = [getattr(component, name, None) for name in METHODS[rule_class]]
    has_methods = all(map(callable, methods))
    if isinstance(component, type) or not (has_methods or callable(component)):
        text = f"the {setting} must be a function or a {rule_class.__name__}: got {short_repr(component)}"
        text += "; did you forget to return it?" if component is None else ""
        raise InputError(text, code="wrong-type", setting=setting)
    if not has_methods:
        return from_function(component)
    options = {name: getattr(component, name) for name in OPTIONS[rule_class] if hasattr(component, name)}
    return rule_class(*methods, **options)
