"""Docstrings on the site: doctests as blocks of code, and the fields of a class as a table."""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, ExprCall, Extension, Object

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)  # from >>> to an empty line


class Docstrings(Extension):
    """Extension of griffe, which reads the source for mkdocstrings; mkdocs.yml names this file."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Mark the doctests of a docstring as Python code."""
        if obj.docstring:
            fenced = EXAMPLE.sub(lambda example: f"\n```pycon\n{example[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        """Append a table of the fields to the docstring of a class, unless its Args describe them."""
        text = cls.docstring.value if cls.docstring else ""
        rows = [_row(field) for field in fields(cls)]
        if rows and "\nArgs:\n" not in text:
            table = "\n".join(["| field | type | description |", "|---|---|---|", *rows])
            cls.docstring = Docstring(f"{text}\n\n{table}".strip(), parent=cls)
        for parameter in cls.parameters:
            parameter.default = _default(parameter.default)


def fields(cls: Class) -> list[Attribute]:
    """The public fields of a dataclass, a NamedTuple or a protocol: its attributes with an annotation."""
    return [member for member in cls.members.values() if _is_field(member)]


def _is_field(member: Any) -> bool:
    is_plain = isinstance(member, Attribute) and not member.name.startswith("_") and "property" not in member.labels
    return is_plain and member.annotation is not None


def description(field: Attribute) -> str:
    """The description of a field: the comment beside it, or the help text of a setting."""
    if _is_setting(field.value):
        return str(field.value.arguments[1]).strip("'\"")
    return field.filepath.read_text().splitlines()[field.lineno - 1].partition("  # ")[2]


def _is_setting(value: Any) -> bool:
    """Whether the value of a field declares a setting of the experiment: `_setting(default, help, ...)`."""
    return isinstance(value, ExprCall) and str(value.function) == "_setting"


def _default(value: Any) -> Any:
    """The default in the value of a field, or in the default of a parameter."""
    return value.arguments[0] if _is_setting(value) else value


def _row(field: Attribute) -> str:
    """A field as a row of a table: name, type with default, and description."""
    value = _default(field.value)
    default = f" = {value}" if value is not None else ""
    kind = f"{field.annotation}{default}".replace("|", "&#124;").replace("<", "&lt;")
    return f"| `{field.name}` | <code>{kind}</code> | {description(field).replace('|', '&#124;')} |"
