"""One round on the air: seconds and peak memory of every channel, 50 clients with 11.17 M entries each.

    python bench/channels.py [--device cuda] [--clients 50] [--entries 11173962] [--only waveform]

The payloads come client by client, as from a trainer; making them is not timed. First each channel is compared with
Eq. (3) on a short vector, then one round is timed: the draw, and the superposition. Memory is what the process, or
the GPU, holds at most beyond what it held before: one client's payload is part of that.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from stableair.channels.kinds import channel, fading, noise
from stableair.contracts import Upload
from stableair.streams import generator

ANALOG = {
    "flat()": True,  # whether it is Eq. (3) to rounding
    "waveform(basis=pulse)": True,
    "waveform(basis=ofdm)": True,
    "waveform(basis=hadamard)": True,
    "waveform(basis='ofdm(taps=4)', timing=8, cfo=1e-7, phase=0.3)": False,
    "waveform(basis=ofdm, antennas=64)": False,
}
DIGITAL = {
    "digital()": True,
    "digital(quantize='qsgd(s=15)')": False,
    "digital(quantize='qsgd(s=15)', aggregate=median)": False,
    "digital(quantize='qsgd(s=15)', aggregate='krum(f=5)')": False,
}


def made(spec: str):
    quiet = spec in DIGITAL
    parts = ("unit()", "none()") if quiet else ("rayleigh()", "sas(alpha=1.5, tau=0.1)")
    return channel.one(spec)()(fading=fading.one(parts[0])(), noise=noise.one(parts[1])())


class Clients:
    """Uploads of one client each, all made from one vector; `seconds` is what making them took."""

    def __init__(self, n: int, d: int, device: torch.device):
        self.n, self.seconds, self.device = n, 0.0, device
        self.base = generator(0, "payload", device=device).normal(d).float()

    def __iter__(self) -> Iterator[Upload]:
        for client in range(self.n):
            start = now(self.device)
            update = self.base.roll(client)[None]
            self.seconds += now(self.device) - start
            yield Upload(torch.tensor([client]), update, update[:, :0], update[:, 0])
            del update


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: torch.device, anew: bool = False) -> float:
    """GiB in use at most since it was last begun anew."""
    if device.type == "cuda":
        if anew:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**30
    if anew:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the highest water mark starts anew
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def compare(spec: str, device: torch.device) -> None:
    """Eq. (3) on 100,001 entries of 5 clients."""
    who, clients, link = torch.arange(5), Clients(5, 100_001, device), made(spec)
    fade = link.draw(5, who, 100_001, 0, 0, device)
    h = fading.one("unit()" if spec in DIGITAL else "rayleigh()")()(5, generator(0, "fading", 0)).to(device)
    exact = sum(h[i] * upload.update[0].double() for i, upload in enumerate(clients)) / 5
    got = link.superpose(clients, fade)
    torch.testing.assert_close(got.g.double(), exact + got.noise, rtol=1e-5, atol=1e-5)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--entries", type=int, default=11_173_962)
    options.add_argument("--only", default="", help="the channels whose spec contains this")
    given = options.parse_args()
    device, d = given.device, given.entries
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {given.clients} clients, {d:,} entries\n")
    print("| channel | draw, s | superposition, s | memory, GiB | complex uses |")
    print("|---|---|---|---|---|")
    for spec, exact in (ANALOG | DIGITAL).items():
        if given.only not in spec:
            continue
        if exact:
            compare(spec, device)
        link, clients = made(spec), Clients(given.clients, d, device)
        link.superpose([], link.draw(2, torch.arange(0), 1000, 0, 0, device))  # warm
        before = peak(device, anew=True) if device.type == "cpu" else torch.cuda.memory_allocated() / 2**30
        peak(device, anew=True)
        start = now(device)
        fade = link.draw(given.clients, torch.arange(given.clients), d, 0, 0, device)
        drawn = now(device)
        got = link.superpose(clients, fade)
        done = now(device) - clients.seconds
        print(
            f"| `{spec}` | {drawn - start:.2f} | {done - drawn:.2f} | {peak(device) - before:.2f} | {got.uses:,.0f} |"
        )
        del fade, got, clients


if __name__ == "__main__":
    main()
