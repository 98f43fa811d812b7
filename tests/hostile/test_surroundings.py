"""Unusual terminals, home folders and pipes, and repeated signals: computed rounds are kept, errors are one line."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import stableair as sa
from helpers.sweeps import children, wait_until

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

TINY = [
    "data=synthetic(samples=60, classes=3, shape=(1, 2, 2))", "model=mlp(width=4)", "clients=5", "device=cpu",
    "local_epochs=1",
]  # fmt: skip
LONG = [*TINY, "rounds=1000000"]
MAIN = "from stableair.cli.main import main; main()"
HOMELESS = """
import os, pwd
def no_user(*_):
    raise KeyError("no such user")
pwd.getpwuid = no_user
"""


def start(*words, first="", out=subprocess.PIPE, **settings):
    """Start a command in a separate process group, as a terminal does."""
    env = {key: value for key, value in os.environ.items() if settings.get(key, "") is not None}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)} | {key: value for key, value in settings.items() if value}
    command = [sys.executable, "-c", first + MAIN, *map(os.fsencode, words)]
    return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.PIPE, process_group=0)


def run_command(*words, **options):
    """(exit code, output, errors) of a command."""
    with start(*words, **options) as process:
        out, errors = (stream.decode(errors="surrogateescape") for stream in process.communicate(timeout=120))
    return process.returncode, out, errors


def test_a_picture_is_written_on_a_terminal_without_greek_letters(tmp_path):
    words = "figure", "fig4a", *TINY, "rounds=1", "partition=iid()", "norm_stats=clients", "--C", 1, "--out"
    code, out, errors = run_command(*map(str, words), str(tmp_path / "f"), PYTHONIOENCODING="latin-1")
    assert (code, errors) == (0, "")
    assert out.splitlines()[-1].endswith("fig4a.txt")
    assert (tmp_path / "f" / "fig4a.png").stat().st_size > 1000


def test_a_folder_name_that_is_not_unicode_is_supported(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    for words in (["run", *TINY, "rounds=1", "--out", folder], ["plot", folder, "-o", f"{folder}.png"],
                  ["report", folder, "-o", f"{folder}.html"]):  # fmt: skip
        code, out, errors = run_command(*words)
        assert (code, errors) == (0, "")
        assert "udcff" in out


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_runs_work_without_a_writable_home_folder(home, tmp_path):
    environment = {"HOME": home, "XDG_CACHE_HOME": None, "STABLEAIR_DATA": None, "first": "" if home else HOMELESS}
    code, _, errors = run_command("run", "cifar10", "--out", str(tmp_path / "a"), HF_HUB_OFFLINE="1", **environment)
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "STABLEAIR_DATA" in errors
    code, _, _ = run_command("run", *TINY, "rounds=1", "--out", str(tmp_path / "b"), **environment)
    assert (code, len(sa.load(tmp_path / "b"))) == (0, 1)
    assert os.listdir(tmp_path) == ["b"]


def test_a_broken_pipe_is_reported(tmp_path):
    with start("run", *LONG, "--out", str(tmp_path / "a")) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 141, "the exit code of a program that SIGPIPE killed"
    assert errors.startswith("stopped: broken pipe; ")
    assert "continue with --resume" in errors
    assert errors.count("\n") == 1
    assert sa.load(tmp_path / "a").rounds


def test_a_full_output_device_is_reported(tmp_path):
    with open("/dev/full", "w") as full, start("list", out=full) as process:
        errors = process.stderr.read().decode()
    assert (process.returncode, errors) == (2, "error: writing: No space left on device\n")


def wait_for_output(process, lines=3):
    for _ in range(lines):
        assert process.stdout.readline(), process.stderr.read().decode()


@pytest.mark.parametrize("times", [1, 5])
def test_repeated_ctrl_c_exits_with_one_line(times, tmp_path):
    with start("run", *LONG, "--out", str(tmp_path / "a")) as process:
        wait_for_output(process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read().decode()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1
    assert times > 2 or "continue" in errors


def loads_torch(process):
    """Whether a child of this process has loaded torch."""
    with suppress(OSError):  # the child has exited
        return any("libtorch" in Path(f"/proc/{child}/maps").read_text() for child in children(process.pid))


@pytest.mark.parametrize("moment", [lambda process: True, loads_torch], ids=["announced", "importing"])
def test_ctrl_c_while_worker_processes_start_exits_with_one_line(moment, tmp_path):
    """The workers need seconds to import; the process group receives Ctrl-C."""
    big = ["data=synthetic(samples=60, shape=(1, 8, 8))", "model=mlp(width=2000, depth=2)", "engine=fast"]
    with start("run", *big, "clients=5", "rounds=100000", "device=cpu", "--out", str(tmp_path / "a")) as process:
        assert b"processes" in process.stdout.readline()
        wait_until(lambda: moment(process))
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read().decode()
    assert process.returncode == 130
    assert errors.startswith("stopped; ")
    assert errors.count("\n") == 1


SLOW = {
    "search": ["search", *LONG, "receiver.C=0.1:10:log"],
    "bench": ["bench", "--rounds", "100000", "--only", "reference"],
    "theory": ["theory", "--check"],
    "demo": ["demo"],
}


def handles(process, number):
    """Whether a process has installed a handler of a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1


def seconds_of_work(process):
    """The CPU time of a process."""
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", SLOW)
def test_sigterm_exits_with_code_143(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ready = "import stableair.paper.theorem, stableair.bench, stableair.searches, optuna; "
    with start(*SLOW[name], first=ready) as process:
        wait_until(lambda: handles(process, signal.SIGTERM))
        before = seconds_of_work(process)
        wait_until(lambda: seconds_of_work(process) > before + 0.3)
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read().decode()
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1
