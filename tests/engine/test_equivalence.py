"""The check that a fast program gives the results of the reference."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stableair.engine
from helpers.engine import Reused, assert_uploads_agree, reference, simulation_of, uploads
from stableair.data.datasets import synthetic
from stableair.engine import accelerate, choose
from stableair.engine.equivalence import Trial, checked_program
from stableair.engine.selection import vmapped_program
from stableair.engine.stacked import Stacked, Tap, Unsupported
from stableair.engine.vmapped import Vmapped
from stableair.errors import InputError
from stableair.models import model


def test_the_trial_uses_the_taps_of_the_steps(monkeypatch):
    sim = simulation_of(Reused().double(), (9, 4, 7))
    assert choose(sim, "auto").engine == "stacked"
    wrong = lambda layer, fused, weight, x, output: Tap(layer, fused, weight, 2 * x, output)  # noqa: E731
    monkeypatch.setattr(stableair.engine.stacked, "Tap", wrong)
    assert choose(sim, "auto").engine == "vmapped", "wrong taps are detected"


class Odd(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))


class Tricky(nn.Module):
    """A network whose first outputs do not show how it trains."""

    def __init__(self, trick):
        super().__init__()
        self.first, self.fc, self.trick = nn.Linear(192, 5), nn.Linear(5, 3), trick
        self.share, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.trick == "blocked":
            with torch.no_grad():
                h = self.first(x.flatten(1))
        else:
            h = self.first(x.flatten(1))
        if self.trick == "mixed later":
            h = h + self.share * h.mean(0)
        if self.trick == "mixed in full batches" and len(h) >= 4:
            h = h - h.mean(0)
        if self.trick == "counted":
            self.calls += 1
        return self.fc(torch.tanh(h)) * self.scale


@pytest.mark.parametrize(
    ("trick", "engine"),
    [("none", "vmapped"), ("blocked", "vmapped"), ("hooked", "reference"), ("hooked later", "reference"),
     ("mixed later", "vmapped"), ("mixed in full batches", "vmapped"), ("counted", "vmapped")],
)  # fmt: skip
def test_the_equivalence_check_compares_more_than_the_first_outputs(trick, engine):
    module = Tricky(trick).double()
    if trick == "hooked":
        module.first.weight.register_hook(lambda grad: -grad)
    if trick == "hooked later":
        module.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", -p.grad))
    sim = simulation_of(module, (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == engine
    assert module.calls == 0, "the check does not change the module"
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


def test_a_blocked_gradient_is_not_stacked():
    class Blocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(192, 5), nn.Linear(5, 3)

        def forward(self, x):
            with torch.no_grad():
                h = self.first(x.flatten(1)).relu()
            return self.fc(h)

    sim = simulation_of(Blocked().double(), (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    fast = accelerate(sim, choice).train
    assert_uploads_agree(sim.train, fast, sim.start.model)
    assert not uploads(fast, sim.start.model)[0][:, : 192 * 5].any()


@pytest.mark.parametrize(
    ("module", "stacking", "vmapping"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 3)), "", "pass draws from torch"),
        (
            nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(192, 3)),
            "layer 0 is a BatchNorm2d with momentum=None",
            "vmapped: it fails",
        ),
        (Odd(), "its code cannot be traced", "data-dependent control flow"),
        (nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0, batch_first=True), nn.Flatten(),
                       nn.Linear(192, 3)), "layer 1 is a Transf|start_dim", "vmapped: it fails"),
    ],
    ids=["dropout", "momentum", "control flow", "no batching rule"],
)  # fmt: skip
def test_the_unsupported_layer_of_a_model_is_named(module, stacking, vmapping):
    sim = simulation_of(module)
    with pytest.raises(InputError, match=f"no fast engine supports this model: .*({stacking}).*{vmapping}") as error:
        choose(sim, "fast")
    assert error.value.code == "no-fast-engine"
    choice = choose(sim, "auto")
    assert choice.engine == "reference"
    assert vmapping in choice.why, "the reason is given"


def test_a_model_whose_stacked_results_differ_is_not_stacked():
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    module[1].register_forward_hook(lambda layer, inputs, output: 2 * output)  # a traced program does not include it
    sim = simulation_of(module, (9, 4, 7))
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


MODEL_SPECS = ["logistic()", "mlp()", "cnn(width=64)", "resnet18()", "resnet34()", "resnet18(norm=group)"]


def local_training(spec, seed, data):
    torch.manual_seed(seed)
    return reference(model.one(spec)()((3, 8, 8), 10), data, [3, 3], batch_size=3).work


@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", MODEL_SPECS)
def test_the_trial_is_the_same_for_every_seed(spec, seeds):
    data = synthetic(samples=6, classes=10, shape=(3, 8, 8))
    first = Trial(local_training(spec, 0, data), torch.float32)
    for seed in range(1, seeds):
        trial = Trial(local_training(spec, seed, data), torch.float32)
        assert torch.equal(trial.state.w, first.state.w)
        assert torch.equal(trial.work.data.train.x, first.work.data.train.x)


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODEL_SPECS)
def test_every_built_in_model_is_stacked(spec):
    """Float32 gradients of a deep network differ by some per cent through rounding; float64 detects errors."""
    work = local_training(spec, 0, synthetic(samples=6, classes=10, shape=(3, 8, 8)))
    assert isinstance(checked_program(Stacked, work), Stacked)


def test_the_tolerance_of_a_module_that_casts_to_float32_is_its_rounding():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(192, 5), nn.Linear(5, 3)

        def forward(self, x):
            return F.linear(self.first(x.flatten(1)).float(), self.fc.weight.float(), self.fc.bias.float()).tanh()

    work = simulation_of(Casting(), (9, 4, 7)).train.work
    assert isinstance(vmapped_program(work), Vmapped)


def test_a_small_effect_of_a_hook_is_detected():
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    module[1].register_forward_hook(lambda layer, inputs, output: 1.00001 * output)
    with pytest.raises(Unsupported):
        checked_program(Stacked, simulation_of(module).train.work)
