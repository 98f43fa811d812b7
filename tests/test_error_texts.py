"""The texts of a few errors; the other tests assert codes and fields."""

import pytest

import stableair as sa
from stableair import builder
from stableair.channels.registries import fading, noise
from stableair.errors import NonFiniteUpload
from stableair.models import model
from stableair.receivers import as_receiver, receiver
from stableair.results.stopping import StoppingRule

RUN = sa.Run(
    sa.Experiment().to_record(),
    [
        {"round": 0, "test/accuracy": 0.5, "test/loss": 2.0},
        {"round": 1, "test/accuracy": None, "test/loss": None, "diverged": True},
    ],
)
TEXTS = {
    "out of range": (lambda: sa.mac(-1), "C must be positive: got -1"),
    "wrong type": (lambda: sa.Experiment(clients=2.5), "clients must be a whole number: got 2.5"),
    "unknown word": (
        lambda: sa.Experiment(norm_stats="client"),
        "norm_stats 'client' is unknown; did you mean 'clients'? allowed: clients, recalibrated, batch",
    ),
    "unknown component": (
        lambda: receiver.one("mack(C=1)"),
        "receiver 'mack' is unknown; did you mean 'mac'? allowed: ",
    ),
    "unknown argument": (
        lambda: receiver.one("mac(c=1)"),
        "receiver 'mac(c=1)': mac has no argument 'c'; did you mean 'C'? allowed: C, gain, pilot; the signature is ",
    ),
    "nested spec": (
        lambda: fading.one("block(of=rayleigh(power=1))"),
        "fading 'block(of=rayleigh(power=1))': a nested spec must be quoted: write of='rayleigh(power=1)'",
    ),
    "factory": (
        lambda: noise.one("sas(alpha=3)")(),
        "noise sas(alpha=3): alpha must be in [0.5, 2]: got 3",
    ),
    "choice in a spec": (
        lambda: model.one("resnet18(norm=layer)")(),
        "model resnet18(norm=layer): norm 'layer' is unknown; allowed: batch, group",
    ),
    "metric of a run": (
        lambda: RUN["accuracy"],
        "metric 'accuracy' was not recorded; did you mean 'test/accuracy'? allowed: test/accuracy, test/loss",
    ),
    "metric of a picture": (
        lambda: sa.plot(RUN, "test/lose"),
        "metric 'test/lose' was not recorded; did you mean 'test/loss'? allowed: test/accuracy, test/loss",
    ),
    "metric of a condition": (
        lambda: StoppingRule("test/los < 1").is_met(RUN.rounds),
        "metric 'test/los' was not recorded; did you mean 'test/loss'? allowed: test/accuracy, test/loss",
    ),
    "monitored metric": (
        lambda: StoppingRule(patience=1, monitor="loss").is_met(RUN.rounds),
        "metric 'loss' was not recorded; did you mean 'test/loss'? allowed: test/accuracy, test/loss",
    ),
    "range without upper limit": (lambda: noise.one("sas(tau=-1)")(), "noise sas(tau=-1): tau must be at least 0 and"),
    "power rule": (
        lambda: builder.build(sa.Experiment(power="limit(P=1)")),
        "power limit(P=1): the power rule needs the interference on the sum of the payloads: got noise_on=mean; set ",
    ),
    "missing arguments": (
        lambda: sa.Experiment(data="csv(sep=';')"),
        "data set csv needs path and label; the signature is csv(path, label, test_path=None, ",
    ),
    "writers": (
        lambda: builder.build(sa.Experiment(partition="by_writer")),
        "by_writer needs data with writers: femnist, hf(..., writer=COLUMN), csv(..., writer=COLUMN) or npz",
    ),
    "nothing returned": (
        lambda: as_receiver(None),
        "the receiver must be a function or a Rule: got None; did you forget to return it?",
    ),
    "device": (lambda: builder.device("tpu"), "device 'tpu' is not available; "),
    "too few samples": (
        lambda: builder.build(sa.Experiment(data="synthetic(samples=20)", clients=300, device="cpu")),
        "clients must be at most the number of training samples, ",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_an_error(name):
    call, text = TEXTS[name]
    with pytest.raises(sa.InputError) as error:
        call()
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def test_an_unknown_component_names_the_fix_for_python():
    with pytest.raises(sa.InputError) as error:
        sa.Experiment(receiver="mac(C=1) | mack()")
    assert str(error.value).endswith("; import the module that registers the custom component")
    assert error.value.hint == "component"


def test_the_text_of_a_non_finite_upload():
    assert str(NonFiniteUpload(3, 7, "update")) == (
        "round 3: client 7 uploaded a non-finite update: its data are not finite, or its local training overflowed"
    )
