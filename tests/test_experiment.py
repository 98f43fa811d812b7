import inspect
import json
import math
import tomllib
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from stableair import baseline
from stableair.builder import build
from stableair.channels.kinds import noise
from stableair.experiment import HOMES, PARTS, PRESETS, TYPES, Experiment, from_words, registry
from stableair.receivers import receiver

CHANGES = {
    "data": "synthetic(samples=100)", "partition": "dirichlet(beta=0.3)", "model": "logistic()", "clients": 7,
    "rounds": 3,
    "seed": 9, "local_epochs": 2, "batch_size": 4, "lr": 0.5, "payload": "delta", "blocks": "layer",
    "fading": "unit()", "augment": "crop_flip",
    "noise": "none()", "channel": "flat(noise_on=sum)", "receiver": "gnc(max_norm=3) | mac(C=0.1)",
    "server": "momentum(beta=0.5)",
    "participation": "sample(m=3)",
    "evaluate": "validation", "norm_stats": "batch", "average": 0.8, "snr_blocks": "layer",
    "device": "cpu", "engine": "reference", "precision": "bf16", "chunk": 3,
}  # fmt: skip

IDS = [
    "b4b8bf78e9ad", "b4b8bf78e9ad", "5af018280153", "928bc3c8e7e8", "de7e9b290092", "01946a5088c7",
    "88edc0b268a6", "5acc1013b054", "fedcf6776880",
]  # fmt: skip


def test_the_defaults_are_the_papers_set_up():
    e = Experiment()
    assert (e.clients, e.lr, e.local_epochs, e.batch_size) == (50, 0.03, 5, 10)
    assert (e.noise, e.fading, e.payload) == ("sas(alpha=1.5, tau=0.1)", "rayleigh(mean=1)", "gradient")
    assert (e.data, e.receiver, e.server, e.blocks, e.rounds) == ("digits", "mac(C=1)", "sgd()", "tensor", 100)


def test_the_changes_cover_every_field():
    assert CHANGES.keys() | {"power"} == TYPES.keys()  # of that kind there is one member


@pytest.mark.parametrize("key", CHANGES)
def test_the_id_is_what_the_experiment_is(key):
    changed = Experiment().with_(**{key: CHANGES[key]})
    assert getattr(changed, key) == CHANGES[key] != getattr(Experiment(), key)
    assert (changed.id() == Experiment().id()) == (key in ("rounds", "device", "engine", "precision", "chunk"))


def test_one_experiment_written_differently_has_one_id():
    base = Experiment().id()
    assert Experiment(fading="rayleigh()", noise="sas(1.5, 0.1)", receiver="mac(1.0)", data="digits()").id() == base
    assert Experiment(lr=3e-2, server="sgd(lr=None)").id() == base
    assert len(base) == 12


@given(st.fixed_dictionaries({}, optional={key: st.just(value) for key, value in CHANGES.items()}))
def test_toml_and_json_give_back_what_was_written(settings):
    e = Experiment(**settings)
    assert Experiment.from_toml(e.to_toml()) == Experiment.from_json(e.to_json()) == e
    assert tomllib.loads(e.to_toml()) == json.loads(e.to_json()) == e.to_dict()


def test_reading_files(tmp_path):
    (tmp_path / "a.toml").write_text('clients = 3\nreceiver = "mac(0.2)"\n')
    (tmp_path / "a.json").write_text('{"clients": 3, "receiver": "mac(0.2)"}')
    assert (
        Experiment.read(tmp_path / "a.toml")
        == Experiment.read(tmp_path / "a.json")
        == Experiment(clients=3, receiver="mac(0.2)")
    )
    (tmp_path / "dotted.toml").write_text('noise.tau = 0.3\n"receiver.C" = 2\n')
    assert Experiment.read(tmp_path / "dotted.toml") == Experiment(noise="sas(alpha=1.5, tau=0.3)", receiver="mac(C=2)")
    for name, text, said in [
        ("bad.toml", "clients = ", "bad.toml: not TOML"), ("bad.json", "{", "bad.json: not JSON"),
        ("list.json", "[]", "not an experiment"), ("key.toml", "client = 3", "did you mean 'clients'"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(sa.InputError, match=said):
            Experiment.read(tmp_path / name)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("missing.toml", "binary.toml"):
        with pytest.raises(sa.InputError, match=name):
            Experiment.read(tmp_path / name)


def test_a_dotted_key_changes_one_argument():
    e = Experiment(receiver="mac(C=1) | gnc(max_norm=3)").with_(**{"receiver.C": 0.3, "noise.alpha": 1.2})
    assert (e.receiver, e.noise) == ("mac(C=0.3) | gnc(max_norm=3)", "sas(alpha=1.2, tau=0.1)")
    assert e.with_(**{"receiver.blocks": "layer"}).receiver == "mac(C=0.3) | gnc(max_norm=3, blocks=layer)"
    with pytest.raises(sa.InputError, match=r"has no argument 'c'; did you mean 'C'"):
        e.with_(**{"receiver.c": 1})
    with pytest.raises(sa.InputError, match="did you mean 'receiver'"):
        e.with_(**{"reciever.C": 1})


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Experiment().clients = 3
    assert len({Experiment(), Experiment(), Experiment(clients=3)}) == 2
    assert {f.name for f in fields(Experiment)} == set(TYPES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"client": 5}, "setting 'client' is unknown; did you mean 'clients'"),
        ({"clients": 0}, "clients must be at least 1: got 0"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"local_epochs": 0}, "local_epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"chunk": -1}, "chunk must be at least 0"),
        ({"clients": 2.5}, "clients must be a whole number: got 2.5"),
        ({"clients": "5"}, "clients must be a whole number: got '5'"),
        ({"clients": True}, "clients must be a whole number: got True"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"lr": 0}, "lr must be positive and finite: got 0"),
        ({"lr": -1}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive and finite: got nan"),
        ({"lr": math.inf}, "lr must be positive and finite: got inf"),
        ({"lr": "fast"}, "lr must be a number: got 'fast'"),
        ({"payload": "gradients"}, "payload: 'gradients' is unknown; did you mean 'gradient'"),
        ({"blocks": "layers"}, "did you mean 'layer'"),
        ({"evaluate": "train"}, "allowed: test, validation"),
        ({"engine": "warp"}, "engine: 'warp' is unknown"),
        ({"average": 1}, "average must be at least 0 and below 1: got 1"),
        ({"average": -0.1}, "average must be at least 0 and below 1"),
        ({"average": math.nan}, "average must be"),
        ({"average": "much"}, "average must be a number: got 'much'"),
        ({"snr_blocks": "model"}, "snr_blocks: 'model' is unknown; allowed: none, tensor, layer"),
        ({"server": "sgd(decay=cosine, floor=0)"}, "floor must be above 0"),
        ({"device": 3}, "device must be a name"),
        ({"noise": "sas(alpha=0.1)"}, "alpha must be in"),
        ({"noise": "sas(tau=-1)"}, "tau must be in"),
        ({"noise": "gauss(std=1)"}, "did you mean 'gaussian'"),
        ({"noise": "gaussian(std=1) | none()"}, "only receivers can be chained"),
        ({"fading": "rayleigh(mean=0)"}, "mean must be positive"),
        ({"receiver": "mac()"}, "missing a required argument: 'C'"),
        ({"receiver": "mac(C=0)"}, "C must be positive"),
        ({"receiver": "mac(C=nan)"}, "C must be positive"),
        ({"receiver": "mac(C='a')"}, "C must be a number or auto: got 'a'"),
        ({"receiver": 3}, "must be a spec"),
        ({"partition": "dirichlet(0)"}, "beta must be positive"),
        ({"partition": "dirichlet"}, "missing a required argument: 'beta'"),
        ({"model": "mpl(200)"}, "did you mean 'mlp'"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"server": "sdg()"}, "did you mean 'sgd'"),
    ],
)
def test_bad_settings_are_refused_when_they_are_made(settings, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")) as error:
        Experiment(**settings)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError):
        Experiment().with_(**settings)


def test_more_clients_than_samples_is_seen_when_it_is_built():
    with pytest.raises(sa.InputError, match="clients must be at most the number of training samples, 1437: got 1438"):
        build(Experiment(clients=1438))


@pytest.mark.parametrize("name", ["cuda:99", "cdua", "tpu", "meta"])
def test_a_device_that_is_not_there(name):
    with pytest.raises(sa.InputError, match=f"device '{name}' is not there; .*cpu"):
        build(Experiment(device=name))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_experiments(name):
    assert from_words([name]) == Experiment(**PRESETS[name])


def test_words_of_a_command_line(tmp_path):
    (tmp_path / "mine.toml").write_text("clients = 3")
    e = from_words([str(tmp_path / "mine.toml"), "rounds=5", "lr=1e-2", "receiver=mac(C=0.5)", "noise.tau=0.2"])
    assert e == Experiment(clients=3, rounds=5, lr=0.01, receiver="mac(C=0.5)", noise="sas(tau=0.2, alpha=1.5)")
    assert from_words([]) == Experiment()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digts"], "neither a preset, a file nor key=value; did you mean 'digits'"),
        (["missing.toml"], "missing.toml: No such file"),
        (["digits", "demo"], "'demo' is not key=value"),
        (["rounds=many"], "rounds must be a whole number: got 'many'"),
        (["rounds=2.5"], "rounds must be a whole number: got '2.5'"),
        (["lr=fast"], "lr must be a number: got 'fast'"),
        (["round=3"], "did you mean 'rounds'"),
        (["receiver.C=big"], "C must be a number or auto: got 'big'"),
        (["=3"], "setting '' is unknown"),
        (["model.width=3"], "auto has no argument 'width'; it takes none; set model= first"),
        (["lr=" + "1" * 400], "lr must be positive and finite: got inf"),
    ],
)
def test_bad_words(words, said):
    with pytest.raises(sa.InputError, match=said):
        from_words(words)


def test_build_follows_the_settings():
    sim = build(
        Experiment(data="synthetic(samples=40, shape=(1, 2, 2))", model="logistic()", clients=4, blocks="model")
    )
    assert sim.n == 4
    assert len(sim.start.w) == 5 * 10
    assert sim.layout.names == ("1.weight", "1.bias")
    same, other = (build(Experiment(model="mlp(3)", seed=seed)).start.w for seed in (0, 1))
    assert torch.equal(same, build(Experiment(model="mlp(3)")).start.w)
    assert not torch.equal(same, other)


@pytest.mark.parametrize(
    ("payload", "server", "step"), [("gradient", "sgd()", 0.03), ("delta", "sgd()", 1.0), ("delta", "sgd(lr=0.5)", 0.5)]
)
def test_the_servers_step(payload, server, step):
    update = build(Experiment(payload=payload, server=server)).update
    torch.testing.assert_close(update(torch.zeros(2), torch.ones(2)), torch.full((2,), -step))


def test_a_servers_own_default_stands(registries):
    sa.server("slow")(lambda lr=0.001: lambda w, g: w - lr * g)
    update = build(Experiment(server="slow()")).update
    torch.testing.assert_close(update(torch.zeros(2), torch.ones(2)), torch.full((2,), -0.001))


def test_blocks_reach_the_receiver_and_the_seed_the_partition():
    parts = {
        blocks: build(Experiment(blocks=blocks)).receive.rules[0].layout for blocks in ("tensor", "layer", "model")
    }
    assert [len(layout.names) for layout in parts.values()] == [4, 2, 1]
    # One step too small to matter over all of a client's data: its loss tells which samples it holds.
    one_look = Experiment(partition="shards(2)", lr=1e-12, local_epochs=1, batch_size=1000, chunk=50)
    start = build(one_look).start
    sims = [build(one_look.with_(seed=seed)) for seed in (0, 0, 1)]
    (first,), (same,), (other,) = (sim.train(start, 0, torch.arange(50)) for sim in sims)
    assert torch.equal(first.loss, same.loss)
    assert not torch.allclose(first.loss, other.loss, rtol=1e-3)


def test_building_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build(Experiment(model="mlp(3)"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bare_name_takes_its_arguments_from_dotted_keys():
    e = Experiment().with_(noise="gaussian", **{"noise.std": 1.5})
    assert e.noise == "gaussian(std=1.5)"
    e = from_words(["receiver=gnc", "receiver.max_norm=3", "receiver.blocks=tensor", "data=cifar10", "data.train=50"])
    assert (e.receiver, e.data) == ("gnc(max_norm=3, blocks=tensor)", "cifar10(train=50)")
    assert from_words(["noise=sas(tau=2)", "noise.alpha=1.2"]).noise == "sas(alpha=1.2, tau=2)"
    with pytest.raises(sa.InputError, match="none has no argument 'tau'"):
        from_words(["noise=none", "noise.tau=3"])
    with pytest.raises(sa.InputError, match="missing a required argument: 'std'"):
        from_words(["noise=gaussian"])


def test_a_new_setting_or_argument_moves_no_id(monkeypatch, registries):
    """What enters the baseline with the value that means "as before" is in no id."""
    before = {spec: Experiment(receiver=spec).id() for spec in ("mac(C=1)", "mac(C=2)")}
    mac = receiver.entries["mac"]

    def wider(C: float, gain: bool | None = None, pilot: int = 0, sharpness: float = 1.0):
        return mac.factory(C, gain, pilot)

    monkeypatch.setitem(receiver.entries, "mac", replace(mac, factory=wider))
    assert Experiment().id() != before["mac(C=1)"], "an argument that no table knows is a difference"
    monkeypatch.setitem(baseline.BASELINE_ARGUMENTS["receiver"]["mac"], "sharpness", 1.0)
    assert {spec: Experiment(receiver=spec).id() for spec in before} == before
    assert Experiment(receiver="mac(C=1, sharpness=2)").id() != before["mac(C=1)"]


def test_a_default_that_changes_moves_the_id_and_old_records_keep_theirs(monkeypatch, registries):
    old = Experiment(receiver="mac(C=1)")
    record, before = old.to_record(), old.id()
    mac = receiver.entries["mac"]

    def changed(C: float, gain: bool | None = True, pilot: int = 0):
        return mac.factory(C, gain, pilot)

    monkeypatch.setitem(receiver.entries, "mac", replace(mac, factory=changed))
    assert Experiment(receiver="mac(C=1)").id() != before
    again = Experiment.from_record(record)
    assert (again.id(), again.receiver) == (before, "mac(C=1, gain=None)"), "what it was called with is written out"


def test_a_default_within_a_spec_moves_the_id_and_old_records_keep_theirs(monkeypatch, registries):
    given, plain = (Experiment(noise=text) for text in ("markov(good='sas(tau=1)')", "markov()"))
    sas = noise.entries["sas"]

    def changed(alpha: float = 1.7, tau: float = 0.1):
        return sas.factory(alpha, tau)

    old = [(e.to_record(), e.id(), e.noise) for e in (given, plain)]
    assert given.noise == "markov(good='sas(alpha=1.5, tau=1)')", "whoever reads it sees what it is"
    assert [Experiment.from_record(record) for record, *_ in old] == [given, plain]
    monkeypatch.setitem(noise.entries, "sas", replace(sas, factory=changed))
    for record, before, text in old:
        assert Experiment.from_record(record).id() == before != Experiment(noise="markov()").id()
        assert "alpha=1.5" in Experiment.from_record(record).noise, text


def test_a_new_argument_within_a_spec_moves_no_id(monkeypatch, registries):
    before, sas = Experiment(noise="markov(p=0.2)").id(), noise.entries["sas"]

    def wider(alpha: float = 1.5, tau: float = 0.1, sharpness: float = 1.0):
        return sas.factory(alpha, tau)

    monkeypatch.setitem(noise.entries, "sas", replace(sas, factory=wider))
    monkeypatch.setitem(baseline.BASELINE_ARGUMENTS["noise"]["sas"], "sharpness", 1.0)
    assert Experiment(noise="markov(p=0.2)").id() == before


def test_the_baseline_names_every_setting_and_argument():
    """Whoever adds a setting, a component or an argument adds it to the table; nobody changes what stands there."""
    assert baseline.BASELINE_SETTINGS.keys() == TYPES.keys()
    for field in HOMES | PARTS:
        for entry in registry(field):
            if entry.factory.__module__.startswith("stableair."):
                known = baseline.BASELINE_ARGUMENTS[field][entry.name]
                parameters = inspect.signature(entry.factory).parameters.values()
                assert {p.name for p in parameters if p.default is not p.empty} == known.keys(), (field, entry.name)


def test_the_baseline_has_not_been_edited():
    """Ids of 0.2.0: a change of any of them makes strangers of all runs there are."""
    ids = [Experiment(**settings).id() for settings in ({}, *PRESETS.values())]
    ids.append(Experiment(receiver="mac(C=auto) | gnc(2)", channel="flat(noise_on=sum)", server="momentum()").id())
    assert ids == IDS


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
def test_the_same_thing_said_otherwise_has_the_same_id(one, other):
    assert Experiment(**one).id() == Experiment(**other).id()


def test_a_record_writes_every_argument_out_and_comes_back():
    e = Experiment(receiver="mac(C=2) | gnc(3)", noise="sas(tau=0.3)", data="synthetic(samples=70)", model="auto")
    record = json.loads(json.dumps(e.to_record()))
    assert record["arguments"]["receiver"] == [{"C": 2, "gain": None, "pilot": 0}, {"max_norm": 3, "blocks": "model"}]
    assert record["arguments"]["noise"] == [{"alpha": 1.5, "tau": 0.3}]
    assert Experiment.from_record(record) == e
    assert Experiment.from_json(json.dumps(record)) == e
    record["arguments"]["noise"][0]["tau"] = 0.4
    with pytest.raises(sa.InputError, match="its arguments are not those of noise=sas"):
        Experiment.from_record(record)


def test_a_record_of_0_1_is_read_as_it_was_meant():
    record = json.loads((Path(__file__).parent / "data" / "run-0.1" / "experiment.json").read_text())
    assert "channel" not in record
    assert Experiment.from_record(record).channel == "flat()"
    assert Experiment.from_record(record | {"noise_on": "sum"}).channel == "flat(noise_on=sum)"
    old = Experiment.from_record(record)
    for text, meant in (
        ("resnet18()", "resnet18(init=he)"),
        ("resnet34(norm=group)", "resnet34(group, he)"),
        ("resnet18", "resnet18(init=he)"),
    ):
        assert Experiment.from_record(record | {"model": text}).id() == old.with_(model=meant).id()
    assert Experiment.from_record(record | {"data": "cifar10", "model": "auto"}).model == "resnet18(init=he)"


def test_a_setting_of_0_1_is_told_its_new_name(tmp_path):
    said = "setting 'noise_on' is now channel.noise_on=sum"
    with pytest.raises(sa.InputError, match=said):
        Experiment(noise_on="sum")
    with pytest.raises(sa.InputError, match=said):
        from_words(["noise_on=sum"])
    (tmp_path / "old.toml").write_text('noise_on = "sum"\n')
    with pytest.raises(sa.InputError, match=said):
        Experiment.read(tmp_path / "old.toml")
    assert from_words(["channel.noise_on=sum"]).channel == "flat(noise_on=sum)"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e300}, r"lr must be at most 1e\+38: got 1e\+300"),
        ({"local_epochs": 10**19}, "local_epochs must be at most 1,000,000,000: got a number of 20 digits"),
        ({"clients": 10**10}, "clients must be at most"),
        ({"seed": 10**30}, "seed must be at most"),
    ],
)
def test_numbers_that_no_experiment_can_have(settings, said):
    with pytest.raises(sa.InputError, match=said):
        Experiment(**settings)


@pytest.mark.parametrize("size", [{"model": "mlp(99999999999999)"}, {"data": "synthetic(samples=99999999999999)"},
                                  {"receiver": "mac(C=auto, pilot=99999999999999)"}])  # fmt: skip
def test_what_does_not_fit_into_memory_is_one_line_and_leaves_nothing(size, tmp_path):
    with pytest.raises(sa.InputError, match="there is not enough memory for an experiment of this size"):
        sa.run(Experiment(rounds=1, device="cpu", **size), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_setting_that_is_given_twice_is_refused(tmp_path):
    with pytest.raises(sa.InputError, match="clients is given twice: 5 and 6"):
        from_words(["clients=5", "clients=6"])
    with pytest.raises(sa.InputError, match="clients is given twice"):
        Experiment.from_json('{"clients": 5, "clients": 6}')
    with pytest.raises(sa.InputError, match="not TOML"):
        Experiment.from_toml("clients = 5\nclients = 6\n")


def test_settings_nested_too_deeply_are_one_line():
    for read, text in ((Experiment.from_json, '{"a":' * 100_000), (Experiment.from_toml, "a = " + "[" * 100_000)):
        with pytest.raises(sa.InputError, match="it is nested too deeply"):
            read(text)


def test_an_infinite_argument_is_recorded_and_read_again(tiny, tmp_path):
    endless = tiny.with_(receiver="mac(C=inf)", rounds=1)
    assert sa.run(endless, tmp_path / "a").experiment == sa.load(tmp_path / "a").experiment == endless
    assert "Infinity" not in (tmp_path / "a" / "experiment.json").read_text()
