"""Experiments written to TOML and JSON, read again, and their ids."""

import inspect
import json
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from helpers.errors import refused
from stableair.channels.registries import noise
from stableair.experiment import (
    COMPONENT_SETTINGS,
    NESTED_COMPONENTS,
    PRESETS,
    TYPES,
    Experiment,
    baseline,
    registry,
    settings_of_record,
)
from stableair.paper import published_runs
from stableair.receivers import receiver

CHANGES = {
    "data": "synthetic(samples=100)", "partition": "dirichlet(beta=0.3)", "model": "logistic()", "clients": 7,
    "rounds": 3,
    "seed": 9, "local_epochs": 2, "batch_size": 4, "lr": 0.5, "payload": "delta", "blocks": "layer",
    "lr_decay": "cosine(over=5)", "local": "fedprox(mu=0.1)", "label_smoothing": 0.1, "evaluate_clients": True,
    "fading": "unit()", "augment": "crop_flip",
    "noise": "none()", "channel": "flat(noise_on=sum)", "receiver": "gnc(max_norm=3) | mac(C=0.1)",
    "server": "momentum(beta=0.5)",
    "participation": "sample(m=3)",
    "evaluate": "validation", "norm_stats": "batch", "average": 0.8, "snr_blocks": "layer",
    "device": "cpu", "engine": "reference", "precision": "bf16", "chunk": 3, "bandwidth": 2e7, "symbol_energy": 1e-9,
}  # fmt: skip
# Ids of version 0.2.0, at commit 56dc272: if one of them changes, existing runs no longer match their experiment.
PRESET_IDS = {
    "digits": "b4b8bf78e9ad", "digits-noniid": "5af018280153", "demo": "928bc3c8e7e8", "cifar10": "de7e9b290092",
    "cifar10-noniid": "01946a5088c7", "cifar100": "88edc0b268a6", "femnist": "5acc1013b054",
}  # fmt: skip
PUBLISHED_IDS = {
    "choice-delta-seed0": "128fbf156478",
    "choice-rayleigh-power-1-seed0": "36ae67a0fc38",
    "choice-resnet18-norm-group-seed0": "7f4d76ff905f",
    "cifar10-auto-seed0": "e3ec353e5c7f",
    "cifar10-gnc-seed0": "d161ddb6c4e1",
    "cifar10-ideal-seed0": "58076925ff56",
    "cifar10-ideal-seed1": "82a8eb322fea",
    "cifar10-mac-seed0": "a7558ace4983",
    "cifar10-mac-seed1": "1e9a6668bfd3",
    "cifar10-noisy-seed0": "cdd0f8c34bac",
    "cifar10-noniid-alpha1.1-Cauto-seed0": "839b9a591068",
    "cifar10-noniid-alpha1.5-Cauto-seed0": "d5d18a53f738",
    "cifar10-noniid-alpha1.1-seed0": "35d1c2fefb7c",
    "cifar10-noniid-tau0.05-C0.065-seed0": "f96f7acff95d",
    "cifar10-noniid-tau0.05-Cauto-seed0": "981a7a1d6fdc",
    "cifar10-noniid-tau0.05-seed0": "959d96e64bd2",
    "cifar10-noniid-tau0.1-seed0": "01946a5088c7",
    "cifar10-noniid-tau0.2-seed0": "c587b0b35f7f",
    "cifar10-noniid-tau0.3-C0.39-seed0": "6ef0da5a67fb",
    "cifar10-noniid-tau0.3-Cauto-seed0": "ad21312b6587",
    "cifar10-noniid-tau0.3-seed0": "ca26678b55cf",
    "cifar100-ideal-seed0": "0ff9309611b6",
    "cifar100-noisy-seed0": "f270f0ee1645",
    "femnist-auto-seed0": "3f55d2cf6075",
    "femnist-gnc-seed0": "46792c5f738b",
    "femnist-ideal-seed0": "4d1a6ad1cf9f",
    "femnist-mac-seed0": "49e2f9bf9096",
    "femnist-noisy-seed0": "45b5709ddc27",
}


def test_the_changes_cover_every_field():
    assert CHANGES.keys() | {"power"} == TYPES.keys()  # the power rules also need noise_on=sum


@pytest.mark.parametrize("key", CHANGES)
def test_the_id_depends_on_every_setting_except_execution_settings(key):
    changed = Experiment().with_(**{key: CHANGES[key]})
    assert getattr(changed, key) == CHANGES[key] != getattr(Experiment(), key)
    assert (changed.id() == Experiment().id()) == (key in ("rounds", "device", "engine", "precision", "chunk"))


def test_the_id_depends_on_the_power_rule():
    base = Experiment(channel="flat(noise_on=sum)")
    assert base.with_(power="limit(P=1)").id() not in (base.id(), base.with_(power="limit(P=2)").id())


def test_one_experiment_written_differently_has_one_id():
    base = Experiment().id()
    assert Experiment(fading="rayleigh()", noise="sas(1.5, 0.1)", receiver="mac(1.0)", data="digits()").id() == base
    assert Experiment(lr=3e-2, server="sgd(lr=None)").id() == base
    assert len(base) == 12


@given(st.fixed_dictionaries({}, optional={key: st.just(value) for key, value in CHANGES.items()}))
def test_experiments_written_to_toml_and_json_are_read_again(settings):
    e = Experiment(**settings)
    assert Experiment.from_toml(e.to_toml()) == Experiment.from_json(e.to_json()) == e
    assert tomllib.loads(e.to_toml()) == json.loads(e.to_json()) == e.to_dict()


def test_experiments_are_read_from_files(tmp_path):
    (tmp_path / "a.toml").write_text('clients = 3\nreceiver = "mac(0.2)"\n')
    (tmp_path / "a.json").write_text('{"clients": 3, "receiver": "mac(0.2)"}')
    assert (
        Experiment.read(tmp_path / "a.toml")
        == Experiment.read(tmp_path / "a.json")
        == Experiment(clients=3, receiver="mac(0.2)")
    )
    (tmp_path / "dotted.toml").write_text('noise.tau = 0.3\n"receiver.C" = 2\n')
    assert Experiment.read(tmp_path / "dotted.toml") == Experiment(noise="sas(alpha=1.5, tau=0.3)", receiver="mac(C=2)")
    for name, text, code in [
        ("bad.toml", "clients = ", "not-toml"), ("bad.json", "{", "not-json"), ("list.json", "[]", "wrong-type"),
        ("key.toml", "client = 3", "unknown-setting"), ("range.toml", "clients = 0", "out-of-range"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(text)
        assert str(refused(code, Experiment.read, tmp_path / name)).startswith(str(tmp_path / name))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("missing.toml", "binary.toml"):
        assert refused("unreadable-file", Experiment.read, tmp_path / name).fields["path"] == tmp_path / name


def test_a_new_setting_or_argument_changes_no_id(monkeypatch, registries):
    """An argument is not part of the id if it has its value of the baseline."""
    before = {spec: Experiment(receiver=spec).id() for spec in ("mac(C=1)", "mac(C=2)")}
    mac = receiver.entries["mac"]

    def wider(C: float, gain: bool | None = None, pilot: int = 0, sharpness: float = 1.0):
        return mac.factory(C, gain, pilot)

    monkeypatch.setitem(receiver.entries, "mac", replace(mac, factory=wider))
    assert Experiment().id() != before["mac(C=1)"], "an argument without a baseline changes the id"
    monkeypatch.setitem(baseline.BASELINE_ARGUMENTS["receiver"]["mac"], "sharpness", 1.0)
    assert {spec: Experiment(receiver=spec).id() for spec in before} == before
    assert Experiment(receiver="mac(C=1, sharpness=2)").id() != before["mac(C=1)"]


def test_a_changed_default_changes_the_id_and_old_records_keep_theirs(monkeypatch, registries):
    old = Experiment(receiver="mac(C=1)")
    record, before = old.to_record(), old.id()
    mac = receiver.entries["mac"]

    def changed(C: float, gain: bool | None = True, pilot: int = 0):
        return mac.factory(C, gain, pilot)

    monkeypatch.setitem(receiver.entries, "mac", replace(mac, factory=changed))
    assert Experiment(receiver="mac(C=1)").id() != before
    again = Experiment.from_record(record)
    assert (again.id(), again.receiver) == (before, "mac(C=1, gain=None)"), "the recorded value is written out"


def test_a_changed_default_within_a_spec_changes_the_id_and_old_records_keep_theirs(monkeypatch, registries):
    explicit, plain = (Experiment(noise=text) for text in ("markov(good='sas(tau=1)')", "markov()"))
    sas = noise.entries["sas"]

    def changed(alpha: float = 1.7, tau: float = 0.1):
        return sas.factory(alpha, tau)

    old = [(e.to_record(), e.id(), e.noise) for e in (explicit, plain)]
    assert explicit.noise == "markov(good='sas(alpha=1.5, tau=1)')", "defaults are written out"
    assert [Experiment.from_record(record) for record, *_ in old] == [explicit, plain]
    monkeypatch.setitem(noise.entries, "sas", replace(sas, factory=changed))
    for record, before, text in old:
        assert Experiment.from_record(record).id() == before != Experiment(noise="markov()").id()
        assert "alpha=1.5" in Experiment.from_record(record).noise, text


def test_a_new_argument_within_a_spec_changes_no_id(monkeypatch, registries):
    before, sas = Experiment(noise="markov(p=0.2)").id(), noise.entries["sas"]

    def wider(alpha: float = 1.5, tau: float = 0.1, sharpness: float = 1.0):
        return sas.factory(alpha, tau)

    monkeypatch.setitem(noise.entries, "sas", replace(sas, factory=wider))
    monkeypatch.setitem(baseline.BASELINE_ARGUMENTS["noise"]["sas"], "sharpness", 1.0)
    assert Experiment(noise="markov(p=0.2)").id() == before


def test_the_baseline_names_every_setting_and_argument():
    """New settings, components and arguments need an entry in the table; existing entries never change."""
    assert baseline.BASELINE_SETTINGS.keys() == TYPES.keys()
    for field in COMPONENT_SETTINGS | NESTED_COMPONENTS:
        for entry in registry(field):
            if entry.factory.__module__.startswith("stableair."):
                known = baseline.BASELINE_ARGUMENTS[field][entry.name]
                parameters = inspect.signature(entry.factory).parameters.values()
                assert {p.name for p in parameters if p.default is not p.empty} == known.keys(), (field, entry.name)


def test_no_id_has_changed():
    assert {name: Experiment(**settings).id() for name, settings in PRESETS.items()} == PRESET_IDS
    assert Experiment().id() == PRESET_IDS["digits"]
    chained = Experiment(receiver="mac(C=auto) | gnc(2)", channel="flat(noise_on=sum)", server="momentum()")
    assert chained.id() == "fedcf6776880"


def test_no_id_of_a_published_run_has_changed():
    ids = {}
    for path in published_runs.FOLDER.glob("*.csv"):
        runs = json.loads(path.with_suffix(".json").read_text())["runs"]
        experiments = {title: Experiment.from_record(run["experiment"]) for title, run in runs.items()}
        ids |= {title.removeprefix("version-0.2/"): e.id() for title, e in experiments.items()}
        assert [Experiment.from_record(e.to_record()) for e in experiments.values()] == list(experiments.values())
    assert ids == PUBLISHED_IDS, "a new run needs a line in the table; the other lines never change"


def published_by_0_1():
    """The records of the published runs that version 0.1.0 computed."""
    for path in published_runs.FOLDER.glob("*.csv"):
        for run in json.loads(path.with_suffix(".json").read_text())["runs"].values():
            if run["environment"][0]["stableair"] == "0.1.0":
                yield run["experiment"]


def test_the_published_runs_of_0_1_are_read():
    """They have noise_on=mean as a setting, no recorded arguments and fewer settings."""
    found = list(published_by_0_1())
    assert len(found) == 2
    for record in found:
        assert record["noise_on"] == "mean"
        assert not {"channel", "arguments"} & record.keys()
        assert Experiment.from_record(record).channel == "flat()"
        other = record | {"noise_on": "sum"}
        assert refused("unknown-setting", Experiment.from_record, other).fields["name"] == "noise_on"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"clients": "5"}, "wrong-type"),
        ({"lr": [1]}, "wrong-type"),
        ({"colour": "red"}, "unknown-setting"),
        ({"arguments": {"noise": [{}, {}]}}, "contradictory-record"),
        ({"arguments": 3}, "contradictory-record"),
    ],
)
def test_an_invalid_record_is_refused(change, code):
    record = Experiment().to_record()
    refused(code, Experiment.from_record, record | change)
    del record["data"]
    assert refused("missing-setting", Experiment.from_record, record).fields["names"] == ["data"]
    refused("wrong-type", Experiment.from_record, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"receiver": "mac(C=1)"}, {"receiver": "mac(C=1.0, pilot=0)"}),
        ({"data": "digits"}, {"data": "digits()"}),
        ({"model": "mlp()"}, {"model": "mlp(200, depth=1)"}),
        ({"rounds": 3, "device": "cpu", "chunk": 2}, {}),
        ({"noise": "markov()"}, {"noise": "markov(bad='sas(1.5, tau=3.0)')"}),
        ({"fading": "ar(0.5)"}, {"fading": "ar(of=rayleigh, a=0.5)"}),
        ({"channel": "waveform()"}, {"channel": "waveform(basis='ofdm(prefix=16)')"}),
    ],
)
def test_equivalent_specs_have_one_id(one, other):
    assert Experiment(**one).id() == Experiment(**other).id()


def test_a_record_contains_every_argument_and_is_read_again():
    e = Experiment(receiver="mac(C=2) | gnc(3)", noise="sas(tau=0.3)", data="synthetic(samples=70)", model="auto")
    record = json.loads(json.dumps(e.to_record()))
    assert record["arguments"]["receiver"] == [{"C": 2, "gain": None, "pilot": 0}, {"max_norm": 3, "blocks": "model"}]
    assert record["arguments"]["noise"] == [{"alpha": 1.5, "tau": 0.3}]
    assert Experiment.from_record(record) == e
    assert Experiment.from_json(json.dumps(record)) == e
    record["arguments"]["noise"][0]["tau"] = 0.4
    assert refused("contradictory-record", Experiment.from_record, record).fields["name"] == "noise"


def test_a_record_of_an_earlier_version_has_the_form_of_this_one():
    """Earlier versions recorded the spelling of the user."""
    new = Experiment(receiver="none | mac(1)", noise="none", fading="unit", model="mlp")
    spellings = {"receiver": "none | mac(C=1)", "noise": "none", "fading": "unit", "model": "mlp", "data": "digits"}
    old = new.to_record() | spellings
    assert old != new.to_record()
    assert Experiment.from_record(old) == Experiment.from_json(json.dumps(old)) == new
    assert Experiment.from_record(old).id() == new.id()
    assert settings_of_record(old) == settings_of_record(new.to_record()) == new.to_dict()
    unregistered = settings_of_record(new.to_record() | {"receiver": "unregistered | other(C=1.0)"})
    assert unregistered["receiver"] == "unregistered() | other(C=1)", "without the plug-in"
    refused("not-a-spec", settings_of_record, new.to_record() | {"receiver": "mac("})


def test_an_infinite_argument_is_recorded_and_read_again(tiny, tmp_path):
    infinite = tiny.with_(receiver="mac(C=inf)", rounds=1)
    assert sa.run(infinite, tmp_path / "a").experiment == sa.load(tmp_path / "a").experiment == infinite
    assert "Infinity" not in (tmp_path / "a" / "experiment.json").read_text()
