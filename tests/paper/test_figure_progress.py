import re

import pytest

from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.paper.catalogue import FIGURES, curves
from stableair.paper.methods import method_of
from stableair.paper.plans import with_threshold

SMALL = "--smoke", "model=logistic()", "clients=2", "--rounds", "1"


@pytest.mark.parametrize("name", ["fig3c", "fig4a", "fig4b", "fig4c"])
def test_the_curve_of_an_experiment_is_its_label(name):
    figure = FIGURES[name]
    labelled = curves(figure, figure.setup, lambda method, base: with_threshold(method, base, 7.0))
    assert [figure.curve_of(one) for one in labelled.values()] == list(labelled)


def test_the_method_of_an_experiment_does_not_depend_on_its_threshold():
    assert [method_of(Experiment(receiver=spec)) for spec in ("mac(C=3)", "mac(C=auto)", "none")] == [
        "mac", "mac", "noisy",
    ]  # fmt: skip
    with pytest.raises(InputError) as error:
        method_of(Experiment(receiver="sign(step=1)"))
    assert error.value.code == "unknown-method"


def test_a_figure_prints_a_line_for_each_curve_and_each_trial(command):
    code, out, _ = command("figure", "fig3c", *SMALL, "--trials", "1", "--max-norm", "9", "--seeds", "2")
    assert code == 0
    curve_lines = re.findall(r"^(.*), seed (\d): \S+: 1 round, test accuracy", out, re.MULTILINE)
    assert sorted(curve_lines) == sorted((label, seed) for label in ("Ideal", "MAC", "GNC", "Noisy") for seed in "01")
    assert re.findall(r"^search, mac\(C=.*\): \S+: 1 round, validation accuracy", out, re.MULTILINE)


def test_a_figure_names_the_curve_of_a_varied_setting(command):
    code, out, _ = command("figure", "fig4b", *SMALL, "--C", "1")
    assert code == 0
    assert re.findall(r"^(.*), seed 0: ", out, re.MULTILINE) == ["τ = 0.05", "τ = 0.1", "τ = 0.2", "τ = 0.3"]
