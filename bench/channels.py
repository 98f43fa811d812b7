"""Time and peak memory of one round over every channel: 50 clients with 11.17 M entries each.

    python bench/channels.py [--device cuda] [--clients 50] [--entries 11173962] [--only waveform]

The payloads are produced client by client, as by a trainer; their production is not timed. Each channel is first
compared with Eq. (3) on a short vector; then the draw and the superposition of one round are timed. Memory is the peak
of the process or the GPU above its level before the round, and includes the payload of one client.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from stableair.channels.registries import channel, fading, noise
from stableair.contracts import Upload
from stableair.streams import generator

ANALOG = {
    "flat()": True,  # whether it equals Eq. (3) up to rounding
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


def build_channel(spec: str):
    """Build a channel; analog ones have Rayleigh fading and stable noise."""
    if spec in DIGITAL:
        return channel.one(spec)()()
    return channel.one(spec)()(fading=fading.one("rayleigh()")(), noise=noise.one("sas(alpha=1.5, tau=0.1)")())


class Clients:
    """Uploads of one client each, derived from one vector; `seconds` is the time to produce them."""

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


def peak(device: torch.device, reset: bool = False) -> float:
    """Return the peak memory in GiB since the last reset."""
    if device.type == "cuda":
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**30
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def compare(spec: str, device: torch.device) -> None:
    """Compare a channel with Eq. (3) on 100,001 entries of 5 clients."""
    indices, clients, air = torch.arange(5), Clients(5, 100_001, device), build_channel(spec)
    draw = air.draw(5, indices, 100_001, 0, 0, device)
    h = fading.one("unit()" if spec in DIGITAL else "rayleigh()")()(5, generator(0, "fading", 0)).to(device)
    exact = sum(h[i] * upload.update[0].double() for i, upload in enumerate(clients)) / 5
    received = air.superpose(clients, draw)
    torch.testing.assert_close(received.g.double(), exact + received.noise, rtol=1e-5, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--entries", type=int, default=11_173_962)
    parser.add_argument("--only", default="", help="only channels whose spec contains this text")
    options = parser.parse_args()
    device, d = options.device, options.entries
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {options.clients} clients, {d:,} entries\n")
    print("| channel | draw, s | superposition, s | memory, GiB | complex uses |")
    print("|---|---|---|---|---|")
    for spec, exact in (ANALOG | DIGITAL).items():
        if options.only not in spec:
            continue
        if exact:
            compare(spec, device)
        air, clients = build_channel(spec), Clients(options.clients, d, device)
        air.superpose([], air.draw(options.clients, torch.arange(0), 1000, 0, 0, device))  # warm-up
        before = peak(device, reset=True) if device.type == "cpu" else torch.cuda.memory_allocated() / 2**30
        peak(device, reset=True)
        start = now(device)
        draw = air.draw(options.clients, torch.arange(options.clients), d, 0, 0, device)
        drawn = now(device)
        received = air.superpose(clients, draw)
        done = now(device) - clients.seconds
        seconds = f"{drawn - start:.2f} | {done - drawn:.2f}"
        print(f"| `{spec}` | {seconds} | {peak(device) - before:.2f} | {received.resources.symbols:,.0f} |")
        del draw, received, clients


if __name__ == "__main__":
    main()
