"""Every engine equals the reference on token ids and on tables, in float32 and in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair as sa
from helpers.engine import all_clients, assert_uploads_agree, reference, uploads
from stableair.builder import build
from stableair.contracts import State
from stableair.engine import EngineChoice, accelerate, choose
from stableair.engine.equivalence import Trial
from stableair.engine.stacked import Stacked, Unsupported
from stableair.vector import state

VOCABULARY = 11
RNG = np.random.default_rng(0)
TOKENS = sa.Dataset.from_arrays(RNG.integers(0, VOCABULARY, (60, 6)), np.arange(60) % 3)
TABLE = sa.Dataset.from_arrays(RNG.normal(5, 3, (60, 4)), np.arange(60) % 3)
SEQUENCE = sa.Dataset.from_arrays(RNG.normal(5, 3, (60, 6, 4)), np.arange(60) % 3)


class Bag(nn.Module):
    """The mean of the embeddings of the tokens, then a dense layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 3)

    def forward(self, tokens):
        assert not tokens.is_floating_point()
        return self.fc(torch.tanh(self.embedding(tokens).mean(1)))


class Attention(nn.Module):
    """One head of self-attention over token ids."""

    def __init__(self):
        super().__init__()
        self.embedding, self.query, self.fc = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.fc((torch.softmax(self.query(x) @ x.mT, -1) @ x).mean(1))


class OneHot(nn.Module):
    """A model that needs integers as inputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(VOCABULARY, 3)

    def forward(self, tokens):
        return self.fc(F.one_hot(tokens, VOCABULARY).to(self.fc.weight.dtype).mean(1))


def mlp(*features):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(features)), 7), nn.ReLU(), nn.Linear(7, 3))


def with_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


CASES = {
    "bag": (TOKENS, Bag, "vmapped"),
    "attention": (TOKENS, Attention, "vmapped"),
    "table": (TABLE, lambda: mlp(4), "stacked"),
    "table with norm": (TABLE, with_norm, "vmapped"),
    "sequence": (SEQUENCE, lambda: mlp(6, 4), "vmapped"),
}


def simulation(case):
    data, make, _ = CASES[case]
    torch.manual_seed(0)
    slow = reference(make(), data, [12, 7, 19, 10])
    plain = build(sa.Experiment(device="cpu", clients=4))
    return replace(plain, train=slow, start=State(state(slow.work.module)), evaluate=plain.evaluate)


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_engine_equals_the_reference(case):
    sim = simulation(case)
    choice = choose(sim, "fast")
    assert choice.engine == CASES[case][2], choice.why
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model, tolerance=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_in_float64_the_engines_agree_to_the_last_digits(case):
    sim = simulation(case)
    data, make, engine = CASES[case]
    torch.manual_seed(0)
    slow = reference(make().double(), data, [12, 7, 19, 10])
    fast = accelerate(replace(sim, train=slow), EngineChoice(engine, "fp32", 2, "")).train
    assert_uploads_agree(slow, fast, state(slow.work.module), tolerance=1e-12)


@pytest.mark.parametrize("case", ["bag", "table"])
def test_processes_have_the_bits_of_the_reference(case):
    sim = simulation(case)
    fast = accelerate(sim, EngineChoice("processes", "fp32", 4, "")).train
    for a, b in zip(uploads(sim.train, sim.start.model), uploads(fast, sim.start.model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_trial_draws_token_ids_of_the_vocabulary(dtype):
    slow = reference(Bag(), TOKENS, [20, 20])
    trial = Trial(slow.work, dtype)
    x = trial.work.data.inputs(trial.work.data.train.x, dtype)
    assert x.dtype == torch.int64
    assert 0 <= x.min() <= x.max() < VOCABULARY
    assert trial.by_module().update.dtype == dtype


def test_a_model_that_cannot_be_vmapped_uses_the_reference():
    slow = reference(OneHot(), TOKENS, [12, 7])
    sim = replace(build(sa.Experiment(device="cpu", clients=2)), train=slow, start=State(state(slow.work.module)))
    choice = choose(sim, "auto")
    assert_uploads_agree(slow, accelerate(sim, choice).train, sim.start.model, tolerance=1e-5)
    assert len(all_clients(slow)) == 2


def test_samples_with_additional_axes_are_not_stacked():
    with pytest.raises(Unsupported):
        Stacked(mlp(6, 4))({}, {}, torch.ones(2, 3, 6, 4))


def test_bf16_is_refused_for_token_ids():
    with pytest.raises(sa.InputError) as error:
        accelerate(simulation("bag"), EngineChoice("vmapped", "bf16", 2, ""))
    assert error.value.code == "unsupported-precision"


@pytest.mark.parametrize("case", ["bag", "table"])
def test_the_evaluation_accepts_every_kind_of_input(case):
    data, make, _ = CASES[case]
    module = make()
    from stableair.evaluation import Evaluate

    scores = Evaluate(module, data, precision="tf32")(state(module))
    expected = (module(data.inputs(data.test.x)).argmax(1) == data.test.y).double().mean()
    assert scores["test/accuracy"] == pytest.approx(float(expected))
