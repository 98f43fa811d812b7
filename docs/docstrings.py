"""How the reference reads the source: examples as code, and the fields of a class as a table with their comments."""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Object

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)  # from >>> to an empty line


class Docstrings(Extension):
    """Read by mkdocstrings, see mkdocs.yml."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            fenced = EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        rows = [_row(field) for field in cls.members.values() if _is_field(field)]
        if rows:
            said = [cls.docstring.value] if cls.docstring else []
            table = "\n".join(["| field | type | |", "|---|---|---|", *rows])
            cls.docstring = Docstring("\n\n".join([*said, table]), parent=cls)


def _is_field(member: Any) -> bool:
    plain = isinstance(member, Attribute) and not member.name.startswith("_") and "property" not in member.labels
    return plain and member.annotation is not None


def _row(field: Attribute) -> str:
    """A field with its type, its default, and the comment beside it."""
    line = field.filepath.read_text().splitlines()[field.lineno - 1]
    said = line.partition("  # ")[2]
    default = f" = {field.value}" if field.value is not None else ""
    kind = f"{field.annotation}{default}".replace("|", "&#124;").replace("<", "&lt;")
    return f"| `{field.name}` | <code>{kind}</code> | {said.replace('|', '&#124;')} |"
