"""Ranks with different settings are refused at the start: they would wait for each other, or mix two runs."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import stableair as sa
from helpers.isolation import restored_registries
from stableair import runner
from stableair.distributed import ProcessGroup, SingleProcess
from stableair.errors import InputError


@pytest.fixture
def group(monkeypatch):
    """Rank 0 of three; the settings of the other ranks follow from its own by the given changes."""

    def make(*changes):
        group = ProcessGroup(0, 1 + len(changes), torch.device("cpu"))
        gathered = lambda settings: [settings, *(settings | change for change in changes)]  # noqa: E731
        monkeypatch.setattr(group, "all_gather_objects", gathered)
        return group

    return make


def test_equal_settings_are_accepted(group):
    group({}, {}).check_agreement({"rounds": 3, "chunk": None})
    SingleProcess().check_agreement({"rounds": 3})


def test_the_error_names_each_setting_that_differs_and_its_values(group):
    with pytest.raises(InputError) as error:
        group({}, {"rounds": 4, "extra": 1}).check_agreement({"rounds": 3, "chunk": None})
    assert error.value.code == "ranks-disagree"
    assert error.value.fields["differing"] == {"rounds": [3, 3, 4], "extra": [None, None, 1]}
    assert "rounds is 3 on rank 0 and 4 on rank 2" in str(error.value)
    assert "\n" not in str(error.value)


def settings_of_rank(experiment=None, folder=None):
    return runner._settings_of_rank(experiment or sa.Experiment(), folder)


def test_every_setting_of_the_experiment_and_its_environment_is_compared():
    environment = {"threads", "plug-ins", "stableair", "torch", "recorded"}
    assert settings_of_rank().keys() == sa.Experiment().to_dict().keys() | environment


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"receiver": "mac(1)"}, {"receiver": "mac(C=1.0)"}, True),
        ({"device": "cuda:0"}, {"device": "cuda:1"}, True),
        ({"device": "cuda:0"}, {"device": "cpu"}, False),
        ({"chunk": 2}, {"chunk": 3}, False),
        ({"engine": "fast"}, {"engine": "reference"}, False),
        ({"noise": "sas()"}, {"noise": "sas(tau=0.2)"}, False),
    ],
)
def test_settings_are_compared_by_their_meaning(one, other, equal):
    assert (settings_of_rank(sa.Experiment(**one)) == settings_of_rank(sa.Experiment(**other))) is equal


def test_a_plug_in_is_compared_by_its_content_not_by_its_folder(tmp_path):
    compared = []
    for folder, factor in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(f"import stableair as sa\nsa.receiver('mine')(lambda: lambda g: {factor} * g)\n")
        with restored_registries():
            sa.load_plugin(file)
            compared.append(settings_of_rank(sa.Experiment(receiver="mine()"))["plug-ins"])
    assert compared[0]
    assert compared[0] == compared[1] != compared[2]


SCRIPT = """
    import os
    import stableair as sa

    rank = int(os.environ["RANK"])
    e = sa.Experiment(
        data="synthetic(samples=70, classes=3, shape=(1, 2, 2))", model="mlp(4)", clients=7, rounds=2, device="cpu"
    )
    other = {"rounds": 5, "chunk": 3, "engine": "reference"}
    what = os.environ["DIFFERENT"]
    sa.run(e.with_(**{what: other[what]}) if rank else e)
"""


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rounds", "chunk", "engine"])
def test_ranks_of_torchrun_with_different_settings_exit_at_once_with_one_line(setting, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DIFFERENT": setting}
    done = subprocess.run(
        [*command, tmp_path / "script.py"], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode != 0
    lines = {line for line in done.stderr.splitlines() if "InputError: the ranks disagree: " in line}
    assert lines, done.stderr
    assert all(f"{setting} is " in line for line in lines)


def test_settings_are_compared_before_anything_is_built(tiny, monkeypatch):
    def refuse(settings):
        raise InputError("the ranks disagree", code="ranks-disagree", differing=settings)

    monkeypatch.setattr(runner, "join_process_group", refuse)
    monkeypatch.setattr(runner, "build", lambda e: pytest.fail("built"))
    with pytest.raises(InputError) as error:
        sa.run(tiny)
    assert error.value.fields["differing"]["rounds"] == tiny.rounds


def test_the_chosen_engine_and_the_data_files_are_compared_too(tiny, monkeypatch):
    """Ranks on different machines may choose differently, or hold different data."""
    compared = []
    monkeypatch.setattr(SingleProcess, "check_agreement", lambda self, settings: compared.append(settings))
    sa.run(tiny.with_(engine="reference", rounds=1))
    assert [settings.keys() for settings in compared] == [{"engine", "precision", "chunk", "data"}]
    assert compared[0]["engine"] == "reference"
