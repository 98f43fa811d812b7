"""One spec for every registered component, and rules applied round after round.

The contract tests run over these specs, so a new component needs a line here.
"""

from torch import Tensor

from stableair.contracts import Reception
from stableair.receivers import as_receiver
from stableair.servers import as_server_rule
from stableair.vector import make_layout

EXAMPLES = {
    "receivers": [
        "mac(C=1)",
        "clip(C=1)",
        "gnc(max_norm=1)",
        "none()",
        "cauchy(K=1)",
        "blank(C=1)",
        "sign(step=1)",
        "quantile_clip(q=0.9)",
        "tanh_clip(C=1)",
    ],
    "noises": [
        "sas(alpha=1.5, tau=0.1)",
        "gaussian(std=2)",
        "student_t(df=3)",
        "middleton(A=0.1, gamma=0.1)",
        "bursts(length=7)",
        "field(density=0.1, exponent=3)",
        "markov(good='sas(tau=0.1)', bad='sas(tau=3)', p=0.1, q=0.5)",
        "none()",
    ],
    "fadings": [
        "rayleigh(mean=1)",
        "rician(K=2)",
        "nakagami(m=2)",
        "unit()",
        "block(of='rician(K=2)', rounds=3, entries=5)",
        "ar(a=0.9)",
    ],
    "partitions": [
        "iid()",
        "dirichlet(beta=0.3)",
        "dirichlet_by_class(beta=0.3)",
        "shards(k=2)",
        "by_writer()",
        "flwr(IidPartitioner)",
    ],
    "models": ["logistic()", "mlp(width=4)", "cnn(width=8)", "resnet18()", "resnet34(norm=group)"],
    "data": [
        "digits()",
        "synthetic(samples=50)",
        "cifar10(train=30)",
        "cifar100()",
        "femnist(test=5)",
        "hf(name='someone/images', writer=who)",
        "csv(path='flowers.csv', label=species, writer=gardener)",
        "npz(path='tokens.npz')",
        "remote()",
    ],
    "servers": [
        "sgd(decay=inverse, over=2)",
        "sgd(decay=cosine, over=3)",
        "sgd()",
        "momentum()",
        "fedavgm(nesterov=True)",
        "adagrad_ota()",
        "adam_ota()",
    ],
    "local": [
        "sgd()",
        "sgd(momentum=0.9, weight_decay=0.01, nesterov=true)",
        "sgd(momentum=0.5, clip=0.3)",
        "fedprox(mu=0.5)",
        "fedprox(mu=0.5, momentum=0.9, clip=0.3)",
        "adam(weight_decay=0.1)",
        "adamw(weight_decay=0.1)",
    ],
    "lr_decays": ["constant()", "inverse(over=2)", "cosine(over=3)"],
    "participations": ["all()", "sample(m=2)", "bernoulli(q=0.5, expected=True)", "dropout(p=0.5, of='sample(m=3)')"],
    "powers": ["none()", "limit(P=1)", "inversion(P=1, threshold=0.1, csi=0.9, phase=0.1, cfo=0.001)"],
    "channels": [
        "flat(noise_on=sum)",
        "waveform(basis='pulse(rolloff=0.5)', timing=0.5, cfo=0.001, phase=0.2)",
        "waveform(basis='ofdm(n=16, prefix=4, taps=3)', timing=2)",
        "waveform(basis=hadamard, antennas=4)",
        "digital(quantize='qsgd(s=4)', aggregate='krum(f=0)', rate=2)",
        "digital(quantize='qsgd(s=300)', aggregate=median)",
        "digital()",
    ],
    "bases": ["pulse()", "pulse(rolloff=0, span=5, samples=3)", "ofdm()", "ofdm(n=12, prefix=0)", "hadamard(n=16)"],
    "quantizers": ["qsgd(s=4)", "qsgd(s=200, coding=elias)", "none()"],
    "aggregators": ["mean()", "median()", "trimmed_mean(f=1)", "krum(f=1)", "geometric_median()"],
}


class RepeatedReceiver:
    """A receiver applied in successive rounds: keeps the memory for the next one, and the last metrics."""

    def __init__(self, rule, blocks=None):
        self.rule, self.blocks = as_receiver(rule), blocks
        self.memory, self.metrics, self.k = None, {}, 0

    def __call__(self, g: Tensor, pilot: Tensor | None = None) -> Tensor:
        if self.memory is None:
            self.memory = self.rule.init(g)
        received = Reception(g, self.blocks or make_layout([("g", tuple(g.shape))]), pilot, self.k)
        out, self.memory, self.metrics = self.rule.apply(received, self.memory)
        self.k += 1
        return out


class RepeatedServer:
    """A server rule applied in successive rounds: keeps the memory for the next one, and the last metrics."""

    def __init__(self, rule):
        self.rule, self.memory, self.metrics = as_server_rule(rule), None, {}

    def __call__(self, w: Tensor, g: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = self.rule.init(w)
        w, self.memory, self.metrics = self.rule.apply(w, g, self.memory)
        return w
