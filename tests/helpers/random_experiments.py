"""Random experiments over all components, plug-ins and models of the zoo; each is a function of its number."""

import random
from typing import NamedTuple

import torch
from torch import nn

import stableair as sa
from helpers.components import EXAMPLES
from helpers.zoo import REPEATABLE, ZOO
from stableair.channels.modulation import Basis
from stableair.channels.power import Power
from stableair.contracts import Aggregator, Message, Quantizer
from stableair.models import NORMS, ResNet
from stableair.spec import format_call


class RandomExperiment(NamedTuple):
    """An experiment, and how its run is interrupted.

    Args:
        settings: The settings that are not the default.
        stop: Number of rounds after which the run is stopped.
        by_error: Whether an error stops the run; otherwise the first run asks for fewer rounds.
        checkpoint_every: Rounds between two checkpoints.
    """

    settings: dict
    stop: int
    by_error: bool
    checkpoint_every: int

    def experiment(self, engine):
        return sa.Experiment(**self.settings, engine=engine)


def draw(number):
    """Random experiment i; most combinations are legal."""
    r = random.Random(f"random experiment {number}")
    clients = r.randint(5, 9) if r.random() < 0.9 else r.randint(1, 4)
    rounds = r.randint(2, 4)
    settings = {
        "device": "cpu",
        "clients": clients,
        "rounds": rounds,
        "seed": r.randrange(10**6),
        "local_epochs": r.choice([1, 1, 2]),
        "batch_size": r.choice([1, 2, 3, 4, 5, 8, 100]),
        "lr": r.choice([0.003, 0.03, 0.1]),
        "lr_decay": r.choice(["constant()", *EXAMPLES["lr_decays"], "in_steps()"]),
        "local": r.choice(["sgd()", *EXAMPLES["local"], "bounded_descent()"]),
        "label_smoothing": r.choice([0.0, 0.0, 0.1]),
        "evaluate_clients": r.random() < 0.3,
        "chunk": r.choice([0, 0, r.randint(1, clients)]),
        "augment": r.choice(["none", "none", "crop_flip"]),
        "payload": r.choice(["gradient", "delta"]),
        "blocks": r.choice(["tensor", "layer", "model"]),
        "evaluate": r.choice(["test", "test", "validation"]),
        "norm_stats": r.choice(["clients", "clients", "recalibrated", "batch"]),
        "average": r.choice([0.0, 0.0, 0.5, 0.9]),
        "snr_blocks": r.choice(["none", "tensor", "layer"]),
        "server": r.choice(EXAMPLES["servers"] + ["heavy_ball()"]),
        "bandwidth": r.choice([1e6, 2e7]),
        "symbol_energy": r.choice([1.0, 1e-9]),
    }
    settings |= _model(r) | _channel(r, clients)
    return RandomExperiment(settings, r.randint(1, rounds - 1), r.random() < 0.5, r.choice([1, 1, 2]))


def _model(r):
    """The data, their partition and the model."""
    kind, partition = r.random(), r.choice(EXAMPLES["partitions"] + ["in_turn()"])
    if kind < 0.04:
        model = r.choice(["logistic()", "mlp(width=4)", "auto"])
        return {"data": "digits()", "model": model, "partition": "iid()", "batch_size": 50, "local_epochs": 1}
    side = 8 if kind > 0.9 else 4
    samples = r.randint(30, 60)
    name = "marked" if r.random() < 0.1 else "synthetic"
    data = f"{name}(samples={samples}, classes=3, shape=(1, {side}, {side}), writers=12)"
    if side == 8:
        model = f"small_resnet(norm={r.choice(sorted(NORMS))})"
    elif kind > 0.7:
        model = r.choice(["logistic()", "mlp(width=4)", "mlp(width=5, depth=2)", "cnn(width=4)"])
    else:
        model = f"zoo(name={r.choice(REPEATABLE)})"
    return {"data": data, "model": model, "partition": partition}


def _channel(r, clients):
    """Participation, channel and receiver."""
    receivers = ["mac(C=auto)", "mac(C=auto, gain=True)", "mac(C=0.5, gain=True)", "cauchy(K=auto)"]
    receivers = r.sample(EXAMPLES["receivers"] + receivers + ["smoothed()", "halved()"], r.choice([1, 1, 2]))
    participation = r.choice(EXAMPLES["participations"] + ["odd_and_even()"]) if clients > 4 else "all()"
    kind = r.random()
    if kind < 0.15 and clients > 4:
        channels = [spec for spec in EXAMPLES["channels"] if spec.startswith("digital")]
        aggregate = r.choice(EXAMPLES["aggregators"] + ["largest()"])
        quantize = r.choice(EXAMPLES["quantizers"] + ["rounded()"])
        channel = r.choice([*channels, f'digital(quantize="{quantize}", aggregate="{aggregate}")'])
        if "aggregate" in channel and "mean()" not in aggregate:
            participation = participation.replace(", expected=True", "")
        power = r.choice(["none()", "limit(P=1)", "inversion(P=1, threshold=0.1, csi=0.9)", "half_power()"])
        fadings = [fading for fading in _fadings() if "entries" not in fading]
        adapts = power.startswith(("inversion", "half"))
        parts = {
            "channel": channel,
            "fading": r.choice(fadings) if adapts else "unit()",
            "noise": "none()",
            "power": power,
        }
    elif kind < 0.35:
        channels = [spec for spec in EXAMPLES["channels"] if spec.startswith("waveform")]
        bases = [f'waveform(basis="{basis}")' for basis in [*EXAMPLES["bases"], "samples()"]]
        channel = r.choice([*channels, *bases])
        fadings = [fading for fading in _fadings() if "entries" not in fading]
        power = r.choice(["none()", "limit(P=1)", "inversion(P=1, threshold=0.1, csi=0.9, phase=0.2)", "half_power()"])
        if "antennas" in channel and power != "none()":
            power = "limit(P=1)"
        if power != "none()":
            channel = channel.removesuffix(")") + ", noise_on=sum)"
        noises = ["sas(alpha=1.5, tau=0.1)", "sas(alpha=1.9, tau=0.01)", "gaussian(std=0.5)", "none()"]
        if "antennas" not in channel:
            noises += ["bursts(length=7)", "field(density=0.01, hold=5)"]
        noises.append("markov(good='sas(tau=0.1)', bad='gaussian(std=1)')")
        parts = {"channel": channel, "fading": r.choice(fadings), "noise": r.choice(noises), "power": power}
    else:
        power = r.choice(["none()", "none()", *EXAMPLES["powers"], "half_power()"])
        fadings = [fading for fading in _fadings() if "entries" not in fading or "inversion" not in power]
        sum_needed = not power.startswith("none")
        channel = r.choice(["flat(noise_on=sum)"] if sum_needed else ["flat()", "flat(noise_on=sum)", "whole()"])
        noises = [*EXAMPLES["noises"], "sas(alpha=1.5, tau=0.01)", "none()", "uniform()"]
        parts = {"channel": channel, "fading": r.choice(fadings), "noise": r.choice(noises), "power": power}
    if not parts["channel"].startswith("digital") and r.random() < 0.1:
        receivers.append("mac(C=auto, pilot=100)")
    return parts | {"participation": participation, "receiver": " | ".join(receivers)}


def _fadings():
    return [*EXAMPLES["fadings"], "rayleigh(power=1)", "slow()"]


# ------------------------------------------------------------------------------------------------------------- plug-ins


def zoo(name):
    """A model of the zoo."""
    return lambda shape, classes: ZOO[name]()


def small_resnet(norm="batch"):
    """A ResNet with two stages."""
    norms = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(2, channels)}
    return lambda shape, classes: ResNet(shape[0], (1, 1), classes, norms[norm], first=4)


def smoothed(beta: float = 0.9):
    """Exponential smoothing of the received vector over rounds."""

    def apply(received, mean):
        mean = torch.lerp(mean, received.g, beta)
        return mean, mean, {"norm": mean.norm().item()}

    return sa.Rule(apply, init=torch.zeros_like)


def halved():
    """Half of every entry."""
    return lambda g: g / 2


def heavy_ball(lr: float = 0.01, beta: float = 0.5):
    """Momentum whose memory is a dict."""

    def apply(w, g, memory):
        velocity = beta * memory["velocity"] + g
        return w - lr * velocity, {"velocity": velocity, "steps": memory["steps"] + 1}, {"steps": memory["steps"]}

    return sa.ServerRule(apply, init=lambda like: {"velocity": torch.zeros_like(like), "steps": 0})


def in_steps():
    """A learning rate that is halved every second round."""
    return lambda k: 0.5 ** (k // 2)


def bounded_descent(beta: float = 0.5):
    """Descent along the mean gradient, of bounded length, with a memory."""

    def step(w, g, mean, lr):
        mean = torch.lerp(mean, g, beta)
        return w - lr * torch.tanh(mean), mean

    return sa.LocalRule(step, init=torch.zeros_like)


def uniform():
    """Uniform noise."""
    return lambda d, source: (0.2 * source.uniform(d) - 0.1).float()


def slow(rho: float = 0.9):
    """Amplitudes that change slowly over rounds."""

    def draw(n, source):
        path = source.at(0).normal(n, 2)
        for j in range(1, source.round + 1):
            path = rho * path + (1 - rho**2) ** 0.5 * source.at(j).normal(n, 2)
        return path.norm(dim=1)

    return draw


def odd_and_even():
    """The even clients, the odd clients and no clients, in turn."""
    return lambda n, source: torch.arange(n)[source.round % 3 :: 2] if source.round % 3 < 2 else torch.arange(0)


def in_turn():
    """Sample i belongs to client i modulo the number of clients."""
    return lambda train, clients, rng: [torch.arange(n, len(train.y), clients).numpy() for n in range(clients)]


def half_power():
    """Half the gain, interference of the sum."""

    class Half(Power):
        needs_noise_on_sum = True

        def gain(self, h):
            return h / 2

    return Half()


def marked(**options):
    """The synthetic data, as uint8 images."""
    data = sa.dataset.one(format_call("synthetic", options))()
    bytes_of = lambda split: split._replace(x=split.x.mul(32).add(128).clamp(0, 255).to(torch.uint8))  # noqa: E731
    return data._replace(train=bytes_of(data.train), test=bytes_of(data.test), mean=128.0, std=32.0)


def whole():
    """The flat channel as a custom channel, which needs whole payloads."""

    class Whole:
        def __init__(self, inner):
            self.draw, self.superpose = inner.draw, inner.superpose

    return lambda **parts: Whole(sa.channel.one("flat()")()(**parts))


def samples():
    """One symbol per sample in time."""

    class Samples(Basis):
        def modulate(self, c):
            return c.flatten()

        def demodulate(self, r):
            return r[:, None]

    return Samples(n=1, hop=1, length=1, max_delay=1, uses=1)


def rounded():
    """Entries rounded to multiples of 1/8."""
    return Quantizer(lambda u, source: Message(1 / 8, (8 * u).round(), 16 * len(u)), torch.float32)


def largest():
    """The largest value of every entry."""
    return Aggregator(per_entry=lambda rows: rows.max(0).values)


PLUGINS = {
    "model": (zoo, small_resnet),
    "receiver": (smoothed, halved),
    "server": (heavy_ball,),
    "local": (bounded_descent,),
    "lr_decay": (in_steps,),
    "noise": (uniform,),
    "fading": (slow,),
    "participation": (odd_and_even,),
    "partition": (in_turn,),
    "power": (half_power,),
    "dataset": (marked,),
    "channel": (whole,),
    "basis": (samples,),
    "quantizer": (rounded,),
    "aggregator": (largest,),
}


def register():
    """Register the plug-ins in this process."""
    for decorator, factories in PLUGINS.items():
        for factory in factories:
            getattr(sa, decorator)(factory.__name__)(factory)
