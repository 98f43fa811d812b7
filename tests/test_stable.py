import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import gamma

from stableair import stable
from stableair.errors import InputError
from stableair.streams import generator


def draws(n, alpha, tau, seed=0, **options):
    return stable.sample(n, alpha, tau, generator(seed, "test"), **options)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0, 1.1, 1.5, 1.9, 2.0])
def test_draws_have_the_characteristic_function_of_the_law(alpha):
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


def test_alpha_1_is_cauchy_and_alpha_2_is_normal():
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


def test_an_entry_does_not_depend_on_the_number_of_draws():
    long = draws(100_000, 1.5, 0.1)
    assert torch.equal(long[:1000], draws(1000, 1.5, 0.1))
    assert torch.equal(long.reshape(100, 1000), draws((100, 1000), 1.5, 0.1))


def test_drawing_advances_the_generator_and_keeps_the_number_of_threads():
    source, threads = generator(0, "test"), torch.get_num_threads()
    parts = [stable.sample(n, 1.5, 0.1, source) for n in (100_000, 7, 70_000)]
    assert torch.equal(torch.cat(parts), draws(170_007, 1.5, 0.1))
    assert torch.get_num_threads() == threads


def test_tau_is_a_scale_and_draws_are_cast_at_the_end():
    assert torch.equal(draws(1000, 1.5, 2.0, dtype=torch.float64), 2 * draws(1000, 1.5, 1.0, dtype=torch.float64))
    assert torch.equal(draws(1000, 1.5, 2.0), draws(1000, 1.5, 2.0, dtype=torch.float64).float())
    assert not draws(1000, 1.5, 0.0).any()


def test_torch_generators_are_supported():
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
def test_arguments_outside_of_their_range_are_refused(alpha, tau):
    with pytest.raises(InputError) as error:
        stable.sample(3, alpha, tau)
    assert error.value.code in ("out-of-range", "wrong-type")


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "thresholds"), [(1.1, (1e3, 1e5)), (1.5, (1e3,)), (1.8, (3e2,))])
def test_the_far_tail_over_1e8_draws(alpha, thresholds):
    source, n, beyond = generator(0, "tail"), 10**8, dict.fromkeys(thresholds, 0)
    for _ in range(100):
        x = stable.sample(n // 100, alpha, 1.0, source).abs()
        assert x.isfinite().all()
        for threshold in thresholds:
            beyond[threshold] += int((x > threshold).sum())
    for threshold, count in beyond.items():
        expected = n * 2 / math.pi * gamma(alpha) * math.sin(math.pi * alpha / 2) * threshold**-alpha
        assert abs(count - expected) < 4.5 * expected**0.5


@pytest.mark.slow
def test_far_cauchy_values_are_distinct():
    source = generator(0, "tail")
    x = torch.cat([(y := stable.sample(10**6, 1.0, 1.0, source).abs())[y > 1e5] for _ in range(100)])
    assert len(x) > 400  # 637 are expected
    assert len(x.unique()) == len(x)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_values(cuda):
    on_cpu = draws(1_000_003, 1.5, 0.1, dtype=torch.float64)
    on_gpu = stable.sample(1_000_003, 1.5, 0.1, generator(0, "test", device=cuda), dtype=torch.float64)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-9, atol=0)


ALPHAS = [0.5, 0.6, 0.8, 1.0, 1.01, 1.3, 1.5, 1.7, 1.9, 1.99]


def fourier(x, alpha):
    """(sf, pdf) from the Fourier integrals on a rotated contour, to 25 digits."""
    with mpmath.workdps(25):
        x, alpha = mpmath.mpf(x), mpmath.mpf(alpha)
        ray = mpmath.expj(min(mpmath.pi, mpmath.pi / (2 * alpha)) / 2)
        points = [0] + [mpmath.mpf(2) ** j / (1 + x) for j in range(-40, 20, 3)]
        wave = lambda s: mpmath.exp(1j * x * s * ray) * mpmath.expm1(-((s * ray) ** alpha))  # noqa: E731
        tail = -mpmath.quad(lambda s: mpmath.im(wave(s) / s), points) / mpmath.pi
        return float(tail), float(mpmath.quad(lambda s: mpmath.re(wave(s) * ray), points) / mpmath.pi)


@pytest.mark.parametrize("alpha", [1.5, *(pytest.param(alpha, marks=pytest.mark.slow) for alpha in (0.6, 1.0, 1.9))])
def test_tail_and_density_against_mpmath(alpha):
    for x in (0.003, 0.9, 4.0, 19.9, 20.1, 100.0):
        tail, density = fourier(x, alpha)
        point = torch.tensor(2.0 * x, dtype=torch.float64)
        assert stable.sf(point, alpha, 2.0).item() == pytest.approx(tail, rel=1e-8)
        assert stable.cdf(point, alpha, 2.0).item() == pytest.approx(1 - tail, rel=1e-12)
        assert stable.pdf(point, alpha, 2.0).item() == pytest.approx(density / 2, rel=1e-8)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("x", [300.0, 1e3, 1e4, 1e6])
def test_the_far_tail_equals_its_series(alpha, x):
    tail = sum(
        (-1) ** (k + 1) * gamma(k * alpha) / math.factorial(k) * math.sin(math.pi * k * alpha / 2) * x ** (-k * alpha)
        for k in range(1, 6)
    )
    assert stable.sf(torch.tensor(x), alpha).item() == pytest.approx(tail / math.pi, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.7, 1.2, 1.6, 1.9])
def test_the_law_against_scipy(alpha):
    x = np.geomspace(0.01, 50, 12)
    torch_x = torch.from_numpy(0.3 * x)
    np.testing.assert_allclose(stable.cdf(torch_x, alpha, 0.3), stats.levy_stable.cdf(x, alpha, 0), rtol=1e-6)
    np.testing.assert_allclose(stable.pdf(torch_x, alpha, 0.3) * 0.3, stats.levy_stable.pdf(x, alpha, 0), rtol=1e-6)


@pytest.mark.parametrize(("alpha", "law"), [(1.0, stats.cauchy()), (2.0, stats.norm(scale=2**0.5))])
def test_cauchy_and_normal_in_closed_form(alpha, law):
    x = np.concatenate([-np.geomspace(1e-3, 30, 50), np.geomspace(1e-3, 30, 50)])
    for function, expected in ((stable.pdf, law.pdf), (stable.cdf, law.cdf), (stable.sf, law.sf)):
        np.testing.assert_allclose(function(torch.from_numpy(x), alpha), expected(x), rtol=1e-9)
    p = np.linspace(0.001, 0.999, 99)
    np.testing.assert_allclose(stable.quantile(torch.from_numpy(p), alpha), law.ppf(p), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [*ALPHAS, 2.0])
def test_the_quantile_is_the_inverse_of_the_distribution_function(alpha):
    x = torch.cat(
        [torch.logspace(-4, 0.6, 40), torch.logspace(0.7, 4, 40) if alpha < 2 else torch.tensor([4.5, 6.0])]
    ).double()
    torch.testing.assert_close(stable.quantile(stable.sf(x, alpha, 3.0), alpha, 3.0), -x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stable.quantile(stable.cdf(x[:40], alpha), alpha), x[:40], rtol=1e-6, atol=1e-12)
    assert stable.quantile(torch.tensor([0.0, 0.5, 1.0]), alpha).tolist() == [-math.inf, 0.0, math.inf]


@pytest.mark.parametrize("alpha", [*ALPHAS, 2.0])
def test_the_score_is_minus_the_slope_of_the_log_density(alpha):
    x = torch.tensor([0.01, 0.2, 1.0, 3.0, 8.0, 11.0, 400.0][: 6 if alpha == 2 else 7], dtype=torch.float64)
    h = 1e-4 * x
    slope = (stable.pdf(x + h, alpha, 0.5).log() - stable.pdf(x - h, alpha, 0.5).log()) / (2 * h)
    torch.testing.assert_close(stable.score(x, alpha, 0.5), -slope, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(stable.score(-x, alpha), -stable.score(x, alpha))
    assert stable.score(torch.tensor(math.inf), 1.5) == 0


@pytest.mark.parametrize("function", [stable.pdf, stable.cdf, stable.sf, stable.score, stable.quantile])
def test_the_law_is_float64_keeps_the_shape_and_refuses_invalid_arguments(function):
    out = function(torch.full((2, 3), 0.25, dtype=torch.float16), 1.5, 1.0)
    assert (out.dtype, out.shape) == (torch.float64, (2, 3))
    for x, alpha, tau in ((0.5, 0.4, 1), (0.5, 2.1, 1), (0.5, 1.5, 0), (0.5, 1.5, -1), (math.nan, 1.5, 1)):
        with pytest.raises(InputError) as error:
            function(torch.tensor(x), alpha, tau)
        assert error.value.code in ("out-of-range", "not-finite")
    with pytest.raises(InputError) as error:
        stable.quantile(torch.tensor([0.5, 1.5]), 1.5)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "p")


@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.5, 1.8, 2.0])
@pytest.mark.parametrize("tau", [1e-6, 0.3, 1e5])
def test_alpha_and_tau_are_estimated(alpha, tau):
    x = draws(10**6, alpha, tau)
    assert stable.estimate(x) == (pytest.approx(alpha, abs=0.02), pytest.approx(tau, rel=0.02))
    mixed = x + 0.2 * tau * generator(0, "signal").normal(10**6).float() + 3 * tau  # a weak signal, and a shift
    assert stable.estimate(mixed) == (pytest.approx(alpha, abs=0.05), pytest.approx(tau, rel=0.05))


@pytest.mark.parametrize(
    "sample", [[], [1.0], [2.0] * 50, [0.0] * 50, [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]], ids=str
)
def test_no_estimate_without_a_sample(sample):
    with pytest.raises(InputError) as error:
        stable.estimate(torch.tensor(sample))
    assert error.value.code == "invalid-sample"


def test_an_estimate_of_a_sparse_sample_is_a_law():
    sparse = torch.zeros(1000)
    sparse[::100] = torch.linspace(-3, 3, 10)  # both quartiles are zero
    alpha, tau = stable.estimate(sparse)
    assert 0.5 <= alpha <= 2
    assert 0 < tau < math.inf


@pytest.mark.gpu
def test_the_law_and_its_estimate_on_a_gpu(cuda):
    x = draws(100_000, 1.5, 0.1)
    for function in (stable.pdf, stable.cdf, stable.sf, stable.score):
        torch.testing.assert_close(function(x.to(cuda), 1.5, 0.1).cpu(), function(x, 1.5, 0.1), rtol=1e-9, atol=0)
    p = torch.linspace(0.01, 0.99, 99).double()
    torch.testing.assert_close(stable.quantile(p.to(cuda), 1.5).cpu(), stable.quantile(p, 1.5))
    assert stable.estimate(x.to(cuda)) == pytest.approx(stable.estimate(x), rel=1e-5)
