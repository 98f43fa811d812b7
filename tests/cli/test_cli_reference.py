"""`stableair list` and the help texts."""

import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from typer.models import ArgumentInfo

import stableair as sa
from stableair.cli.main import COMMANDS, data
from stableair.cli.reference import KINDS
from stableair.experiment import COMPONENT_SETTINGS, SETTING_FIELDS, allowed_values, registry


@pytest.mark.parametrize("kind", KINDS)
def test_list_prints_signatures_for_plural_and_singular_kinds(command, kind):
    code, out, _ = command("list", kind)
    assert code == 0
    assert command("list", KINDS[kind])[1] == out
    entries = list(sa.spec.REGISTRIES[kind])
    assert entries
    assert all(entry.typed_signature in out and entry.summary in out for entry in entries)


def test_list_shows_types_and_knows_every_kind(command):
    out = command("list", "receivers")[1]
    assert re.search(
        r"^  mac\(C: float \| auto, gain: bool \| None = None, pilot: int = 0\)  +Median", out, re.MULTILINE
    )
    assert set(KINDS) == set(sa.spec.REGISTRIES)


def test_the_list_of_a_kind_describes_the_arguments(command):
    description = "      C: Blanking threshold, above 0.\n"
    assert description in command("list", "receivers")[1]
    assert description not in command("list")[1]


def test_list_prints_one_setting(command):
    code, out, _ = command("list", "norm_stats")
    assert (code, out.splitlines()[0]) == (0, "norm_stats: clients | recalibrated | batch = clients")
    assert SETTING_FIELDS["norm_stats"].metadata["help"] in out
    assert command("list", "batch_size")[1].startswith("batch_size: int, at least 1 = 10\n")
    assert "did you mean 'norm_stats'?" in command("list", "norm_stat")[2]


def test_list_prints_one_component_of_every_kind_that_has_it(command, registries, tmp_path):
    (tmp_path / "mine.py").write_text('import stableair as sa\n@sa.receiver("trim")\ndef trim(C: int): "Trimmed."\n')
    assert command("list", "mac")[1].splitlines()[0] == "receivers"
    assert "Clipping threshold" in command("list", "mac")[1]
    assert "gnc" not in command("list", "mac")[1]
    titles = [line for line in command("list", "sgd")[1].splitlines() if not line.startswith(" ")]
    assert titles == ["local", "servers"]
    assert command("list", "trim", "--plugin", tmp_path / "mine.py")[1] == "receivers\n  trim(C: int)  Trimmed.\n"


def test_list_prints_the_components_with_an_argument(command):
    out = command("list", "noise.tau")[1]
    listed = re.findall(r"^  (\w+)\(", out, re.MULTILINE)
    assert listed == [entry.name for entry in registry("noise") if "tau" in entry.parameters]
    assert re.findall(r"^ {6}(\w+): ", out, re.MULTILINE) == ["tau"] * len(listed)


def test_list_suggests_the_closest_name(command):
    for word, name in (("macc", "mac"), ("receiverss", "receivers"), ("round", "rounds")):
        code, _, errors = command("list", word)
        assert code == 2
        assert f"did you mean {name!r}?" in errors
        assert "batch_size" not in errors, "the settings would hide the suggestion"
    assert command("list", "noise.nothing")[0] == 2


def test_list_works_without_earlier_commands():
    words = [sys.executable, "-m", "stableair", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in ("  rayleigh(", "  gnc(", "  momentum(", "  flat(", "  by_writer("))


def test_list_prints_everything_and_version_prints_the_version(command):
    _, out, _ = command("list")
    assert all(f"{kind}\n" in out for kind in (*KINDS, "presets", "settings"))
    assert re.search(r"^  clients: int, at least 1 = 50 +Number of clients", out, re.MULTILINE)
    assert command("list", "setting")[1] == command("list", "settings")[1] != command("list", "preset")[1]
    assert command("--version")[1] == f"{sa.__version__}\n"


def test_list_settings_describes_each_with_its_allowed_values(command):
    lines = dict(line.strip().split(": ", 1) for line in command("list", "settings")[1].splitlines()[1:])
    assert list(lines) == list(SETTING_FIELDS)
    for name, line in lines.items():
        assert SETTING_FIELDS[name].metadata["help"] in line
        if name in COMPONENT_SETTINGS:
            assert all(entry.name in line for entry in registry(name))
        elif SETTING_FIELDS[name].type in (int, float):
            assert SETTING_FIELDS[name].metadata["allowed"].words in line
        else:
            assert name == "device" or line.startswith(" | ".join(allowed_values(name)))


def test_every_out_option_has_the_short_form_o(command):
    for words in (*COMMANDS, "data show"):
        shown = command(*words.split(), "--help")[1]
        assert ("--out" in shown) == ("-o" in re.findall(r"(?<!\S)-\w(?!\S)", shown)), words


def described_arguments():
    """The commands and the help texts of their arguments, as the functions declare them."""
    subcommands = {
        f"data {entry.name or entry.callback.__name__}": entry.callback for entry in data.app.registered_commands
    }
    for name, function in {**COMMANDS, **subcommands}.items():
        for hint in get_type_hints(function, include_extras=True).values():
            for info in getattr(hint, "__metadata__", ()):
                if isinstance(info, ArgumentInfo):
                    yield pytest.param(name, info.help, id=name)


@pytest.mark.parametrize(("name", "text"), list(described_arguments()))
def test_the_help_of_a_command_describes_its_arguments(command, monkeypatch, name, text):
    """Some versions of typer and click drop these texts: typer 0.20 with click 8.5."""
    monkeypatch.setenv("COLUMNS", "400")  # no line break within a text
    assert text
    assert text in command(*name.split(), "--help")[1]


def test_help_imports_no_large_package():
    code = (
        "import sys; sys.argv = ['stableair', '--help']\n"
        "from stableair.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
