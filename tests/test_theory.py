import math

import numpy as np
import pytest
import torch

from stableair import stable, theory
from stableair.errors import InputError
from stableair.paper import theory_plots
from stableair.paper.theorem import Check, check
from stableair.receivers import blank, cauchy, clip, gnc, mac, none, sign, tanh_clip
from stableair.streams import generator
from stableair.theory import best_threshold, bound, efficacy, fisher, tail_constant, unclipped


def test_the_tail_constant():
    assert tail_constant(1.5) == pytest.approx(0.399, abs=1e-3)
    assert tail_constant(1.0) == pytest.approx(2 / math.pi)
    assert tail_constant(2.0) == pytest.approx(0, abs=1e-12)


def test_exact_p_c_is_the_share_that_mac_leaves_unclipped():
    rng = generator(0, "places").numpy()
    for i in range(20):
        alpha, tau, ratio = rng.uniform(0.8, 2), 10 ** rng.uniform(-2, 1), 10 ** rng.uniform(-0.5, 1.5)
        C, n = ratio * tau, 100_000
        g = stable.sample(n, alpha, tau, generator(i, "xi"))
        share = (mac(C)(g) == g).double().mean().item()
        p = unclipped(C, alpha, tau).value
        assert abs(share - p) < 3 * math.sqrt(p * (1 - p) / n) + 2 / n


def test_the_forms_of_lemma_1():
    printed, corrected, exact = (unclipped(5, 1.5, 0.1, form=form).value for form in theory.FORMS)
    assert printed == pytest.approx(1 - (0.1 / 5) ** 1.5)
    assert corrected == pytest.approx(exact, abs=2e-5), "the leading order is accurate in the far tail"
    assert abs(printed - exact) > 1e-3, "the printed form lacks the tail constant"
    moved = unclipped(5, 1.5, 0.1, G=1.0).value
    assert moved == pytest.approx(unclipped(5 - math.sqrt(2), 1.5, 0.1).value)


def test_a_form_outside_its_range_is_refused():
    value, notes = unclipped(0.05, 1.5, 0.1, form="printed")
    assert value < 0
    assert "not a probability" in notes[0]
    assert unclipped(0.05, 1.5, 0.1, form="exact").notes == ()
    value, notes = unclipped(1.0, 1.5, 0.1, G=1.0)
    assert (value, notes) == (0.0, ("C > sqrt2 G is violated: 1 <= 1.41421",))


@pytest.mark.parametrize(("alpha", "ratio", "law", "leading"), [(2, 0.1, 0.056, "1"), (1.9, 1, 0.519, "0.904218")])
def test_the_corrected_form_is_exact_where_the_leading_order_is_inaccurate(alpha, ratio, law, leading):
    value, (note,) = unclipped(0.1 * ratio, alpha, 0.1, form="corrected")
    assert value == pytest.approx(law, abs=5e-4)
    assert f"the leading order, {leading}, is" in note


def test_the_corrected_form_is_accurate_and_equals_the_leading_order_in_the_tail():
    for alpha in (0.7, 1, 1.3, 1.5, 1.9, 1.99, 2):
        for ratio in (0.01, 0.3, 1, 2, 5, 9, 30, 1000):
            (corrected, notes), exact = unclipped(ratio, alpha, 1, form="corrected"), unclipped(ratio, alpha, 1).value
            assert abs(corrected - exact) <= theory.MAX_RELATIVE_ERROR * (1 - exact) + 1e-12
            if not notes:
                assert corrected == pytest.approx(1 - tail_constant(alpha) * ratio**-alpha, abs=1e-12)
            if ratio >= 9 and alpha < 1.95:
                assert notes == ()


def test_the_exact_form_is_a_lower_bound_on_what_mac_keeps():
    n, C, G, alpha, tau = 200_000, 1.0, 0.4, 1.5, 0.1
    for gap in (0.0, G * math.sqrt(2)):  # distance between the entries of the gradient
        s = torch.zeros(n)
        s[: n // 10] = gap  # the median is that of the other entries
        g = s + stable.sample(n, alpha, tau, generator(3, "xi"))
        kept = (mac(C)(g) == g)[: n // 10].double().mean().item()
        least, most = unclipped(C, alpha, tau, G).value, unclipped(C + math.sqrt(2) * G, alpha, tau).value
        assert least - 0.01 < kept < most + 0.01
        assert kept > least + 0.01, "entries beyond C - sqrt2 G may be unclipped"


def test_theorem_1_term_by_term():
    K, C, alpha, tau, eta, L, G, d, gap = 50, 3.0, 1.5, 0.1, 0.1, 4.0, 1.0, 1000, 7.0
    p = 1 - (tau / C) ** alpha
    printed = 2 * gap / (K * p * (2 - eta * L) * eta)
    printed += eta**2 * d * L / 2 * (p * (C / 2**0.5 - G) ** 2 + (1 - p) * C**2)
    assert bound(K, C, alpha, tau, eta, L, G, d, gap, "printed").value == pytest.approx(printed)
    margin = C - 2**0.5 * G
    p = 1 - 2 * stable.sf(torch.tensor(margin), alpha, tau).item()
    B = p * margin**2 + (1 - p) * C**2
    corrected = 2 * gap / (K * p * (2 - eta * L) * eta) + eta * d * L * B / (p * (2 - eta * L))
    assert bound(K, C, alpha, tau, eta, L, G, d, gap, "corrected").value == pytest.approx(corrected)


def test_violated_conditions_are_reported():
    value, notes = bound(100, 1, 1.5, 0.1, 0.5, 10, 1, 100)
    assert value == math.inf
    assert notes == (
        "C > sqrt2 G is violated: 1 <= 1.41421",
        "eta < 2 / L is violated: 0.5 >= 0.2",
        "there is no bound",
    )
    assert bound(100, 2, 1.5, 0.1, 0.01, 10, 1, 100).notes == ()


@pytest.mark.parametrize(("alpha", "best", "share"), [(1.1, 0.54, 0.90), (1.5, 1.25, 0.96), (1.9, 2.56, 0.99)])
def test_the_best_threshold(alpha, best, share):
    assert best_threshold(alpha) == pytest.approx(best, abs=0.01)
    top = efficacy(clip(best), alpha)
    assert top / fisher(alpha) == pytest.approx(share, abs=0.01)
    assert top > max(efficacy(clip(0.7 * best), alpha), efficacy(clip(1.4 * best), alpha))
    assert best_threshold(2.0) == math.inf


def test_efficacy_of_the_receivers():
    assert fisher(1.0) == pytest.approx(0.5, rel=1e-4)  # Cauchy
    assert fisher(2.0) == pytest.approx(0.5, rel=1e-3)  # N(0, 2)
    assert efficacy(none(), 2.0) == pytest.approx(0.5, rel=1e-3)
    assert efficacy(cauchy(1.0), 1.0) == pytest.approx(fisher(1.0), rel=1e-6), "the score of the noise is the best rule"
    density = stable.pdf(torch.tensor(0.0), 1.5).item()
    assert efficacy(sign(1.0), 1.5) == pytest.approx(4 * density**2, rel=1e-3)
    for rule in (clip(1), mac(1), tanh_clip(1), blank(3), cauchy(2), sign(1)):
        assert 0.3 * fisher(1.5) < efficacy(rule, 1.5) <= fisher(1.5)
    assert efficacy(none(), 1.5) < 0.1 * fisher(1.5)
    assert efficacy(gnc(1.0), 1.5) == pytest.approx(efficacy(none(), 1.5)), "scaling changes nothing"
    assert efficacy(clip(0.2), 1.5, tau=0.1) == pytest.approx(100 * efficacy(clip(2), 1.5))


def test_efficacy_is_the_signal_to_noise_ratio_after_the_rule():
    s, n, alpha = 0.05, 4_000_000, 1.5
    xi = stable.sample(n, alpha, 1.0, generator(0, "xi"), dtype=torch.float64)
    with_signal, without = clip(1.25)(xi + s), clip(1.25)(xi)
    ratio = (with_signal - without).mean().square() / without.square().mean() / s**2
    assert ratio.item() == pytest.approx(efficacy(clip(1.25), alpha), rel=0.02)


def test_theorem_1_against_a_simulation():
    result = check(1.5, 0.03, 1.8, 0.03, rounds=200, repeats=3)
    assert result.measured + 3 * result.error < result.corrected
    assert result.measured - 3 * result.error > result.printed, "the printed bound is violated here"
    quiet = check(1.5, 1e-6, 10.0, 0.1, rounds=50, repeats=2)
    assert quiet.measured < quiet.corrected


def test_the_plots_of_the_theory():
    figure = theory_plots.overview(1.5, 0.1, 1.0, 0.3)
    left, right = figure.axes
    assert len(left.collections) == 3
    curve = right.lines[4]  # alpha = 1.5: a line and a dot each for 1.1, 1.3, then 1.5
    peak = curve.get_xdata()[np.argmax(curve.get_ydata())]
    assert peak == pytest.approx(1.25, rel=0.1)
    shown = [text.get_text().rpartition(" ")[2] for text in left.get_legend().get_texts()]
    low, high = (2 * stable.sf(torch.tensor(1 + end * 0.3 * 2**0.5), 1.5, 0.1).item() for end in (-1, 1))
    assert shown == [f"{p:.3g}" for p in (1 - low, low - high, high)], "the probabilities, since areas show none"
    assert len({str(line._unscaled_dash_pattern) for line in right.lines if len(line.get_xdata()) > 2}) == 5
    axes = theory_plots.checks([Check(1.5, 0.1, 1, 0.1, 2.0, 0.1, 1.0, 4.0)]).axes[0]
    shares = [points.lines[0].get_ydata().item() for points in axes.containers]
    assert (axes.get_yscale(), shares) == ("log", [2.0, 0.5]), "measured / bound"


@pytest.mark.parametrize(
    "call",
    [
        lambda: unclipped(0, 1.5, 0.1), lambda: unclipped(1, 0.1, 0.1), lambda: unclipped(1, 1.5, -0.1),
        lambda: unclipped(1, 1.5, 0.1, G=-1), lambda: unclipped(1, 1.5, 0.1, form="wrong"),
        lambda: bound(0, 1, 1.5, 0.1, 1, 1, 0, 1),
        lambda: bound(1, 1, 1.5, 0.1, 0, 1, 0, 1), lambda: bound(1, 1, 1.5, 0.1, 1, 1, 0, 1, form="exact"),
        lambda: best_threshold(0.4), lambda: efficacy(clip(1), 3), lambda: tail_constant(math.nan),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(call):
    with pytest.raises(InputError):
        call()
