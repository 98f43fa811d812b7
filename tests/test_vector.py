import torch
from torch import nn

from stableair.vector import ModelState, attach, buffers, moments, parameters, pooled, state


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_the_blocks_of_a_layout_cover_every_entry_once():
    layout = parameters(module())
    assert layout.names == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
    assert layout.shapes == ((4, 3), (4,), (4,), (4,), (2, 4))
    assert layout.offsets == (0, 12, 16, 20, 24, 32)
    v = torch.arange(64).reshape(2, 32)
    assert [part.shape[-1] for part in layout.split(v)] == [12, 4, 4, 4, 8]
    assert torch.equal(torch.cat(layout.split(v), dim=-1), v)


def test_blocks_can_be_merged():
    layout = parameters(module())
    assert layout.merge("tensor") == layout
    assert (layout.merge("layer").names, layout.merge("layer").offsets) == (("0", "1", "2"), (0, 16, 24, 32))
    assert layout.merge("model").offsets == (0, 32)


def test_state_takes_parameters_and_float_buffers():
    w, stats = state(module())
    assert w.shape == (32,)
    assert torch.equal(stats, torch.tensor([0.0] * 4 + [1.0] * 4))  # running mean and variance, not the batch counter
    assert state(nn.Linear(2, 2)).stats.shape == (0,)


def test_an_attached_module_reads_and_writes_the_vectors():
    net, other = module(), module()
    x = torch.randn(6, 3)
    flat = ModelState(state(net).w * 2, state(net).stats.clone())
    grad = torch.zeros(32)
    attach(net, flat, grad)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert torch.equal(net(x), other(x))
    net.zero_grad(set_to_none=False), net(x).square().sum().backward()
    other(x).square().sum().backward()
    assert torch.equal(grad, torch.cat([p.grad.flatten() for p in other.parameters()]))
    assert flat.stats[:4].abs().sum() > 0, "a forward pass updates the running mean"
    flat.w.zero_()
    assert not any(p.any() for p in net.parameters())


def test_pooled_statistics_equal_those_of_all_samples():
    """Clients with different means: the pooled variance includes the variance of the means."""
    samples = torch.randn(3, 50, 4) * torch.tensor([1.0, 2.0, 0.5, 3.0]) + 1e3 * torch.arange(3.0)[:, None, None]
    norms = buffers(module())
    each = torch.cat([samples.mean(1), samples.var(1, correction=0)], 1)
    sent = moments(each, norms)
    assert sent.dtype == torch.float64
    together = pooled(sent.mean(0), norms)
    everything = samples.flatten(0, 1).double()
    torch.testing.assert_close(together[:4], everything.mean(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(together[4:], everything.var(0, correction=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(pooled(moments(each, norms), norms).float(), each, rtol=1e-5, atol=1e-5)
    assert torch.equal(each[:, 4:], samples.var(1, correction=0)), "the statistics of the clients do not change"


def test_only_a_mean_and_a_variance_of_one_layer_make_a_pair():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_var", torch.ones(2))
            self.register_buffer("temperature", torch.ones(1))
            self.norm = nn.BatchNorm1d(1)

    norms = buffers(Odd())
    sent = moments(torch.tensor([3.0, 3.0, 5.0, 2.0, 7.0]), norms)
    assert sent.tolist() == [3, 3, 5, 2, 11]
    assert pooled(sent, norms).tolist() == [3, 3, 5, 2, 7]
