"""Components by name: registries, and the strict parser of specs such as "mac(C=0.1)".

A component is a factory whose parameters are its hyper-parameters. The signature of the factory is the schema of the
spec.
"""

import ast
import inspect
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from keyword import iskeyword
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from stableair.errors import InputError, StableairError
from stableair.sources import Source, source_of
from stableair.validation import as_path, check_simple_types, short_repr, suggest, type_name

log = logging.getLogger("stableair")

MAX_LENGTH = 500  # characters of a spec
REGISTRIES: dict[str, "Registry"] = {}
PLUGINS: list[str] = []  # paths of the loaded plug-in files
# The inputs and the form of the functions that a factory of these kinds returns.
RULES = {
    "receiver": (("the received vector",), "g -> g"),
    "server": (("the model", "the received vector"), "(w, g) -> w"),
}
Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A registered component: its factory and the options it was registered with.

    >>> import stableair as sa
    >>> entry = sa.receiver.entry("clip")
    >>> entry.typed_signature
    'clip(C: float)'
    """

    name: str  # the name in specs
    factory: Callable[..., Any]  # returns the component
    declared: dict[str, Any]  # the options of the registration
    source: Source | None = None  # None for a factory of this package

    @property
    def parameters(self) -> list[str]:
        """The names of the factory's parameters."""
        return list(inspect.signature(self.factory).parameters)

    @property
    def signature(self) -> str:
        """The signature without types, as error messages show it."""
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(self.factory).parameters.values()]
        return f"{self.name}{inspect.Signature(parameters)}"

    @property
    def typed_signature(self) -> str:
        """The signature with types, as `stableair list` shows it."""
        return f"{self.name}({', '.join(self.typed_parameters.values())})"

    @property
    def typed_parameters(self) -> dict[str, str]:
        """The parameters with their types and defaults, such as `C: float | auto`, by their names."""
        return {name: _format_parameter(p) for name, p in inspect.signature(self.factory).parameters.items()}

    @property
    def required(self) -> list[inspect.Parameter]:
        """The parameters without a default."""
        parameters = inspect.signature(self.factory).parameters.values()
        return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @property
    def open(self) -> bool:
        """Whether the factory accepts arguments of any name (**kwargs)."""
        kinds = [p.kind for p in inspect.signature(self.factory).parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds

    @property
    def specs(self) -> dict[str, "Registry"]:
        """The registries of the parameters that are specs."""
        return self.declared.get("specs", {})

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments, with the default arguments of nested specs added."""
        nested = {k: v for k, v in arguments.items() if k in self.specs and isinstance(v, str)}
        return arguments | {k: str(self.specs[k].one(text).full()) for k, text in nested.items()}

    @property
    def user_location(self) -> tuple[str, int] | None:
        """The file and line of a factory outside this package; None for a factory of this package."""
        code = getattr(inspect.unwrap(self.factory), "__code__", None)
        if code is None or Path(code.co_filename).is_relative_to(Path(__file__).parent):
            return None
        return code.co_filename, code.co_firstlineno

    @property
    def summary(self) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


@dataclass(frozen=True)
class Call:
    """A parsed component such as `mac(C=0.1)`: its registry, its name and its arguments by name.

    Calling it builds the component.

    >>> import stableair as sa
    >>> call = sa.Experiment(receiver="clip(2)").call("receiver")
    >>> str(call), call.kind, call.arguments
    ('clip(C=2)', 'receiver', {'C': 2})
    >>> clip = call()  # the receiver itself
    """

    registry: "Registry"  # the registry of its kind
    name: str  # name of the component
    arguments: dict[str, Any]  # the explicit arguments by name

    def __str__(self) -> str:
        return format_call(self.name, self.arguments)

    @property
    def kind(self) -> str:
        """The kind of component, such as "receiver"."""
        return self.registry.kind

    @property
    def entry(self) -> Entry:
        """The entry that is registered under the name now.

        A notebook may have redefined it after the spec was parsed.
        """
        return self.registry.entry(self.name)

    @property
    def is_object(self) -> bool:
        """Whether the component is a Python object, which the spec only names."""
        return self.name == OBJECT

    @property
    def title(self) -> str:
        """The name of the component, or the last part of the name of a Python object."""
        return re.sub(r"\W", "", self.arguments["name"].rpartition(".")[2]) if self.is_object else self.name

    @property
    def user_location(self) -> tuple[str, int] | None:
        """The file and line of a component outside this package; None for a component of this package."""
        if self.is_object:
            passed = PASSED_OBJECTS.get().get(self.arguments["digest"])
            return passed.location if passed else None
        return self.entry.user_location

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters by name, including those passed on to **kwargs."""
        declared = inspect.signature(self.entry.factory).parameters
        named = {name: p for name, p in declared.items() if p.kind != p.VAR_KEYWORD}
        return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.arguments} | named

    def with_(self, argument: str, value: Any) -> "Call":
        """Return a copy with one argument changed or added.

        Args:
            argument: Name of the argument.
            value: Its new value.
        """
        changed = replace(self, arguments=self.arguments | {argument: value})
        ordered = {name: changed.arguments[name] for name in changed.parameters if name in changed.arguments}
        return replace(self, arguments=ordered)

    def full(self) -> "Call":
        """Return a copy with every argument, defaults included, in the order of the signature."""
        declared = inspect.signature(self.entry.factory).parameters
        defaults = {k: p.default for k, p in declared.items() if p.default is not p.empty}
        complete = self.entry.complete(defaults | self.arguments)
        order = dict.fromkeys([*declared, *self.arguments])
        return replace(self, arguments={k: complete[k] for k in order if k in complete})

    def without_defaults(self, names: Iterable[str]) -> "Call":
        """Return a copy without the named arguments whose value is the default."""
        defaults = replace(self, arguments={}).full().arguments
        hidden = [k for k in names if k in defaults and equal(self.arguments[k], defaults[k])]
        return replace(self, arguments={k: v for k, v in self.arguments.items() if k not in hidden})

    def __call__(self) -> Any:
        """Build the component."""
        try:
            if self.entry.source:  # the components of this package check their arguments themselves
                check_simple_types(self.entry.factory, self.arguments)
            return self.entry.factory(**self.arguments)
        except StableairError as error:
            raise error.with_message(f"{self.kind} {self}: {error}") from None
        except Exception as error:
            if (where := traceback_location(error)) or isinstance(error, ValueError | TypeError):
                raise InputError(f"{self.kind} {self}: {where or error}", code="component-failed") from error
            raise


class Registry:
    """The components of one kind by name; a call returns a decorator that registers a component.

    Args:
        kind: Name of the kind in error messages, such as "receiver".
        plural: Plural of the kind, such as "receivers".

    >>> from stableair import receiver
    >>> [str(call) for call in receiver.parse("gnc(2) | mac(C=1)")]
    ['gnc(max_norm=2)', 'mac(C=1)']
    """

    def __init__(self, kind: str, plural: str):
        self.kind = kind
        self.plural = plural
        self.entries: dict[str, Entry] = {}
        REGISTRIES[plural] = self

    @property
    def decorator(self) -> str:
        """The public name of this registry, such as `receiver` in `@sa.receiver("soft")`."""
        return self.kind.replace(" ", "")

    def entry(self, name: str) -> Entry:
        """Return the component of a name; "object" stands for the Python objects that are passed to a run."""
        return OBJECT_ENTRY if name == OBJECT else self.entries[name]

    def __call__(self, name: str, **declared: Any) -> Callable[[Factory], Factory]:
        """Register a factory: `@receiver("soft")` registers it as "soft"."""
        if not isinstance(name, str) or not name.isidentifier():
            text = f"a {self.kind}'s name must be an identifier: got {short_repr(name)}"
            if callable(name):  # @sa.receiver without parentheses
                function = getattr(name, "__name__", "name")
                text = f'the {self.kind} {function} needs a name: write @sa.{self.decorator}("{function}")'
            raise InputError(text, code="not-an-identifier", value=name)

        def register(factory: Factory) -> Factory:
            known = self.entries.get(name)
            redefined_in_notebook = known and known.factory.__module__ == factory.__module__ == "__main__"
            if name == OBJECT or (known and not redefined_in_notebook):
                owner = known.factory.__module__ if known else __name__
                text = f"{self.kind} {name!r} is already registered by {owner}; choose another name"
                raise InputError(text, code="name-taken", name=name)
            self.entries[name] = Entry(name, factory, declared, source_of(factory))
            return factory

        return register

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def parse(self, text: str) -> tuple[Call, ...]:
        """Parse "a(x=1) | b(y=2)" and check each name and argument against its factory.

        Raises:
            InputError: `not-a-spec`, `unknown-component`, `unknown-argument` or another problem of the text.
        """
        if not isinstance(text, str):
            message = f"{self.kind} must be a spec such as 'name(argument=1)': got {short_repr(text)}"
            raise InputError(message, code="not-a-spec", value=text)
        return tuple(self._call(node, text) for node in _stages(self.kind, text))

    def one(self, text: str) -> Call:
        """Parse the single component "a(x=1)"."""
        calls = self.parse(text)
        if len(calls) != 1:
            message = f"{self.kind} {text!r}: only receivers can be chained with '|'"
            raise InputError(message, code="not-one-component", value=text)
        return calls[0]

    def _call(self, node: ast.expr, text: str) -> Call:
        function, positional, keywords = _parts(node)
        if not isinstance(function, ast.Name):
            _refuse_code(self.kind, text, function)
        if function.id not in (OBJECT, *self.entries):
            message = f"{self.kind} {function.id!r} is unknown; {suggest(function.id, self.entries)}"
            raise InputError(
                message, code="unknown-component", hint="component", kind=self.kind, name=function.id,
                allowed=list(self.entries), advice="import the module that registers the custom component",
            )  # fmt: skip
        entry = self.entry(function.id)
        self._check_keywords(entry, keywords, text)
        self._check_nested(entry, positional, keywords, text)
        named = {str(keyword.arg): _value(self.kind, text, keyword.value) for keyword in keywords}
        arguments = self._bind(entry, [_value(self.kind, text, value) for value in positional], named, text)
        try:
            arguments = entry.complete(arguments)
        except StableairError as error:
            if error.hint == "argument":  # the command line's advice is for components that are settings
                error.hint = ""
            raise error.with_message(f"{self.kind} {text}: {error}") from None
        return Call(self, entry.name, arguments)

    def _check_keywords(self, entry: Entry, keywords: list[ast.keyword], text: str) -> None:
        """Refuse arguments that the factory does not have, and arguments that are given twice."""
        known = entry.parameters
        names: set[str] = set()
        for keyword in keywords:
            if keyword.arg is None:
                _refuse_code(self.kind, text, keyword.value)
            if keyword.arg not in known and not entry.open:
                advice = suggest(keyword.arg, known) if known else "it takes no arguments"
                problem = f"{entry.name} has no argument {keyword.arg!r}; {advice}"
                message = f"{self.kind} {text!r}: {problem}; the signature is {entry.signature}"
                raise InputError(
                    message, code="unknown-argument", component=entry.name, name=keyword.arg, allowed=known
                )
            if keyword.arg in names:
                problem = f"argument {keyword.arg!r} is given twice"
                message = f"{self.kind} {text!r}: {problem}; the signature is {entry.signature}"
                raise InputError(message, code="duplicate-argument", component=entry.name, name=keyword.arg)
            names.add(keyword.arg)

    def _check_nested(self, entry: Entry, positional: list[ast.expr], keywords: list[ast.keyword], text: str) -> None:
        """Refuse nested specs that are not quoted."""
        by_position = zip(inspect.signature(entry.factory).parameters, positional, strict=False)
        for name, node in [*by_position, *((keyword.arg, keyword.value) for keyword in keywords)]:
            if name in entry.specs and isinstance(node, ast.Call):
                message = f"{self.kind} {text!r}: a nested spec must be quoted: write {name}={ast.unparse(node)!r}"
                raise InputError(message, code="unquoted-spec", component=entry.name, name=name)

    def _bind(self, entry: Entry, positional: list[Any], named: dict[str, Any], text: str) -> dict[str, Any]:
        """Return the arguments by name, including the arguments in **kwargs."""
        try:
            bound = inspect.signature(entry.factory).bind_partial(*positional, **named)
            if missing := [p.name for p in entry.required if p.name not in bound.arguments]:
                raise self._missing(entry, missing, positional, named, text)
        except TypeError as error:
            message = f"{self.kind} {text!r}: {error}; the signature is {entry.signature}"
            raise InputError(message, code="wrong-arguments", component=entry.name) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            passed_on = bound.signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD
            arguments |= value if passed_on else {name: value}
        return arguments

    def _missing(
        self, entry: Entry, missing: list[str], positional: list[Any], named: dict[str, Any], text: str
    ) -> InputError:
        """Return the error about arguments that a spec lacks."""
        fields: dict[str, Any] = {"component": entry.name, "kind": self.kind, "names": missing, "value": text}
        message = f"{self.kind} {entry.name} needs {' and '.join(missing)}; the signature is {entry.signature}"
        given = [*map(format_value, positional), *(f"{name}={format_value(value)}" for name, value in named.items())]
        advice = f"write {entry.name}({', '.join([*given, *(f'{name}=VALUE' for name in missing)])})"
        inputs, form = RULES.get(self.kind, ((), ""))
        if entry.source and missing == entry.parameters and len(missing) == len(inputs):
            function = getattr(entry.factory, "__name__", entry.name)
            factory = f"`def {function}(): return lambda {', '.join(missing)}: ...`"
            annotations = [p.annotation for p in entry.required]
            if all(str(getattr(one, "__name__", one)).rpartition(".")[2] == "Tensor" for one in annotations):
                message = f"{self.kind} {entry.name}: {function} must return a function {form}: it is a factory"
                return InputError(f"{message}; write {factory}", code="not-a-factory", **fields)
            if all(one is inspect.Parameter.empty for one in annotations):
                message += f"; if {' and '.join(missing)} is {' and '.join(inputs)}, write {factory}"
        return InputError(message, code="missing-argument", hint="argument", advice=advice, **fields)


# -------------------------------------------------------------------------------------------------- Python objects

# The name of a component that is a Python object, passed to `sa.run`: object(name='net.Net', digest='...').
OBJECT = "object"
OBJECT_SETTINGS = "data", "model", "receiver", "server"  # the settings that may be Python objects


@dataclass(frozen=True)
class PassedObject:
    """A Python object that is passed to a run as a component."""

    component: Any  # as a registered factory would return it
    location: tuple[str, int] | None  # file and line of its code


PASSED_OBJECTS: ContextVar[Mapping[str, PassedObject]] = ContextVar("PASSED_OBJECTS", default={})  # noqa: B039 (never changed in place)


@contextmanager
def passed_objects(objects: Mapping[str, PassedObject]) -> Iterator[Mapping[str, PassedObject]]:
    """Make Python objects available by their digests within the block; yields all that are available there."""
    available = {**PASSED_OBJECTS.get(), **objects}
    token = PASSED_OBJECTS.set(available)
    try:
        yield available
    finally:
        PASSED_OBJECTS.reset(token)


def passed_object(name: str, digest: str) -> Any:
    """Return a Python object that was passed to `sa.run`.

    Raises:
        InputError: The object was not passed to this run (`object-needed`).
    """
    if digest not in PASSED_OBJECTS.get():
        text = f"{name} is a Python object, and a spec contains only its name"
        raise InputError(text, code="object-needed", advice="pass the object itself, as to sa.run")
    return PASSED_OBJECTS.get()[digest].component


OBJECT_ENTRY = Entry(OBJECT, passed_object, {})


_WITH_DIGEST = re.compile(rf"{OBJECT}\(name='?([^',]*)'?, digest='?([0-9a-f]*)'?\)")


def without_digests(text: str) -> str:
    """Replace each Python object in a spec by its name, for labels.

    >>> without_digests("object(name='net.Net', digest='3f')")
    'net.Net'
    """
    return _WITH_DIGEST.sub(r"\1", text)


def with_short_digests(text: str) -> str:
    """Replace each Python object in a spec by its name and the start of its digest, for labels that would be equal.

    >>> with_short_digests("object(name='net.Net', digest='3f9a01')")
    'net.Net (3f9a)'
    """
    return _WITH_DIGEST.sub(lambda found: f"{found[1]} ({found[2][:4]})", text)


# ----------------------------------------------------------------------------------------------------------- the parser


def parse_unchecked(kind: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse "a(x=1) | b(y=2)" into names and arguments; the components need not be registered."""
    components = []
    for node in _stages(kind, text):
        function, positional, keywords = _parts(node)
        if not isinstance(function, ast.Name) or positional or any(keyword.arg is None for keyword in keywords):
            _refuse_code(kind, text, node)
        components.append((function.id, {str(word.arg): _value(kind, text, word.value) for word in keywords}))
    return components


def canonical(kind: str, text: str) -> str:
    """Return a spec as `Experiment` writes it; the components need not be registered.

    >>> canonical("receiver", "none|mac(C = 1.0)")
    'none() | mac(C=1)'
    """
    return " | ".join(format_call(name, arguments) for name, arguments in parse_unchecked(kind, text))


def literal(text: str) -> Any:
    """Parse a text like an argument of a spec; a text that is not a literal is returned unchanged.

    >>> literal("0.5"), literal("(1, 2)"), literal("auto"), literal("f(1)")
    (0.5, (1, 2), 'auto', 'f(1)')
    """
    try:
        return _value("value", text, ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return text


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """Write a component as a spec.

    >>> format_call("mac", {"C": 1.0})
    'mac(C=1)'
    """
    return f"{name}({', '.join(f'{key}={format_value(value)}' for key, value in arguments.items())})"


WORDS = "inf", "nan", "true", "false", "none"  # a text that equals one of these words must be quoted in a spec


def format_value(value: Any) -> str:
    """Write a value in the syntax of a spec; numpy numbers are written as Python numbers."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # mac(C=1.0) and mac(C=1) are one experiment
    if isinstance(value, str) and value.isidentifier() and not iskeyword(value) and value.lower() not in WORDS:
        return value
    if isinstance(value, tuple):
        items = ", ".join(map(format_value, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    return repr(value)


def equal(a: Any, b: Any) -> bool:
    """Whether two arguments are equal; 1 equals 1.0, but not True."""
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else a == b


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers components. `--plugin FILE` calls this function.

    The components can then be used in specs by their names. Worker processes of a sweep load the same file.

    Args:
        path: The Python file, with functions decorated by `@sa.receiver`, `@sa.noise`, ...

    Raises:
        InputError: The file does not exist (`missing-file`) or raises an error (`plugin-failed`).

    ```python
    sa.load_plugin("my_rule.py")  # contains @sa.receiver("soft")
    sa.run(sa.Experiment(receiver="soft(C=1)"))
    ```
    """
    if not as_path("plug-in", path).is_file():
        raise InputError(f"plug-in {path} does not exist", code="missing-file", path=path)
    before = _custom_components()
    loader = SourceFileLoader(f"stableair_plugin_{Path(path).stem}", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec, "a file's loader always has a spec"
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    except StableairError as error:
        raise error.with_message(f"plug-in {path}: {error}") from None
    except (Exception, SystemExit) as error:
        cause = traceback_location(error, str(path)) or f"{type(error).__name__}: {error}"
        raise InputError(f"plug-in {path} cannot be imported: {cause}", code="plugin-failed", path=path) from error
    PLUGINS.append(str(path))
    if _custom_components() == before:
        log.warning('plug-in %s registers no component; decorate a factory, such as with @sa.receiver("name")', path)


def _custom_components() -> set[tuple[str, str]]:
    """Return the kinds and names of the components that are registered outside this package."""
    return {(one.kind, entry.name) for one in REGISTRIES.values() for entry in one if entry.source}


def traceback_location(error: BaseException, *files: str) -> str:
    """Return the file, line and text of an error raised in these files or in a user's component, else ""."""
    locations = [entry.user_location for registry in REGISTRIES.values() for entry in registry]
    locations += [passed.location for passed in PASSED_OBJECTS.get().values()]
    user_files = {*(location[0] for location in locations if location), *PLUGINS, *files}
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for file, line in reversed(frames):
        if file in user_files:
            return f"{file}, line {line}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _parts(node: ast.expr) -> tuple[ast.expr, list[ast.expr], list[ast.keyword]]:
    """Split a call into function, positional and keyword arguments; a bare name has no arguments."""
    return (node.func, node.args, node.keywords) if isinstance(node, ast.Call) else (node, [], [])


def _format_parameter(parameter: inspect.Parameter) -> str:
    """Write a parameter with its type in words: `C: float | auto`."""
    kinds: dict[Any, str] = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}
    stars = kinds.get(parameter.kind, "")
    annotation = "" if parameter.annotation is parameter.empty else f": {type_name(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f" = {format_value(parameter.default)}"
    return f"{stars}{parameter.name}{annotation}{default}"


def _stages(kind: str, text: str) -> list[ast.expr]:
    """Parse the expressions between the `|` of a spec."""
    if len(text) > MAX_LENGTH:
        message = f"{kind} {text[:40]!r}...: a spec has at most {MAX_LENGTH} characters: got {len(text)}"
        raise InputError(message, code="spec-too-long", value=text)
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        message = f"{kind} {text!r} is not a spec; write it as name(argument=1, other=2)"
        raise InputError(message, code="not-a-spec", value=text) from None
    stages = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        stages.append(node.right)
        node = node.left
    return [node, *reversed(stages)]


def _value(kind: str, text: str, node: ast.expr) -> Any:
    """Evaluate a literal: number, string, true/false/none, bare word (`auto`) or tuple; refuse any other code."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id="inf" | "nan" as word):
            return math.inf if word == "inf" else math.nan
        case ast.Name(id=word):
            return {"true": True, "false": False, "none": None}.get(word, word)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(kind, text, operand)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_value(kind, text, e) for e in elements)
    _refuse_code(kind, text, node)


def _refuse_code(kind: str, text: str, node: ast.AST) -> NoReturn:
    message = f"{kind} {text!r}: {ast.unparse(node)!r} is code; only component names and literal arguments are allowed"
    raise InputError(message, code="code-in-spec", value=text)
