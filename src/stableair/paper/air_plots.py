"""Plots of the components that relax an assumption of Eq. (3): power, interference and fading."""

import math
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import exp1

from stableair import stable
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels.fading import amplitudes_along, rayleigh
from stableair.channels.fading import ar as ar_fading
from stableair.channels.fading import block as block_fading
from stableair.channels.noise import bursts as bursts_noise
from stableair.channels.noise import field as field_noise
from stableair.channels.noise import field_law
from stableair.channels.noise import markov as markov_noise
from stableair.channels.power import inversion as inversion_power
from stableair.contracts import FadingLaw
from stableair.experiment import Experiment
from stableair.streams import generator

SEED = 0


def limit() -> Figure:
    """Draw the SNR over the rounds, without and with a power limit, for both payloads."""
    figure, panels = _panels(2, "communication round", "SNR, dB")
    base = Experiment(clients=10, rounds=10, local_epochs=1, channel="flat(noise_on=sum)", receiver="mac(C=auto)")
    for axes, power in zip(panels, ("none()", "limit(P=1)"), strict=True):
        for payload, style in (("gradient", "-"), ("delta", "--")):
            sim = build(base.with_(payload=payload, power=power, device="cpu"))
            ratio = [round.metrics["channel/snr_db"] for round in simulate(sim, sim.start, base.rounds)]
            axes.plot(
                _round_numbers(base.rounds), np.array(ratio, float), style, linewidth=2, label=f"payload={payload}"
            )
        axes.set_title(f"power={power}")
        axes.legend(fontsize="small")
    panels[1].sharey(panels[0])
    figure.suptitle(f"{base.data}, {base.clients} clients, {base.noise} on the sum", fontsize="medium")
    return figure


def inversion(draws: int = 40_000) -> Figure:
    """Draw cost and benefit of the inversion threshold, and the mean gain under imperfect channel knowledge."""
    figure, (left, right) = _panels(2)
    t = np.geomspace(0.003, 3, 200)
    left.plot(t, np.exp(-t), label="share of the clients that send, exp(-t)")
    left.plot(t, exp1(t), label="power to invert a channel, E$_1$(t)")
    left.plot(t, np.sqrt(exp1(t)) / np.exp(-t), "--", label="noise in the mean, sqrt(E$_1$(t)) / exp(-t)")
    left.set(xscale="log", yscale="log", xlabel="threshold t", title="Rayleigh fading of power 1, P = 1")
    left.legend(fontsize="small")
    phases = np.linspace(0.01, math.pi, 100)
    for law, factor in (("uniform", np.sin(phases) / phases), ("gaussian", np.exp(-(phases**2) / 2))):
        for csi, colour in ((1.0, "tab:blue"), (0.7, "tab:orange")):
            style, marker = ("-", "o") if law == "uniform" else ("--", "s")
            right.plot(phases, csi * factor, style, color=colour, label=f"csi={csi:g}, {law}")
            right.plot(phases[::14], [_mean_gain(csi, a, law, draws) for a in phases[::14]], marker, color=colour)
    right.set(xlabel="phase error, radians", ylabel="mean gain", title=f"lines: formula; marks: {draws:,} clients")
    right.legend(fontsize="small")
    return figure


def _mean_gain(csi: float, phase: float, law: str, draws: int) -> float:
    fading, clients = rayleigh(power=1), torch.arange(draws)
    rule = inversion_power(1, 0.2, csi, float(phase), law).for_fading(fading)  # type: ignore[arg-type]
    sent = rule.transmissions(fading(draws, generator(SEED, "fading", 0)), clients, SEED, 0)
    return float(np.mean([one.gain for one in sent.values()]).real)


def bursts(entries: int = 3000, alpha: float = 1.2, tau: float = 0.1) -> Figure:
    """Draw bursts of three lengths; the entries have the same law."""
    figure, panels = _panels(3, "entry", r"$|\xi|$", tall=True)
    for axes, length in zip(panels, (1, 30, 300), strict=True):
        xi = bursts_noise(alpha, tau, length)(entries, generator(SEED, "noise", 0))
        axes.plot(xi.abs().numpy(), ".", markersize=2)
        axes.set(yscale="log", ylim=(1e-3, 1e2))
        axes.set_title(f"bursts(alpha={alpha:g}, tau={tau:g}, length={length})", fontsize="medium")
    return figure


def markov(rounds: int = 150, p: float = 0.1, q: float = 0.3) -> Figure:
    """Draw the strength of the interference in each round."""
    figure, (axes,) = _panels(1, "communication round", r"median of $|\xi|$ in the round")
    draw = markov_noise(p=p, q=q)
    size = np.array([draw(2000, generator(SEED, "noise", k)).abs().median().item() for k in range(rounds)])
    bad = size > math.sqrt(size.min() * size.max())
    axes.plot(_round_numbers(rounds), size, color="0.7", linewidth=1)
    for which, colour, name in ((~bad, "tab:green", "good: sas(tau=0.1)"), (bad, "tab:red", "bad: sas(tau=3)")):
        axes.plot(_round_numbers(rounds)[which], size[which], "o", markersize=4, color=colour, label=name)
    shares = f"{bad.mean():.0%} of the rounds are bad, {p / (p + q):.0%} expected"
    axes.set(yscale="log", title=f"markov(p={p:g}, q={q:g}): {shares}")
    axes.legend(fontsize="small")
    return figure


def field(density: float = 0.1, draws: int = 300_000) -> Figure:
    """Draw a Poisson field of interferers, and the tail of the interference with that of the stable law."""
    figure, (left, right) = _panels(2)
    rng = generator(SEED, "picture", 0).numpy()
    x, y = rng.uniform(-15, 15, (2, rng.poisson(density * 30**2)))
    power = np.hypot(x, y) ** -4
    left.scatter(x, y, 4 + 60 * np.sqrt(power / power.max()), color="tab:red", label="interferers")
    left.plot(0, 0, "k^", markersize=9, label="server")
    left.set(aspect="equal", xlabel="east of the server", ylabel="north of the server")
    left.set_title(f"density={density:g}; size: amplitude here, exponent 4")
    left.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)  # outside the axes
    for exponent in (2.5, 4, 8):
        alpha, tau = field_law(density, exponent)
        xi = field_noise(density, exponent)(draws, generator(SEED, "noise", 0)).abs().sort().values.double()
        above = 1 - (np.arange(draws) + 0.5) / draws
        some = np.unique(draws - np.geomspace(1, draws, 60).astype(int))
        (line,) = right.plot(xi[some], above[some], "o", markersize=3.5, label=f"exponent={exponent:g}")
        grid = np.geomspace(float(xi[some[0] + 1]), float(xi[-1]), 200)
        law = 2 * stable.sf(torch.from_numpy(grid), alpha, tau)
        right.plot(grid, law, color=line.get_color(), linewidth=1, label=rf"SaS({alpha:.2g}, {tau:.2g})")
    right.set(xscale="log", yscale="log", xlabel="x", ylabel=r"$P(|\xi| > x)$")
    right.set_title(f"marks: {draws:,} entries; lines: the law")
    right.set_xlim(left=1e-2)
    right.legend(fontsize="small", loc="upper right")
    return figure


def block(rounds: int = 30, d: int = 200) -> Figure:
    """Draw the amplitude of one client over rounds and entries."""
    figure, panels = _panels(2, "entry", "communication round")
    for axes, entries in zip(panels, (None, 25), strict=True):
        law = block_fading(rounds=5, entries=entries)
        assert isinstance(law, FadingLaw)
        rows = []
        for k in range(rounds):
            first = law(1, generator(SEED, "fading", k)).item()
            rows.append(amplitudes_along(law, first, d, generator(SEED, "fading", k, 0)))
        around = -0.5, d - 0.5, rounds + 0.5, 0.5
        image = axes.imshow(torch.stack(rows), extent=around, aspect="auto", interpolation="nearest", vmin=0, vmax=2.5)
        axes.set_title("block(rounds=5)" if entries is None else f"block(rounds=5, entries={entries})")
        axes.grid(visible=False)
    figure.colorbar(image, ax=panels, label="amplitude h of client 0")
    return figure


def ar(rounds: int = 150) -> Figure:
    """Draw the amplitude of one client over the rounds, for three correlations."""
    figure, panels = _panels(3, "communication round", "h", tall=True)
    for axes, a in zip(panels, (0.0, 0.9, 0.99), strict=True):
        h = [ar_fading(a)(1, generator(SEED, "fading", k)).item() for k in range(rounds)]
        axes.plot(_round_numbers(rounds), h, linewidth=1.5)
        axes.set_title(f"ar(a={a:g})", fontsize="medium")
        axes.set_ylim(0, 3.6)
    return figure


def _round_numbers(rounds: int) -> np.ndarray:
    """Return the round numbers of an axis, which start at 1."""
    return np.arange(1, rounds + 1)


def _panels(number: int, xlabel: str = "", ylabel: str = "", tall: bool = False) -> tuple[Figure, list[Axes]]:
    """Create a figure with `number` panels: side by side, or with `tall` one above the other."""
    size, shape = ((8, 1.9 * number), (number, 1)) if tall else ((5.2 * max(number, 1.5), 4.0), (1, number))
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(*shape, squeeze=False).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set(ylabel=ylabel)
    for axes in panels[-1:] if tall else panels:
        axes.set(xlabel=xlabel)
    return figure, panels


PICTURES: dict[str, Callable[[], Figure]] = {  # by the name of the component
    "limit": limit,
    "inversion": inversion,
    "bursts": bursts,
    "field": field,
    "markov": markov,
    "block": block,
    "ar": ar,
}
