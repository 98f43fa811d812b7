"""The script that tests/test_distributed.py starts with torchrun: experiments by name, and digests of their runs."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import stableair as sa
from stableair.channels.registries import channel
from stableair.memory import tensors

RANK = int(os.environ.get("RANK", 0))  # of this process
TINY = sa.Experiment(
    data="synthetic(samples=70, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=7, rounds=4, device="cpu"
)


def normed():
    """A model with norm buffers."""
    return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, classes))


def varying_participation():
    """0, 1, 4 and 7 clients in rounds 0 to 3."""
    return lambda n, source: torch.arange((0, 1, 4, 7)[source.round])


def killed_rank():
    """All clients. Rank 1 is killed in round 2 if torchrun has restarted the ranks KILL_AFTER_RESTARTS times."""

    def draw(n, source):
        if (
            source.round == 2
            and RANK == 1
            and os.environ.get("KILL_AFTER_RESTARTS") == os.environ["TORCHELASTIC_RESTART_COUNT"]
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.arange(n)

    return draw


def whole():
    """A custom channel that needs whole payloads."""

    class Whole:
        def __init__(self, inner):
            self.draw, self.superpose = inner.draw, inner.superpose

    return lambda **parts: Whole(channel.one("flat()")()(**parts))


def not_built():
    """A model that only rank 0 can build."""

    def make(shape, classes):
        if RANK:
            raise ValueError("this rank has no such model")
        return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))

    return make


def out_of_memory():
    """A model for which only rank 0 has enough memory."""

    class OutOfMemory(nn.Linear):
        def forward(self, x):
            if RANK and torch.is_grad_enabled():
                raise MemoryError("not enough memory")
            return super().forward(x.flatten(1))

    return lambda shape, classes: OutOfMemory(4, classes)


def overflowing():
    """A model that overflows on every rank except rank 0."""

    class Overflowing(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.linear = nn.Linear(4, classes)

        def forward(self, x):
            return self.linear(x.flatten(1)) * (1 if RANK == 0 else float("nan"))

    return lambda shape, classes: Overflowing(classes)


COMPONENTS = {
    sa.model: (normed, overflowing, out_of_memory, not_built),
    sa.participation: (varying_participation, killed_rank),
    channel: (whole,),
}


def experiments():
    """Register the components; return the experiments by name."""
    for register, factories in COMPONENTS.items():
        for factory in factories:
            register(factory.__name__)(factory)
    return {
        "plain": TINY.with_(engine="reference"),
        "unequal": TINY.with_(engine="reference", partition="dirichlet_by_class(1)", receiver="mac(C=auto)"),
        "buffers": TINY.with_(engine="reference", model="normed()", server="momentum()", fading="nakagami(m=2)"),
        "varying participation": TINY.with_(engine="reference", participation="varying_participation()"),
        "averaged": TINY.with_(
            engine="reference", average=0.8, participation="dropout(0.3, of='sample(5)')", server="adam_ota()"
        ),
        "turning": TINY.with_(
            engine="reference",
            channel="flat(noise_on=sum)",
            power="inversion(P=1, threshold=0.1, csi=0.9, cfo=0.01)",
            fading="rayleigh(power=1)",
        ),
        "in blocks": TINY.with_(engine="reference", fading="block(entries=5)", noise="bursts(length=4)"),
        "whole payloads": TINY.with_(engine="reference", channel="whole()"),
        "signals": TINY.with_(
            engine="reference", channel="waveform(basis='ofdm(n=8, prefix=2)', timing=1)", participation="sample(5)"
        ),
        "digital": TINY.with_(
            engine="reference",
            channel="digital(quantize='qsgd(s=3)', aggregate=median)",
            fading="unit()",
            noise="none()",
            receiver="none()",
        ),
        "power over signals": TINY.with_(
            engine="reference",
            channel="waveform(hadamard, noise_on=sum)",
            power="inversion(P=1, threshold=0.1, csi=0.9, phase=0.2)",
            noise="bursts(length=5)",
        ),
        "power of digital links": TINY.with_(
            engine="reference",
            channel="digital('qsgd(s=3)')",
            power="inversion(P=1, threshold=0.3)",
            noise="none()",
            receiver="none()",
        ),
        "stacked": TINY.with_(engine="fast", chunk=2),
        "local rule": TINY.with_(
            engine="fast", chunk=2, local="adam()", lr_decay="inverse(over=1)", evaluate_clients=True
        ),
        "killed_rank": TINY.with_(
            engine="reference", participation="killed_rank()", receiver="mac(C=auto)", server="momentum()"
        ),
    }


def digest(run):
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "checksum")} for row in run.rounds]
    state = b"".join(t.cpu().numpy().tobytes() for t in tensors(run.state))
    return hashlib.sha256(state + repr(rows).encode()).hexdigest()


if __name__ == "__main__":
    (task, folder, *names), known = sys.argv[1:], experiments()
    if task == "digests":
        digests = {name: digest(sa.run(known[name])) for name in names}
        if RANK == 0:
            Path(folder).write_text(json.dumps(digests))
    if task == "rounds":  # record this number of rounds
        sa.run(known["killed_rank"].with_(rounds=int(names[0])), folder, resume=True)
    if task == "disagree":
        sa.run(TINY.with_(seed=RANK))
    if task in ("overflowing", "out_of_memory", "not_built"):
        sa.run(TINY.with_(model=f"{task}()", engine="reference"), folder)
