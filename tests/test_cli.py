import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import stableair as sa
from stableair.cli import main as cli
from stableair.cli.display import describe_round, progress
from stableair.cli.reference import KINDS
from stableair.paper import demo, theorem


def but(words, *others):
    """The words with some of their settings changed: a setting may be given once."""
    changed = [other.partition("=")[0] for other in others]
    return [*(word for word in words if word.partition("=")[0] not in changed), *others]


@pytest.fixture
def small(tiny):
    return [f"{key}={value}" for key, value in tiny.to_dict().items()]


def test_run_records_and_says_how_it_went(command, small, tmp_path):
    code, out, errors = command("run", *small, "--out", "a")
    assert (code, errors) == (0, "")
    lines = out.splitlines()
    assert lines.pop(0) == "engine stacked, fp32, 5 clients at a time: a small model, the clients' models stacked"
    assert lines[0].startswith("seed 0  1/4  test accuracy 0.")
    assert lines[0].endswith(" dB")
    assert lines[-1].startswith("a: 4 rounds, test accuracy")
    assert len(sa.load("a")) == 4


def test_resume_and_refusal(command, small):
    command("run", *but(small, "rounds=2"), "--out", "a")
    code, _, errors = command("run", *small, "--out", "a")
    assert code == 2
    assert errors.startswith("error: a already holds this run; add --resume")
    code, out, _ = command("run", *small, "--out", "a", "--resume")
    assert code == 0
    assert [line[:10] for line in out.splitlines()[1:-1]] == ["seed 0  3/", "seed 0  4/"]
    code, out, _ = command("run", *small, "--out", "a", "--resume")
    assert (code, len(out.splitlines())) == (0, 1), "a finished run is not computed again"


def test_seeds_have_folders_of_their_own(command, small, tmp_path):
    code, _, _ = command("run", *but(small, "seed=4"), "--seeds", 3, "--out", "a")
    assert code == 0
    assert {sa.load(p).experiment.seed: p.name for p in (tmp_path / "a").iterdir()} == {
        4: "seed4",
        5: "seed5",
        6: "seed6",
    }
    code, out, _ = command("plot", "a", "-o", "a.png")
    assert (code, out) == (0, "a.png\n")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_without_out_the_folder_is_named_after_the_run(command, small, tiny, tmp_path):
    assert command("run", *small)[0] == 0
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [f"synthetic-mac-seed0-{tiny.id()}"]


def test_a_plugin_and_a_file(command, small, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import stableair as sa\n@sa.receiver('twice')\ndef twice():\n    '''Double.'''\n    return lambda g: 2 * g\n"
    )
    (tmp_path / "e.toml").write_text('receiver = "twice()"\nrounds = 1\n')
    code, _, errors = command(
        "run", "e.toml", *[w for w in small if w[:5] not in ("recei", "round")], "--plugin", "mine.py"
    )
    assert (code, errors) == (0, "")


def test_a_diverged_run_exits_0_and_says_so(command, small):
    code, out, _ = command("run", *but(small, "receiver=none()", "noise=sas(alpha=0.5, tau=1e37)"), "--out", "a")
    assert code == 0
    assert out.splitlines()[-1].startswith("a: diverged at round ")
    assert out.splitlines()[-2].endswith("diverged")
    command("run", *small, "--out", "b")
    assert command("plot", "a", "b")[0] == 0


def test_one_refused_seed_refuses_all(command, small, tmp_path):
    command("run", *but(small, "seed=1"), "--out", "a/seed1")
    code, out, errors = command("run", *small, "--seeds", 2, "--out", "a")
    assert (code, out) == (2, "")
    assert "a/seed1 already holds this run" in errors
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["seed1"]


def test_runs_without_the_metric_are_left_out_and_said(command, small):
    command("run", *small, "--out", "r/test")
    command("run", *but(small, "evaluate=validation"), "--out", "r/validation")
    code, out, errors = command("plot", "r", "-o", "c.png")
    assert (code, out, errors) == (0, "c.png\n", "left out: r/validation has no test/accuracy\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "roudns=3"], "did you mean 'rounds'"),
        (["run", "rounds=0"], "rounds must be at least 1: got 0"),
        (["run", "rounds=x"], "rounds must be a whole number: got 'x'"),
        (["run", "digist"], "did you mean 'digits'"),
        (["run", "missing.toml"], "missing.toml: No such file"),
        (["run", "clients=9999"], "clients must be at most the number of training samples"),
        (["run", "receiver=mac()"], "the signature is mac(C, gain=None, pilot=0)"),
        (["run", "receiver=mac(C=__import__('os'))"], "is code"),
        (["run", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["run", "--plugin", "missing.py"], "plug-in missing.py: there is no such file"),
        (["run", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["run", "--seeds", "0"], "--seeds"),
        (["run", "--sedes", "3"], "No such option"),
        (["rum"], "No such command 'rum'"),
        (["plot", "missing"], "missing: there is no such folder"),
        (["plot"], "Missing argument"),
        (["list", "receiver"], "did you mean 'receivers'"),
        (["data", "check", "cifar11"], "did you mean 'cifar10'"),
        (["data", "prepare", "digits"], "set of the hub: 'digits' is unknown; allowed: cifar10, cifar100, femnist, hf"),
        (["data", "check", "hf(a/b)"], "is code"),
        (["data", "check", "hf('a/b')"], "safetensors is not there; with a network"),
        (["data", "show", "femnist", "--partition", "by_writer()"], "at most the number of"),
        (["theory", "--alpha", "3"], "alpha must be in [0.5, 2]: got 3"),
        (["theory", "--tau", "0", "--plot", "t.png"], "tau must be positive"),
        (["theory", "--tau", "1e308"], "too large or too small to compute with"),
        (["theory", "--d", "9" * 400], "d must be at most 9,223,372,036,854,775,807: got a number of 400 digits"),
        (["theory", "--check", "--plot", "t.xyz"], "its ending must give the format"),
        (["run", "model=mlp(2, depth=1000000000)"], "depth must be at most 1,000"),
        (["run", "data=hf('')"], "needs a name such as 'user/set'"),
        (["run", "data=hf('/proc')"], "/proc holds no images"),
        (["plot", "a" * 300], "a path may have 4,095 bytes, and a name in it 255"),
        (["report", "a" * 300], "a path may have 4,095 bytes, and a name in it 255"),
        (["bench", "--record", "/dev/null/x"], "cannot write /dev/null/x: Not a directory; choose another --record"),
        (["bench", "--record", "/proc/x"], "cannot write /proc/x"),
        (["figure", "fig3a", "--max-norm", "0"], "max_norm must be positive"),
        (["search", "digits", "receiver.C=0.1:1", "--device", "x"], "device 'x' is not there"),
        (["search", "cifar10", "receiver.C=0.1:1", "--data-dir", "empty"], "cifar10.safetensors is not there"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(command, tmp_path, words, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing is fetched
    monkeypatch.setenv("STABLEAIR_DATA", os.environ["STABLEAIR_DATA"])  # what a command changes is put back
    code, out, errors = command(*words)
    assert code == 2
    assert errors.startswith("error: ")
    assert said in errors
    assert errors.count("\n") == 1
    assert out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_list_gives_signatures(command, kind):
    code, out, _ = command("list", kind)
    assert code == 0
    entries = list(sa.spec.REGISTRIES[kind])
    assert entries
    assert all(entry.typed_signature in out and entry.summary in out for entry in entries)


def test_list_shows_types_and_knows_every_kind(command):
    out = command("list", "receivers")[1]
    assert re.search(
        r"^  mac\(C: float \| auto, gain: bool \| None = None, pilot: int = 0\)  +Median", out, re.MULTILINE
    )
    assert set(KINDS) == set(sa.spec.REGISTRIES)


def test_list_needs_nothing_that_ran_before():
    words = [sys.executable, "-m", "stableair", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in ("  rayleigh(", "  gnc(", "  momentum(", "  flat(", "  by_writer("))


def test_list_gives_everything_and_the_version_is_there(command):
    _, out, _ = command("list")
    assert all(f"{kind}\n" in out for kind in (*KINDS, "presets", "settings"))
    assert re.search(r"^  clients +50$", out, re.MULTILINE)
    assert command("--version")[1] == f"{sa.__version__}\n"


def refused(message, hint):
    """An error as the library raises it."""
    error = sa.InputError(message)
    error.hint = hint
    return error


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("resume", "a is taken; add --resume or choose another --out"),
        ("folder", "a is taken; choose another --out"),
        ("record", "a is taken; choose another --record"),
        ("data", "a is taken; choose another --data-dir"),
        ("", "a is taken"),
        ("something else", "a is taken"),
    ],
)
def test_the_command_line_adds_the_option_that_would_help(command, monkeypatch, hint, said):
    def plan(*_, **__):
        raise refused("a is taken", hint)

    monkeypatch.setattr("stableair.paper.figures.plan", plan)
    assert command("figure", "fig3a") == (2, "", f"error: {said}\n")


def test_an_error_that_hints_at_nothing_stays_as_it_is(command, monkeypatch):
    def plan(*_, **__):
        raise sa.InputError("a is taken")

    monkeypatch.setattr("stableair.paper.figures.plan", plan)
    assert command("figure", "fig3a") == (2, "", "error: a is taken\n")


def test_every_option_that_is_hinted_at_exists():
    from typer.main import get_command

    groups = get_command(cli.app).commands, get_command(cli.data.app).commands
    known = {word for group in groups for one in group.values() for option in one.params for word in option.opts}
    hinted = re.findall(r"--[a-z-]+", " ".join(cli.FLAGS.values()))
    assert len(hinted) >= len(cli.FLAGS)
    assert set(hinted) <= known


ROW = {"round": 1, "test/accuracy": 0.5, "test/loss": 1.0, "train/loss": 2.0, "channel/snr_db": -41.26}


def test_a_round_in_words():
    assert describe_round(ROW) == "test accuracy 0.5000  train loss 2  SNR -41.3 dB"
    assert describe_round(ROW | {"channel/snr_db": None}).endswith("SNR none")
    assert describe_round(ROW | {"diverged": True, "test/accuracy": None}) == "diverged"


@pytest.mark.parametrize(("every_round", "shown"), [(True, f"seed 7  2/3  {describe_round(ROW)}\n"), (False, "")])
def test_piped_output_has_a_line_a_round_or_none(capsys, every_round, shown):
    with progress(every_round) as start_run:
        start_run("seed 7", 3)(ROW)
    assert capsys.readouterr().out == shown


def test_a_terminal_has_one_live_line(capsys, monkeypatch):
    monkeypatch.setattr("rich._console", None)  # the one that is shared was made for what it saw first
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress() as start_run:
        start_run("seed 7", 3)(ROW | {"test/accuracy": 0.25})
        start_run("seed 8", 3)(ROW)
    erase = "\x1b[2K"
    shown = capsys.readouterr().out.rpartition(erase)[2]  # what stays on the screen
    assert "seed 8" in shown
    assert "2/3" in shown
    assert "test accuracy 0.5000" in shown
    assert "seed 7" not in shown


def test_search_says_what_it_found_and_the_command_that_runs_it(command, small, tmp_path):
    words = [word for word in small if not word.startswith("receiver=")]
    options = "--trials", 2, "--device", "cpu", "--out", "s"
    code, out, errors = command("search", *words, "receiver.C=0.1:10:log", *options)
    assert (code, errors) == (0, "")
    lines = out.splitlines()
    best = next(line for line in lines if line.startswith("best: ")).split()[1]
    assert [line.split()[0] for line in lines[:2]].count(best) == 1
    again = shlex.split(next(line for line in lines if line.startswith("stableair run ")))
    assert again == ["stableair", "run", *words, best, "--device", "cpu"]
    assert lines[-2:] == ["s/search.json", "s/search.png"]
    assert (tmp_path / "s" / "search.png").stat().st_size > 1000
    assert command(*again[1:], "--out", "r")[0] == 0
    code, _, errors = command("search", *words, "receiver.C=0.1:10", "receiver.C=1", "--out", "t")
    assert (code, errors) == (2, "error: receiver.C is given twice\n")


def test_theory_prints_every_form_and_draws(command, tmp_path):
    code, out, _ = command("theory", "--G", 0.1, "--plot", "t.png")
    assert code == 0
    names = ["p_C printed", "p_C corrected", "p_C exact", "p_C at most", "bound printed", "bound corrected"]
    assert [line[:16].strip() for line in out.splitlines()] == [*names, "C* weak signal", "t.png"]
    least, most = (float(line.split()[2 + ("most" in line)]) for line in out.splitlines()[2:4])
    assert least < most
    assert (tmp_path / "t.png").stat().st_size > 1000
    _, out, _ = command("theory", "--C", 1, "--G", 1)
    assert "C > sqrt2 G is broken" in out
    assert "no bound follows" in out


def test_theory_checks_the_theorem(command, monkeypatch):
    monkeypatch.setattr(theorem, "CHECKS", [(1.5, 0.03, 1.8, 0.03)])
    code, out, _ = command("theory", "--check", "--plot", "t.png")
    assert code == 0
    assert "the printed bound is broken" in out


def test_help_needs_nothing_heavy():
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


def test_plot_itself_needs_no_torch(tiny, tmp_path):
    sa.run(tiny, tmp_path / "a")
    code = (
        "import sys; sys.argv = ['stableair', 'plot', 'a']\n"
        "from stableair.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "curves.png\n", "")


def test_the_demo_tunes_on_validation_and_compares_on_test(command, monkeypatch, tmp_path, tiny):
    monkeypatch.setitem(demo.PRESETS, "demo", tiny.with_(rounds=3).to_dict())
    monkeypatch.setattr(demo, "TUNING_ROUNDS", 2)
    monkeypatch.setitem(demo.GRID, "mac", ("mac(C={})", (1e-6, 1, 1e-5)))
    code, out, _ = command("demo")
    assert code == 0
    final = json.loads((tmp_path / "demo.json").read_text())
    assert list(final) == ["ideal", "mac", "gnc", "noisy"]
    assert (tmp_path / "demo.png").stat().st_size > 1000
    runs = {p.name: sa.load(p) for p in (tmp_path / "runs" / "demo").iterdir()}
    for name, run in runs.items():
        tuning = name.startswith("tune-")
        assert run.settings["evaluate"] == ("validation" if tuning else "test")
        assert any(key.startswith("test/") for key in run.rounds[0]) != tuning, "tuning never sees the test data"
        assert not tuning or run.settings["receiver"] in out
    assert final["mac"] == runs["mac"]["test/accuracy"][-1]
    tuned = [run for name, run in runs.items() if name.startswith("tune-mac")]
    assert len({run.settled("validation/accuracy") for run in tuned}) > 1, "the thresholds differ"
    assert runs["mac"].settings["receiver"] == "mac(C=1)", "the best one was taken"
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("rounds.jsonl")}
    assert command("demo")[0] == 0
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("rounds.jsonl")} == written, "nothing is computed twice"


def test_data_shows_lists_and_checks(command, tmp_path, data_folder):
    code, out, _ = command("data", "show", "digits", "--partition", "dirichlet(0.3)", "--clients", 7, "-o", "l.png")
    assert code == 0
    assert out.splitlines() == [
        "1437 samples, 10 classes, 7 clients by dirichlet(beta=0.3)",
        "samples a client: 205 to 206; classes a client: 7 to 9",
        "l.png",
    ]
    assert (tmp_path / "l.png").stat().st_size > 1000
    code, out, _ = command("data", "list")
    assert (code, out.splitlines()[0]) == (0, str(data_folder))
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["cifar10", "cifar100", "femnist"]
    assert out.count("MB") == 4
    assert "not there" not in out
    assert "as its description tells" in command("data", "check", "cifar10")[1]
    assert command("data", "prepare", "cifar10")[1] == f"{data_folder / 'cifar10.safetensors'}\n"


def test_another_data_folder(command, tmp_path, data_folder, monkeypatch):
    monkeypatch.setenv("STABLEAIR_DATA", str(data_folder))  # what the command changes is put back
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cifar10.safetensors").write_bytes((data_folder / "cifar10.safetensors").read_bytes())
    small = "rounds=1", "clients=2", "model=logistic()", "norm_stats=clients"
    words = "run", "cifar10", *small, "--data-dir", "d", "--out", "r"
    code, _, errors = command(*words)
    assert (code, errors) == (0, "note: d/cifar10.safetensors is unchecked: there is no cifar10.json beside it\n")
    environment = json.loads((tmp_path / "r" / "environment.json").read_text())[0]
    written = json.loads((data_folder / "cifar10.json").read_text())["sha256"]
    assert environment["data"] == {"cifar10.safetensors": written}
    altered = bytearray((tmp_path / "d" / "cifar10.safetensors").read_bytes())
    altered[-1] ^= 1
    (tmp_path / "d" / "cifar10.safetensors").write_bytes(altered)
    code, _, errors = command(*but(words, "rounds=2"), "--resume")
    assert code == 2
    assert "r was begun with other data files" in errors
    assert "as its description tells" in command("data", "check", "cifar10", "--describe", "--data-dir", "d")[1]


@pytest.mark.parametrize("words", [["--debug", "run", "rounds=0"], ["run", "rounds=0", "--debug"]])
def test_debug_shows_the_whole_traceback_wherever_it_stands(command, words):
    code, _, errors = command(*words)
    assert code == 2
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.endswith("\nerror: rounds must be at least 1: got 0\n")
    assert "Traceback" in command("nothing")[2], "and so does the variable, which it has set"


def test_a_mistake_of_our_own_is_one_line_and_another_exit_code(command, monkeypatch):
    monkeypatch.setattr("stableair.paper.figures.plan", lambda *_, **__: {}["not there"])
    code, out, errors = command("figure", "fig3a")
    assert (code, out) == (1, "")
    assert errors.startswith("error: KeyError: 'not there' (a mistake in stableair itself")
    assert "--debug" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--device", "x"], "device 'x' is not there"), (["--data-dir", "empty"], "cifar10.safetensors is not there")],
)
def test_what_a_figure_lacks_is_found_before_its_search(command, tmp_path, words, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing is fetched
    monkeypatch.setenv("STABLEAIR_DATA", os.environ["STABLEAIR_DATA"])
    monkeypatch.setattr("stableair.sweeps.cooperative.run", lambda *_, **__: pytest.fail("computed in vain"))
    code, _, errors = command("figure", "fig3a", *words)
    assert (code, said in errors, errors.count("\n")) == (2, True, 1)
    assert not list(tmp_path.iterdir())


def test_one_bad_folder_does_not_spoil_the_others(command, small, tmp_path):
    command("run", *small, "--out", "good")
    for words in (["plot"], ["report"]):
        code, _, errors = command(*words, "missing", "a" * 300, "good")
        assert code == 0
        assert errors.count("left out: ") == errors.count("\n") == 2
    with pytest.warns(sa.checks.Note, match="left out: missing: there is no such folder"):
        sa.plot(["missing", "good"])
