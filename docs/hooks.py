"""Generated content of the site: files of other folders, the API reference, and the reference tables.

The front matter of a page selects what is appended to its text:

- `modules: [channels]`: all public names of these modules, from `stableair._public()`, and their registered components.
- `also: [searches.Result]`: other classes and functions.
- `whole: [streams]`: all public members of these modules.
- `generated: settings`: a table of `reference_tables.py`.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]  # document this copy of the source

from reference_tables import TABLES  # noqa: E402

import stableair as sa  # noqa: E402
from stableair.experiment import COMPONENT_SETTINGS, NESTED_COMPONENTS, registry  # noqa: E402
from stableair.spec import Entry  # noqa: E402

OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*"))]
SCRIPT = re.compile(r"^## \[[^]]*\]\((examples/\w+\.py)\)\n\n(?:.+\n)+", re.MULTILINE)  # of the page of examples
SOURCE_ONLY = re.compile(r"<!-- source only -->.*?<!-- end -->\n", re.DOTALL)  # not shown on the site
COMMAND = re.compile(  # an indented block with commands or the first line of a run
    r'<div class="language-text (?=highlight"><pre><span></span><code>'
    r"(?:engine|flwr|make|pip|python|ray|sbatch|stableair|torchrun|unshare) )"
)
PICTURE = re.compile(r"(!\[[^]]*\])\(([\w/.-]+)\.png\)")


def on_files(files: Files, config: Any) -> Files:
    for path in OUTSIDE:
        files.append(File(path, str(ROOT), config.site_dir, use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    markdown = SOURCE_ONLY.sub("", markdown)
    if page.file.src_uri in OUTSIDE:
        markdown = markdown.replace("](docs/", "](")
    for path in OUTSIDE:  # the source has them beside docs/, the site beside the pages
        markdown = markdown.replace(f"](../{path}", f"]({path}")
    if page.file.src_uri == "examples.md":
        markdown = SCRIPT.sub(_with_code, markdown)
    markdown = PICTURE.sub(lambda image: _with_dark_version(image, Path(page.file.src_uri).parent), markdown)
    if "modules" in page.meta:
        markdown = "\n".join([markdown, *_reference(page.meta["modules"], page.meta.get("whole", []))])
    if "also" in page.meta:
        entries = (_entry("stableair", path, f"stableair.{path}", 2) for path in page.meta["also"])
        markdown = "\n".join([markdown, *entries])
    if "generated" in page.meta:
        markdown = "\n".join([markdown, *TABLES[page.meta["generated"]]()])
    return markdown


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    return COMMAND.sub('<div class="language-text command ', html)


def _with_dark_version(image: re.Match, folder: Path) -> str:
    """A picture, followed by its version for the dark mode if the file exists."""
    dark = f"{image[2]}-dark.png"
    if not (ROOT / "docs" / folder / dark).exists():
        return image[0]
    return f"{image[1]}({image[2]}.png#only-light)\n{image[1]}({dark}#only-dark)"


def _with_code(section: re.Match) -> str:
    """A section of the page of examples, followed by the script that it describes."""
    code = "".join(f"    {line}".rstrip() + "\n" for line in (ROOT / section[1]).read_text().splitlines())
    return f'{section[0]}\n??? example "The script"\n\n    ```python\n{code}    ```\n'


def _reference(modules: list[str], whole: list[str]) -> Iterator[str]:
    """The entries of a page: public names, components by kind, and complete modules."""
    kinds = {field: registry(field) for field in COMPONENT_SETTINGS | NESTED_COMPONENTS}
    known = [None, *kinds.values(), *(entry.factory for kind in kinds.values() for entry in kind)]
    homes = {name: _home(name, module) for name, module in sa._public().items()}
    shown = [name for name, home in homes.items() if _within(home, modules) and home not in whole]
    for name in sorted(shown, key=lambda name: _position(name, homes[name], modules)):
        if (found := getattr(sa, name, None)) not in known:
            others = [entry.factory.__name__ for kind in kinds.values() for entry in kind if _is_in(entry, name)]
            filters = {"filters": ["!^_", f"!^({'|'.join(others)})$"]} if others else {}  # components have a section
            yield _entry(getattr(found, "__module__", sa._public()[name]), name, f"sa.{name}", 2, **filters)
    for field, kind in kinds.items():
        module, name = (COMPONENT_SETTINGS | NESTED_COMPONENTS)[field]
        if _within(module.removeprefix("stableair."), modules):
            yield f"## All {kind.plural} {{ #{module}.{name} }}\n"
            yield f"`@sa.{name}(name)` registers a custom component ([guide](../extending.md)).\n"
            for entry in kind:
                yield _entry(entry.factory.__module__, entry.factory.__qualname__, entry.name, 3)
    for name in whole:
        yield _entry(
            "stableair", name, f"sa.{name}" if sa._public().get(name) == "stableair" else f"stableair.{name}", 2
        )


def _home(name: str, module: str) -> str:
    """The module of a public name, without the package; for a public module, the module itself."""
    return name if module == "stableair" else module.removeprefix("stableair.")


def _is_in(entry: Entry, module: str) -> bool:
    return entry.factory.__module__ == f"stableair.{module}"


def _within(home: str, modules: list[str]) -> bool:
    return any(home == module or home.startswith(f"{module}.") for module in modules)


def _position(name: str, home: str, modules: list[str]) -> tuple[int, str, int]:
    """The position of a public name on a page: modules as in the front matter, names as in the source."""
    first = next(i for i, module in enumerate(modules) if _within(home, [module]))
    defined = list(vars(import_module(f"stableair.{home}")))
    return first, home, defined.index(name) if name in defined else 0  # 0: a public module


def _entry(module: str, name: str, heading: str, level: int, **options: Any) -> str:
    """An instruction of mkdocstrings."""
    options = {"heading": heading, "toc_label": heading, "heading_level": level, **options}
    return "\n      ".join([f"::: {module}.{name}\n    options:", *(f"{k}: {v}" for k, v in options.items())]) + "\n"


def on_env(env: Any, config: Any, files: Files) -> None:
    """Stop the build if a public name is on no page."""
    modules = [module for file in files.documentation_pages() for module in file.page.meta.get("modules", [])]
    registered = [module.removeprefix("stableair.") for module, _ in COMPONENT_SETTINGS.values()]
    homes = [*(_home(name, module) for name, module in sa._public().items()), *registered]
    if lost := [home for home in homes if not _within(home, modules)]:
        raise PluginError(f"no page in docs/reference/ has {', '.join(lost)} among its modules")


def on_post_build(config: Any) -> None:
    """Remove the marks of formulas from the search index: alpha instead of \\(\\alpha\\)."""
    index = Path(config.site_dir) / "search/search_index.json"
    marked = re.compile(r"\\\\[(\[](.*?)\\\\[)\]]")  # a backslash is written as two in JSON
    index.write_text(marked.sub(lambda formula: formula[1].replace("\\\\", ""), index.read_text()))
