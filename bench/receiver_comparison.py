"""Search the parameter of MAC and of similar receivers over three channels, and write the plan of a comparison.

    python bench/receiver_comparison.py [--out runs/receiver-search] > bench/receiver-comparison.toml
    stableair compare bench/receiver-comparison.toml --out runs/receivers

Every rule has the same budget: six values, 15 rounds each, with seed 10 on a validation split. The comparison then runs
30 rounds on the test split with the seeds 0 to 4.
"""

import argparse
import sys
from pathlib import Path

import stableair as sa

CHANNELS = "sas(alpha=1.5, tau=0.3)", "sas(alpha=1.1, tau=1)", "gaussian(std=1)"
RULES = {  # the searched parameter and its range, by receiver
    "mac": ("C", "0.1:30:log"), "clip": ("C", "0.1:30:log"), "tanh_clip": ("C", "0.1:30:log"),
    "blank": ("C", "0.1:30:log"), "cauchy": ("K", "0.1:30:log"), "quantile_clip": ("q", "0.5:0.99"),
    "gnc": ("max_norm", "1:1000:log"), "sign": ("step", "0.01:3:log"),
}  # fmt: skip
COMMON = {"data": "digits", "model": "mlp(width=50)", "rounds": 30, "device": "cpu"}


def searched(rule: str, noise: str, folder: Path) -> str:
    """Return the spec of a receiver with the best value of its parameter."""
    parameter, space = RULES[rule]
    low = space.partition(":")[0]
    base = sa.Experiment(**COMMON | {"rounds": 15}, noise=noise, receiver=f"{rule}({parameter}={low})", seed=10)
    return sa.search(base, {f"receiver.{parameter}": space}, folder / base.name, trials=6).best.receiver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/receiver-search"), help="folder of the searches")
    options = parser.parse_args()
    lines = [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in COMMON.items()]
    for noise in CHANNELS:
        receivers = []
        for rule in RULES:
            receivers.append(searched(rule, noise, options.out))
            print(f"{noise}: {receivers[-1]}", file=sys.stderr, flush=True)
        listed = "".join(f'    "{receiver}",\n' for receiver in [*receivers, "none()"])
        lines.append(f'\n[[runs]]\nnoise = "{noise}"\nreceiver = [\n{listed}]')
    print("\n".join(lines))


if __name__ == "__main__":
    main()
