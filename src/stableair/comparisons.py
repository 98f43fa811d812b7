"""Comparison of receivers over channels on the same seeds: all share data, batches, fading and noise."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from stableair.contracts import Dataset
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.literals import PluginChange
from stableair.results.budgets import at_equal, stop_condition
from stableair.results.callbacks import Callback
from stableair.results.comparison import Comparison, Line
from stableair.results.grouping import group
from stableair.results.options import RunOptions
from stableair.results.reading import log_left_out, on_one_split, runs_from
from stableair.results.resources import RESOURCES, check_resource
from stableair.results.run import Run
from stableair.results.statistics import CHANNEL, MIN_SEEDS, PAIRED_BY, compare_groups
from stableair.spec import passed_objects
from stableair.sweeps.plans import Plan, expand_plan, read_plan, replace_objects
from stableair.sweeps.processes import sweep
from stableair.validation import as_path, pluralize

log = logging.getLogger("stableair")

ALL_CHANNELS = "all channels"


def compare(
    plan: Plan | str | Path | Iterable[Experiment] | Iterable[Run | str | Path],
    folder: str | Path = "runs/compare",
    *,
    seeds: int | None = None,
    equal: str | None = None,
    budget: float | None = None,
    parallel: int = 1,
    plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
    data: Dataset | str | None = None,
    model: nn.Module | Callable[..., Any] | str | None = None,
    receiver: Any = None,
    server: Any = None,
    **options: Unpack[RunOptions],
) -> Comparison:
    """Compare receivers over channels with paired seeds. `stableair compare` calls this function.

    Runs with the same seed share data, batches, fading and noise, so the receivers are compared seed by seed. Each
    channel becomes a table; every other varied setting becomes a row. With `equal`, all channels share one table.

    Args:
        plan: As for `sweep`, such as `{"receiver": ["mac(C=1)", "none()"], "noise.tau": [0.1, 0.5], "rounds": 30}`.
            A value may be a Python object, such as `{"receiver": ["mac(C=1)", my_receiver]}`. Alternatively finished
            runs, or folders of runs; then nothing is computed.
        folder: Folder of the runs; finished runs in it are not computed again.
        seeds: Number of seeds of each experiment of a plan; default: the number in the plan, or else five.
        equal: Resource of which every run gets the same budget: "symbols", "airtime", "energy", "energy_max" or "bits".
            Each run is cut after its last round within the budget. None: the runs have equal numbers of rounds.
        budget: The budget. None: the smallest total of the compared runs. With a budget and without `stop`, the runs of
            a plan stop when they have used the budget.
        parallel: Number of processes on this machine.
        plugin_changed: As for `run`.
        callbacks: Observers of the runs of a plan.
        data: A data set for all experiments of a plan, as for `sweep`.
        model: A network for all experiments.
        receiver: A receiver for all experiments.
        server: A server for all experiments.
        **options: As for `run`, see `RunOptions`.

    Returns:
        The accuracies, paired differences, 95 % confidence intervals and p-values.

    Raises:
        InputError: The plan is invalid, its experiments cannot be paired (`not-paired`), or an option is given for
            recorded runs (`unused-options`). The budget is given without `equal` (`budget-without-equal`), is too small
            or too large, or a run did not record or use the resource.
        StableairError: An experiment failed.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> small = {"data": "synthetic(samples=60)", "clients": 3, "rounds": 2}
    >>> plan = {**small, "receiver": ["mac(C=1)", "none()"]}
    >>> with TemporaryDirectory() as folder:
    ...     comparison = sa.compare(plan, folder, seeds=2)
    >>> sorted(line.receiver for line in comparison.lines["sas(alpha=1.5, tau=0.1)"])
    ['mac(C=1)', 'none()']
    """
    if budget is not None and not equal:
        raise InputError(f"a budget needs a resource: add equal={' or '.join(RESOURCES)}", code="budget-without-equal")
    objects = {"data": data, "model": model, "receiver": receiver, "server": server}
    if _is_recorded(plan):
        _refuse_unused({"seeds": seeds, **objects, **options})
        return comparison(plan, equal, budget)  # type: ignore[arg-type]
    specs, in_plan = replace_objects(plan)  # type: ignore[arg-type]
    experiments = comparison_plan(specs, seeds, equal)
    if equal and budget is not None and not options.get("stop"):
        options["stop"] = stop_condition(equal, budget)
    with passed_objects(in_plan):
        runs = sweep(
            experiments, folder, parallel=parallel, plugin_changed=plugin_changed, callbacks=callbacks, **objects,
            **options,
        )  # fmt: skip
    return comparison(runs, equal, budget)


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """Refuse options of runs that would have no effect: recorded runs are compared as they are."""
    if unused := [name for name, value in options.items() if value and name != "progress"]:
        text = f"recorded runs are compared as they are: leave out {', '.join(unused)}"
        raise InputError(text, code="unused-options", options=unused)


def _is_recorded(plan: object) -> bool:
    """Whether the argument consists of runs or folders of runs, not of a plan."""
    if isinstance(plan, str | Path):
        return as_path("plan", plan).is_dir()
    return isinstance(plan, Run) or (
        isinstance(plan, list | tuple) and bool(plan) and all(isinstance(one, Run | str | Path) for one in plan)
    )


def comparison_plan(
    plan: Plan | str | Path | Iterable[Experiment], seeds: int | None = None, equal: str | None = None
) -> list[Experiment]:
    """Return the experiments of a comparison.

    Args:
        plan: As for `compare`, without recorded runs.
        seeds: Number of seeds; default: the number in the plan, or else five.
        equal: As for `compare`.

    Raises:
        InputError: The plan is invalid, its experiments cannot be paired (`not-paired`), or there is no such resource.
    """
    if equal:
        check_resource(equal)
    plan = read_plan(plan) if isinstance(plan, str | Path) else plan
    if isinstance(plan, Mapping):
        default = 1 if isinstance(plan.get("seed"), list | tuple) else MIN_SEEDS
        plan = {"seeds": default} | dict(plan) | ({} if seeds is None else {"seeds": seeds})
    experiments = expand_plan(plan)
    _by_channel([Run(experiment.to_record(), []) for experiment in experiments], one_table=bool(equal))
    return experiments


def comparison(
    runs: Run | str | Path | Iterable[Run | str | Path], equal: str | None = None, budget: float | None = None
) -> Comparison:
    """Compare recorded runs.

    Runs with fewer rounds than the longest are left out, unless they diverged or stopped early. With `equal`, runs that
    are unfinished are left out. Runs on validation data are left out if there are runs on the test data.

    Args:
        runs: Runs, run folders, or folders that contain run folders. The channels of runs keep their order; channels
            of folders are sorted by name.
        equal: Resource of which every run gets the same budget, as for `compare`.
        budget: The budget, as for `compare`.

    Raises:
        InputError: No run has a complete round, the runs cannot be paired, or they cannot have the same budget.
    """
    sources = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    readable, left_out = runs_from(sources)
    log_left_out(left_out)
    split, started = on_one_split([run for run in readable if run.rounds])
    if not started:
        raise InputError("nothing to compare: no run has a complete round", code="no-rounds")
    complete, common = at_equal(started, equal, budget) if equal else (_of_equal_length(started), None)
    metric = f"{split}/accuracy"
    lines, pairs = {}, {}
    channels = _by_channel(complete, one_table=bool(equal))
    if not all(isinstance(source, Run) for source in sources):  # the order of run folders has no meaning
        channels = dict(sorted(channels.items()))
    for channel, groups in channels.items():
        unsorted = [Line(name, each, [run.settled(metric) for run in each]) for name, each in groups.items()]
        lines[channel] = sorted(unsorted, key=lambda line: (-line.accuracy, line.receiver))
        pairs[channel] = compare_groups(groups, metric, equal_rounds=not equal)
    return Comparison(lines, pairs, common)


def _of_equal_length(runs: list[Run]) -> list[Run]:
    """Return the runs with the largest number of rounds, and shorter runs that diverged or stopped early."""
    rounds = max((len(run) for run in runs if run.diverged is None), default=0)
    kept = [run for run in runs if len(run) == rounds or run.diverged is not None or run.stopped]
    if shorter := [len(run) for run in runs if len(run) < rounds and run.diverged is None and not run.stopped]:
        lengths = " and ".join(pluralize(n, "round") for n in sorted(set(shorter)))
        log.warning("%s left out: %s, while the longest run has %d", pluralize(len(shorter), "run"), lengths, rounds)
    return kept


def _by_channel(runs: list[Run], one_table: bool = False) -> dict[str, dict[str, list[Run]]]:
    """Group the runs by channel and receiver.

    Args:
        runs: The runs.
        one_table: Whether one table holds a line for each combination of receiver and channel.

    Raises:
        InputError: The runs cannot be paired (code "not-paired").
    """
    for key in PAIRED_BY:
        if len(values := sorted({str(run.settings[key]) for run in runs})) > 1:
            reason = f"{key} is {' and '.join(values)}; all runs must have the same {key}"
            raise _not_paired(reason, name=key)
    channels: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        channels.setdefault(tuple(run.settings[key] for key in CHANNEL), []).append(run)
    varied = [i for i in range(len(CHANNEL)) if len({channel[i] for channel in channels}) > 1]
    named_by = varied or [CHANNEL.index("noise")]
    groups = {", ".join(channel[i] for i in named_by): group(of_channel) for channel, of_channel in channels.items()}
    if one_table:
        groups = {ALL_CHANNELS: group(runs)}
    for channel, receivers in groups.items():
        if len(receivers) < 2:
            reason = f"{channel} has only one receiver, {next(iter(receivers))}; add a second one"
            raise _not_paired(reason, channel=channel)
        seeds = [{run.settings["seed"] for run in of_receiver} for of_receiver in receivers.values()]
        if not any(one & other for one, other in combinations(seeds, 2)):
            raise _not_paired(f"no two receivers share a seed over {channel}", channel=channel)
    return groups


def _not_paired(reason: str, **fields: str) -> InputError:
    return InputError(f"these runs cannot be paired: {reason}", code="not-paired", **fields)
