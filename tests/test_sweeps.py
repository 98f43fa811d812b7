"""Many experiments at once: plans, processes that share a folder and may be killed, SLURM's script, a Ray cluster."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import stableair as sa
from stableair.checks import Note
from stableair.cli.sweeps import ADVICE, standing
from stableair.experiment import Experiment
from stableair.results import folder as folders
from stableair.results.folder import LOCK, locked
from stableair.results.run import load
from stableair.sweeps import clusters, cooperative, processes
from stableair.sweeps.cooperative import Board, Job
from stableair.sweeps.plans import MOST, plan_of_words, planned, read_plan

SETTINGS = {
    "data": "synthetic(samples=60, classes=3, shape=(1, 2, 2))", "model": "mlp(width=4)", "clients": 5, "device": "cpu",
}  # fmt: skip
PLAN = SETTINGS | {"rounds": 3, "receiver": ["mac(C=1)", "none()"]}
WORDS = [f"{key}={value}" for key, value in SETTINGS.items()] + ["receiver=mac(C=1),none()"]
ROOT = Path(sa.__file__).absolute().parents[1]


def numbers(run):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rounds]


def begun(*words, **more):
    """A real process of the command; what it says is piped."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more.pop("env", {})
    words = [sys.executable, "-m", "stableair", *map(str, words)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **more)


def until(happens, seconds=60):
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def rounds(folder):
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_every_combination_with_every_seed():
    plan = {"clients": 7, "receiver": ["mac(C=1)", "none()"], "noise.tau": [0.1, 0.5, 1], "seed": 4, "seeds": 2}
    found = planned(plan)
    assert [(e.receiver, e.noise, e.seed) for e in found] == [
        (receiver, f"sas(alpha=1.5, tau={tau})", seed)
        for receiver in ("mac(C=1)", "none()") for tau in (0.1, 0.5, 1) for seed in (4, 5)
    ]  # fmt: skip
    assert len({e.name for e in found}) == 12
    assert {e.clients for e in found} == {7}


def test_tables_of_runs_go_on_top_of_what_stands_above(tmp_path):
    (tmp_path / "plan.toml").write_text(
        'preset = "digits-noniid"\nseeds = 2\nnoise.tau = 0.5\n'
        '[[runs]]\nreceiver = "mac(C=1)"\nseeds = 1\n[[runs]]\nreceiver = ["gnc(max_norm=3)", "none()"]\nclients = 9\n'
    )
    found = planned(tmp_path / "plan.toml")
    assert [(e.receiver, e.clients, e.seed) for e in found] == [
        ("mac(C=1)", 50, 0), ("gnc(max_norm=3)", 9, 0), ("gnc(max_norm=3)", 9, 1),
        ("none()", 9, 0), ("none()", 9, 1),
    ]  # fmt: skip
    assert {(e.partition, e.noise) for e in found} == {("dirichlet(beta=0.3)", "sas(alpha=1.5, tau=0.5)")}


def test_what_is_planned_twice_is_there_once():
    assert len(planned({"noise.tau": [0.5, 0.5, 5e-1], "seed": [0, 0]})) == 1
    with pytest.raises(sa.InputError, match="planned twice, with another rounds"):
        planned({"runs": [{"rounds": 3}, {"rounds": 4}]})


def test_words_are_a_plan_with_commas_outside_of_brackets(tmp_path):
    (tmp_path / "plan.toml").write_text("clients = 9\nnoise.tau = [0.1, 0.2]\n")
    words = [str(tmp_path / "plan.toml"), "receiver=mac(C=1, gain=True),chain", "noise.tau=0.3", "rounds=5", "seeds=2"]
    assert plan_of_words(words) == {
        "clients": 9, "noise.tau": 0.3, "receiver": ["mac(C=1, gain=True)", "chain"], "rounds": 5, "seeds": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"recever": "none()"}, "did you mean 'receiver'"),
        ({"receiver.D": [1, 2]}, "no argument 'D'"),
        ({"receiver": []}, "receiver is an empty list"),
        ({"receiver": ["none()", 3]}, "receiver must be a spec"),
        ({"receiver": [["none()"]]}, "receiver must be a spec"),
        ({"clients": ["many"]}, "clients must be a whole number"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": "five"}, "seeds must be a whole number"),
        ({"seeds": [1, 2]}, "seeds must be a whole number"),
        ({"preset": "digit"}, "did you mean 'digits'"),
        ({"rounds": [3, 4]}, "rounds cannot vary"),
        ({"runs": []}, "runs must be tables"),
        ({"runs": 3}, "runs must be tables"),
        ({"runs": {"receiver": "none()"}}, "each under a line [[runs]]"),
        ({"run": [{"receiver": "none()"}]}, "did you mean 'runs'"),
        ({"run": {"receiver": "none()"}}, "did you mean 'runs'"),
        ({"sedes": 3}, "did you mean 'seeds'"),
        ({"runs": [{"preste": "digits"}]}, "did you mean 'preset'"),
        ({"seed": list(range(MOST)), "lr": [0.1, 0.2]}, "20,000 experiments"),
        ([], "the plan is empty"),
        ([Experiment(), "b"], "got 'b'"),
        (3, "a plan is a table of settings"),
        ("no.toml", "no.toml: No such file"),
    ],
)
def test_a_wrong_plan_is_one_line_and_nothing_is_made(plan, said, tmp_path):
    with pytest.raises(sa.InputError, match=re.escape(said)) as error:
        sa.sweep(plan, tmp_path / "s")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a = ", "a = 1\na = 2", "\0"])
def test_a_plan_that_is_no_toml(text, tmp_path):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(sa.InputError, match=r"plan\.toml is not TOML"):
        read_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recever=none()"], "did you mean 'receiver'"),
        (["digit"], "neither a preset, a plan's file nor key=value"),
        (["lr=0.1", "lr=0.2"], "lr is given twice"),
        (["clients=3,x"], "clients must be a whole number: got 'x'"),
        (["--ray", "here", "lr=0.1"], "HOST:PORT"),
        (["--ray", "ray://127.0.0.1:1", "lr=0.1"], "HOST:PORT"),
        (["--ray", "127.0.0.1:1", "lr=0.1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--ray", "127.0.0.1:99999", "lr=0.1"], "no Ray cluster answers"),
        (["--slurm", "lr=0.1"], "SLURM takes no job: Could not detect"),
        (["--slurm", "--ray", "auto", "lr=0.1"], "choose one"),
        (["--slurm-option", "time=5", "lr=0.1"], "goes with --slurm"),
    ],
)
def test_a_wrong_command_is_one_line_and_nothing_is_made(words, said, command, tmp_path):
    code, out, errors = command("sweep", *words, "--out", "s")
    assert (code, out, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: ")
    assert said in errors
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_sweep_is_the_plain_runs_bit_for_bit(parallel, tmp_path):
    ended = []
    runs = sa.sweep(PLAN, tmp_path / "s", parallel=parallel, done=lambda one, outcome: ended.append(one.name))
    assert sorted(ended) == sorted(path.name for path in (tmp_path / "s").iterdir())
    for run, experiment in zip(runs, planned(PLAN), strict=True):
        plain = sa.run(experiment)
        assert run.experiment == experiment
        assert numbers(run) == numbers(plain)
        assert torch.equal(run.state.w, plain.state.w)


@pytest.mark.slow
def test_three_sweeps_share_the_work_and_what_a_killed_one_left_is_taken_over(tmp_path):
    """Three processes on one folder. The one that has the first experiment is killed in the middle of it."""
    words = ["sweep", *WORDS, "rounds=12", "--seeds", "2", "--out", tmp_path / "s"]
    experiments = planned(plan_of_words(WORDS) | {"rounds": 12, "seeds": 2})
    first, *rest = (tmp_path / "s" / one.name for one in experiments)
    victim = begun(*words)
    until(lambda: rounds(first) > 3)
    victim.send_signal(signal.SIGSTOP)  # it keeps its lock, and goes no further
    left_at = rounds(first)
    others = [begun(*words) for _ in range(2)]
    until(lambda: sum(rounds(folder) > 0 for folder in rest) >= 2)
    assert rounds(first) == left_at < 12, "nobody else touches what is locked"
    victim.kill()
    victim.communicate()
    for other in others:
        out, errors = other.communicate(timeout=120)
        assert (other.returncode, errors) == (0, "")
        assert len(out.splitlines()) == len(experiments) + 1, "each sees all of them finished"
    for experiment in experiments:
        found, plain = load(tmp_path / "s" / experiment.name), sa.run(experiment)
        assert numbers(found) == numbers(plain)
        assert torch.equal(found.state.w, plain.state.w)
    started = [[at["first_round"] for at in load(folder).environments] for folder in (first, *rest)]
    assert len(started[0]) == 2, "the killed one's was resumed"
    assert 0 < started[0][1] <= left_at + 1
    assert started[1:] == [[0]] * len(rest), "and nothing else was computed twice"
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.slow
def test_helpers_end_with_the_process_that_started_them(tmp_path):
    parent = begun("sweep", *WORDS, "rounds=100000", "--parallel", 2, "--out", tmp_path / "s")
    until(lambda: len(list((tmp_path / "s").rglob(LOCK))) == 2 if (tmp_path / "s").exists() else False)
    (helper,) = children(parent.pid)
    parent.kill()
    parent.communicate()
    until(lambda: not alive(helper))
    assert [len(load(path)) > 0 for path in (tmp_path / "s").iterdir() if rounds(path)], "what they did can be read"


@pytest.mark.slow
def test_stopped_in_order_it_says_how_to_go_on_and_leaves_no_process(tmp_path):
    parent = begun("sweep", *WORDS, "rounds=100000", "--parallel", 2, "--out", tmp_path / "s")
    until(lambda: sum(rounds(path) > 1 for path in (tmp_path / "s").glob("*")) == 2)
    (helper,) = children(parent.pid)
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=60)
    assert (parent.returncode, errors) == (143, f"stopped; {ADVICE}\n")
    assert not alive(helper)
    assert not list(tmp_path.rglob(LOCK))


def children(pid):
    found = [path.parent for path in Path("/proc").glob("[0-9]*/stat") if f" {pid} " in after_name(path)]
    return [int(path.name) for path in found]


def after_name(path):
    """The state and the parent of a process."""
    try:
        return " ".join(path.read_text().rpartition(")")[2].split()[:2]) + " "
    except OSError:
        return ""


def alive(pid):
    return not after_name(Path(f"/proc/{pid}/stat")).startswith(("Z", "X")) and Path(f"/proc/{pid}").exists()


def test_a_locked_experiment_is_waited_for_and_the_others_come_first(tmp_path, monkeypatch):
    experiments = planned(PLAN)
    lock = locked(tmp_path / experiments[0].name)
    lock.__enter__()
    monkeypatch.setattr(cooperative.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    ended = [one.name for one, _ in cooperative.taken(experiments, tmp_path)]
    assert ended == [experiments[1].name, experiments[0].name]


def test_one_that_fails_keeps_no_other_from_being_computed(tmp_path):
    plan = PLAN | {"lr": [1e30, 0.03], "receiver": "mac(C=1)"}
    with pytest.raises(
        sa.InputError, match=r"1 of 2 experiments failed; the first, synthetic-mac-\S+: round 0: client"
    ):
        sa.sweep(plan, tmp_path / "s")
    assert [path.name for path in (tmp_path / "s").iterdir()] == [planned(plan)[1].name]
    with pytest.raises(sa.InputError, match="1 of 1 experiment failed"):
        sa.sweep(plan | {"lr": 1e30}, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_longer_run_that_is_there_is_cut(tmp_path):
    (experiment,) = planned(SETTINGS)
    sa.run(experiment.with_(rounds=4), tmp_path / experiment.name)
    (run,) = sa.sweep([experiment.with_(rounds=2)], tmp_path)
    assert len(run) == 2


@pytest.mark.parametrize("folder", ["/proc/x", "/proc"])
def test_a_folder_in_which_nothing_can_be_made_is_refused_at_once(folder):
    with pytest.raises(sa.InputError, match="cannot write to"), locked(Path(folder)):
        pass


def test_without_locks_there_is_one_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with pytest.raises(sa.InputError, match="on a disk without locks"):
        sa.sweep(PLAN, tmp_path / "s", parallel=2)
    assert not list(tmp_path.iterdir())
    with pytest.warns(Note, match="disk without locks"):
        assert len(sa.sweep(PLAN, tmp_path / "s")) == 2


def test_torchrun_and_helpers_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sa.InputError, match="leave out parallel, or torchrun"):
        sa.sweep(PLAN, tmp_path / "s", parallel=2)
    assert not list(tmp_path.iterdir())


def test_helpers_have_gpus_of_their_own_unless_one_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [processes.own_gpu(i, [Experiment()]).get("CUDA_VISIBLE_DEVICES") for i in range(1, 5)] == [
        "1",
        "2",
        "0",
        "1",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert processes.own_gpu(1, [Experiment()]) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert processes.own_gpu(1, [Experiment(), Experiment(device="cuda:1")]) == {}


def test_another_process_is_told_all_that_it_needs(tmp_path, registries):
    plugin = tmp_path / "mine.py"
    plugin.write_text("import stableair as sa\n@sa.receiver('twice')\ndef twice(): return lambda g: 2 * g\n")
    sa.load_plugin(plugin)
    (experiment,) = planned(SETTINGS | {"rounds": 2, "receiver": "twice()"})
    job = json.dumps(Job.of([experiment], tmp_path / "s"))
    code = "import json, sys; from stableair.sweeps.cooperative import Job; Job(*json.loads(sys.argv[1]))()"
    subprocess.run([sys.executable, "-c", code, job], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert numbers(load(tmp_path / "s" / experiment.name)) == numbers(sa.run(experiment))


@pytest.mark.slow
def test_a_search_that_is_started_twice_is_shared_and_finds_the_same(tmp_path):
    words = ["search", *WORDS[:-1], "rounds=8", "receiver.C=0.001:10:log", "--trials", 4, "--seeds", 2]
    both = [begun(*words, "--out", tmp_path / "s") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0] == said[1]
    found = sa.search(
        Experiment(**SETTINGS, rounds=8), {"receiver.C": "0.001:10:log"}, tmp_path / "t", trials=4, seeds=2
    )
    there = json.loads((tmp_path / "s" / "search.json").read_text())["trials"]
    assert there == [trial._asdict() for trial in found.trials]
    begun_once = [len(load(path.parent).environments) for path in (tmp_path / "s").rglob("experiment.json")]
    assert begun_once == [1] * 8, "no round is computed twice"


@pytest.mark.slow
def test_a_figure_that_is_made_twice_at_once_is_shared(tmp_path):
    words = ["figure", "fig4c", "--smoke", "--seeds", 2, "model=logistic()", "--out", tmp_path / "s"]
    both = [begun(*words) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert [len(load(path.parent).environments) for path in (tmp_path / "s").rglob("experiment.json")] == [1] * 8


# --------------------------------------------------------------------------------------------------------------- board


def test_the_board_reads_what_the_folders_say(tmp_path):
    experiments = planned(PLAN | {"seeds": 2})
    board = Board(experiments, tmp_path)
    assert [(one.rounds, one.finished) for one in board.look()] == [(0, False)] * 4
    sa.run(experiments[0], tmp_path / experiments[0].name)
    sa.run(experiments[1].with_(rounds=2), tmp_path / experiments[1].name)
    with locked(tmp_path / experiments[2].name):
        found = board.look()
    assert [one.rounds for one in found] == [3, 2, 0, 0]
    assert [one.finished for one in found] == [True, False, False, False]
    assert [one.at_work for one in found] == [False, False, True, False]
    assert found[1].row["test/accuracy"] == load(tmp_path / experiments[1].name)["test/accuracy"][-1]
    with open(tmp_path / experiments[1].name / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 2, "test/acc')
    assert board.look()[1].rounds == 2, "a line that is being written is none yet"


def test_the_table_has_a_line_for_each_setting_and_those_at_work_first(tmp_path):
    experiments = planned(SETTINGS | {"rounds": 2, "noise.tau": [0.1, 0.2, 0.3, 0.4], "seeds": 2})
    sa.run(experiments[0], tmp_path / experiments[0].name)
    lines = {f"tau {i}": [one.name for one in experiments[2 * i : 2 * i + 2]] for i in range(4)}
    with locked(tmp_path / experiments[7].name):
        shown = standing(lines, Board(experiments, tmp_path), height=40)
        few = standing(lines, Board(experiments, tmp_path), height=8)
    assert list(shown.columns[1].cells) == ["1/2", "0/2", "0/2", "0/2"]
    assert list(shown.columns[2].cells) == ["2/4", "0/4", "0/4", "0/4"]
    assert list(shown.columns[3].cells) == ["", "", "", "seed 1"]
    assert shown.caption == "1 of 8 finished"
    assert list(few.columns[0].cells) == ["tau 3", "tau 0"]
    assert few.caption == "1 of 8 finished, 2 settings not shown"


# -------------------------------------------------------------------------------------------------------- SLURM and Ray


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """There is no SLURM here: an sbatch that keeps the script it is handed, an srun that does what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "sbatch": f'cp "$1" {tmp_path}/script.sh; echo Submitted batch job 77',
        "srun": 'while [ "${1#--}" != "$1" ]; do case $1 in --output|--error) shift;; esac; shift; done; exec "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "script.sh"


@pytest.mark.slow
def test_what_slurm_is_handed_is_an_array_of_processes_that_take_part(slurm, tmp_path):
    options = {"partition": "gpu", "time": 90, "gpus_per_node": 1, "cpus_per_task": 4}
    assert clusters.submit(PLAN, tmp_path / "s", jobs=2, options=options) == "77"
    script = slurm.read_text()
    for line in "array=0-1%2", "partition=gpu", "time=90", "gpus-per-node=1", "cpus-per-task=4", "job-name=stableair":
        assert f"#SBATCH --{line}\n" in script
    for i in (0, 1):  # what SLURM would do with it
        ids = {"SLURM_JOB_ID": f"{77 + i}", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": f"{i}"}
        more = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        env = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a"} | ids | more
        subprocess.run(["bash", slurm], check=True, env=env, capture_output=True)
    for experiment in planned(PLAN):
        assert numbers(load(tmp_path / "s" / experiment.name)) == numbers(sa.run(experiment))
    again = clusters.Shift.of(planned(PLAN), tmp_path / "s").checkpoint()
    assert isinstance(again.function, clusters.Shift), "when its time is over it is queued again as it was"


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--slurm-option", "partiton=gpu"], "partiton"), (["--slurm-option", "gpu"], "'gpu' is not key=value")],
)
def test_a_wrong_option_of_slurm_is_one_line(words, said, slurm, command, tmp_path):
    code, _, errors = command("sweep", *WORDS, "--slurm", *words, "--out", "s")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert said in errors
    assert not slurm.exists()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("module", "start"), [("submitit", "_submitit"), ("ray", "_ray")])
def test_a_missing_extra_says_the_command(module, start, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(sa.InputError, match=r"pip install 'stableair\[(slurm|ray)\]'"):
        getattr(clusters, start)()


@pytest.mark.slow
def test_what_answers_and_is_no_ray_cluster_is_said_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECTS", 6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(sa.InputError, match="is no Ray cluster"):
            clusters.sweep_on_ray(PLAN, tmp_path / "s", address)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def ray_cluster(tmp_path_factory):
    """A cluster of two CPUs on this machine; its address, and the process that all of it hangs on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = tmp_path_factory.mktemp("r")
    own = tempfile.mkdtemp(prefix="sa-ray-", dir="/tmp")  # sockets lie in it, whose paths must be short
    words = f"start --head --port {port} --num-cpus 2 --include-dashboard false --disable-usage-stats --block"
    log = (place / "log").open("wb")
    code = "from ray.scripts.scripts import main; main()"
    head = subprocess.Popen(
        [sys.executable, "-c", code, *shlex.split(words), "--temp-dir", own],
        stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    until(lambda: b"Ray runtime started" in (place / "log").read_bytes())
    yield f"127.0.0.1:{port}", head.pid
    family = descendants(head.pid)
    head.terminate()
    head.wait(30)
    until(lambda: not any(map(alive, family)), 30)
    log.close()
    shutil.rmtree(own, ignore_errors=True)


def descendants(pid):
    direct = children(pid)
    return [*direct, *(one for child in direct for one in descendants(child))]


@pytest.mark.slow
def test_a_ray_task_whose_worker_is_killed_goes_on_from_its_checkpoint(ray_cluster, tmp_path):
    address, head = ray_cluster
    words = [*WORDS, "rounds=60", "--seeds", "2"]
    sweep = begun("sweep", *words, "--out", tmp_path / "s", "--ray", address)
    folder = until(lambda: next((path for path in (tmp_path / "s").glob("*") if rounds(path) > 5), None))
    lock = (folder / LOCK).stat().st_ino
    holders = [pid for pid in descendants(head) if lock in open_files(pid)]
    assert len(holders) == 1
    os.kill(holders[0], signal.SIGKILL)
    out, errors = sweep.communicate(timeout=240)
    assert (sweep.returncode, errors) == (0, "")
    experiments = planned(plan_of_words(WORDS) | {"rounds": 60, "seeds": 2})
    assert len(re.findall(r"^\d/4  .*60 rounds", out, re.MULTILINE)) == 4, "Ray says beside it that a worker died"
    for experiment in experiments:
        found = load(tmp_path / "s" / experiment.name)
        assert numbers(found) == numbers(sa.run(experiment))
        assert (len(found.environments) == 2) == (found.folder == folder), "only the killed one began again"
    assert load(folder).environments[1]["first_round"] > 0, "from its checkpoint"


def open_files(pid):
    try:
        return [os.stat(path).st_ino for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
    except OSError:
        return []
