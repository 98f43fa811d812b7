"""Results of a plug-in that has changed are refused, kept or recomputed, but never silently reused."""

import functools
import json
import os
import subprocess
import sys

import pytest

import stableair as sa
from helpers import ROOT
from helpers.isolation import restored_registries
from stableair.errors import InputError
from stableair.results.checksums import ENVIRONMENT
from stableair.results.plugins import MIXED, component_sources, mixed_components
from stableair.results.report import page
from stableair.sources import source_of

RECEIVER = """
import stableair as sa
from scaling import FACTOR

@sa.receiver("scaled")
def scaled(a: float = 1.0):
    return lambda g: FACTOR * {factor} * a * g

@sa.noise("quiet")
def quiet():
    return sa.noise.one("none()")()
"""
OTHER = "import stableair as sa\n\n@sa.receiver('other')\ndef other():\n    return lambda g: g\n# {}\n"


class Plugin:
    """A plug-in that imports a local module; each use loads it again, as another process does."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.file = folder, folder / "rules.py"
        monkeypatch.syspath_prepend(str(folder))
        self.write()

    def write(self, factor=0.5, imported=1.0):
        self.file.write_text(RECEIVER.format(factor=factor))
        (self.folder / "scaling.py").write_text(f"from constants import FACTOR  # {imported}\n")
        (self.folder / "constants.py").write_text(f"FACTOR = {imported}\n")

    def __call__(self, function, *args, **options):
        for name in ("scaling", "constants", "stableair_plugin_rules"):
            sys.modules.pop(name, None)
        with restored_registries():
            sa.load_plugin(self.file)
            return function(*args, **options)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Plugin(tmp_path, monkeypatch)


@pytest.fixture
def settings(tiny):
    return {key: getattr(tiny, key) for key in ("data", "model", "clients", "rounds", "device")} | {
        "receiver": "scaled()", "rounds": 2
    }  # fmt: skip


def run(settings, folder, **options):
    return sa.run(sa.Experiment(**settings), folder, resume=True, **options)


def accuracy_and_loss(run):
    return run["train/loss"], run["test/loss"]


def environments(folder):
    return json.loads((folder / ENVIRONMENT).read_text())


@pytest.mark.parametrize("rounds", [2, 4], ids=["finished", "half-finished"])
@pytest.mark.parametrize("change", [{"factor": 0.7}, {"imported": 2.0}], ids=["plug-in", "imported module"])
def test_change_is_refused_and_names_the_file(plugin, settings, tmp_path, rounds, change):
    plugin(run, settings, tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    plugin.write(**change)
    with pytest.raises(InputError) as error:
        plugin(run, settings | {"rounds": rounds}, tmp_path / "a")
    assert (error.value.code, error.value.hint) == ("plugin-changed", "plugin")
    assert error.value.fields["file"] == str(plugin.file)
    assert error.value.fields["component"] == "receiver scaled"
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_unchanged_plugin_is_reused(plugin, settings, tmp_path):
    first = plugin(run, settings, tmp_path / "a")
    os.utime(plugin.file)
    assert plugin(run, settings, tmp_path / "a")["seconds"] == first["seconds"]
    assert len(plugin(run, settings | {"rounds": 3}, tmp_path / "a")) == 3


def test_keep_uses_finished_results_and_records_both_versions(plugin, settings, tmp_path):
    first = plugin(run, settings, tmp_path / "a")
    plugin.write(factor=0.7)
    kept = plugin(run, settings, tmp_path / "a", plugin_changed="keep")
    assert kept["seconds"] == first["seconds"]
    (entry,) = environments(tmp_path / "a")
    versions = [entry[key]["receiver scaled"]["version"] for key in ("plugins", "plugins_kept")]
    assert versions[0] != versions[1]
    assert plugin(run, settings, tmp_path / "a")["seconds"] == first["seconds"], "an accepted version is accepted again"
    plugin.write(factor=0.9)
    with pytest.raises(InputError):
        plugin(run, settings, tmp_path / "a")


def test_keep_continues_a_half_finished_run(plugin, settings, tmp_path):
    plugin(run, settings, tmp_path / "a")
    plugin.write(factor=0.7)
    assert len(plugin(run, settings | {"rounds": 3}, tmp_path / "a", plugin_changed="keep")) == 3
    versions = [entry["plugins"]["receiver scaled"]["version"] for entry in environments(tmp_path / "a")]
    assert len(set(versions)) == 2


def test_a_run_that_diverged_in_its_first_round_is_refused_too(plugin, settings, tmp_path):
    plugin.write(factor=1e39)
    first = plugin(run, settings, tmp_path / "a")
    assert first.diverged == 0
    plugin.write(factor=0.5)
    with pytest.raises(InputError) as error:
        plugin(run, settings, tmp_path / "a")
    assert error.value.code == "plugin-changed"
    assert plugin(run, settings, tmp_path / "a", plugin_changed="recompute").diverged is None


@pytest.mark.parametrize("rounds", [2, 4])
def test_recompute_starts_the_run_again(plugin, settings, tmp_path, rounds):
    settings = settings | {"rounds": rounds}
    plugin(run, settings | {"rounds": 2}, tmp_path / "a")
    plugin.write(factor=0.7)
    again = plugin(run, settings, tmp_path / "a", plugin_changed="recompute")
    assert accuracy_and_loss(again) == accuracy_and_loss(plugin(run, settings, None))
    assert len(environments(tmp_path / "a")) == 1
    unchanged = plugin(run, settings, tmp_path / "a", plugin_changed="recompute")
    assert unchanged["seconds"] == again["seconds"], "only changed plug-ins are recomputed"


def test_kept_results_can_be_recomputed_later(plugin, settings, tmp_path):
    plugin(run, settings, tmp_path / "a")
    plugin.write(factor=0.7)
    plugin(run, settings, tmp_path / "a", plugin_changed="keep")
    again = plugin(run, settings, tmp_path / "a", plugin_changed="recompute")
    assert accuracy_and_loss(again) == accuracy_and_loss(plugin(run, settings, None))
    assert mixed_components([again]) == []


def test_only_components_of_the_experiment_change_the_version(plugin, settings, tmp_path):
    plain = settings | {"receiver": "mac(C=1)"}
    first = plugin(run, plain, tmp_path / "a")
    assert environments(tmp_path / "a")[0]["plugins"] == {}
    plugin.write(factor=0.7)
    assert plugin(run, plain, tmp_path / "a")["seconds"] == first["seconds"]


def test_versions_include_nested_components(plugin, settings):
    noise = "markov(good='quiet()', bad='sas(tau=3)', p=0.1, q=0.5)"
    sources = plugin(lambda: component_sources(sa.Experiment(**settings | {"noise": noise})))
    assert set(sources) == {"receiver scaled", "noise quiet"}


def sweep(settings, folder, **options):
    return sa.sweep(settings, folder, **options)[0]


def search(settings, folder, **options):
    result = sa.search(sa.Experiment(**settings), {"receiver.a": "0.5,1"}, folder, trials=2, **options)
    return [trial.score for trial in result.trials]


def compare(settings, folder, **options):
    plan = settings | {"receiver": ["scaled()", "mac(C=1)"], "seeds": 1}
    lines = sa.compare(plan, folder, **options).lines.values()
    return [(line.receiver, line.accuracy, line.seconds) for of_channel in lines for line in of_channel]


@pytest.mark.parametrize("function", [sweep, search, compare])
def test_functions_that_reuse_runs_follow_the_policy(plugin, settings, tmp_path, function):
    first = plugin(function, settings, tmp_path / "s")
    plugin.write(factor=0)
    with pytest.raises(InputError) as error:
        plugin(function, settings, tmp_path / "s")
    assert error.value.code == "plugin-changed"
    kept = plugin(function, settings, tmp_path / "s", plugin_changed="keep")
    if function is sweep:
        first, kept = accuracy_and_loss(first), accuracy_and_loss(kept)
    assert kept == first
    folders = [path.parent for path in (tmp_path / "s").rglob(ENVIRONMENT)]
    for folder in folders:
        (entry,) = environments(folder)
        if entry["plugins"]:
            assert entry["plugins_kept"] != entry["plugins"], "both versions are recorded"
    plugin.write(factor=0.1)
    plugin(function, settings, tmp_path / "s", plugin_changed="recompute")
    for folder in folders:
        assert len(environments(folder)) == 1
        assert "plugins_kept" not in environments(folder)[0]
    with pytest.raises(InputError) as error:
        plugin(function, settings, tmp_path / "s", plugin_changed="kept")
    assert error.value.code in ("unknown-value", "wrong-type")


def test_a_trial_that_was_stopped_early_records_both_versions_too(plugin, settings, tmp_path, monkeypatch):
    """Its score stops it again before `sa.run` reads its folder."""
    settings |= {"rounds": 3}
    monkeypatch.setattr("optuna.trial.Trial.should_prune", lambda trial: trial.number == 1)
    plugin(search, settings, tmp_path / "s")
    plugin.write(factor=0.7)
    plugin(search, settings, tmp_path / "s", plugin_changed="keep")
    entries = [environments(path.parent) for path in (tmp_path / "s").rglob(ENVIRONMENT)]
    assert len(entries) == 2
    assert all("plugins_kept" in entry for (entry,) in entries)


@pytest.mark.parametrize("rounds", [2, 4], ids=["finished", "half-finished"])
def test_results_of_an_earlier_version_are_marked(plugin, settings, tmp_path, rounds):
    plan = settings | {"receiver": ["scaled()", "mac(C=1)"], "seeds": 2}
    before = plugin(sa.compare, plan, tmp_path / "s")
    assert MIXED not in str(before)
    assert MIXED not in page(list_runs(before))
    assert "earlier_version" not in sa.table(list_runs(before))
    plugin.write(factor=0.7)
    after = plugin(sa.compare, plan | {"rounds": rounds}, tmp_path / "s", plugin_changed="keep")
    marked = [line for line in str(after).splitlines() if MIXED in line]
    assert [line.split()[0] for line in marked] == ["scaled()", f"{MIXED}:"]
    assert "receiver scaled" in marked[1]
    html = page(list_runs(after))
    assert html.count(f"<td>scaled() {MIXED}</td>") == 1
    assert f"mac(C=1) {MIXED}" not in html
    assert [row.split("&")[0].strip() for row in after.to_latex().splitlines() if "dagger" in row] == [
        r"scaled() $\dagger$"
    ]
    assert after.to_pandas().set_index("receiver")["earlier_version"].to_dict() == {"scaled()": True, "mac(C=1)": False}
    assert sa.table(list_runs(after))["earlier_version"].eq(True).sum() == 2
    assert "an earlier version of the receiver scaled" in html


def list_runs(comparison):
    return [run for lines in comparison.lines.values() for line in lines for run in line.runs]


def test_seeds_of_different_versions_are_marked(plugin, settings, tmp_path):
    for seed, factor in enumerate((0.5, 0.7)):
        plugin.write(factor=factor)
        plugin(run, settings | {"seed": seed}, tmp_path / str(seed))
    runs = [sa.load(tmp_path / str(seed)) for seed in (0, 1)]
    assert mixed_components(runs) == ["receiver scaled"]
    assert mixed_components(runs[:1]) == []


def test_worker_processes_get_the_policy(plugin, settings, tmp_path):
    plan = settings | {"receiver": ["scaled()", "scaled(a=2)"]}
    plugin(sa.sweep, plan, tmp_path / "s")
    plugin.write(factor=0.7)
    os.environ["PYTHONPATH"], before = (
        f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        os.environ.get("PYTHONPATH"),
    )
    try:
        runs = plugin(sa.sweep, plan, tmp_path / "s", parallel=2, plugin_changed="recompute")
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    assert len(runs) == 2
    assert all(len(environments(path.parent)) == 1 for path in (tmp_path / "s").rglob(ENVIRONMENT))


@pytest.mark.parametrize("words", [["run", "--resume"], ["sweep"], ["search", "receiver.a=0.5,1", "--trials", "2"]])
def test_commands_refuse_keep_or_recompute_results(words, settings, plugin, command, tmp_path):
    words = [*words, *(f"{key}={value}" for key, value in settings.items()), "--out", "s", "--plugin", "rules.py"]

    def call(*options):
        for name in ("scaling", "constants", "stableair_plugin_rules"):
            sys.modules.pop(name, None)
        with restored_registries():
            return command(*words, *options)

    assert call()[0] == 0
    plugin.write(factor=0.7)
    code, output, errors = call()
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "rules.py" in errors
    assert "has changed since; --plugin-changed=keep uses these results" in errors
    if words[0] == "sweep":  # the line of each experiment
        assert "plugin_changed" not in output
        assert "--plugin-changed=keep uses these results" in output
    code, _, errors = call("--plugin-changed=keep")
    assert code == 0
    assert "results of an earlier version of the receiver scaled are kept" in errors
    plugin.write(factor=0.9)
    assert call("--plugin-changed=recompute")[0] == 0
    assert call("--plugin-changed=kept")[0] == 2


INLINE = """
import sys
import stableair as sa
{extra}
@sa.receiver("inline")
def inline():
    return lambda g: {factor} * g

try:
    e = sa.Experiment(**eval(sys.argv[1]))
    sa.run(e, sys.argv[2], resume=True)
    print(len(sa.run(e, sys.argv[2], resume=True)))
except sa.StableairError as error:
    print(error.code)
"""


def python(*words):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=env).stdout.strip()


def test_inline_components_are_hashed_by_their_source(settings, tmp_path):
    arguments = repr(settings | {"receiver": "inline()"}), tmp_path / "a"
    outputs = []
    for extra, factor in (("", 0.5), ("# another line of the script", 0.5), ("", 0.7)):
        (tmp_path / "script.py").write_text(INLINE.format(extra=extra, factor=factor))
        outputs.append(python(tmp_path / "script.py", *arguments))
    assert outputs == ["2", "2", "plugin-changed"]


def test_component_without_source_is_not_reused_from_another_process(settings, tmp_path):
    arguments = repr(settings | {"receiver": "inline()"}), tmp_path / "a"
    code = INLINE.format(extra="", factor=0.5)
    assert python("-c", code, *arguments) == "2", "the same process may reuse it"
    version = environments(tmp_path / "a")[0]["plugins"]["receiver inline"]["version"]
    assert version.startswith("unknown:")
    assert python("-c", code, *arguments) == "plugin-changed"


def test_classes_and_partial_functions_have_a_source():
    class Thing:
        pass

    for factory in (Thing, functools.partial(Thing), lambda: Thing):
        source = source_of(factory)
        assert source.file == __file__
        assert source.version.startswith("sha256:")


def test_components_of_the_package_have_no_source(tiny):
    assert component_sources(tiny) == {}
