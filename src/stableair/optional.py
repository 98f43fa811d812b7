"""Import of optional packages."""

from importlib import import_module
from typing import Any

from stableair.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Full name of the module, such as "submitit.helpers".
        extra: The extra of stableair that installs the package, such as "slurm".

    Returns:
        The imported module.

    Raises:
        MissingExtraError: The module cannot be imported. Its fields are `module` and `extra`.

    >>> require("math", extra="hub").sqrt(4.0)
    2.0
    >>> require("no_such_package", extra="hub")
    Traceback (most recent call last):
    stableair.errors.MissingExtraError: no_such_package cannot be imported; run: pip install 'stableair[hub]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        message = f"{module} cannot be imported; run: pip install 'stableair[{extra}]'"
        raise MissingExtraError(message, module=module, extra=extra) from error
