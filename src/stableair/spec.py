"""Components by name: registries, and the strict parser of "mac(C=0.1)".

A component is a factory whose parameters are its hyper-parameters: its signature is the schema of its spec.
"""

import ast
import hashlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stableair.checks import InputError, in_words, nearest, place

LONGEST = 500  # characters; no honest spec is longer
REGISTRIES: dict[str, "Registry"] = {}
Factory = TypeVar("Factory", bound=Callable[..., Any])
PLUGINS: dict[str, str] = {}  # the files loaded so far and their SHA-256: a run records them


@dataclass(frozen=True)
class Entry:
    """A registered factory and what it declared of itself."""

    name: str
    factory: Callable[..., Any]
    declared: dict[str, Any]

    @property
    def signature(self) -> str:
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(self.factory).parameters.values()]
        return f"{self.name}{inspect.Signature(parameters)}"

    @property
    def typed_signature(self) -> str:
        """The signature with the types of its arguments, as `stableair list` shows it."""
        return f"{self.name}({', '.join(map(_typed, inspect.signature(self.factory).parameters.values()))})"

    @property
    def open(self) -> bool:
        """Whether it takes arguments of any name, to hand them on."""
        kinds = [p.kind for p in inspect.signature(self.factory).parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds

    @property
    def specs(self) -> dict[str, "Registry"]:
        """The parameters that are specs themselves, and where these are looked up."""
        return self.declared.get("specs", {})

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments, in which every spec within the spec has all of its own."""
        inner = {k: v for k, v in arguments.items() if k in self.specs and isinstance(v, str)}
        return arguments | {k: str(self.specs[k].one(text).full()) for k, text in inner.items()}

    @property
    def home(self) -> tuple[str, int] | None:
        """The file and line where it is made, if that is not in this package."""
        code = getattr(inspect.unwrap(self.factory), "__code__", None)
        if code is None or Path(code.co_filename).is_relative_to(Path(__file__).parent):
            return None
        return code.co_filename, code.co_firstlineno

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


@dataclass(frozen=True)
class Call:
    """One parsed component, `mac(C=0.1)`: its entry and its arguments by name."""

    kind: str
    entry: Entry
    arguments: dict[str, Any]
    bare: bool = False  # written without parentheses

    def __str__(self) -> str:
        if self.bare and not self.arguments:
            return self.entry.name
        return spell(self.entry.name, self.arguments)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        declared = inspect.signature(self.entry.factory).parameters
        named = {name: p for name, p in declared.items() if p.kind != p.VAR_KEYWORD}
        return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.arguments} | named

    def with_(self, argument: str, value: Any) -> "Call":
        """The same call with one argument changed or added."""
        changed = replace(self, arguments=self.arguments | {argument: value})
        given = changed.arguments
        return replace(self, arguments={name: given[name] for name in changed.parameters if name in given})

    def full(self) -> "Call":
        """The same call with every argument, defaults included, in the order of the signature."""
        declared = inspect.signature(self.entry.factory).parameters
        defaults = {k: p.default for k, p in declared.items() if p.default is not p.empty}
        every = self.entry.complete(defaults | self.arguments)
        order = dict.fromkeys([*declared, *self.arguments])
        return replace(self, arguments={k: every[k] for k in order if k in every}, bare=False)

    def without(self, hidden: dict[str, Any]) -> "Call":
        """The same call without the arguments of these names that equal their defaults."""
        usual = replace(self, arguments={}).full().arguments
        same = [k for k, v in self.arguments.items() if k in hidden and k in usual and equal(v, usual[k])]
        return replace(self, arguments={k: v for k, v in self.arguments.items() if k not in same})

    def __call__(self) -> Any:
        """Build the component."""
        try:
            return self.entry.factory(**self.arguments)
        except InputError as error:
            raise InputError(f"{self.kind} {self}: {error}", hint=error.hint) from None
        except Exception as error:
            if (where := line_of(error)) or isinstance(error, ValueError | TypeError):
                raise InputError(f"{self.kind} {self}: {where or error}") from error
            raise


class Registry:
    """The components of one kind by name; calling it gives the decorator that adds one."""

    def __init__(self, kind: str, plural: str):
        self.kind = kind
        self.plural = plural
        self.entries: dict[str, Entry] = {}
        REGISTRIES[plural] = self

    def __call__(self, name: str, **declared: Any) -> Callable[[Factory], Factory]:
        """`@receiver("soft")` on a factory makes it known as "soft"."""
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"a {self.kind}'s name must be an identifier: got {name!r}")

        def register(factory: Factory) -> Factory:
            known = self.entries.get(name)
            again_in_notebook = known and known.factory.__module__ == factory.__module__ == "__main__"
            if known and not again_in_notebook:
                raise InputError(
                    f"{self.kind} {name!r} is already registered by {known.factory.__module__}; choose another name"
                )
            self.entries[name] = Entry(name, factory, declared)
            return factory

        return register

    if not TYPE_CHECKING:  # a type checker is to see that there is no such attribute

        def __getattr__(self, name: str) -> Any:
            """In 0.1 `sa.receiver` was a module too, with `sa.receiver.mac` in it."""
            raise AttributeError(f"{self.kind!r} is the decorator that registers a {self.kind}; it has no {name!r}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def parse(self, text: str) -> tuple[Call, ...]:
        """The calls of "a(x=1) | b(y=2)", each name and argument checked against its factory."""
        if not isinstance(text, str):
            raise InputError(f"{self.kind} must be a spec such as 'name(argument=1)': got {text!r}")
        return tuple(self._call(node, text) for node in _stages(self.kind, text))

    def one(self, text: str) -> Call:
        """The single call of "a(x=1)"."""
        calls = self.parse(text)
        if len(calls) != 1:
            raise InputError(f"{self.kind} {text!r}: only receivers can be chained with '|'")
        return calls[0]

    def _call(self, node: ast.expr, text: str) -> Call:
        function, positional, keywords = _parts(node)
        if not isinstance(function, ast.Name):
            raise _refused(self.kind, text, function)
        if function.id not in self.entries:
            raise InputError(f"{self.kind} {function.id!r} is unknown; {nearest(function.id, self.entries)}")
        entry = self.entries[function.id]
        known = list(inspect.signature(entry.factory).parameters)
        for keyword in keywords:
            if keyword.arg is None:
                raise _refused(self.kind, text, keyword.value)
            if keyword.arg not in known and not entry.open:
                problem = f"{entry.name} has no argument {keyword.arg!r}; {nearest(keyword.arg, known)}"
                raise InputError(f"{self.kind} {text!r}: {problem}; the signature is {entry.signature}")
        for name, inner in [*zip(known, positional, strict=False), *((word.arg, word.value) for word in keywords)]:
            if name in entry.specs and isinstance(inner, ast.Call):
                quoted = f"{name}={ast.unparse(inner)!r}"
                raise InputError(f"{self.kind} {text!r}: a spec within a spec stands in quotes: write {quoted}")
        named = {str(keyword.arg): _value(self.kind, text, keyword.value) for keyword in keywords}
        if len(named) < len(keywords):
            raise InputError(f"{self.kind} {text!r}: an argument is given twice; the signature is {entry.signature}")
        try:
            bound = inspect.signature(entry.factory).bind(*(_value(self.kind, text, a) for a in positional), **named)
        except TypeError as error:
            raise InputError(f"{self.kind} {text!r}: {error}; the signature is {entry.signature}") from None
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            handed_on = bound.signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD
            given |= value if handed_on else {name: value}
        try:
            given = entry.complete(given)
        except InputError as error:
            raise InputError(f"{self.kind} {text}: {error}", hint=error.hint) from None
        return Call(self.kind, entry, given, bare=not isinstance(node, ast.Call))


def parse_words(kind: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of "a(x=1) | b(y=2)", without asking whether there are such components."""
    found = []
    for node in _stages(kind, text):
        function, positional, keywords = _parts(node)
        if not isinstance(function, ast.Name) or positional or any(keyword.arg is None for keyword in keywords):
            raise _refused(kind, text, node)
        found.append((function.id, {str(word.arg): _value(kind, text, word.value) for word in keywords}))
    return found


def _parts(node: ast.expr) -> tuple[ast.expr, list[ast.expr], list[ast.keyword]]:
    """What is called, and its arguments by position and by name; a bare name has none."""
    return (node.func, node.args, node.keywords) if isinstance(node, ast.Call) else (node, [], [])


def spell(name: str, arguments: dict[str, Any]) -> str:
    """A component as it stands in a spec."""
    return f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"


def _typed(parameter: inspect.Parameter) -> str:
    """A parameter with its type in words: `C: float | auto`."""
    kinds: dict[Any, str] = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}
    stars = kinds.get(parameter.kind, "")
    annotated = "" if parameter.annotation is parameter.empty else f": {in_words(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f" = {written(parameter.default)}"
    return f"{stars}{parameter.name}{annotated}{default}"


def literal(text: str) -> Any:
    """One argument's value as it would stand in a spec; what is no literal stays text."""
    try:
        return _value("value", text, ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return text


MOVED = {  # modules and names of 0.1, and where they are now
    "adaptive": "stableair.receivers.adaptive", "channel": "stableair.channels.kinds", "demo": "stableair.paper.demo",
    "figures": "stableair.paper.figures", "hub": "stableair.data.hub", "partition": "stableair.data.partitions",
    "plot": "stableair.results.plot", "receiver": "stableair.receivers",
    "record": "stableair.runner and stableair.results.run",
    "report": "stableair.results.report", "search": "stableair.searches", "server": "stableair.servers",
    "simulate": "stableair.algorithm", "theory_plot": "stableair.paper.theory_plots",
    "track": "stableair.results.track",
    "Dataset": "stableair.contracts", "Split": "stableair.contracts", "Upload": "stableair.contracts",
    "Received": "stableair.contracts", "Fade": "stableair.contracts", "Overflow": "stableair.contracts",
    "build": "stableair.builder", "run": "stableair.runner", "load": "stableair.results.run",
    "products": "stableair.local, as float32_matmul", "synthetic": "stableair.data.sets",
    "digits": "stableair.data.sets",
    "dataset": "stableair.data.sets", "Channel": "stableair.channels.flat, as Flat", "Evaluate": "stableair.evaluation",
}  # fmt: skip


def moved_to(name: str) -> str:
    """What to say after the name of something that was elsewhere in 0.1."""
    return f"; it is now in {MOVED[name]}" if name in MOVED else ""


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers components."""
    if not place("plug-in", path).is_file():
        raise InputError(f"plug-in {path}: there is no such file")
    loader = SourceFileLoader(f"stableair_plugin_{Path(path).stem}", str(path))
    found = spec_from_loader(loader.name, loader)
    assert found, "a file's loader always has a spec"
    module = module_from_spec(found)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    except InputError as error:
        raise InputError(f"plug-in {path}: {error}", hint=error.hint) from None
    except (Exception, SystemExit) as error:
        missing = re.search(r"No module named 'stableair\.(\w+)|cannot import name '(\w+)' from 'stableair", str(error))
        hint = moved_to(missing[1] or missing[2]) if missing else ""
        what = line_of(error, str(path)) or f"{type(error).__name__}: {error}"
        raise InputError(f"plug-in {path} does not import: {what}{hint}") from error
    PLUGINS[str(path)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()


def line_of(error: BaseException, *files: str) -> str:
    """What went wrong in these files or in a user's own component, with its line; empty where it was in none."""
    own = {entry.home[0] for registry in REGISTRIES.values() for entry in registry if entry.home}
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for file, line in reversed(places):
        if file in {*own, *PLUGINS, *files}:
            return f"{file}, line {line}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _stages(kind: str, text: str) -> list[ast.expr]:
    if len(text) > LONGEST:
        raise InputError(f"{kind} {text[:40]!r}...: a spec has at most {LONGEST} characters, this one {len(text)}")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise InputError(f"{kind} {text!r} is not a spec; write it as name(argument=1, other=2)") from None
    stages = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        stages.append(node.right)
        node = node.left
    return [node, *reversed(stages)]


def _value(kind: str, text: str, node: ast.expr) -> Any:
    """A literal: number, text, true/false/none, a bare word (`auto`), or a tuple of them. Anything else is code."""
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
    raise _refused(kind, text, node)


def _refused(kind: str, text: str, node: ast.AST) -> InputError:
    return InputError(f"{kind} {text!r}: {ast.unparse(node)!r} is code; only names, numbers and words are allowed")


def equal(a: Any, b: Any) -> bool:
    """Whether two arguments are the same; 1 is 1.0, and True is neither."""
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else a == b


def written(value: Any) -> str:
    """A value as it stands in a spec; a number of numpy's as Python writes it."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # mac(C=1.0) and mac(C=1) are one experiment
    if isinstance(value, str) and value.isidentifier() and value.lower() not in ("inf", "nan", "true", "false", "none"):
        return value
    if isinstance(value, tuple):
        return f"({written(value[0])},)" if len(value) == 1 else f"({', '.join(map(written, value))})"
    return repr(value)
