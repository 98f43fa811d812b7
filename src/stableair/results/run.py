"""A recorded run: its experiment and its rounds. This module does not import torch."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stableair.errors import InputError
from stableair.experiment import COMPONENT_SETTINGS, EXECUTION, Experiment, components_of_record, settings_of_record
from stableair.markup import html_table, sparkline
from stableair.results.checksums import ENVIRONMENT, read_environments
from stableair.results.metrics import Row, unknown_metric
from stableair.results.resources import (
    RESOURCES,
    ROUNDING,
    check_resource,
    format_amount,
    is_recorded,
    rounds_within,
    totals,
)
from stableair.results.run_files import read_labels
from stableair.results.stopping import StoppingRule
from stableair.spec import PassedObject, passed_objects, without_digests
from stableair.validation import integer, positive, short_repr, typed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor, nn

    from stableair.contracts import State
    from stableair.results.checkpoint import Checkpoint

FLOWER_KEYS = "strategy", "network"  # what a run of Flower records in its environment, because they are not settings
LAST = 10  # number of rounds over which `Run.settled` averages: with interference the accuracy fluctuates


@dataclass(frozen=True)
class Run:
    """A recorded run: run["test/accuracy"] is the list of the values of a metric, one per round.

    run["symbols"], run["airtime"], run["energy"], run["energy_max"] and run["bits"] are the totals of the resources
    after each round. `len(run)` is the number of complete rounds. Notebooks display a run as a table with its accuracy
    curve.

    Raises:
        InputError: The metric was not recorded (`unknown-metric`).

    >>> import stableair as sa
    >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
    >>> run["channel/senders"], len(run), run.settings["receiver"]
    ([3, 3], 2, 'mac(C=1)')
    """

    record: dict[str, Any]  # the content of experiment.json
    rounds: list[Row]  # for each round, its metrics by name
    folder: Path | None = None  # the run folder; None for a run in memory
    final: "State | None" = field(default=None, compare=False)  # the last finite state, if it is in memory
    objects: Mapping[str, PassedObject] = field(default_factory=dict, repr=False, compare=False)  # objects by digest
    rule: StoppingRule | None = None  # of early stopping, for a run in memory; a run folder records it

    def __getitem__(self, metric: str) -> list[Any]:
        if isinstance(metric, str) and metric in RESOURCES:
            return totals(self.rounds, metric)
        if self.rounds and (not isinstance(metric, str) or not any(metric in row for row in self.rounds)):
            raise unknown_metric(metric, self.rounds)
        return [
            row.get(metric) for row in self.rounds
        ]  # None if an earlier version computed the round without this metric

    @typed
    def has(self, metric: str) -> bool:
        """Return whether the run has recorded a metric or a resource.

        A metric must be in the last round; earlier rounds may lack it. A resource must be in all rounds.
        """
        if metric in RESOURCES:
            return is_recorded(self.rounds, metric)
        return bool(self.rounds) and metric in self.rounds[-1]

    def __len__(self) -> int:
        return len(self.rounds)

    def __repr__(self) -> str:
        words = {"seed": "seed {}", "rounds": "{} round" if self.settings["rounds"] == 1 else "{} rounds"}
        return f"Run({', '.join(words.get(name, '{}').format(value) for name, value in self._summary())})"

    def _repr_html_(self) -> str:
        metric = f"{self.settings['evaluate']}/accuracy"
        line = sparkline([row.get(metric) for row in self.rounds])
        return html_table([*self._summary(), *([(metric, line)] if line else [])], caption="Run")

    def _summary(self) -> list[tuple[str, str]]:
        """Return the main settings and results as pairs (name, text)."""
        settings, metric = self.settings, f"{self.settings['evaluate']}/accuracy"
        rows = [(name, without_digests(settings[name])) for name in ("data", "noise", "receiver")]
        expected = f" of {settings['rounds']}" if len(self) < settings["rounds"] else ""
        rows += [("seed", str(settings["seed"])), ("rounds", f"{len(self)}{expected}")]
        accuracy = [row[metric] for row in self.rounds if row.get(metric) is not None]
        if self.diverged is not None:
            rows.append(("result", f"diverged at round {self.diverged + 1}"))
        elif accuracy:
            text = f"{accuracy[-1]:.4f} (best {max(accuracy):.4f})"
            rows.append(("result", f"{settings['evaluate']} accuracy {text}"))
        return [*rows, *([("folder", str(self.folder))] if self.folder else [])]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recorded settings of the experiment, by name."""
        return settings_of_record(self.record)

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run.

        Raises:
            InputError: The run uses a component that is not registered, such as a component of a plug-in.
        """
        return Experiment.from_record(self.record)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The seed and everything else that affects the results; copies of a run have the same identity."""
        plain = {k: v for k, v in self.settings.items() if k not in (*EXECUTION, *COMPONENT_SETTINGS, "seed")}
        plain |= self.flower
        return self.settings["seed"], repr(sorted(plain.items())), repr(components_of_record(self.record))

    @cached_property
    def flower(self) -> dict[str, str]:
        """The strategy and the network of a run of Flower, by name; empty for other runs."""
        recorded = {name: value for each in self.environments for name, value in each.items()}
        return {name: recorded[name] for name in FLOWER_KEYS if name in recorded}

    @property
    def diverged(self) -> int | None:
        """The zero-based round in which the model became non-finite; None if the run did not diverge."""
        return self.rounds[-1]["round"] if self.rounds and self.rounds[-1].get("diverged") else None

    def settled(self, metric: str) -> float:
        """Return the mean of a metric over the last ten rounds.

        For a run with fewer than 20 rounds, this is the mean over the second half. With interference the accuracy
        fluctuates from round to round; therefore the last value alone is a poor measure.

        Args:
            metric: Name of a recorded metric.

        Returns:
            The mean; 0 if the run diverged, or recorded no value in these rounds.

        >>> import stableair as sa
        >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=4))
        >>> run.settled("test/accuracy") == sum(run["test/accuracy"][-2:]) / 2
        True
        """
        return self.mean_of_last(metric, self.settled_rounds) or 0.0

    @property
    def settled_rounds(self) -> int:
        """The number of last rounds over which `settled` averages."""
        return min(LAST, max(1, len(self) // 2))

    def mean_of_last(self, metric: str, rounds: int) -> float | None:
        """Return the mean of a metric over the last rounds.

        Args:
            metric: Name of a recorded metric.
            rounds: Number of rounds.

        Returns:
            The mean over the recorded values; None if there is none, or if the run diverged.
        """
        last = [v for v in self[metric][-integer("rounds", rounds, least=1) :] if v is not None]
        return None if self.diverged is not None or not last else sum(last) / len(last)

    def fluctuation(self, metric: str) -> float | None:
        """Return the standard deviation of a metric over the last ten rounds.

        Args:
            metric: Name of a recorded metric.

        Returns:
            The sample standard deviation; None for fewer than two recorded values, or if the run diverged.
        """
        last = [v for v in self[metric][-LAST:] if v is not None]
        return None if self.diverged is not None or len(last) < 2 else statistics.stdev(last)

    def within(self, resource: str, budget: float) -> "Run":
        """Return the run up to its last round within a budget of a resource.

        Only the rounds are cut; `state` is still the final state of the whole run.

        Args:
            resource: "symbols", "airtime", "energy", "energy_max" or "bits".
            budget: Largest total of the resource.

        Returns:
            The shortened run.

        Raises:
            InputError: The run has not recorded the resource (`resource-not-recorded`), or its first round exceeds the
                budget (`budget-too-small`).
        """
        used, budget = self[check_resource(resource)], positive("budget", budget)
        rounds = rounds_within(used, budget)
        if not rounds:
            unit, first = RESOURCES[resource].unit, format_amount(used[0] if used else 0.0)
            text = f"{self}: the budget {format_amount(budget)} is too small: the first round uses {first} {unit}"
            raise InputError(text, code="budget-too-small", resource=resource, budget=budget)
        if self.diverged and used[-1] >= budget * (1 - ROUNDING):  # nothing is left for the round in which it diverged
            rounds = min(rounds, self.diverged)
        return replace(self, rounds=self.rounds[:rounds])

    @property
    def state(self) -> "State":
        """The state after the last complete round: the model and all memories.

        Raises:
            InputError: No round is complete (`no-rounds`).
            CorruptRunError: The checkpoint is damaged.
        """
        if self.final is not None:
            return self.final
        from stableair.results.checkpoint import read_checkpoint

        last = self.folder and read_checkpoint(self.folder)
        if not last:
            raise InputError(f"{self.folder}: no round is complete yet", code="no-rounds", folder=self.folder)
        return last.state

    def module(self, model: Any = None, data: Any = None) -> "nn.Module":
        """Return the trained network, in evaluation mode on the CPU.

        The data set is loaded, since the network depends on the shape of its samples.

        Args:
            model: For a run from a folder whose model is a Python object: the model that was passed to `sa.run`, or
                another model of the same structure.
            data: For a run from a folder whose data set is a Python object: the data set.

        Returns:
            The network with the parameters and buffers after the last complete round.

        Raises:
            InputError: No round is complete (`no-rounds`), a Python object must be passed (`object-needed`), or the
                model has a different number of entries (`wrong-model`).

        >>> import stableair as sa
        >>> experiment = sa.Experiment(data="synthetic(samples=60)", model="mlp(width=4)", clients=3, rounds=1)
        >>> sum(p.numel() for p in sa.run(experiment).module().parameters())
        310
        """
        from stableair import vector
        from stableair.builder import network
        from stableair.objects import as_settings

        settings, objects = as_settings(model=model, data=data)
        with passed_objects({**self.objects, **objects}):
            module = network(self.experiment.with_(**settings))
        vector.load(module, self.state.model)
        return module.eval()

    def state_dict(self, model: Any = None, data: Any = None) -> "dict[str, Tensor]":
        """Return the parameters and buffers of the trained network by name.

        Args:
            model: As for `module`.
            data: As for `module`.
        """
        return self.module(model, data).state_dict()

    @property
    def best(self) -> "Checkpoint":
        """The checkpoint after the best round, with `rounds` and `state`; only for a run with `keep_best`.

        Raises:
            InputError: The run has no best checkpoint (`no-best`).
            CorruptRunError: The file is damaged.
        """
        from stableair.results.checkpoint import read_best

        return read_best(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run completed all rounds, diverged, or was stopped early."""
        return len(self) >= self.settings["rounds"] or self.diverged is not None or self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped early by `stop` or `patience`."""
        recorded = [each["stopping"] for each in self.environments[-1:] if "stopping" in each]
        rule = StoppingRule(**recorded[0]) if recorded else self.rule
        return len(self) < self.settings["rounds"] and rule is not None and rule.is_met(self.rounds)

    @property
    def labels(self) -> list[list[int]] | None:
        """The number of samples per client and class, (clients, classes); None if it was not recorded.

        Raises:
            CorruptRunError: The file is damaged.
        """
        return read_labels(self.folder) if self.folder else None

    @property
    def environments(self) -> list[dict[str, Any]]:
        """The environments that computed the rounds: device, engine, versions, checksums of the data.

        A resumed run has several environments. A run in memory has none.

        Raises:
            CorruptRunError: The file is damaged.
        """
        return read_environments(self.folder) if self.folder and (self.folder / ENVIRONMENT).exists() else []

    def to_pandas(self) -> Any:
        """Return the rounds as a pandas DataFrame, with one row per round and one column per metric."""
        import pandas

        return pandas.DataFrame([{k: v for k, v in row.items() if k != "diverged"} for row in self.rounds])

    def plot(self, metric: str | None = None, *, ax: "Axes | None" = None, label: str | None = None) -> "Axes":
        """Draw a metric against the rounds. To draw several runs, use `sa.plot`.

        A cross marks the last finite round of a run that diverged. You can also draw several runs into the same axes;
        then add a legend with `ax.legend()`.

        Args:
            metric: Name of a recorded metric. None: the accuracy on the data of the evaluation.
            ax: Axes to draw into. None: the axes of a new pyplot figure.
            label: Name of the line in a legend.

        Returns:
            The matplotlib axes.

        Raises:
            InputError: The metric was not recorded (`unknown-metric`), or no round is complete (`no-rounds`).

        >>> import stableair as sa
        >>> from matplotlib.figure import Figure
        >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
        >>> axes = run.plot("train/loss", ax=Figure().subplots(), label="MAC")
        >>> axes.lines[0].get_xdata().tolist()  # plots start at round 1
        [1, 2]
        """
        from matplotlib.axes import Axes

        from stableair.results.axes import label_metric, label_rounds, mark_divergence

        metric = f"{self.settings['evaluate']}/accuracy" if metric is None else metric
        values = self[metric]
        if not values:
            raise InputError(f"{self.folder}: no round is complete yet", code="no-rounds", folder=self.folder)
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(layout="constrained")[1]
        if not isinstance(ax, Axes):
            raise InputError(
                f"ax must be a matplotlib Axes: got {short_repr(ax)}", code="wrong-type", name="ax", value=ax
            )
        rounds = [row["round"] + 1 for row in self.rounds]  # plots start at round 1
        heights = [math.nan if value is None else value for value in values]
        name, marker = None if label is None else str(label), "o" if len(values) == 1 else None
        (line,) = ax.plot(rounds, heights, label=name, marker=marker)
        if self.diverged:
            mark_divergence(ax, self.diverged, heights[self.diverged - 1], line.get_color())
        label_rounds(ax)
        label_metric(ax, metric)
        ax.grid(alpha=0.3)
        return ax
