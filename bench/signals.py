"""What the basis does to the receivers: MAC, auto MAC, GNC and none on pulses, OFDM and Hadamard codes, the digits.

    python bench/signals.py [--out runs/signals] [--rounds 30] [--seeds 3]

MAC's and GNC's thresholds are searched for each channel with seed 0 on a validation split; then every rule runs with
seeds 1 to 3 on the test split, paired. Finished runs are not repeated. The table goes to standard output as Markdown,
the picture to air-receivers.png in the folder of the runs.
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
    "Eq. (3), twice tau": {"channel": "flat()", "noise.tau": 1},  # an entry's scale on the two before
}
SEARCHED = {
    "MAC": [f"mac(C={C})" for C in (0.5, 1, 2, 4, 8)],
    "GNC": [f"gnc(max_norm={most})" for most in (20, 50, 100, 200, 500, 1000)],
}
GIVEN = {"MAC, C=auto": "mac(C=auto)", "none": "none()"}


def accuracy(experiment: sa.Experiment, root: Path) -> float:
    """The accuracy over the last rounds of an experiment, computed or read from its folder; 0.1 where it diverged."""
    run = sa.run(experiment, root / experiment.id(), resume=True, checkpoint_every=experiment.rounds)
    return run.settled(f"{experiment.evaluate}/accuracy") if run.diverged is None else 0.1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/signals"))
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    base = sa.Experiment(rounds=given.rounds, device="cpu", noise="sas(alpha=1.5, tau=0.5)")

    print("| channel | " + " | ".join([*SEARCHED, *GIVEN]) + " |")
    print("|---" * (1 + len(SEARCHED) + len(GIVEN)) + "|")
    table: dict[str, dict[str, list[float]]] = {}
    for label, settings in CHANNELS.items():
        here = base.with_(**settings)
        rules = {
            name: max(
                tried, key=lambda rule, e=here: accuracy(e.with_(receiver=rule, evaluate="validation"), given.out)
            )
            for name, tried in SEARCHED.items()
        } | GIVEN
        table[label] = {
            name: [100 * accuracy(here.with_(receiver=rule, seed=1 + i), given.out) for i in range(given.seeds)]
            for name, rule in rules.items()
        }
        cells = [
            f"{statistics.mean(found):.1f} +- {statistics.stdev(found) / len(found) ** 0.5:.1f}"
            + (f" ({rules[name].partition('=')[2].rstrip(')')})" if name in SEARCHED else "")
            for name, found in table[label].items()
        ]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
    print(save(drawn(table), given.out / "air-receivers.png"))


def drawn(table: dict[str, dict[str, list[float]]]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(table.values())))
    for i, name in enumerate(names):
        places = [j + (i - (len(names) - 1) / 2) * 0.2 for j in range(len(table))]
        found = [rules[name] for rules in table.values()]
        axes.bar(places, [statistics.mean(values) for values in found], 0.18, label=name, alpha=0.75)
        for place, values in zip(places, found, strict=True):
            axes.plot([place] * len(values), values, ".", color="black", markersize=4)
    axes.set_xticks(range(len(table)), table)
    axes.set(
        ylim=(0, 109), ylabel="test accuracy, %", title="Digits, noise in time of alpha 1.5 and tau 0.5; dots are seeds"
    )
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small", ncols=4, loc="upper center", frameon=False)
    return figure


if __name__ == "__main__":
    main()
