"""Every model of the zoo trains with engine=auto as with engine=reference, or auto uses the reference with a reason."""

import random

import numpy as np
import pytest
import torch

import stableair as sa
from helpers.callbacks import Hooks
from helpers.runs import same
from helpers.zoo import IMPURE, PURE, REPEATABLE, ZOO
from stableair.builder import build
from stableair.engine import EngineChoice, Unsupported, accelerate, choose

ONLY_REFERENCE = {  # pure, but neither stacked nor vmapped
    "attention",  # torch has no batching rule for these operations
    "batch_norm_cumulative",
    "bilinear",
    "elman",
    "gru",
    "lstm",
    "moving_average_buffer",
    "spectral_norm",
    "transformer",
    "weight_norm",
    "branch_on_counting_buffer",  # Python branches on values of tensors
    "branch_on_data",
    "branch_on_weights",
    "loop_on_data",
    "embedding_with_padding",  # vmap gives the padding a gradient
}
STACKED = {
    "batch_norm_2d",
    "batch_norm_without_weights",
    "frozen_bias",
    "frozen_layer",
    "gelu_tanh",
    "group_norm",
    "grouped_convolution",
    "logistic",
    "other_in_training",
    "pooling",
    "relu",
    "relu_in_place",
    "unused_layer",
    "used_twice",
    "without_bias",
}


@pytest.fixture
def experiment(registries):
    """An experiment by the name of a model; no noise, batches of 4 and 3 samples."""
    sa.model("zoo")(lambda name: lambda shape, classes: ZOO[name]())
    data = "synthetic(samples=30, classes=3, shape=(1, 4, 4))"
    base = sa.Experiment(data=data, clients=4, rounds=3, local_epochs=1, batch_size=4, device="cpu")
    return lambda name: base.with_(model=f"zoo(name={name})", noise="none()", receiver="none()")


def assert_runs_agree(a, b):
    """Compare the models and losses of two runs, up to the rounding of float32."""
    for x, y in zip(a.state.model, b.state.model, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
    assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-3)


@pytest.mark.parametrize("name", PURE)
def test_auto_agrees_with_the_reference(experiment, name):
    started = []
    fast = sa.run(experiment(name), callbacks=[Hooks(start=started.append)])
    expected = "reference" if name in ONLY_REFERENCE else "stacked" if name in STACKED else "vmapped"
    assert (started[0]["engine"], bool(started[0]["why"])) == (expected, True), started[0]["why"]
    if expected != "reference":
        assert_runs_agree(fast, sa.run(experiment(name).with_(engine="reference")))


@pytest.mark.parametrize("name", IMPURE)
def test_a_model_with_side_effects_uses_the_reference(experiment, name):
    sim = build(experiment(name))
    choice = choose(sim, "auto")
    assert choice.engine == "reference"
    assert "forward pass" in choice.why or "hook" in choice.why
    for engine in ("stacked", "vmapped"):
        with pytest.raises(Unsupported) as error:
            accelerate(sim, EngineChoice(engine, "fp32", 4, ""))
        assert error.value.code == "impure-model"


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_choice_depends_neither_on_generators_nor_on_the_mode(experiment, name):
    choices = set()
    for seed in range(5):
        sim = build(experiment(name).with_(seed=seed))
        torch.manual_seed(seed)
        sim.train.work.module.train(seed % 2 == 0)
        choices.add(choose(sim, "auto").engine)
        accelerate(sim, choose(sim, "auto"))
    assert len(choices) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATABLE)
def test_a_run_is_repeatable_and_resumable(experiment, name, tmp_path):
    """Also for models that draw or count in buffers: generators and buffers are reset for every client."""
    e = experiment(name).with_(engine="reference")
    first = sa.run(e)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    second = sa.run(e)
    sa.run(e.with_(rounds=1), tmp_path / "a")
    resumed = sa.run(e, tmp_path / "a", resume=True)
    assert same(first, second)
    assert same(first, resumed)


def test_signs_differ_between_engines_only_where_the_true_gradient_is_zero(experiment):
    """A bias before a batch norm has no effect: its gradient is rounding, and sign() amplifies it."""
    sim = build(experiment("batch_norm_2d").with_(local_epochs=5, lr=0.1))
    fast = accelerate(sim, choose(sim, "auto"))
    slow, quick = (next(iter(s.train(sim.start.model, 0, torch.arange(4)))).update.mean(0) for s in (sim, fast))
    for name, a, b in zip(sim.layout.names, sim.layout.split(slow), sim.layout.split(quick), strict=True):
        if name == "0.bias":
            assert max(a.abs().max(), b.abs().max()) < 1e-5 * slow.abs().max()
        else:
            assert torch.equal(a.sign(), b.sign()), name
