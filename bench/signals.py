"""Effect of the modulation on the receivers MAC, mac(C=auto), GNC and none: pulses, OFDM and Hadamard codes; digits.

    python bench/signals.py [--out runs/signals] [--rounds 30] [--seeds 3]

The thresholds of MAC and GNC are searched for each channel with seed 0 on a validation split; then every receiver runs
with seeds 1 to 3 on the test split, paired. Finished runs are not repeated. The program prints the table as Markdown
and writes the picture to air-receivers.png in the folder of the runs.
"""

import argparse
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import stableair as sa
from stableair.results.plot import save

CHANNELS = {
    "Eq. (3)": {"channel": "flat()"},
    "pulse": {"channel": "waveform(basis=pulse)"},
    "ofdm": {"channel": "waveform(basis=ofdm)"},
    "hadamard": {"channel": "waveform(basis=hadamard)"},
    "Eq. (3), twice tau": {"channel": "flat()", "noise.tau": 1},  # the scale of an entry with ofdm and hadamard
}
SEARCHED = {
    "MAC": [f"mac(C={C})" for C in (0.5, 1, 2, 4, 8)],
    "GNC": [f"gnc(max_norm={most})" for most in (20, 50, 100, 200, 500, 1000)],
}
FIXED = {"MAC, C=auto": "mac(C=auto)", "none": "none()"}


def accuracy(experiment: sa.Experiment, root: Path) -> float:
    """Return the settled accuracy of an experiment, computed or read from its folder; 0.1 if it diverged."""
    run = sa.run(experiment, root / experiment.id(), resume=True, checkpoint_every=experiment.rounds)
    return run.settled(f"{experiment.evaluate}/accuracy") if run.diverged is None else 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/signals"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    base = sa.Experiment(rounds=options.rounds, device="cpu", noise="sas(alpha=1.5, tau=0.5)")

    print("| channel | " + " | ".join([*SEARCHED, *FIXED]) + " |")
    print("|---" * (1 + len(SEARCHED) + len(FIXED)) + "|")
    table: dict[str, dict[str, list[float]]] = {}
    for label, settings in CHANNELS.items():
        experiment = base.with_(**settings)
        rules = {
            name: max(
                specs,
                key=lambda rule, e=experiment: accuracy(e.with_(receiver=rule, evaluate="validation"), options.out),
            )
            for name, specs in SEARCHED.items()
        } | FIXED
        table[label] = {
            name: [
                100 * accuracy(experiment.with_(receiver=rule, seed=1 + i), options.out) for i in range(options.seeds)
            ]
            for name, rule in rules.items()
        }
        cells = [
            f"{statistics.mean(values):.1f} +- {statistics.stdev(values) / len(values) ** 0.5:.1f}"
            + (f" ({rules[name].partition('=')[2].rstrip(')')})" if name in SEARCHED else "")
            for name, values in table[label].items()
        ]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
    print(save(draw(table), options.out / "air-receivers.png", force=True))


def draw(table: dict[str, dict[str, list[float]]]):
    """Plot the accuracies as bars, with one dot per seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(table.values())))
    for i, name in enumerate(names):
        positions = [j + (i - (len(names) - 1) / 2) * 0.2 for j in range(len(table))]
        accuracies = [rules[name] for rules in table.values()]
        axes.bar(positions, [statistics.mean(values) for values in accuracies], 0.18, label=name, alpha=0.75)
        for position, values in zip(positions, accuracies, strict=True):
            axes.plot([position] * len(values), values, ".", color="black", markersize=4)
    axes.set_xticks(range(len(table)), table)
    axes.set(
        ylim=(0, 109),
        ylabel="test accuracy, %",
        title="Digits, time-domain noise with alpha = 1.5, tau = 0.5; one dot per seed",
    )
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small", ncols=4, loc="upper center", frameon=False)
    return figure


if __name__ == "__main__":
    main()
