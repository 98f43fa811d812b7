"""The exceptions of stableair.

Every message is one line: what is wrong, the value, what is allowed, and the fix. Programs handle errors by class;
`code` identifies the problem and does not change with the wording of the message.
"""

from typing import Any, ClassVar


class StableairError(Exception):
    """Base class of all errors that stableair raises on purpose.

    Args:
        message: One line: what is wrong, the value, what is allowed, and the fix.
        code: Stable identifier of the problem, such as "out-of-range"; default: the identifier of the class.
        hint: Keyword of the fix, such as "resume", which the command line translates into one of its options.
        advice: The fix for Python callers; appended to the message.
        setting: The setting whose component broke its contract, such as "receiver".
        **fields: Values that belong to the code, such as name="lr" and value=-1.

    >>> import stableair as sa
    >>> try:
    ...     sa.Experiment(rounds=-1)
    ... except sa.StableairError as error:
    ...     print(error.code, error.fields)
    out-of-range {'name': 'rounds', 'value': -1, 'low': 1}
    """

    default_code: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, code: str = "", hint: str = "", advice: str = "", setting: str = "", **fields: Any
    ):
        super().__init__(f"{message}; {advice}" if advice else message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.advice = advice
        self.setting = setting
        self.fields = fields

    def with_message(self, message: str) -> "StableairError":
        """Return a copy with another message; class, code, hint, advice, setting and fields stay.

        Args:
            message: The new message.
        """
        copy = type(self).__new__(type(self), message)
        copy.__dict__.update(self.__dict__)
        copy.message = message.removesuffix(f"; {self.advice}")  # the command line prints its options instead
        copy.args = (f"{copy.message}; {self.advice}" if self.advice else message,)
        return copy


class InputError(StableairError, ValueError):
    """An argument, setting, file or component of the user is invalid.

    It is also a ValueError. Its arguments are those of `StableairError`.

    >>> import stableair as sa
    >>> try:
    ...     sa.Experiment(payload="weights")
    ... except sa.InputError as error:
    ...     print(error.code)
    ...     print(error)
    unknown-value
    payload 'weights' is unknown; allowed: gradient, delta
    """

    default_code = "invalid-input"


class NonFiniteUpload(InputError):
    """A client's upload of round k is not finite.

    Args:
        k: The round.
        client: The client.
        what: The part of the upload: "update", "norm buffer" or "loss".
    """

    default_code = "non-finite-upload"

    def __init__(self, k: int, client: int, what: str):
        why = "its data are not finite, or its local training overflowed"
        super().__init__(f"round {k}: client {client} uploaded a non-finite {what}: {why}", client=client, what=what)
        self.k, self.client, self.what = k, client, what

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        """Pickle by the arguments: ranks send their errors to each other."""
        return NonFiniteUpload, (self.k, self.client, self.what)


class CorruptRunError(StableairError):
    """A file of a run folder is damaged and cannot be restored.

    >>> from tempfile import TemporaryDirectory
    >>> from pathlib import Path
    >>> import stableair as sa
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "experiment.json").write_text("{")
    ...     try:
    ...         sa.load(folder)
    ...     except sa.CorruptRunError as error:
    ...         print(error.code)
    corrupt-run
    """

    default_code = "corrupt-run"


class RunBusyError(StableairError):
    """Another process holds the lock of a run folder. Wait for it, or choose another folder.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> from pathlib import Path
    >>> from stableair.results.lock import locked
    >>> with TemporaryDirectory() as folder, locked(Path(folder)):  # as another process would
    ...     try:
    ...         sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=1), folder)
    ...     except sa.RunBusyError as error:
    ...         print(error.code)
    run-busy
    """

    default_code = "run-busy"


class ResourceError(StableairError):
    """The device, memory, port or processes that a call needs are not available.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> with TemporaryDirectory() as folder, sa.watch(folder, port=0) as server:
    ...     try:
    ...         sa.watch(folder, server.server_port)
    ...     except sa.ResourceError as error:
    ...         print(error.code)
    port-busy
    """

    default_code = "resource"


class MissingExtraError(StableairError, ImportError):
    """An optional package is not installed; the message has the command that installs it.

    It is also an ImportError.

    >>> from stableair.optional import require
    >>> try:
    ...     require("no_such_package", extra="hub")
    ... except MissingExtraError as error:
    ...     print(error.code, isinstance(error, ImportError))
    missing-extra True
    """

    default_code = "missing-extra"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, for messages of one line; its class if it has no message."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
