import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import gamma

from stableair import stable
from stableair.checks import InputError
from stableair.streams import generator


def draws(n, alpha, tau, seed=0, **how):
    return stable.sample(n, alpha, tau, generator(seed, "test"), **how)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0, 1.1, 1.5, 1.9, 2.0])
def test_the_characteristic_function(alpha):
    n, tau = 400_000, 0.3
    x = draws(n, alpha, tau, dtype=torch.float64)
    for t in (0.3, 1.0, 3.0, 10.0):
        wave = torch.exp(1j * t * x)
        expected = math.exp(-((tau * t) ** alpha))
        assert abs(wave.real.mean() - expected) < 4.5 * wave.real.std() / n**0.5
        assert abs(wave.imag.mean()) < 4.5 * wave.imag.std() / n**0.5


@pytest.mark.parametrize("alpha", [0.7, 1.3, 1.8])
def test_quantiles_against_scipy(alpha):
    n, tau = 200_000, 2.0
    x = np.sort(draws(n, alpha, tau, dtype=torch.float64).numpy())
    for p in (0.05, 0.25, 0.5, 0.9, 0.98):
        below, above = np.searchsorted(x, stats.levy_stable.ppf(p, alpha, 0, scale=tau) + np.array([-1e-6, 1e-6])) / n
        slack = 4.5 * math.sqrt(p * (1 - p) / n)
        assert below - slack < p < above + slack


def test_cauchy_and_normal():
    assert stats.kstest(draws(200_000, 1, 0.5).numpy(), stats.cauchy(scale=0.5).cdf).pvalue > 1e-3
    assert stats.kstest(draws(200_000, 2, 0.5).numpy(), stats.norm(scale=0.5 * 2**0.5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0, 1.1, 1.5, 2.0])
def test_the_ends_of_the_interval_are_finite_and_mirror_images(alpha):
    ends = torch.tensor([2.0**-53, 2.0**-40, 0.25], dtype=torch.float64)
    u, v = (grid.flatten() for grid in torch.meshgrid(ends, torch.cat([ends, 1 - ends]), indexing="ij"))
    left, right = stable.from_uniform(u, v, alpha, 1.0), stable.from_uniform(1 - u, v, alpha, 1.0)
    assert left.isfinite().all()
    assert torch.equal(left, -right)
    assert (left < 0).all()


def test_the_tail_is_not_cut_at_the_grid_of_a_small_uniform():
    u = torch.tensor([2.0**-50], dtype=torch.float64)
    exact = -1 / math.tan(math.pi * 2.0**-50)
    assert stable.from_uniform(u, torch.tensor([0.5]).double(), 1.0, 1.0).item() == pytest.approx(exact, rel=1e-12)


def test_an_entry_does_not_depend_on_how_many_are_drawn():
    long = draws(100_000, 1.5, 0.1)
    assert torch.equal(long[:1000], draws(1000, 1.5, 0.1))
    assert torch.equal(long.reshape(100, 1000), draws((100, 1000), 1.5, 0.1))


def test_tau_is_a_scale_and_the_dtype_is_the_last_cast():
    assert torch.equal(draws(1000, 1.5, 2.0, dtype=torch.float64), 2 * draws(1000, 1.5, 1.0, dtype=torch.float64))
    assert torch.equal(draws(1000, 1.5, 2.0), draws(1000, 1.5, 2.0, dtype=torch.float64).float())
    assert not draws(1000, 1.5, 0.0).any()


def test_torch_generators_serve_too():
    first, again = (stable.sample(10, 1.5, 1.0, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert stable.sample((2, 3), 1.5, 1.0).shape == (2, 3)


@pytest.mark.parametrize(
    ("alpha", "tau"),
    [
        (0.49, 1),
        (2.01, 1),
        (math.nan, 1),
        ("a", 1),
        (True, 1),
        (1.5, -1),
        (1.5, math.nan),
        (1.5, math.inf),
        (1.5, None),
    ],
)
def test_outside_the_range(alpha, tau):
    with pytest.raises(InputError, match="must be"):
        stable.sample(3, alpha, tau)


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "places"), [(1.1, (1e3, 1e5)), (1.5, (1e3,)), (1.8, (3e2,))])
def test_the_far_tail_over_1e8_draws(alpha, places):
    source, n, beyond = generator(0, "tail"), 10**8, dict.fromkeys(places, 0)
    for _ in range(100):
        x = stable.sample(n // 100, alpha, 1.0, source).abs()
        assert x.isfinite().all()
        for place in places:
            beyond[place] += int((x > place).sum())
    for place, count in beyond.items():
        expected = n * 2 / math.pi * gamma(alpha) * math.sin(math.pi * alpha / 2) * place**-alpha
        assert abs(count - expected) < 4.5 * expected**0.5


@pytest.mark.slow
def test_far_cauchy_values_are_distinct():
    source = generator(0, "tail")
    x = torch.cat([(y := stable.sample(10**6, 1.0, 1.0, source).abs())[y > 1e5] for _ in range(100)])
    assert len(x) > 400  # 637 are expected
    assert len(x.unique()) == len(x)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_values(cuda):
    here = draws(1_000_003, 1.5, 0.1, dtype=torch.float64)
    there = stable.sample(1_000_003, 1.5, 0.1, generator(0, "test", device=cuda), dtype=torch.float64)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=0)
