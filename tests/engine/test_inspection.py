"""The inspection of a module before a fast engine is used; it is done once."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import stableair as sa
from helpers.zoo import IMPURE, PURE
from stableair import vector
from stableair.builder import build
from stableair.contracts import State
from stableair.engine import EngineChoice, Unsupported, accelerate, choose, equivalence
from stableair.engine.inspection import forward_effects
from stableair.training.reference import Reference

DATA = "synthetic(samples=30, classes=3, shape=(1, 4, 4))"


@pytest.fixture
def sim():
    """A function that makes a simulation with a module as its model."""
    made = build(sa.Experiment(data=DATA, model="logistic()", clients=4, local_epochs=1, batch_size=4, device="cpu"))

    def simulation(module):
        return replace(
            made, start=State(vector.state(module)), train=Reference(replace(made.train.work, module=module))
        )

    return simulation


@pytest.mark.parametrize(
    ("name", "draws", "state"),
    [
        ("relu", "", ""),
        ("batch_norm_2d", "", ""),
        ("spectral_norm", "", ""),
        ("dropout", "torch's generator", ""),
        ("draws_from_python", "Python's random", ""),
        ("draws_from_numpy", "numpy.random", ""),
        ("entropy_of_the_system", "different outputs for the same input", ""),
        ("warm_up_counter", "", "attribute calls"),
        ("counter_in_a_closure", "", "variable calls"),
        ("recording_hook", "", "variable seen"),
    ],
)
def test_the_effects_of_a_forward_pass_are_named(sim, name, draws, state):
    effects = forward_effects(sim((PURE | IMPURE)[name]()).train.work)
    assert draws in effects.draws
    assert state in effects.state
    assert (bool(effects.draws), bool(effects.state)) == (bool(draws), bool(state))


def test_an_inspection_changes_neither_the_module_nor_generators(sim):
    for name in ("warm_up_counter", "draws_from_python", "draws_from_numpy", "dropout", "batch_norm_2d"):
        module = (PURE | IMPURE)[name]()
        made = sim(module)
        before = torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())
        weights = [t.clone() for t in (*module.parameters(), *module.buffers())]
        choose(made, "auto")
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), pickle.dumps(np.random.get_state())) == before[1:]
        assert all(torch.equal(*pair) for pair in zip(weights, (*module.parameters(), *module.buffers()), strict=True))
        assert getattr(module, "calls", 0) == 0


def test_a_run_checks_a_program_once(tiny, monkeypatch):
    checks, check = [], equivalence._check
    monkeypatch.setattr(equivalence, "_check", lambda *args: (checks.append(args[-1]), check(*args)))
    sa.run(tiny.with_(rounds=1))
    assert checks == [0, 1]


def test_a_choice_for_another_simulation_is_checked_again(sim):
    pure, impure = sim(PURE["relu"]()), sim(IMPURE["late_switch"]())
    choice = choose(pure, "auto")
    assert accelerate(pure, choice).train.program is choice.checked.program
    assert accelerate(pure, choice._replace(engine="vmapped")).train.program is not choice.checked.program
    with pytest.raises(Unsupported) as error:
        accelerate(impure, choice)
    assert error.value.code == "impure-model"


def test_a_choice_is_recorded_without_its_program(sim):
    choice = choose(sim(PURE["relu"]()), "auto")
    assert choice.record() == {"engine": "stacked", "precision": "fp32", "chunk": 4, "why": choice.why}


@pytest.mark.parametrize("name", ["late_switch", "parameter_hook", "backward_hook", "forward_hook"])
def test_processes_support_only_models_that_can_be_copied(sim, name):
    made = sim((PURE | IMPURE)[name]())
    with pytest.raises(Unsupported) as error:
        accelerate(made, EngineChoice("processes", "fp32", 4, ""))
    assert error.value.code == ("unpicklable-model" if name == "forward_hook" else "impure-model")


def test_processes_are_not_chosen_for_a_large_model_with_python_state(sim, monkeypatch):
    monkeypatch.setattr("stableair.engine.selection.available_cores", lambda: 2)
    for name, engine in (("late_switch", "reference"), ("draws_from_python", "unpicklable"), ("logistic", "processes")):
        made = sim((PURE | IMPURE)[name]())
        large = made.start._replace(model=made.start.model._replace(w=torch.empty(6_600_000)))
        work = replace(made.train.work, epochs=50)
        choice = choose(replace(made, start=large, train=Reference(work)), "auto", rounds=10**9)
        assert choice.engine == ("processes" if engine == "processes" else "reference")
        assert {"reference": "calls", "unpicklable": "cannot be sent", "processes": "cores"}[engine] in choice.why


def test_a_program_that_is_traced_differently_each_time_is_refused(sim):
    class Alternating(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 3)

        def forward(self, x):
            type(self).calls += 1
            return self.fc(x.flatten(1)).relu() if type(self).calls % 2 else self.fc(x.flatten(1)).tanh()

    with pytest.raises(Unsupported, match="a different path each time"):
        equivalence.checked_program(equivalence.Stacked, sim(Alternating()).train.work)


def test_a_module_in_evaluation_mode_is_traced_in_training_mode(sim):
    made = sim(PURE["other_in_training"]())
    made.train.work.module.eval()
    start = made.start.model
    fast = accelerate(made, choose(made, "auto"))
    (a,), (b,) = (list(s.train(start, 0, torch.arange(4))) for s in (made, fast))
    torch.testing.assert_close(a.update, b.update, rtol=1e-4, atol=1e-5)


class Sparse(nn.Module):
    """A model with a sparse tensor among its attributes."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(16, 3), torch.eye(16).to_sparse()

    def forward(self, x):
        return self.layer(torch.sparse.mm(self.mask, x.flatten(1).T).T)


def test_a_model_whose_state_cannot_be_inspected_uses_the_reference(sim):
    chosen = choose(sim(Sparse()), "auto", "auto", 0, 3)
    assert chosen.engine == "reference"
    assert "cannot be inspected" in chosen.why
