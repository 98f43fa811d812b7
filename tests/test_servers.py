import pytest
import torch

import stableair as sa
from components import EXAMPLES
from stableair.checks import InputError
from stableair.contracts import Update
from stableair.servers import momentum, server, sgd


@pytest.mark.parametrize("spec", EXAMPLES["servers"])
def test_every_rule_steps_against_the_gradient_and_not_in_place(spec):
    w, g = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5])
    out = server.one(spec).with_("lr", 0.1)()(w, g)
    torch.testing.assert_close(out, torch.tensor([0.95, 2.05]))
    assert w.tolist() == [1.0, 2.0]
    assert g.tolist() == [0.5, -0.5]


def test_sgd_is_equation_4():
    w, g = torch.randn(10), torch.randn(10)
    assert torch.equal(sgd(0.03)(w, g), w - 0.03 * g)


def test_momentum_is_torchs_and_keeps_its_velocity():
    w = torch.nn.Parameter(torch.randn(5))
    flat, rule, optimiser = w.detach().clone(), momentum(0.1, beta=0.8), torch.optim.SGD([w], lr=0.1, momentum=0.8)
    for step in range(4):
        if step == 2:  # saved and restored half way
            saved, rule = rule.state_dict(), momentum(0.1, beta=0.8)
            rule.load_state_dict(saved)
        w.grad = torch.full((5,), float(step + 1))
        flat = rule(flat, w.grad)
        optimiser.step()
    torch.testing.assert_close(flat, w.detach())


@pytest.mark.parametrize("text", ["sgd(lr=0)", "sgd(lr=-1)", "sgd(lr=inf)", "momentum(beta=1.5)"])
def test_bad_arguments(text):
    with pytest.raises(InputError, match="must be"):
        server.one(text)()


def test_the_metrics_of_a_server_are_recorded(tiny, registries):
    @sa.server("telling")
    class Telling(Update):
        def apply(self, w, g):
            self.length = g.norm().item()
            return w - g

        def metrics(self):
            return {"length": self.length}

    run = sa.run(tiny.with_(server="telling()", rounds=2))
    assert all(length > 0 for length in run["server/length"])
    assert "server/length" not in sa.run(tiny.with_(rounds=1)).rounds[0]
