import pytest
import torch

from components import EXAMPLES
from stableair.checks import InputError
from stableair.models import logistic, mlp, model


@pytest.mark.parametrize("spec", EXAMPLES["models"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 5)])
def test_every_model_gives_a_logit_a_class(spec, shape):
    module = model.one(spec)()(shape, 7)
    assert module(torch.randn(5, *shape)).shape == (5, 7)


def entries(module):
    return sum(p.numel() for p in module.parameters())


def test_sizes():
    assert entries(logistic()((1, 8, 8), 10)) == 65 * 10
    assert entries(mlp(200)((1, 8, 8), 10)) == 65 * 200 + 201 * 10
    assert entries(mlp(20, depth=3)((1, 8, 8), 10)) == 65 * 20 + 2 * 21 * 20 + 21 * 10


@pytest.mark.parametrize("text", ["mlp(width=0)", "mlp(depth=0)", "mlp(width=1.5)"])
def test_bad_arguments(text):
    with pytest.raises(InputError, match="must be"):
        model.one(text)()
