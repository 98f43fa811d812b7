"""The paper's figures as data: their curves, presets, searched thresholds and modelling choices.

The paper gives neither the number of rounds nor any threshold. `Figure.ours` and the constants below mark this
project's choices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from stableair.experiment import Experiment, preset
from stableair.paper.methods import LABELS, METHODS, experiments, method_of
from stableair.searches import Range

ROUNDS = 100
TRIALS, SEARCH_ROUNDS = 12, 20  # budget of a threshold search, the same for MAC and GNC
SEARCHED = {  # receiver, searched setting and range by method
    "MAC": (METHODS["mac"].receiver.format(0.13), METHODS["mac"].key, Range(0.01, 10, log=True)),
    "GNC": (METHODS["gnc"].receiver.format(100), METHODS["gnc"].key, Range(1, 100_000, log=True)),
}
# One local epoch on the embedded digits gives about the paper's SNR. After five, the interference has little effect.
SMOKE: dict[str, Any] = {
    "data": "digits", "model": "auto", "norm_stats": "clients", "rounds": 60, "local_epochs": 1, "lr": 0.2,
}  # fmt: skip
SMOKE_PARTITION = {"by_writer()": "dirichlet(beta=0.3)"}  # the digits have no writers
SMOKE_TRIALS = 6

SNR = {0.05: -35, 0.1: -41, 0.2: -47, 0.3: -50}  # the paper's average SNR in dB, by tau
SYMBOLS = {"noise.alpha": "α", "noise.tau": "τ", "receiver.C": "C"}
AUTO, SCALED = "mac(C=auto)", "C = 1.3 τ"
CHOICES: dict[str, dict[str, Any]] = {  # an alternative to each choice of this project: docs/reproduction.md
    "the difference of the weights as payload": {"payload": "delta"},
    "fading of unit power instead of unit mean": {"fading": "rayleigh(power=1)"},
    "group norm instead of batch norm": {"model": "resnet18(norm=group)"},
    "clients of unequal size": {"partition": "dirichlet_by_class(beta=0.3)"},
    "interference added before the division by N": {"channel.noise_on": "sum"},
    "He's initialisation instead of PyTorch's": {"model": "resnet18(init=he)"},
}


class Figure(NamedTuple):
    """A figure of curves over rounds: the paper's four methods, or MAC with one setting varied."""

    title: str
    preset: str
    metric: str = "test/accuracy"
    vary: str = ""  # dotted key of the varied setting; empty: compare the four methods
    values: tuple[float, ...] = ()
    ours: str = ""  # this project's choices in this figure

    @property
    def setup(self) -> Experiment:
        """The experiment that all curves start from."""
        return preset(self.preset).with_(rounds=ROUNDS)

    @property
    def searched(self) -> tuple[str, ...]:
        """The methods whose threshold is searched."""
        return {"": ("MAC", "GNC"), "receiver.C": ()}.get(self.vary, ("MAC",))

    def label(self, value: float) -> str:
        """Return the label of the curve at one value of the varied setting."""
        return f"{SYMBOLS[self.vary]} = {value:g}"

    def curve_of(self, experiment: Experiment) -> str:
        """Return the label of the curve that an experiment belongs to: its method, or its value of the varied setting.

        >>> FIGURES["fig4b"].curve_of(Experiment(noise="sas(alpha=1.5, tau=0.3)"))
        'τ = 0.3'
        """
        if not self.vary:
            return _method_label(method_of(experiment))
        setting, _, argument = self.vary.partition(".")
        return self.label(experiment.calls(setting)[0].full().arguments[argument])


def _method_label(method: str) -> str:
    """Return the label of a method as the first word of a legend entry."""
    return LABELS[method][0].upper() + LABELS[method][1:]


FIGURES = {
    "fig3a": Figure("Fig. 3(a): CIFAR-10, ResNet-18", "cifar10"),
    "fig3b": Figure("Fig. 3(b): CIFAR-100, ResNet-34", "cifar100"),
    "fig3c": Figure("Fig. 3(c): FEMNIST, CNN", "femnist"),
    "fig3d": Figure("Fig. 3(d): CIFAR-10, ResNet-18", "cifar10", "test/loss"),
    "fig3e": Figure("Fig. 3(e): CIFAR-100, ResNet-34", "cifar100", "test/loss"),
    "fig3f": Figure("Fig. 3(f): FEMNIST, CNN", "femnist", "test/loss"),
    "fig4a": Figure(
        "Fig. 4(a): MAC over the tail index", "cifar10-noniid", vary="noise.alpha", values=(1.1, 1.2, 1.3, 1.4, 1.5),
        ours="any α but 1.1 and 1.5",
    ),
    "fig4b": Figure(
        "Fig. 4(b): MAC over the scale", "cifar10-noniid", vary="noise.tau", values=tuple(SNR),
    ),
    "fig4c": Figure(
        "Fig. 4(c): MAC over the threshold", "cifar10-noniid", vary="receiver.C", values=(0.05, 0.13, 0.3, 1.0),
        ours="the values of C",
    ),
}  # fmt: skip
SAME_RUNS = {"fig3d": "fig3a", "fig3e": "fig3b", "fig3f": "fig3c"}  # loss and accuracy of the same runs
DRAWINGS = {  # figures without runs
    "fig2": "what MAC does to a gradient: centralise, clip, recover",
    "interval": "the appendix's clipping decision interval",
}

Tune = Callable[[str, Experiment], Experiment]  # (method, experiment) -> the experiment with that method's threshold


def curves(figure: Figure, base: Experiment, tune: Tune, search_each: bool = False) -> dict[str, Experiment]:
    """Return the experiment of every curve, by label.

    Args:
        figure: The figure.
        base: The experiment that all curves start from.
        tune: Sets the threshold of a method.
        search_each: Tune C at every value of the varied setting, instead of once for all curves.
    """
    if not figure.vary:
        methods = experiments(base, lambda method: tune(LABELS[method], base))
        return {_method_label(method): one for method, one in methods.items()}
    if figure.vary == "receiver.C":
        return {figure.label(C): base.with_(receiver=f"mac(C={C})") for C in figure.values}
    if not search_each:
        tuned = tune("MAC", base)
        return {figure.label(value): tuned.with_(**{figure.vary: value}) for value in figure.values}
    labelled = {}
    for value in figure.values:
        tuned = tune("MAC", base.with_(**{figure.vary: value}))
        labelled[f"{figure.label(value)}, C = {tuned.receiver.partition('=')[2].rstrip(')')}"] = tuned
    return labelled


def published_curves(name: str) -> dict[str, Experiment]:
    """Return the experiments whose runs are published for a figure, by label: the paper's curves, then additional ones.

    The name "choices" selects the alternatives to this project's choices where the paper leaves the setting open.
    """
    if name == "choices":
        base = preset("cifar10-noniid")
        return {"baseline": base} | {label: base.with_(**settings) for label, settings in CHOICES.items()}
    figure = FIGURES[name]
    base = figure.setup
    paper = curves(figure, base, lambda method, one: one.with_(receiver=SEARCHED[method][0]))
    extra: dict[str, Experiment] = {}
    if not figure.vary:
        extra = {"MAC, C = auto": base.with_(receiver=AUTO)}
    if figure.vary == "noise.tau":  # C in proportion to tau; at tau = 0.1 it equals the common C
        for tau in (tau for tau in SNR if tau != 0.1):
            scaled = paper[figure.label(tau)].with_(**{"receiver.C": round(1.3 * tau, 4)})
            extra[f"{figure.label(tau)}, C = {1.3 * tau:g}"] = scaled
    if figure.vary.startswith("noise."):
        extra |= {f"{label}, C = auto": one.with_(receiver=AUTO) for label, one in paper.items()}
    return paper | extra
