"""Python objects in place of specs: a network, a data set, a receiver or a server that is passed to a run."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stableair.contracts import Dataset, Rule, ServerRule
from stableair.errors import InputError
from stableair.fingerprints import fingerprint, qualified_name
from stableair.spec import OBJECT, PassedObject, format_call
from stableair.validation import ADVICE, short_repr

MAX_NAME = 200  # characters of a recorded name


def as_settings(**objects: Any) -> tuple[dict[str, str], dict[str, PassedObject]]:
    """Convert Python objects to specs.

    Args:
        **objects: An object or a spec for each setting; None leaves out the setting.

    Returns:
        The settings, each a spec such as object(name='net.Net', digest='...'); and the objects by digest, for
        `spec.passed_objects`.

    Raises:
        InputError: An object cannot be used for its setting (`wrong-type`).
    """
    settings: dict[str, str] = {}
    passed: dict[str, PassedObject] = {}
    for setting, value in objects.items():
        if value is None or isinstance(value, str):
            settings |= {} if value is None else {setting: value}
            continue
        component, digest = _component(setting, value), fingerprint(value)
        passed[digest] = PassedObject(component, _location(value))
        settings[setting] = format_call(OBJECT, {"name": _name(value), "digest": digest})
    return settings, passed


def is_object(value: Any) -> bool:
    """Whether a value of a setting is a Python object that can take the place of a spec."""
    return isinstance(value, Dataset | Rule | ServerRule) or callable(value)


def _component(setting: str, value: Any) -> Any:
    """Convert a Python object to the value that a registered factory of the setting would return."""
    if setting == "data" and not isinstance(value, Dataset):
        text = f"data must be a Dataset: got {short_repr(value)}"
        raise InputError(text, code="wrong-type", advice=ADVICE["Dataset"])
    if setting != "model":
        return value
    if isinstance(value, nn.Module):
        return lambda shape, classes: copy.deepcopy(value).cpu()
    if not callable(value):
        text = f"the model must be a torch.nn.Module or a function that returns one: got {short_repr(value)}"
        raise InputError(text, code="wrong-type", setting="model")
    if not _needs_no_argument(value):
        check_model_function(value)
    return lambda shape, classes: _built(value, shape, classes)


def _built(factory: Callable[..., Any], shape: tuple[int, ...], classes: int) -> Any:
    """Call a user's factory of a module: without arguments if it needs none, else with the shape and the classes."""
    made = factory() if _needs_no_argument(factory) else factory(shape, classes)
    return check_model_function(made)(shape, classes) if callable(made) and not isinstance(made, nn.Module) else made


def check_model_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can be called with the shape of a sample and the number of classes.

    Raises:
        InputError: It has other arguments (`invalid-model`).
    """
    if not _accepts(function, "shape", "classes"):
        name = f"{qualified_name(function)}{inspect.signature(function)}"
        text = f"a model function takes (shape, classes) or no argument: got {name[-MAX_NAME:]}"
        raise InputError(text, code="invalid-model", setting="model")
    return function


def _needs_no_argument(factory: Callable[..., Any]) -> bool:
    return _accepts(factory)


def _accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return bool(arguments)
    return True


def _name(value: Any) -> str:
    """Return the name under which an object is recorded; a data set from a file has the name of the file."""
    if isinstance(value, Dataset):
        return value.files[0][0][-MAX_NAME:] if value.files else "Dataset"
    return qualified_name(value.apply if isinstance(value, Rule | ServerRule) else value)[-MAX_NAME:]


def _location(value: Any) -> tuple[str, int] | None:
    """Return the file and line of the code of an object; None for code of an installed package, such as torch."""
    is_network = isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))
    function = value.forward if is_network else getattr(value, "apply", value)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None or {"site-packages", "dist-packages"} & {*Path(code.co_filename).parts}:
        return None
    return code.co_filename, code.co_firstlineno
