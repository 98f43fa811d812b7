"""The memory of a round depends on the model and the clients, not on the values of settings."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stableair.channels import assembly
from stableair.channels.power import DRAWS
from stableair.contracts import Upload
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.memory import tensors
from stableair.vector import NOTHING

D, N = 650, 5  # entries, clients


class LargestTensor(TorchDispatchMode):
    """Record the bytes of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tensors(out)]
        self.largest = max([self.largest, *sizes])
        return out


def largest_tensor(k=3, **settings):
    """Bytes of the largest tensor of one round over a channel with these settings."""
    e = Experiment(clients=N, **settings)
    link = assembly.assemble({name: e.call(name) for name in ("channel", *assembly.PARTS)}, 0, NOTHING, None)
    clients = torch.arange(N)
    upload = Upload(clients, torch.ones(N, D), torch.zeros(N, 0), torch.zeros(N))
    with LargestTensor() as watch:
        link.superpose([upload], link.draw(N, clients, D, 0, k, "cpu"))
    return watch.largest


@pytest.mark.parametrize(
    "settings",
    [
        {"fading": "block(entries=1000000000)"},
        {"fading": "block(entries=649)"},
        {"fading": "block(rounds=1000000000)"},
        {"fading": "ar(a=0.9999999)"},
        {"noise": "bursts(length=1000000000)"},
        {"noise": "field(density=1, hold=1000000000)"},
        {"noise": "middleton(A=1000, gamma=1)"},
        {"noise": "bursts(length=1000000000)", "channel": "waveform()"},
        {"noise": "field(density=1)", "channel": "waveform()"},
        {"noise": "markov(p=0.000001, q=0.000001)"},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_no_tensor_is_much_larger_than_the_vector(settings):
    assert largest_tensor(**settings) <= 16 * 8 * D


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("waveform(antennas=65536)", 8 * DRAWS),
        ("waveform(basis='ofdm(n=4096, prefix=4096, taps=1024)')", 8192 * 32),
        ("waveform(basis='hadamard(n=4096)')", 4096 * 32),
        ("waveform(basis='pulse(span=16, samples=256)')", 256 * (D / 2 + 16) * 32),
    ],
)
def test_the_memory_of_a_waveform_is_bounded_by_its_antennas_paths_and_samples(spec, limit):
    assert largest_tensor(channel=spec) <= limit


@pytest.mark.parametrize(
    ("basis", "high"), [("pulse(span=256, samples=256)", 4096), ("ofdm(n=65536, prefix=65536, taps=65537)", 1024)]
)
def test_excessive_sizes_are_refused(basis, high):
    with pytest.raises(InputError) as error:
        Experiment(channel=f"waveform(basis='{basis}')")
    assert (error.value.code, error.value.fields["high"]) == ("out-of-range", high)
