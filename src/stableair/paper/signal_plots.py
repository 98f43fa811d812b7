"""Plots of the waveform channel and of the digital reference."""

import math
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure

from stableair.channels.digital import CODINGS, qsgd
from stableair.channels.fading import rayleigh, unit
from stableair.channels.modulation import Basis, hadamard, ofdm, pulse
from stableair.channels.noise import sas
from stableair.channels.waveform import Waveform
from stableair.streams import generator

BASES: dict[str, Callable[[], Basis]] = {"pulse()": pulse, "ofdm()": ofdm, "hadamard()": hadamard}
ENTRIES = 512


def waveform() -> Figure:
    """Draw the effect on the entries of one impulse, and of stable noise, in time, for each modulation."""
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    rows = figure.subplots(2, 3, sharey="row")
    for top, bottom, (name, make) in zip(*rows, BASES.items(), strict=True):
        basis = make()
        blocks = basis.blocks(ENTRIES)
        impulse = torch.zeros(basis.samples(blocks), dtype=torch.complex128)
        size = 10 * basis.oversampling**0.5  # of the sample with an impulse of size 10 per unit of time
        impulse[blocks // 2 * basis.hop + basis.length // 2] = size * np.exp(0.4j)
        alone = torch.view_as_real(basis.demodulate(impulse)).flatten().numpy()
        air = Waveform(unit(), sas(alpha=1.5, tau=0.1), basis=basis)
        noise = air.draw(1, torch.arange(1), ENTRIES, seed=1, k=0).xi.numpy()
        for axes, values in ((top, alone), (bottom, noise)):
            axes.vlines(np.arange(len(values)), 0, values, linewidth=0.8, color="tab:blue")
            axes.grid(alpha=0.3)
        hit = int((np.abs(alone) > 0.1).sum())
        top.set_title(f"{name}: {hit} of {ENTRIES} entries move by 0.1 or more", fontsize="medium")
        middle, largest = np.median(np.abs(noise)), np.abs(noise).max()
        bottom.set_title(f"median size {middle:.2f}, largest {largest:.1f}", fontsize="medium")
        bottom.set_xlabel("entry")
    rows[0][0].set_ylabel("response to one impulse of size 10")
    rows[1][0].set_ylabel(r"response to noise, $\alpha$ = 1.5, $\tau$ = 0.1")
    return figure


def antennas() -> Figure:
    """Draw the scale of the interference after blind combining, over the number of antennas."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    counts, clients, rounds = [1, 4, 16, 64, 256, 1024], 10, 200
    for alpha, marker in zip((1.0, 1.2, 1.5, 2.0), "os^D", strict=True):
        scales = []
        for count in counts:
            air = Waveform(rayleigh(power=1), sas(alpha, 1.0), antennas=count)
            scale = [air.combine(clients, torch.arange(clients), 0, k)[1] for k in range(rounds)]
            scales.append(math.exp(np.mean(np.log(scale))) / math.sqrt(clients))
        style = {
            "markersize": 10 - 3 * (alpha - 1),
            "fillstyle": "none",
        }  # hollow marks of several sizes: at M = 1 they coincide
        (line,) = axes.loglog(counts, scales, marker, **style, label=f"alpha = {alpha:g}")
        mean = math.gamma(1 + alpha / 2) ** (1 / alpha)  # (E |H|^alpha)^(1 / alpha) of a complex normal H of power 1
        axes.loglog(counts, [mean * count ** (1 / alpha - 1) for count in counts], "--", lw=1, color=line.get_color())
    axes.set(xlabel="antennas M", ylabel=r"scale of the interference, in $\sqrt{N} \tau / N$")
    axes.set_title(
        rf"Blind combining; marks: geometric mean of {rounds} rounds"
        "\n"
        r"dashed: $\Gamma(1 + \alpha/2)^{1/\alpha} M^{1/\alpha - 1}$, the law for many antennas",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def digital() -> Figure:
    """Draw the error of QSGD over the bits per entry, for both codings, and its bound."""
    d, levels = 10_000, [1, 3, 7, 15, 31, 63, 127]
    u = generator(0, "payload").normal(d).float()
    errors: list[float] = []
    bits: dict[str, list[float]] = {coding: [] for coding in CODINGS}
    for s in levels:
        sent = {coding: qsgd(s, coding).quantize(u, generator(0, "quantize", 0)) for coding in CODINGS}
        for coding, message in sent.items():
            bits[coding].append(message.bits / d)
        off = sent["plain"].levels.double() * sent["plain"].scale - u
        errors.append((off.norm() / u.double().norm()).item() ** 2)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for coding, marker in zip(CODINGS, "os", strict=True):
        axes.semilogy(bits[coding], errors, f"{marker}-", label=f"measured, coding={coding}")
    bound = [min(d / s**2, math.sqrt(d) / s) for s in levels]
    axes.semilogy(bits["plain"], bound, "--", color="black", linewidth=1, label="bound on the error, coding=plain")
    for x, y, s in zip(bits["plain"], errors, levels, strict=True):
        axes.annotate(f"s = {s}", (x, y), xytext=(-8, -8), textcoords="offset points", ha="right", fontsize="small")
    axes.set(
        xlim=(0.5, 9),
        xlabel="bits per entry",
        ylabel=r"$\|Q(u) - u\|^2 / \|u\|^2$",
        title=f"QSGD on {d:,} normal entries",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"waveform": waveform, "antennas": antennas, "digital": digital}
