import pytest
import torch
from torch import nn

from helpers.components import EXAMPLES
from stableair.builder import build
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.models import cnn, logistic, mlp, model, resnet18, resnet34


@pytest.mark.parametrize("spec", EXAMPLES["models"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12)])
def test_every_model_returns_one_logit_per_class(spec, shape):
    module = model.one(spec)()(shape, 7)
    assert module(torch.randn(5, *shape)).shape == (5, 7)


def entries(module):
    return sum(p.numel() for p in module.parameters())


def test_the_numbers_of_parameters():
    assert entries(logistic()((1, 8, 8), 10)) == 65 * 10
    assert entries(mlp(200)((1, 8, 8), 10)) == 65 * 200 + 201 * 10
    assert entries(mlp(20, depth=3)((1, 8, 8), 10)) == 65 * 20 + 2 * 21 * 20 + 21 * 10
    assert entries(cnn()((1, 28, 28), 62)) == 6_603_710


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_numbers_of_parameters_of_the_networks_of_the_paper(norm):
    assert entries(resnet18(norm)((3, 32, 32), 10)) == 11_173_962
    assert entries(resnet34(norm)((3, 32, 32), 100)) == 21_328_292


def test_the_stem_keeps_the_resolution_and_three_stages_halve_it():
    module = resnet18()((3, 32, 32), 10)
    seen = []
    for layer in (module.bn1, module.layer1, module.layer2, module.layer3, module.layer4):
        layer.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape[1:])))
    module(torch.zeros(2, 3, 32, 32))
    assert seen == [(64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_group_norm_treats_samples_separately_and_has_no_buffers():
    x = torch.randn(4, 3, 16, 16)
    batch, group = (resnet18(norm)((3, 16, 16), 5) for norm in ("batch", "group"))
    assert torch.allclose(group(x)[:1], group(x[:1]), atol=1e-5)
    assert not torch.allclose(batch(x)[:1], batch(x[:2])[:1], atol=1e-2)
    assert (sum(b.numel() for b in group.buffers()), sum(b.is_floating_point() for b in batch.buffers())) == (0, 40)


@pytest.mark.parametrize("text", ["resnet18()", "cnn()"])
def test_images_too_small_are_refused(text):
    with pytest.raises(InputError) as error:
        model.one(text)()((1, 2, 2), 10)
    assert (error.value.code, error.value.fields["shape"]) == ("image-too-small", (1, 2, 2))


def test_an_unknown_norm_is_refused():
    with pytest.raises(InputError) as error:
        model.one("resnet18(norm=layer)")()
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "norm")


@pytest.mark.parametrize("text", ["mlp(width=0)", "mlp(depth=0)", "mlp(width=1.5)", "cnn(width=0)"])
def test_invalid_arguments_are_refused(text):
    with pytest.raises(InputError) as error:
        model.one(text)()
    assert error.value.code in ("out-of-range", "wrong-type")


def flat(inputs, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (flat(64, 7), r"must return a tensor of shape \(2, 10\), one logit per class: got \(2, 7\)"),
        (flat(64, 13), r"one logit per class: got \(2, 13\)"),
        (
            flat(65, 10),
            r"does not accept the data: inputs of shape \(2, 1, 8, 8\), two samples: RuntimeError: mat1 and mat2",
        ),
        (flat(64, 10).requires_grad_(False), "no parameter with requires_grad=True"),
        (5, "must be a torch.nn.Module: got int"),
    ],
    ids=["few outputs", "many outputs", "other inputs", "nothing to learn", "no module"],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(module, message, registries):
    model("mine")(lambda: lambda shape, classes: module)
    with pytest.raises(InputError, match=message) as error:  # one code for all cases, with different texts
        build(Experiment(model="mine()", device="cpu"))
    assert (error.value.code, error.value.setting) == ("invalid-model", "model")
    assert "\n" not in str(error.value)


def test_the_default_initialisation_is_that_of_torch():
    def convolutions(text):
        torch.manual_seed(0)
        module = model.one(text)()((3, 16, 16), 10)
        return [p for p in module.parameters() if p.ndim == 4]

    for p in convolutions("resnet18()"):  # uniform in +- 1/sqrt(fan-in)
        assert p.std().item() == pytest.approx((3 * p[0].numel()) ** -0.5, rel=0.05)
        assert p.abs().max() <= p[0].numel() ** -0.5
    for p in convolutions("resnet18(init=he)"):
        assert p.std().item() == pytest.approx((2 / (p.shape[0] * p[0, 0].numel())) ** 0.5, rel=0.05)
    with pytest.raises(InputError) as error:
        model.one("resnet34(init=xavier)")()
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "init")
