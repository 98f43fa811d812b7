"""Specs in labels: without the arguments that have their default in all runs."""

import pytest

import stableair as sa
from stableair.results.run import Run
from stableair.results.short_specs import short_settings


def short(setting, *specs):
    runs = [Run(sa.Experiment(**{setting: spec}).to_record(), []) for spec in specs]
    return [settings[setting] for settings in short_settings(runs)]


@pytest.mark.parametrize(
    ("setting", "specs", "expected"),
    [
        ("noise", ["sas(alpha=1.5, tau=0.3)"], ["sas(tau=0.3)"]),
        ("noise", ["sas(alpha=1.5, tau=0.1)", "sas(tau=0.5)"], ["sas(tau=0.1)", "sas(tau=0.5)"]),
        ("noise", ["sas(alpha=1.5, tau=1)", "sas(alpha=1.2, tau=0.1)"],
         ["sas(alpha=1.5, tau=1)", "sas(alpha=1.2, tau=0.1)"]),
        ("noise", ["markov(bad='sas(tau=2)', q=0.5)"], ["markov(bad='sas(tau=2)')"]),
        ("noise", ["markov(bad='sas(tau=2)')", "markov(q=0.1)"], ["markov(bad='sas(tau=2)')", "markov(q=0.1)"]),
        ("noise", ["markov(bad='sas(tau=2)')", "markov(bad='sas(alpha=1.2, tau=2)')"],
         ["markov(bad='sas(alpha=1.5, tau=2)')", "markov(bad='sas(alpha=1.2, tau=2)')"]),
        ("channel", ["digital(quantize='qsgd(s=1)', rate=1)"], ["digital(quantize='qsgd(s=1)')"]),
        ("receiver", ["gnc(2, blocks=model) | mac(C=1, pilot=0)"], ["gnc(max_norm=2) | mac(C=1)"]),
        ("model", ["auto", "mlp(200)"], ["auto", "mlp()"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_argument_is_omitted_if_it_has_its_default_in_all_runs(setting, specs, expected):
    assert short(setting, *specs) == expected


def test_arguments_that_are_texts_are_not_read_as_specs():
    specs = ["csv(path='a (1).csv', label=y)", "csv(path='f( x=1)', label=y)"]
    assert short("data", *specs) == specs
