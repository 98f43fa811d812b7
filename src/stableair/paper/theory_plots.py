"""Plots of the theory: the steps of MAC, the clipping interval, the efficacy curves, and Theorem 1."""

import math

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stableair import stable, theory
from stableair.builder import build
from stableair.experiment import Experiment
from stableair.paper.theorem import Check
from stableair.receivers import clip, mac, median
from stableair.results.styles import LINES


def overview(alpha: float, tau: float, C: float, G: float) -> Figure:
    """Draw the clipping decision interval and the efficacy of clipping, side by side."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    interval(left, alpha, tau, C, G)
    efficacies(right, alpha, C / tau)
    return figure


def decision() -> Figure:
    """Draw the interval of Appendix B at the paper's alpha and tau; C and G are this project's choices."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    interval(figure.subplots(), alpha=1.5, tau=0.1, C=1.0, G=0.3)
    return figure


def interval(axes: Axes, alpha: float, tau: float, C: float, G: float) -> None:
    """Draw the interval of Appendix B: |xi| <= C - sqrt2 G keeps an entry, and |xi| > C + sqrt2 G clips it."""
    width = math.sqrt(2) * G
    low, high = max(C - width, 0), C + width
    x = np.linspace(0, 1.35 * high, 600)
    density = 2 * stable.pdf(torch.from_numpy(x), alpha, tau).numpy()
    axes.plot(x, density, color=rcParams["text.color"], linewidth=1.5)
    beyond = [1.0, *(2 * stable.sf(torch.tensor([low, high], dtype=torch.float64), alpha, tau)).tolist(), 0.0]
    regions = [
        (0, low, "tab:green", "", r"kept: $|\xi| \leq C - \sqrt{2}\,G$"),
        (low, high, "tab:orange", "///", "depends on the gradient; counted as clipped"),
        (high, x[-1], "tab:red", "xxx", r"clipped: $|\xi| > C + \sqrt{2}\,G$"),
    ]
    for (start, stop, colour, hatch, text), more, less in zip(regions, beyond, beyond[1:], strict=False):
        if stop > start:
            inside = (x >= start) & (x <= stop)
            axes.fill_between(
                x[inside], density[inside], 1e-12, facecolor=colour, alpha=0.35, linewidth=0, hatch=hatch,
                edgecolor=rcParams["text.color"], label=f"{text}: probability {more - less:.3g}",
            )  # fmt: skip
    _mark(axes, C)
    axes.set(yscale="log", xlim=(0, x[-1]), ylim=(density.min() / 2, density.max() * 2))
    axes.set(xlabel=r"$|\xi|$", ylabel="density", title=f"Clipping decision interval, alpha = {alpha:g}, tau = {tau:g}")
    axes.legend(fontsize="small", loc="upper right", framealpha=1)


def efficacies(axes: Axes, alpha: float, ratio: float) -> None:
    """Draw the efficacy of clipping over C / tau as a share of the Fisher information; mark the best C."""
    grid = np.geomspace(0.05, 50, 80)
    for a, style in zip(sorted({1.1, 1.3, 1.5, 1.7, 1.9, alpha}), LINES, strict=False):
        share = [theory.efficacy(clip(C), a) / theory.fisher(a) for C in grid]
        (line,) = axes.plot(grid, share, linestyle=style, label=f"alpha = {a:g}", linewidth=2.4 if a == alpha else 1.3)
        best = theory.best_threshold(a)
        if math.isfinite(best):
            axes.plot(
                best, theory.efficacy(clip(best), a) / theory.fisher(a), "o", color=line.get_color(), markersize=5
            )
    _mark(axes, ratio)
    axes.set(xscale="log", ylim=(0, 1.03), xlabel=r"$C / \tau$", ylabel="efficacy, share of the Fisher information")
    axes.set_title("Efficacy of clipping for a weak signal")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower center")


def _mark(axes: Axes, C: float) -> None:
    axes.axvline(C, color=rcParams["text.color"], linestyle="--", linewidth=1)
    axes.annotate("C", (C, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points")


def checks(rows: list[Check]) -> Figure:
    """Draw the measured gradient norm as a share of both bounds of Theorem 1; a bound holds if the share is below 1."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    x = np.arange(len(rows))
    for form, marker, colour in (("printed", "v", "tab:red"), ("corrected", "o", "tab:green")):
        bounds = np.array([getattr(row, form) for row in rows])
        shares, errors = (np.array([getattr(row, column) for row in rows]) / bounds for column in ("measured", "error"))
        name = f"measured / bound {'as printed' if form == 'printed' else form}"
        axes.errorbar(x, shares, 2 * errors, fmt=marker, color=colour, markersize=8, capsize=3, label=name)
    axes.axhline(1, color=rcParams["text.color"], linestyle="--", linewidth=1)
    axes.annotate("above: the bound is violated", (0.01, 1), xycoords=("axes fraction", "data"), xytext=(0, 4),
                  textcoords="offset points", fontsize="small")  # fmt: skip
    names = [f"$\\alpha$={r.alpha:g}\n$\\tau$={r.tau:g}\nC={r.C:g}\n$\\eta$={r.eta:g}" for r in rows]
    axes.set_xticks(x, names, fontsize="small")
    text = r"mean of $\|\nabla f(w_k)\|^2$, measured / bound"
    axes.set(yscale="log", ylabel=text, title="Theorem 1 on pseudo-Huber losses, L = G = 1")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def steps(C: float = 1.0, entries: int = 60) -> Figure:
    """Draw Fig. 2: the three steps of MAC on the output layer's gradient, in round 0 of 50 clients on digits."""
    experiment = Experiment(noise="sas(alpha=1.5, tau=0.3)", device="cpu")
    sim = build(experiment)
    clients = sim.participants(0)
    draw = sim.channel.draw(sim.n, clients, len(sim.start.model.w), sim.seed, 0, "cpu")
    received = sim.channel.superpose(sim.train(sim.start.model, 0, clients), draw)
    g, clean = (sim.layout.split(v)[-2].double().flatten() for v in (received.g, received.clean))
    first = max(0, min(int((g - median(g)).abs().argmax()) - entries // 2, len(g) - entries))
    shown = slice(first, first + entries)  # centred on the largest impulse
    m = median(g)
    centred, clipped, recovered = g - m, clip(C)(g - m), mac(C)(g)

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = r"1. centralise: $g - \mathrm{med}(g)$", r"2. clip to $[-C, C]$", r"3. recover: $+\,\mathrm{med}(g)$"
    x = np.arange(first, first + entries)
    for axes, title, values in zip(panels, titles, (centred, clipped, recovered), strict=True):
        heights = values[shown].numpy()
        colours = np.where(np.abs(centred[shown].numpy()) > C, "tab:red", "tab:blue")
        axes.vlines(x, 0, heights, color=colours, linewidth=1.2)
        axes.scatter(x, heights, 9, color=colours, zorder=3)
        centre = float(m) if axes is panels[2] else 0.0
        for bound in (centre - C, centre + C):
            axes.axhline(bound, color=rcParams["text.color"], linestyle="--", linewidth=1)
        axes.axhline(0, color=rcParams["text.color"], linewidth=0.6)
        axes.set(title=title, xlabel="entry of the output layer's weights")
        axes.grid(alpha=0.3)
    panels[2].plot(x, clean[shown].numpy(), color="tab:green", linewidth=1.2, label="mean of the clients' gradients")
    for axes in panels[1:]:
        axes.set_ylim(-1.7 * C, 1.7 * C)
    panels[0].set_ylabel("value")
    panels[0].plot([], [], "o-", color="tab:red", markersize=4, label=f"beyond C = {C:g}")
    panels[0].legend(fontsize="small", loc="best")
    panels[2].legend(fontsize="small", loc="lower right")
    figure.suptitle(f"MAC on a received gradient: {experiment.data}, {experiment.noise}, median {m.item():.2g}")
    return figure
