"""The kernels against a plain transcription in torch: on a GPU where there is one, else in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from stableair.builder import build
from stableair.data.datasets import synthetic
from stableair.engine import EngineChoice, accelerate, kernels
from stableair.engine.kernel_layers import by_kernels, conv2d, group_norm, kernel_convolutions, kernel_group_norms
from stableair.engine.kernels import Activation, Moments, Norm
from stableair.engine.resnet import ResNetWorker, supports
from stableair.engine.stacked import Stacked
from stableair.engine.trainer import StackedTrainer
from stableair.engine.worker import StackedWorker
from stableair.experiment import Experiment
from stableair.models import ResNet, cnn, model
from stableair.training.local_training import LocalTraining
from stableair.training.reference import Reference
from stableair.vector import state

PLACE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [  # N, B, H, W, C, O, K, stride, pad: sides, channels and rows that fill no tile, and several tiles
    (2, 3, 8, 8, 16, 32, 3, 1, 1),
    (2, 3, 8, 8, 3, 20, 3, 1, 1),
    (2, 2, 8, 6, 20, 33, 3, 2, 1),
    (3, 2, 8, 8, 16, 24, 1, 2, 0),
    (1, 10, 4, 4, 40, 70, 3, 1, 1),
]


def drawn(*shape):
    return torch.randn(*shape, device=PLACE)


def convolved(x, w, stride, pad):
    """One client after the other, in torch; in float64, since a GPU would else round more than the kernels do."""
    each = [
        F.conv2d(a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2), None, stride, pad)
        for a, b in zip(x.double(), w.double(), strict=True)
    ]
    return torch.stack(each).permute(0, 1, 3, 4, 2).float().contiguous()


def near(a, b, tolerance=1e-5):
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * b.norm()


def room(n, b):
    """Every client has all its samples but the last, who has one less."""
    samples = torch.full((n,), b, dtype=torch.int32, device=PLACE)
    samples[-1] -= 1
    return samples


@pytest.mark.parametrize("case", CASES)
def test_convolution_and_the_sums_for_its_norm(case):
    n, b, h, w, c, o, k, stride, pad = case
    x, weight = drawn(n, b, h, w, c), drawn(n, o, k, k, c)
    y, partial = kernels.conv_forward(x, weight, room(n, b), stride, pad)
    expected = convolved(x, weight, stride, pad)
    near(y, expected)
    expected[-1, -1] = 0  # a sample that is not there does not count
    near(partial.sum(1), torch.stack([expected.sum((1, 2, 3)), expected.square().sum((1, 2, 3))], 1), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_input_includes_other_paths(case):
    n, b, h, w, c, o, k, stride, pad = case
    x, weight = drawn(n, b, h, w, c).requires_grad_(), drawn(n, o, k, k, c)
    y = convolved(x, weight, stride, pad)
    dy, more = torch.randn_like(y), drawn(n, b, h, w, c)
    (expected,) = torch.autograd.grad(y, x, dy)
    near(kernels.conv_input_grad(dy, weight, (h, w), stride, pad)[0], expected)
    near(kernels.conv_input_grad(dy, weight, (h, w), stride, pad, add=more)[0], expected + more)


@pytest.mark.parametrize("norms", ["one", "two"])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_passes_through_relu_to_the_norm_layers(case, norms):
    n, b, h, w, c, o, k, stride, pad = case
    dy, weight = drawn(n, b, *((side + 2 * pad - k) // stride + 1 for side in (h, w)), o), drawn(n, o, k, k, c)
    layers = [(drawn(n, b, h, w, c), Moments(*(drawn(n, c) for _ in range(4)))) for _ in range(1 + (norms == "two"))]
    (y, moments), *_ = layers
    scale, shift = (t[:, None, None, None] for t in moments[2:])
    a = F.relu(scale * y + shift) if norms == "one" else F.relu(drawn(n, b, h, w, c))
    plain, _ = kernels.conv_input_grad(dy, weight, (h, w), stride, pad)
    activation = Activation(layers, None if norms == "one" else a)
    g, partials = kernels.conv_input_grad(dy, weight, (h, w), stride, pad, activation=activation)
    near(g, plain * (a > 0))
    for (y, moments), partial in zip(layers, partials, strict=True):
        mean, rstd = (t[:, None, None, None] for t in moments[:2])
        sums = [t.sum((1, 2, 3)) for t in (g, g * (y - mean) * rstd)]
        near(partial.sum(1), torch.stack(sums, 1), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_the_weights_and_their_copy(case):
    n, b, h, w, c, o, k, stride, pad = case
    x, weight = drawn(n, b, h, w, c), drawn(n, o, k, k, c).requires_grad_()
    y = convolved(x, weight, stride, pad)
    dy = torch.randn_like(y)
    (slope,) = torch.autograd.grad(y, weight, dy)
    new, copy = weight.detach().clone(), weight.detach().bfloat16()
    kernels.conv_weight_grad_sgd(dy, x, new, copy, 0.1, stride, pad)
    near(new, weight.detach() - 0.1 * slope)
    near(copy.float(), new, 0.01)
    assert not torch.equal(copy, weight.detach().bfloat16()), "the copy moved along"


@pytest.mark.parametrize("rest", ["nothing", "a shortcut", "a shortcut with a norm"])
def test_forward_and_backward_of_norm_relu_and_shortcut(rest):
    """The second client has a sample less: what is computed of the third is not counted, and its gradient is zero."""
    n, shape, c, there = 2, (3, 5, 4), 20, (3, 2)
    y, aside = drawn(n, *shape, c).requires_grad_(), drawn(n, *shape, c)
    gamma, beta, running = (1 + drawn(n, c) / 4).requires_grad_(), drawn(n, c).requires_grad_(), drawn(2, n, c).abs()
    norm = Norm(gamma.detach().clone(), beta.detach().clone(), *running.clone())
    expected, want_mean, want_var = torch.zeros_like(y), *running.clone()
    for i, m in enumerate(there):
        out = F.batch_norm(y[i, :m].flatten(0, 2), want_mean[i], want_var[i], gamma[i], beta[i], True, 0.1, 1e-5)
        expected = expected.index_put((torch.tensor(i), torch.arange(m)), out.view(m, *shape[1:], c))
    seen = torch.stack([F.pad(y.detach()[i, :m], (0,) * 7 + (3 - m,)) for i, m in enumerate(there)])
    partial = torch.stack([seen.sum((1, 2, 3)), seen.square().sum((1, 2, 3))], 1)[:, None]
    moments = kernels.bn_finalize(partial, norm, room(n, 3), 20, 0.1, 1e-5)
    near(norm.running_mean, want_mean)
    near(norm.running_var, want_var)
    affine = (drawn(n, c), drawn(n, c))
    if rest == "nothing":
        a, out = kernels.bn_relu(y.detach(), moments[2:]), F.relu(expected)
    elif rest == "a shortcut":
        a, out = kernels.bn_relu(y.detach(), moments[2:], aside), F.relu(expected + aside)
    else:
        a = kernels.bn_relu(y.detach(), moments[2:], aside, affine)
        scale, shift = (t[:, None, None, None] for t in affine)
        out = F.relu(expected + scale * aside + shift)
    near(a[0], out[0])
    near(a[1, :2], out[1, :2])
    da = torch.randn_like(a)
    da[1, 2] = 0
    dy, dgamma, dbeta = torch.autograd.grad(out, (y, gamma, beta), da)
    g, partial = kernels.relu_grad_sums(da, a, y.detach(), moments)
    assert torch.equal(g, da * (a > 0))
    sums = kernels.bn_affine_sgd(partial, norm, 0.5)
    near(norm.gamma, gamma.detach() - 0.5 * dgamma)
    near(norm.beta, beta.detach() - 0.5 * dbeta)
    near(kernels.bn_input_grad(g, y.detach(), moments, sums, room(n, 3)), dy, 1e-4)


GROUP_NORMS = [  # N, B, H, W, C, groups: several tiles of pixels, several programs, groups of odd size, one group
    (2, 3, 10, 8, 16, 8),
    (2, 2, 5, 3, 24, 8),
    (1, 2, 3, 3, 130, 13),
    (2, 1, 4, 4, 20, 1),
    (1, 2, 1, 2, 6, 6),
]


@pytest.mark.parametrize("case", GROUP_NORMS)
def test_group_norm_and_its_gradients(case):
    n, b, h, w, c, groups = case
    x = (3 + 2 * drawn(n, b, h, w, c)).requires_grad_()
    gamma, beta = (1 + drawn(n, c) / 4).requires_grad_(), drawn(n, c).requires_grad_()
    each = zip(x.double(), gamma.double(), beta.double(), strict=True)
    images = [F.group_norm(a.permute(0, 3, 1, 2), groups, weight, bias, 1e-3) for a, weight, bias in each]
    expected = torch.stack(images).permute(0, 1, 3, 4, 2)
    y, moments = kernels.group_norm(x.detach(), gamma.detach(), beta.detach(), groups, 1e-3)
    near(y, expected.detach().float())
    dy = drawn(n, b, h, w, c)
    dx, dgamma, dbeta = torch.autograd.grad(expected, (x, gamma, beta), dy.double())
    got, sums = kernels.group_norm_grad(dy, x.detach(), gamma.detach(), moments, groups)
    near(got, dx, 1e-4)
    near(sums, torch.stack([dbeta, dgamma], 1), 1e-4)


def test_a_client_without_samples_is_left_as_it_is():
    n, c = 2, 20
    norm = Norm(*(drawn(n, c) for _ in range(4)))
    before = [t.clone() for t in norm]
    samples = torch.tensor([2, 0], dtype=torch.int32, device=PLACE)
    moments = kernels.bn_finalize(drawn(n, 3, 2, c).abs(), norm, samples, 6, 0.1, 1e-5)
    assert all(torch.equal(now[1], then[1]) for now, then in zip(norm, before, strict=True))
    assert not torch.equal(norm.running_mean[0], before[2][0])
    assert not moments.scale[1].any()
    assert not moments.shift[1].any(), "nothing can grow from layer to layer"


def small(sizes, batch_size=4):
    """A trainer of a small residual network over clients of the given sizes."""
    torch.manual_seed(0)
    module = ResNet(3, (1, 2), 4, nn.BatchNorm2d, first=16).to(PLACE)
    data = synthetic(samples=20, classes=4, shape=(3, 8, 8)).to(PLACE)
    parts = [part.to(PLACE) for part in torch.arange(sum(sizes)).split(sizes)]
    return LocalTraining(module, data, parts, epochs=1, batch_size=batch_size, lr=0.02, payload="gradient", seed=1)


def both(slow, precision, worker=ResNetWorker):
    """The uploads of the kernels and of the reference."""
    program, resnet = by_kernels(Stacked(slow.module)), worker is ResNetWorker
    start, fast = state(slow.module), StackedTrainer(slow, program, precision, 3, resnet)
    who = torch.arange(len(slow.parts))
    ((got,), (expected,)) = fast(start, 0, who), Reference(slow)(start, 0, who)
    assert type(fast._worker) is worker
    order = got.clients.argsort().to(PLACE)
    return [(a[order], b) for a, b in zip(got[1:4], expected[1:4], strict=True)]


@pytest.mark.slow  # in the interpreter
def test_a_residual_network_is_the_references():
    """Full batches, a short last batch, and clients that have finished before the others."""
    for got, expected in both(small([1, 6, 4]), "fp32"):
        near(got, expected, 1e-3)


class Mixed(nn.Module):
    """Convolutions that the kernels take, with and without a bias, and two that they do not."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 5, padding=2), nn.GroupNorm(2, 8)
        self.down, self.across = nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.Conv2d(12, 12, 1)
        self.grouped, self.oblong = nn.Conv2d(12, 12, 3, padding=1, groups=3), nn.Conv2d(12, 6, (1, 3))
        self.fc = nn.Linear(48, 4)

    def forward(self, x):
        x = F.relu(self.down(F.relu(self.norm(self.first(x)))), inplace=True)
        return self.fc(torch.flatten(self.oblong(F.relu(self.grouped(F.relu(self.across(x))))), 1))


class Small(nn.Sequential):
    """Two convolutions and a group norm that the kernels take, small enough for the interpreter."""

    def __init__(self):
        first, second = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, bias=False)
        norm, relu = nn.GroupNorm(2, 4), nn.ReLU(inplace=True)
        super().__init__(first, norm, relu, second, relu, nn.Flatten(), nn.Linear(4, 4))


class Twice(nn.Module):
    """A convolution that is called twice, a shortcut in the other layout, and a pool."""

    def __init__(self):
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1, groups=3)
        self.pool, self.fc = nn.AvgPool2d(4), nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.conv(x)) + self.grouped(x)
        return self.fc(self.pool(F.max_pool2d(self.conv(x), 3, 1, 1) * x.mean((2, 3), keepdim=True)).flatten(1))


IN_STACKED = [
    pytest.param(Small, [4, 3], id="small"),
    pytest.param(Twice, [4, 3], id="twice"),
    pytest.param(Mixed, [1, 6, 4], id="mixed, unequal", marks=pytest.mark.slow),  # in the interpreter
    pytest.param(lambda: cnn(width=4)((3, 8, 8), 4), [1, 6, 4], id="cnn, unequal", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("network", "sizes"), IN_STACKED)
def test_a_stacked_network_with_its_convolutions_by_kernels_is_the_references(network, sizes):
    torch.manual_seed(0)
    work = replace(small(sizes), module=network().to(PLACE))
    for got, expected in both(work, "fp32", StackedWorker):
        near(got, expected, 1e-4)


def test_a_frozen_convolution_stays_as_it_is():
    torch.manual_seed(0)
    work = replace(small([4, 3]), module=Small().to(PLACE))
    work.module[3].weight.requires_grad_(False)
    for got, expected in both(work, "fp32", StackedWorker):
        near(got, expected, 1e-4)


def test_which_convolutions_the_kernels_take():
    program = Stacked(Mixed())
    assert kernel_convolutions(program) == ["first", "down", "across"]
    assert kernel_group_norms(program) == ["norm"]
    changed = by_kernels(program)
    assert [name for name, function in changed.functions.items() if function is conv2d] == kernel_convolutions(program)
    assert changed.functions["norm"] is group_norm
    assert not {conv2d, group_norm} & {*program.functions.values()}, "the original program is unchanged"
    for other in (nn.GroupNorm(2, 8, affine=False), nn.GroupNorm(1, 256)):
        assert not kernel_group_norms(Stacked(nn.Sequential(other)))
    for other in ({"dilation": 2}, {"padding": (1, 0)}, {"padding": "same"}, {"stride": (1, 2)}):
        assert not kernel_convolutions(Stacked(nn.Sequential(nn.Conv2d(3, 4, 3, **other))))


def test_images_keep_the_layout_of_the_kernels(monkeypatch):
    """Between kernels nothing is copied: neither in the forward pass nor in the backward pass."""
    torch.manual_seed(0)
    module = ResNet(3, (1, 1), 4, lambda c: nn.GroupNorm(2, c), first=4).to(PLACE)
    copies = []
    copy = torch.Tensor.contiguous

    def contiguous(x, *arguments, **keywords):
        if x.ndim == 5 and not x.is_contiguous(*arguments, **keywords):
            copies.append(tuple(x.shape))
        return copy(x, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    work = replace(small([2, 2], batch_size=2), module=module)
    next(iter(StackedTrainer(work, by_kernels(Stacked(module)), "fp32", 2)(state(module), 0, torch.arange(2))))
    assert copies == [(2, 2, 8, 8, 3)], "the input of the network"


def test_the_copies_of_the_weights_follow_the_steps():
    work = replace(small([4, 3]), module=Small().to(PLACE))
    worker = StackedWorker(work, "bf16", 2, by_kernels(Stacked(work.module)))
    worker.load_state(state(work.module))
    assert {*worker.operands} == {"0.weight", "3.weight", "6.weight"}
    for name, operand in worker.operands.items():
        assert torch.equal(operand, worker.p[name].bfloat16())


def test_accelerate_uses_the_kernels_that_are_requested(monkeypatch, registries):
    @model("convolutions")
    def convolutions():
        return lambda shape, classes: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, classes)
        )

    data = "synthetic(shape=(1, 4, 4))"
    sim = build(Experiment(device=PLACE, model="convolutions()", clients=2, data=data, batch_size=3))
    fast = accelerate(sim, EngineChoice("kernels", "bf16", 2, ""))
    assert [name for name, function in fast.train.program.functions.items() if function is conv2d] == ["0", "2"]
    # Interpreted kernels are too slow for a trial of a ResNet, whose layers the tests above compare one by one.
    monkeypatch.setattr("stableair.engine.selection.checked_program", lambda make, work: make(work.module))
    monkeypatch.setattr("stableair.engine.selection.check_kernels", lambda *arguments: None)
    sim = build(
        Experiment(device=PLACE, model="resnet18()", clients=2, data="synthetic(shape=(3, 8, 8))", batch_size=3)
    )
    fast = accelerate(sim, EngineChoice("kernels", "bf16", 2, ""))
    assert type(fast.train._new_worker()) is ResNetWorker


@pytest.mark.gpu
def test_convolutions_in_bfloat16_are_the_references_within_its_rounding(cuda):
    torch.manual_seed(0)
    work = replace(small([8, 8], batch_size=8), module=Mixed().to(PLACE))
    for (got, expected), tolerance in zip(both(work, "bf16", StackedWorker), (0.1, 0.01, 0.01), strict=True):
        near(got, expected, tolerance)


@pytest.mark.gpu
def test_a_residual_network_in_bfloat16_is_the_references_within_its_rounding(cuda):
    """In one step: a gradient jumps where rounding carries an entry over the kink of a relu.

    On a GPU alone: Triton's interpreter has no products of bfloat16.
    """
    for (got, expected), tolerance in zip(both(small([8, 8], batch_size=8), "bf16"), (0.5, 0.01, 0.01), strict=True):
        near(got, expected, tolerance)


def test_the_products_read_the_model_that_was_broadcast():
    slow = small([8, 8])
    worker = ResNetWorker(slow, "bf16", 2)
    worker.load_state(state(slow.module))
    convs = list(worker.convolutions())
    assert len(convs) == 1 + 3 * 2 + 1
    for conv in convs:
        assert torch.equal(conv.copy, conv.weight.bfloat16())
        assert torch.equal(conv.weight[0], conv.weight[1])


def test_which_networks_have_kernels():
    assert supports(ResNet(3, (1,), 4, nn.BatchNorm2d))
    assert not supports(ResNet(3, (1,), 4, lambda c: nn.GroupNorm(2, c)))
    assert not supports(nn.Linear(1, 1))
    assert not supports(type("Half", (ResNet,), {})(3, (1,), 4, nn.BatchNorm2d)), "it may compute something else"
    other, frozen = (ResNet(3, (1,), 4, nn.BatchNorm2d) for _ in range(2))
    other.fc = nn.Sequential(nn.Linear(64, 4))
    frozen.conv1.weight.requires_grad_(False)
    assert not supports(other)
    assert not supports(frozen)
    assert not supports(ResNet(3, (1,), 4, lambda c: nn.BatchNorm2d(c, affine=False)))
