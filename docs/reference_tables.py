"""Tables of the reference that are generated from the code: commands, settings, components and error codes."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from stableair.cli.main import app
from stableair.cli.reference import KINDS, PLURALS, describe_arguments, describe_setting
from stableair.experiment import COMPONENT_SETTINGS, SETTING_FIELDS, registry
from stableair.spec import Entry
from stableair.validation import type_name

CODE = re.compile(r"[a-z]+(?:-[a-z]+)*")
BAR, ESCAPED_BAR = re.compile(r"\|(?=[^`]*(?:`[^`]*`[^`]*)*$)"), r"\\|"  # not within `code`
SOURCE = Path(__file__).parents[1] / "src/stableair"


def settings() -> Iterator[str]:
    """The settings with type, allowed values, default and description."""
    yield from table(("setting", "type and default", "description"), map(_setting, SETTING_FIELDS))


def _setting(name: str) -> tuple[str, ...]:
    field = SETTING_FIELDS[name]
    kind = type_name(field.type).replace(" | ", ", ")
    if name in COMPONENT_SETTINGS:
        kind = f"[spec](components.md#{PLURALS.get(name, name)})"
    elif restricted := field.metadata["allowed"]:
        kind = f"{kind}, {restricted.words}"
    return f"`{name}`", f"{kind}<br>`{field.default}`", describe_setting(name)


def components() -> Iterator[str]:
    """A section per kind of component, with the summary and the arguments of each component."""
    for plural, setting in KINDS.items():
        yield f"## `{setting}` {{ #{plural} }}\n"
        yield f"{SETTING_FIELDS[setting].metadata['help'] if setting in SETTING_FIELDS else 'Argument of a channel.'}\n"
        yield from table(("component", "description"), map(_component, registry(setting)))
        yield ""


def _component(entry: Entry) -> tuple[str, ...]:
    descriptions = describe_arguments(entry)
    arguments = (f"`{typed}`: {descriptions.get(name, '')}" for name, typed in entry.typed_parameters.items())
    return f"`{entry.name}`", "<br>".join([entry.summary, *arguments])


def commands() -> Iterator[str]:
    """A section per command, with its arguments and options."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for path, each in _with_subcommands(name, command):
            yield f"### stableair {path}\n"
            yield f"{' '.join((each.help or '').split())}\n"
            if hasattr(each, "commands"):
                continue
            usage = " ".join([path, *(_placeholder(p) for p in each.params if p.param_type_name == "argument")])
            yield f"```sh\nstableair {usage} [OPTIONS]\n```\n"
            yield from table(("argument or option", "default", "description"), map(_parameter, each.params))
            yield ""


def _with_subcommands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for subname, subcommand in getattr(command, "commands", {}).items():
        yield f"{name} {subname}", subcommand


def _placeholder(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _parameter(parameter: Any) -> tuple[str, ...]:
    default = "" if parameter.default in (None, "", False) else f"`{parameter.default}`"
    if parameter.param_type_name == "argument":
        return f"`{_placeholder(parameter)}`", default, parameter.help or ""
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.split()[0].upper()}"
    return ", ".join(f"`{flag}{value}`" for flag in parameter.opts), default, parameter.help or ""


class Code(NamedTuple):
    """An error code with the template of one of its messages."""

    code: str
    message: str


def errors() -> Iterator[str]:
    """The error codes with the templates of their messages."""
    messages: dict[str, list[str]] = {}
    for code, message in error_codes():
        seen = messages.setdefault(code, [])
        if message and message not in seen:
            seen.append(message)
    yield from table(
        ("code", "message"),
        ((f"`{code}`", "<br>".join(f"`{text}`" for text in texts[:3])) for code, texts in sorted(messages.items())),
    )


def error_codes() -> Iterator[Code]:
    """The codes in the source: `code="..."` in calls, and assignments to `code` and `default_code`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for scope in ast.walk(ast.parse(path.read_text())):
            if isinstance(scope, ast.FunctionDef | ast.ClassDef):
                yield from (code for code in _codes_in(scope) if CODE.fullmatch(code.code))


def _codes_in(scope: ast.AST) -> Iterator[Code]:
    """The codes in a function or class; a message may be in a variable of the same scope."""
    assignments = [node for node in ast.walk(scope) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    for node in assignments:
        yield from (Code(code, "") for code in _assigned_codes(node))
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and (codes := [word.value for word in node.keywords if word.arg == "code"]):
            message = node.args[0] if node.args else None
            if isinstance(message, ast.Name):
                earlier = [each for each in assignments if each.lineno < node.lineno]
                values = [each.value for each in earlier if ast.unparse(_target(each)) == message.id]
                message = values[-1] if values else None
            yield from (Code(code, _template(message)) for value in codes for code in _constants(value))


def _assigned_codes(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    """The codes in `code = "..."`, `code, text = "...", text` and `default_code = "..."`."""
    target, value = _target(node), node.value
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    for name, each in zip(target.elts, value.elts, strict=False) if both else [(target, value)]:
        if ast.unparse(name) in ("code", "default_code"):
            yield from _constants(each)


def _target(node: ast.Assign | ast.AnnAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


def _constants(value: ast.expr | None) -> list[str]:
    """The texts of an expression: one constant, or both sides of a conditional expression."""
    if isinstance(value, ast.IfExp):
        return _constants(value.body) + _constants(value.orelse)
    return [str(value.value)] if isinstance(value, ast.Constant) and value.value else []


def _template(message: ast.expr | None) -> str:
    """A message with its values in braces; "" if it is computed elsewhere."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in message.values)
    return ""


def table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    head = tuple(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(BAR.sub(ESCAPED_BAR, cell) for cell in row)} |"


TABLES = {"commands": commands, "settings": settings, "components": components, "errors": errors}
