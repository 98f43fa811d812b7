"""Plans: every combination of settings, and invalid plans."""

import pytest

import stableair as sa
from helpers.errors import refused
from stableair.experiment import Experiment
from stableair.sweeps.plans import MAX_EXPERIMENTS, expand_plan, parse_plan, read_plan


def test_a_plan_is_every_combination_with_every_seed():
    plan = {"clients": 7, "receiver": ["mac(C=1)", "none()"], "noise.tau": [0.1, 0.5, 1], "seed": 4, "seeds": 2}
    found = expand_plan(plan)
    assert [(e.receiver, e.noise, e.seed) for e in found] == [
        (receiver, f"sas(alpha=1.5, tau={tau})", seed)
        for receiver in ("mac(C=1)", "none()") for tau in (0.1, 0.5, 1) for seed in (4, 5)
    ]  # fmt: skip
    assert len({e.name for e in found}) == 12
    assert {e.clients for e in found} == {7}


def test_tables_of_runs_override_the_settings_above_them(tmp_path):
    (tmp_path / "plan.toml").write_text(
        'preset = "digits-noniid"\nseeds = 2\nnoise.tau = 0.5\n'
        '[[runs]]\nreceiver = "mac(C=1)"\nseeds = 1\n[[runs]]\nreceiver = ["gnc(max_norm=3)", "none()"]\nclients = 9\n'
    )
    found = expand_plan(tmp_path / "plan.toml")
    assert [(e.receiver, e.clients, e.seed) for e in found] == [
        ("mac(C=1)", 50, 0), ("gnc(max_norm=3)", 9, 0), ("gnc(max_norm=3)", 9, 1),
        ("none()", 9, 0), ("none()", 9, 1),
    ]  # fmt: skip
    assert {(e.partition, e.noise) for e in found} == {("dirichlet(beta=0.3)", "sas(alpha=1.5, tau=0.5)")}


def test_repeated_experiments_of_a_plan_are_run_once():
    assert len(expand_plan({"noise.tau": [0.5, 0.5, 5e-1], "seed": [0, 0]})) == 1
    with pytest.raises(sa.InputError) as error:
        expand_plan({"runs": [{"rounds": 3}, {"rounds": 4}]})
    assert error.value.code == "planned-twice"


def test_words_of_the_command_line_are_split_at_commas_outside_of_brackets(tmp_path):
    (tmp_path / "plan.toml").write_text("clients = 9\nnoise.tau = [0.1, 0.2]\n")
    words = [str(tmp_path / "plan.toml"), "receiver=mac(C=1, gain=True),chain", "noise.tau=0.3", "rounds=5", "seeds=2"]
    assert parse_plan(words) == {
        "clients": 9, "noise.tau": 0.3, "receiver": ["mac(C=1, gain=True)", "chain"], "rounds": 5, "seeds": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"recever": "none()"}, ("unknown-setting", "recever")),
        ({"receiver.D": [1, 2]}, ("unknown-argument", "D")),
        ({"receiver": []}, ("empty-list", "receiver")),
        ({"receiver": ["none()", 3]}, ("not-a-spec", "receiver")),
        ({"receiver": [["none()"]]}, ("not-a-spec", "receiver")),
        ({"clients": ["many"]}, ("wrong-type", "clients")),
        ({"seeds": 0}, ("out-of-range", "seeds")),
        ({"seeds": "five"}, ("wrong-type", "seeds")),
        ({"seeds": [1, 2]}, ("wrong-type", "seeds")),
        ({"preset": "digit"}, ("unknown-value", "preset")),
        ({"rounds": [3, 4]}, ("execution-varies", "rounds")),
        ({"runs": []}, ("wrong-type", "runs")),
        ({"runs": 3}, ("wrong-type", "runs")),
        ({"runs": {"receiver": "none()"}}, ("wrong-type", "runs")),
        ({"run": [{"receiver": "none()"}]}, ("unknown-setting", "run")),
        ({"run": {"receiver": "none()"}}, ("unknown-setting", "run")),
        ({"sedes": 3}, ("unknown-setting", "sedes")),
        ({"runs": [{"preste": "digits"}]}, ("unknown-setting", "preste")),
        ({"seed": list(range(MAX_EXPERIMENTS)), "lr": [0.1, 0.2]}, ("plan-too-large", None)),
        ([], ("empty-plan", None)),
        ([Experiment(), "b"], ("wrong-type", "plan")),
        (3, ("wrong-type", "plan")),
        ("no.toml", ("unreadable-file", None)),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line_and_writes_nothing(plan, expected, tmp_path):
    with pytest.raises(sa.InputError) as error:
        sa.sweep(plan, tmp_path / "s")
    assert (error.value.code, error.value.fields.get("name")) == expected
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a = ", "a = 1\na = 2", "\0"])
def test_an_invalid_toml_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(sa.InputError) as error:
        read_plan(tmp_path / "plan.toml")
    assert error.value.code == "not-toml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recever=none()"], "did you mean 'receiver'"),
        (["digit"], "neither a preset, the file of a plan nor key=value"),
        (["clients=3,x"], "clients must be a whole number: got 'x'"),
        (["--ray", "here", "lr=0.1"], "HOST:PORT"),
        (["--ray", "ray://127.0.0.1:1", "lr=0.1"], "HOST:PORT"),
        (["--ray", "127.0.0.1:1", "lr=0.1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--ray", "127.0.0.1:99999", "lr=0.1"], "no Ray cluster answers"),
        (["--slurm", "lr=0.1"], "SLURM rejects the job: Could not detect"),
        (["--slurm", "--ray", "auto", "lr=0.1"], "choose one"),
        (["--slurm-option", "time=5", "lr=0.1"], "needs --slurm"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line_and_writes_nothing(words, expected, command, tmp_path):
    code, out, errors = command("sweep", *words, "--out", "s")
    assert (code, out, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: ")
    assert expected in errors
    assert not list(tmp_path.iterdir())


def test_an_argument_applies_to_the_components_that_have_it():
    words = ["receiver=mac,gnc,none", "receiver.C=1,2", "receiver.max_norm=9", "noise.tau=0.1,0.5", "rounds=1"]
    receivers = [one.receiver for one in expand_plan(parse_plan(words)) if "tau=0.5" in one.noise]
    assert receivers == ["mac(C=1)", "mac(C=2)", "gnc(max_norm=9)", "none()"]
    refused("unknown-argument", expand_plan, parse_plan(["receiver=none,sign(1)", "receiver.C=1"]))
