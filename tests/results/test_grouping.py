"""Groups of runs that differ only in the seed, and their labels."""

import json

import pytest

import stableair as sa
from stableair.results.grouping import group
from stableair.results.run import Run


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment(**settings).to_dict(), rows)


def test_labels_contain_the_settings_that_differ():
    ideal = {"fading": "unit()", "noise": "none()", "receiver": "none()"}
    groups = group([made([1], **ideal), made([1], receiver="mac(C=2)"), made([1], clients=5, receiver="mac(C=2)")])
    assert list(groups) == ["ideal", "clients=50", "clients=5"]
    both = [made([1], clients=n, **more) for n in (5, 50) for more in (ideal, {})]
    assert list(group(both)) == ["ideal, clients=5", "clients=5", "ideal, clients=50", "clients=50"]
    assert list(group([made([1])])) == ["mac(C=1)"]
    assert list(group([made([1], **ideal, participation="sample(5)"), made([1])])) == ["ideal, sample(m=5)", "mac(C=1)"]


def test_runs_of_earlier_versions_with_another_spelling_are_in_the_same_group():
    """Earlier versions recorded `none` as well as `none()`."""
    ideal = {"fading": "unit()", "noise": "none()", "receiver": "none()"}
    old = [Run(run.record | dict.fromkeys(("noise", "receiver"), "none") | {"channel": "flat", "data": "digits"},
               run.rounds) for run in (made([1], **ideal, seed=1), made([1], **ideal, clients=5))]  # fmt: skip
    groups = group([made([1], **ideal), *old, made([1])])
    assert {name: len(runs) for name, runs in groups.items()} == {
        "ideal, clients=50": 2, "ideal, clients=5": 1, "mac(C=1)": 1,
    }  # fmt: skip
    assert old[0].settings["receiver"] == "none()"


def test_only_the_plain_flat_channel_is_ideal():
    free = {"fading": "unit", "noise": "none()", "receiver": "none()"}
    krum = "digital(quantize='qsgd(s=4, coding=plain)', aggregate='krum(f=2, keep=1)')"
    runs = [made([1], **free), made([1], **free, channel=krum), made([1], **free, power="limit(P=1)"), made([1])]
    short = "digital(quantize='qsgd(s=4)', aggregate='krum(f=2)')"  # without the arguments that have their default
    assert list(group(runs)) == ["ideal", short, "ideal, limit(P=1)", "mac(C=1)"]
    assert list(group(runs[1:2])) == [short]


def test_ambiguous_values_are_labelled_with_their_setting():
    runs = [made([1], receiver="none()"), made([1], power="limit(P=1)"), made([1], augment="crop_flip")]
    assert list(group([*runs[:1], made([1])])) == ["none()", "mac(C=1)"], "one setting alone needs no name"
    assert list(group(runs)) == [
        "augment=none, power=none(), receiver=none()",
        "augment=none, power=limit(P=1), receiver=mac(C=1)",
        "augment=crop_flip, power=none(), receiver=mac(C=1)",
    ], "a setting has its name in all labels or in none"
    ideal = {"fading": "unit()", "noise": "none()", "receiver": "none()"}
    grid = [made([1], noise=f"sas(tau={tau})", receiver=each) for tau in (0.1, 0.5) for each in ("mac(C=1)", "none()")]
    assert list(group([made([1], **ideal), *grid])) == [
        "ideal",
        *(f"sas(tau={tau}), {each}" for tau in (0.1, 0.5) for each in ("mac(C=1)", "none()")),
    ], "only the receiver can be none() in these labels"


def test_a_power_rule_of_all_runs_is_in_no_label():
    """As in the sweep of docs/link-budget.md."""
    noisy = {"channel": "flat(noise_on=sum)", "power": "limit(P=1)"}
    digital = {"fading": "unit()", "noise": "none()", "receiver": "none()", "power": "limit(P=1)"}
    runs = [made([1], **noisy), made([1], **noisy | {"receiver": "none()"}),
            *(made([1], **digital, channel=f"digital(quantize='qsgd(s={s})', rate=2)") for s in (1, 3))]  # fmt: skip
    expected = ["mac(C=1)", "none()", *(f"digital(quantize='qsgd(s={s})', rate=2)" for s in (1, 3))]
    assert list(group(runs)) == expected
    unlimited = made([1], **digital | {"power": "none()"}, channel="digital(rate=3)")
    assert [name for name in group([*runs, unlimited]) if "limit" in name] == [
        f"{each}, limit(P=1)" for each in expected[2:]
    ]


def test_runs_that_differ_only_in_a_default_are_separate_groups():
    records = [sa.Experiment(receiver="mac(C=auto)").to_record() for _ in range(3)]
    for number, record in enumerate(records):
        record["arguments"]["receiver"] = [{"C": "auto", "gain": None, "pilot": number}]
    assert list(group([Run(record, []) for record in records]))[1:] == ["mac(C=auto) (2)", "mac(C=auto) (3)"]


def test_runs_that_differ_only_in_a_default_have_different_identities(finished, tmp_path):
    one = finished[0].to_record()
    other = json.loads(json.dumps(one))
    other["noise"], other["arguments"]["noise"] = "sas()", [{"alpha": 1.5, "tau": 0.7}]
    plain = one | {"noise": "sas()"}
    assert Run(plain, []).identity != Run(other, []).identity
    assert list(group([Run(plain, []), Run(other, [])])) == ["mac(C=auto)", "mac(C=auto) (2)"]
    assert Run(one, []).identity == Run(plain, []).identity, "another spelling of the same experiment"


@pytest.mark.parametrize("order", [1, -1])
def test_labels_do_not_depend_on_the_order_of_the_runs(order):
    """The digest distinguishes objects with the same name; a number distinguishes other equal labels."""
    specs = [f"object(name='make.lambda', digest='{digest}')" for digest in ("3f9a01", "77aa02")]
    runs = [made([1], receiver=spec) for spec in specs][::order]
    names = {run.settings["receiver"]: name for name, (run,) in group(runs).items()}
    assert names == dict(zip(specs, ["make.lambda (3f9a)", "make.lambda (77aa)"], strict=True))
    records = [sa.Experiment(receiver="mac(C=auto)").to_record() for _ in range(2)]
    for number, record in enumerate(records):
        record["arguments"]["receiver"] = [{"C": "auto", "gain": None, "pilot": number}]
    labels = {run.record["arguments"]["receiver"][0]["pilot"]: name
              for name, (run,) in group([Run(record, []) for record in records[::order]]).items()}  # fmt: skip
    assert labels == {0: "mac(C=auto)", 1: "mac(C=auto) (2)"}
