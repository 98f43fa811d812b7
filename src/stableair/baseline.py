"""What an experiment was when ids began to count from here, 0.2.0. It is never edited, and only ever added to.

`Experiment.id()` hashes what differs from this. A new setting, component or argument enters with the value that means
"as before". A default that changes later stays as it is here: what relies on it is then another experiment.
"""

from typing import Any

BASELINE_SETTINGS: dict[str, Any] = {
    "data": "digits",
    "partition": "iid()",
    "model": "auto",
    "clients": 50,
    "rounds": 100,
    "seed": 0,
    "local_epochs": 5,
    "batch_size": 10,
    "lr": 0.03,
    "augment": "none",
    "payload": "gradient",
    "blocks": "tensor",
    "participation": "all()",
    "power": "none()",
    "channel": "flat()",
    "fading": "rayleigh(mean=1)",
    "noise": "sas(alpha=1.5, tau=0.1)",
    "receiver": "mac(C=1)",
    "server": "sgd()",
    "evaluate": "test",
    "norm_stats": "clients",
    "average": 0.0,
    "snr_blocks": "none",
    "device": "auto",
    "engine": "auto",
    "precision": "auto",
    "chunk": 0,
}

BASELINE_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "digits": {},
        "synthetic": {"samples": 1000, "classes": 10, "shape": (1, 8, 8), "spread": 1.0, "writers": 10, "seed": 0},
        "cifar10": {"train": None, "test": None},
        "cifar100": {"train": None, "test": None},
        "femnist": {"train": None, "test": None},
        "hf": {"image": "image", "label": "label", "writer": None, "config": None, "train": None, "test": None},
        "remote": {},
    },
    "partition": {
        "iid": {},
        "dirichlet": {},
        "dirichlet_by_class": {},
        "shards": {"k": 2},
        "by_writer": {},
        "flwr": {},
    },
    "model": {
        "logistic": {},
        "mlp": {"width": 200, "depth": 1},
        "cnn": {"width": 2048},
        "resnet18": {"norm": "batch", "init": "torch"},
        "resnet34": {"norm": "batch", "init": "torch"},
    },
    "participation": {
        "all": {},
        "sample": {},
        "bernoulli": {"expected": False},
        "dropout": {"of": "all()"},
    },
    "power": {
        "none": {},
        "limit": {},
        "inversion": {"csi": 1, "phase": 0, "phase_law": "uniform", "cfo": 0},
    },
    "channel": {
        "flat": {"noise_on": "mean"},
        "waveform": {"basis": "ofdm()", "timing": 0, "cfo": 0, "phase": 0, "antennas": 0, "noise_on": "mean"},
        "digital": {"quantize": "none()", "aggregate": "mean()", "rate": 1},
    },
    "fading": {
        "rayleigh": {"mean": 1, "power": None},
        "rician": {"mean": 1},
        "nakagami": {"mean": 1},
        "unit": {},
        "block": {"of": "rayleigh()", "rounds": None, "entries": None},
        "ar": {"of": "rayleigh()"},
    },
    "noise": {
        "sas": {"alpha": 1.5, "tau": 0.1},
        "gaussian": {},
        "student_t": {"scale": 1},
        "middleton": {"std": 1},
        "bursts": {"alpha": 1.5, "tau": 0.1, "length": 100},
        "field": {"exponent": 4, "hold": 1, "power": 1},
        "markov": {"good": "sas(tau=0.1)", "bad": "sas(tau=3)", "p": 0.1, "q": 0.5},
        "none": {},
    },
    "receiver": {
        "mac": {"gain": None, "pilot": 0},
        "clip": {},
        "gnc": {"blocks": "model"},
        "cauchy": {},
        "blank": {},
        "sign": {},
        "quantile_clip": {},
        "tanh_clip": {},
        "none": {},
    },
    "server": {
        "sgd": {"lr": None, "decay": "constant", "over": 100, "floor": 0.01},
        "momentum": {"lr": None, "beta": 0.9},
        "fedavgm": {"lr": None, "beta": 0.9, "nesterov": False},
        "adagrad_ota": {"lr": 0.01, "b1": 0.9, "alpha": 1.5, "eps": 1e-8},
        "adam_ota": {"lr": 0.01, "b1": 0.9, "b2": 0.9, "alpha": 1.5, "eps": 1e-8},
    },
}
