"""Clipping of gradients in place: the rule is `mac`, with the conventions of torch.nn.utils.clip_grad_norm_."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from stableair import mac, stable, theory
from stableair.errors import InputError
from stableair.nn import clip_grad_mac_
from stableair.streams import generator

GRADIENTS = arrays(
    "float32",
    st.lists(st.integers(1, 5), max_size=3).map(tuple),  # a scalar too
    elements=st.floats(-1e6, 1e6, width=32),
).map(torch.from_numpy)
THRESHOLDS = st.floats(1e-3, 1e3)


def parameters_with(*gradients):
    """Parameters with these gradients; None for a parameter without a gradient."""
    parameters = []
    for g in gradients:
        p = torch.zeros(2, requires_grad=True) if g is None else torch.zeros_like(g, requires_grad=True)
        p.grad = g
        parameters.append(p)
    return parameters


def tensors(*rows):
    return [torch.tensor(row) for row in rows]


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def shifted_gradients(seed=0, shapes=((4, 3), (7,), (), (2, 1, 3))):
    """Gradients with different medians."""
    source = generator(seed, "gradients")
    return [(3 * source.normal(*shape) + 5 * i).float() for i, shape in enumerate(shapes)]


@given(st.lists(GRADIENTS, min_size=1, max_size=4), THRESHOLDS)
def test_clipping_is_mac_on_each_tensor(gradients, C):
    before = [g.clone() for g in gradients]
    share = clip_grad_mac_(parameters_with(*gradients), C)
    for was, now in zip(before, gradients, strict=True):
        assert torch.equal(now, mac(C)(was.flatten()).reshape(was.shape))
    changed = flat(gradients) != flat(before)
    torch.testing.assert_close(share, changed.sum() / changed.numel())
    assert clip_grad_mac_(parameters_with(*gradients), C) == 0, "clipping again changes nothing"


@given(st.lists(GRADIENTS, min_size=1, max_size=4), THRESHOLDS)
def test_one_median_is_used_for_all_gradients_together(gradients, C):
    before = flat(gradients).clone()
    share = clip_grad_mac_(parameters_with(*gradients), C, layerwise=False)
    assert torch.equal(flat(gradients), mac(C)(before))
    changed = flat(gradients) != before
    torch.testing.assert_close(share, changed.sum() / changed.numel())


def test_one_median_for_all_gradients_differs_from_one_median_each():
    each, together = (parameters_with(*tensors([0.0, 1.0, 90.0], [50.0, 51.0, 52.0])) for _ in range(2))
    assert clip_grad_mac_(each, 2.0).item() == pytest.approx(1 / 6)
    assert clip_grad_mac_(together, 2.0, layerwise=False).item() == pytest.approx(3 / 6)
    assert [p.grad.tolist() for p in each] == [[0.0, 1.0, 3.0], [50.0, 51.0, 52.0]]
    assert [p.grad.tolist() for p in together] == [[48.0, 48.0, 52.0], [50.0, 51.0, 52.0]]


def test_the_median_is_the_lower_middle():
    (p,) = parameters_with(torch.tensor([[4.0, 1.0], [3.0, 2.0]]))
    clip_grad_mac_(p, 0.25)
    assert p.grad.tolist() == [[2.25, 1.75], [2.25, 2.0]], "one median for the whole matrix: 2, not 2.5 or 3"


def test_clipping_differs_from_clipping_at_zero_and_from_scaling_the_norm():
    rules = {
        "mac": lambda p: clip_grad_mac_(p, 1.0),
        "value": lambda p: nn.utils.clip_grad_value_(p, 1.0),
        "norm": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    }
    results = {}
    for name, rule in rules.items():
        (p,) = parameters_with(torch.tensor([5.0, 5.5, 6.0, 1e6, -1e6]))
        rule(p)
        results[name] = p.grad.tolist()
    assert results["mac"] == [5.0, 5.5, 6.0, 6.5, 4.5]
    assert results["value"] == [1.0, 1.0, 1.0, 1.0, -1.0]
    assert max(map(abs, results["norm"][:3])) < 1e-5


def test_clipping_changes_the_existing_gradient_tensors():
    parameters = parameters_with(*shifted_gradients())
    gradients, addresses = [p.grad for p in parameters], [p.grad.data_ptr() for p in parameters]
    values = [p.detach().clone() for p in parameters]
    clip_grad_mac_(parameters, 0.5)
    for p, g, address, value in zip(parameters, gradients, addresses, values, strict=True):
        assert p.grad is g
        assert g.data_ptr() == address
        assert torch.equal(p.detach(), value), "the parameters do not change"
    assert not torch.equal(flat(gradients), flat(shifted_gradients())), "some entries are clipped"


def test_a_gradient_that_requires_a_gradient():
    (p,) = parameters_with(torch.tensor([0.0, 1.0, 90.0], requires_grad=True))
    clip_grad_mac_(p, 1.0)
    assert p.grad.tolist() == [0.0, 1.0, 2.0]
    assert p.grad.is_leaf, "clipping is not part of the graph"


def test_a_strided_gradient_is_clipped_in_place():
    base = torch.tensor([[0.0, 10.0], [1.0, 20.0], [90.0, 30.0]])
    (p,) = parameters_with(base.T[:1])
    clip_grad_mac_(p, 1.0)
    assert base.tolist() == [[0.0, 10.0], [1.0, 20.0], [2.0, 30.0]], "the other column does not change"


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_tensor_a_list_and_a_generator_give_the_same_result(layerwise):
    def clipped(convert):
        parameters = parameters_with(*shifted_gradients(shapes=((4, 3),)))
        share = clip_grad_mac_(convert(parameters), 0.5, layerwise)
        return share.item(), parameters[0].grad.tolist()

    conversions = [lambda ps: ps[0], list, lambda ps: (p for p in ps), tuple, iter]
    results = [clipped(conversion) for conversion in conversions]
    assert all(result == results[0] for result in results)
    assert results[0][0] > 0


def test_parameters_without_a_gradient_are_left_out():
    first, missing, last = parameters = parameters_with(torch.tensor([0.0, 1.0, 90.0]), None, torch.tensor([7.0]))
    assert clip_grad_mac_(parameters, 1.0).item() == 0.25, "one of four entries, not of six"
    assert missing.grad is None
    assert first.grad.tolist() == [0.0, 1.0, 2.0]
    assert last.grad.tolist() == [7.0]


@pytest.mark.parametrize(
    "parameters", [[], parameters_with(None), parameters_with(torch.empty(0)), parameters_with(torch.empty(0, 3), None)]
)
@pytest.mark.parametrize("layerwise", [True, False])
def test_without_gradients_the_share_is_zero(parameters, layerwise):
    share = clip_grad_mac_(parameters, 1.0, layerwise, error_if_nonfinite=True)
    assert share.shape == ()
    assert share.dtype == torch.float32
    assert share.item() == 0.0


@pytest.mark.parametrize("layerwise", [True, False])
def test_an_empty_gradient_has_no_effect(layerwise):
    parameters = parameters_with(torch.empty(0), torch.tensor([0.0, 1.0, 90.0, 1.0]))
    assert clip_grad_mac_(parameters, 1.0, layerwise).item() == 0.25
    assert parameters[1].grad.tolist() == [0.0, 1.0, 2.0, 1.0]


def test_an_exhausted_generator_is_logged(caplog):
    parameters = iter(parameters_with(*shifted_gradients()))
    clip_grad_mac_(parameters, 1.0)
    assert clip_grad_mac_(parameters, 1.0) == 0
    assert "empty generator" in caplog.text


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_parameter_that_is_passed_twice_is_clipped_once(layerwise):
    p, q = parameters_with(*tensors([0.0, 1.0, 90.0], [2.0]))
    assert clip_grad_mac_([p, q, p], 1.0, layerwise).item() == 0.25
    assert p.grad.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("layerwise", [True, False])
def test_infinite_entries_are_finite_after_clipping(layerwise):
    parameters = parameters_with(*tensors([0.0, math.inf, 1.0, -math.inf, 0.5], [1.0, 0.25, math.inf]))
    assert clip_grad_mac_(parameters, 2.0, layerwise).item() == pytest.approx(3 / 8)
    assert all(p.grad.isfinite().all() for p in parameters)
    lost = parameters_with(torch.tensor([0.0, math.inf, 1.0]))
    nn.utils.clip_grad_norm_(lost, 2.0)
    assert not lost[0].grad.isfinite().all(), "scaling the norm gives non-finite values"


def test_a_nan_makes_all_entries_of_its_block_nan():
    each, together = (parameters_with(*tensors([0.0, math.nan, 1.0], [1.0, 0.0, 0.5, 5.0])) for _ in range(2))
    assert clip_grad_mac_(each, 1.0).item() == pytest.approx(4 / 7), "the whole block is clipped"
    assert each[0].grad.isnan().all()
    assert each[1].grad.tolist() == [1.0, 0.0, 0.5, 1.5]
    assert clip_grad_mac_(together, 1.0, layerwise=False).item() == 1.0
    assert all(p.grad.isnan().all() for p in together)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("C", [1.0, math.inf])
def test_non_finite_values_are_refused_before_any_change(bad, layerwise, C):
    parameters = parameters_with(*tensors([0.0, 1.0, 90.0], [1.0, bad]))
    with pytest.raises(RuntimeError, match=r"`parameters` have NaN or infinite entries.*`error_if_nonfinite=False`"):
        clip_grad_mac_(parameters, C, layerwise, error_if_nonfinite=True)
    assert parameters[0].grad.tolist() == [0.0, 1.0, 90.0]
    torch.testing.assert_close(parameters[1].grad, torch.tensor([1.0, bad]), equal_nan=True)
    fine = parameters_with(torch.tensor([0.0, 1.0, 90.0]))
    assert clip_grad_mac_(fine, 1.0, layerwise, error_if_nonfinite=True).item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("layerwise", [True, False])
def test_each_gradient_keeps_its_dtype(layerwise):
    kinds = torch.float32, torch.bfloat16, torch.float64, torch.float16
    parameters = parameters_with(*(torch.tensor([0.0, 1.0, -0.5, 90.0, 0.25], dtype=kind) for kind in kinds))
    share = clip_grad_mac_(parameters, 2.0, layerwise)
    assert [p.grad.dtype for p in parameters] == list(kinds)
    for p in parameters:
        assert p.grad.tolist() == [0.0, 1.0, -0.5, 2.25, 0.25]
    assert share.dtype == torch.float32
    assert share.item() == pytest.approx(0.2)


def test_one_median_of_several_dtypes_is_not_rounded():
    wide = torch.tensor([1 + 2.0**-40, 5.0, -5.0], dtype=torch.float64)
    parameters = parameters_with(torch.tensor([5.0, -5.0], dtype=torch.bfloat16), wide)
    clip_grad_mac_(parameters, 1.0, layerwise=False)
    assert wide.tolist() == [1 + 2.0**-40, 2 + 2.0**-40, 2.0**-40], "a median rounded to bfloat16 would be 1"
    assert parameters[0].grad.tolist()[0] == 2.0


@pytest.mark.parametrize("layerwise", [True, False])
def test_an_infinite_threshold_changes_nothing(layerwise):
    parameters = parameters_with(*tensors([0.0, math.inf, math.inf], [1.0, math.nan], [-3e38, 3e38]))
    assert clip_grad_mac_(parameters, math.inf, layerwise).item() == 0.0
    expected = torch.tensor([0.0, math.inf, math.inf, 1.0, math.nan, -3e38, 3e38])
    torch.testing.assert_close(flat([p.grad for p in parameters]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, "1", "automatic", None, True])
def test_invalid_thresholds_are_refused(bad):
    parameters = parameters_with(torch.tensor([0.0, 1.0, 90.0]))
    with pytest.raises(InputError) as error:
        clip_grad_mac_(parameters, bad)
    assert error.value.code in ("out-of-range", "wrong-type")


def test_auto_estimates_the_threshold_from_the_current_gradients_only():
    def clipped(tau, call):
        noise = stable.sample(20_000, 1.5, tau, generator(0, "noise", call))
        gradients = [noise[:5000] + 100, noise[5000:].reshape(150, 100)]
        before = [g.clone() for g in gradients]
        return clip_grad_mac_(parameters_with(*gradients), "auto"), before, gradients

    first = clipped(0.1, 0)
    clipped(3.0, 1)
    again = clipped(0.1, 0)
    assert first[0] == again[0]
    assert torch.equal(flat(first[2]), flat(again[2])), "earlier calls have no effect"
    assert first[0] == pytest.approx(1 - theory.unclipped(1.255 * 0.1, 1.5, 0.1).value, abs=0.02)
    threshold = (first[2][1] - first[1][1].flatten().median()).abs().max().item()
    assert threshold == pytest.approx(theory.best_threshold(1.5) * 0.1, rel=0.05)


def test_auto_clips_gradients_without_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2))
    nn.functional.cross_entropy(model(torch.randn(64, 20)), torch.arange(64) % 2).backward()
    assert clip_grad_mac_(model.parameters(), "auto") > 0.1


@pytest.mark.parametrize("gradients", [[], [torch.zeros(0)], [torch.full((3,), 2.0)], [torch.tensor([math.inf, 1.0])]])
def test_auto_leaves_gradients_that_do_not_vary(gradients):
    before = [g.clone() for g in gradients]
    assert clip_grad_mac_(parameters_with(*gradients), "auto") == 0
    assert all(torch.equal(a, b) for a, b in zip(before, gradients, strict=True))


def test_gradients_without_a_median_are_refused_before_any_change():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    (dense,) = parameters_with(torch.tensor([0.0, 1.0, 90.0]))
    (complex_numbers,) = parameters_with(torch.zeros(2, dtype=torch.complex64))
    for parameter, kind in ((table.weight, "torch.sparse_coo"), (complex_numbers, "torch.complex64")):
        with pytest.raises(InputError) as error:
            clip_grad_mac_([dense, parameter], 1.0)
        assert (error.value.code, error.value.fields) == ("unsupported-gradient", {"kind": kind})
    assert dense.grad.tolist() == [0.0, 1.0, 90.0]


def test_objects_other_than_parameters_are_refused():
    model = nn.Sequential(nn.Linear(2, 1))
    for wrong, name in ((model, "Linear"), (model[0], "Linear"), (model.named_parameters(), "tuple"), (3, "int")):
        with pytest.raises(InputError) as error:
            clip_grad_mac_(wrong, 1.0)
        assert (error.value.code, error.value.fields) == ("wrong-type", {"name": "parameters", "value": name})
    with pytest.raises(InputError) as error:
        clip_grad_mac_(model.parameters(), 1.0, 2.0)
    assert (error.value.code, error.value.fields) == ("wrong-type", {"name": "layerwise", "value": 2.0})


@pytest.fixture
def no_synchronisation(monkeypatch):
    """Access to the values of a tensor on the host fails, because it would wait for a GPU."""

    def refuse(self, *_):
        raise AssertionError("the host waits for the device")

    for name in ("item", "__bool__", "tolist", "__float__", "__int__", "__index__", "numpy", "cpu", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)


@pytest.mark.parametrize("layerwise", [True, False])
def test_the_host_never_waits_for_the_device(layerwise, no_synchronisation):
    clip_grad_mac_(parameters_with(*shifted_gradients(), torch.tensor([0.0, math.inf, math.nan])), 1.0, layerwise)
    with pytest.raises(AssertionError, match="waits"):  # only this check has to wait
        clip_grad_mac_(parameters_with(*shifted_gradients()), 1.0, layerwise, error_if_nonfinite=True)


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("C", [1.0, math.inf])
def test_clipping_of_meta_tensors(layerwise, C):
    parameters = parameters_with(*(torch.empty(shape, device="meta") for shape in ((3, 2), (), (5,))))
    share = clip_grad_mac_(parameters, C, layerwise)
    assert (share.device.type, share.shape, share.dtype) == ("meta", (), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_gpu_gives_the_same_values_without_synchronisation(cuda, layerwise):
    on_cpu, on_gpu = parameters_with(*shifted_gradients()), parameters_with(*(g.to(cuda) for g in shifted_gradients()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        share = clip_grad_mac_(on_gpu, 0.5, layerwise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert share.device.type == "cuda"
    assert share.item() == pytest.approx(clip_grad_mac_(on_cpu, 0.5, layerwise).item(), rel=1e-6)
    assert all(torch.equal(p.grad, q.grad.cpu()) for p, q in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layerwise", [True, False])
def test_gradients_on_two_devices_are_clipped(cuda, layerwise):
    on_cpu, split = (
        parameters_with(*shifted_gradients()),
        parameters_with(*(g.to(cuda) if i % 2 else g for i, g in enumerate(shifted_gradients()))),
    )
    share = clip_grad_mac_(split, 0.5, layerwise)
    assert share.device.type == "cpu", "that of the first gradient"
    assert share.item() == clip_grad_mac_(on_cpu, 0.5, layerwise).item()
    assert all(torch.equal(p.grad, q.grad.cpu()) for p, q in zip(on_cpu, split, strict=True))


def test_clipping_between_backward_and_the_step_of_an_optimizer():
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (-model(torch.tensor([[0.0, 1.0, 90.0]]))).backward()
    share = clip_grad_mac_(model.parameters(), 1.0)
    assert not share.requires_grad
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 1.0, 2.0]]  # the gradient was [0, -1, -90], its median -1
