"""Search the parameters of any part on a validation split. The test data stay unseen, and every method searched with
the same trials, rounds and seeds has had the same budget."""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stableair.builder import build
from stableair.checks import InputError, place, shown, typed, whole
from stableair.contracts import Overflow
from stableair.experiment import EXECUTION, TYPES, Experiment
from stableair.files import write_whole
from stableair.results.folder import check_writable
from stableair.results.run import Run, load
from stableair.results.sealed import EXPERIMENT, read_plain
from stableair.runner import enough_memory
from stableair.spec import literal
from stableair.streams import generator
from stableair.sweeps.cooperative import taken
from stableair.sweeps.plans import over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULT = "search.json"
METRIC = "validation/accuracy"


class Range(NamedTuple):
    """From low to high; log spaces by factors, int takes whole numbers alone."""

    low: float
    high: float
    log: bool = False
    int: bool = False

    def suggest(self, trial: Any, key: str) -> float:
        if self.int:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return float(f"{trial.suggest_float(key, self.low, self.high, log=self.log):.3g}")  # C=0.134 is fine enough

    def at(self, share: float) -> float:
        """The value at a share of the way from low to high."""
        span = self.high / self.low if self.log else self.high - self.low
        value = self.low * span**share if self.log else self.low + share * span
        return round(value) if self.int else value

    def ends(self) -> tuple[float, float]:
        return (int(self.low), int(self.high)) if self.int else (self.low, self.high)

    def __str__(self) -> str:
        return ":".join(
            [f"{self.low:g}", f"{self.high:g}", *(["log"] if self.log else []), *(["int"] if self.int else [])]
        )


class OneOf(NamedTuple):
    """One of several values."""

    values: tuple

    def suggest(self, trial: Any, key: str) -> Any:
        return trial.suggest_categorical(key, self.values)

    def at(self, share: float) -> Any:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def ends(self) -> tuple:
        return self.values

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


Space = Range | OneOf
OnRound = Callable[[dict[str, Any]], Any]


class Trial(NamedTuple):
    """One candidate: its parameters, its score and over how many rounds it was judged."""

    values: dict[str, Any]
    score: float
    rounds: int
    stopped: bool = False  # early, because it was hopeless
    failed: str = ""  # what kept it from being computed


class Result(NamedTuple):
    """What a search found; `best` is the experiment with the best values, on the test split again."""

    base: Experiment
    spaces: dict[str, Space]
    trials: list[Trial]

    @property
    def winner(self) -> Trial:
        return max((t for t in self.trials if not t.stopped and not t.failed), key=lambda trial: trial.score)

    @property
    def at_boundary(self) -> list[str]:
        """The ranges whose best value is at one of their ends: there the best may lie beyond."""
        return [
            key for key, one in self.spaces.items()
            if isinstance(one, Range) and not one.at(0.05) < self.winner.values[key] < one.at(0.95)
        ]  # fmt: skip

    @property
    def best(self) -> Experiment:
        return self.base.with_(**self.winner.values)


def space(key: str, text: str) -> Space | None:
    """The space that `0.01:10:log`, `1:9:int` or `a,b,c` stands for; None where the text is a plain value."""
    if TYPES.get(key) is str and not re.fullmatch(r"[\w,]+", text):
        return None  # such as device=cuda:0
    low, *rest = text.split(":")
    if rest and "(" not in text:
        high, *options = rest
        if set(options) - {"log", "int"} or not _number(low) or not _number(high):
            raise InputError(f"{key}={text} is no range: write low:high, low:high:log or low:high:int")
        found = Range(float(low), float(high), "log" in options, "int" in options or TYPES.get(key) is int)
        if not found.low < found.high or (found.log and found.low <= 0):
            more = ", and above 0 for log" if found.log else ""
            raise InputError(f"{key}={text}: low must be below high{more}")
        if found.int and not (found.low.is_integer() and found.high.is_integer()):
            raise InputError(f"{key}={text}: its ends must be whole numbers")
        return found
    if "," in text and "(" not in text:
        return OneOf(tuple(map(literal, text.split(","))))
    return None


def _as_space(key: str, given: Space | str) -> Space:
    if not isinstance(key, str) or not isinstance(given, str | Range | OneOf):
        raise InputError(f"{shown(key)} must be searched in a range or in values: got {shown(given)}")
    found = space(key, given) if isinstance(given, str) else given
    if found is None:
        raise InputError(f"{key}={given} is one value: write a range such as 0.01:10:log, or values with commas")
    return found


def _number(text: str) -> bool:
    """Whether it is a finite number, written as one."""
    plain = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text.strip())
    return bool(plain) and math.isfinite(float(text))


@typed
def search(
    base: Experiment,
    spaces: Mapping[str, Space | str],
    folder: str | Path,
    *,
    trials: int = 12,
    seeds: int = 1,
    progress: Callable[[str, int], OnRound] = lambda title, rounds: lambda row: None,
    log: Callable[[str], Any] = lambda line: None,
) -> Result:
    """Try so many values, each with the seeds base.seed, base.seed + 1, ... for base.rounds on a validation split.

    The first half of the trials is spread evenly over the spaces, the other half placed by what those found. A trial
    that after a third of its rounds is among the worst quarter of those before it is stopped. All is kept in the
    folder: the same search goes on where it was stopped, and a finished one is not computed again.
    """
    _optuna()  # without it nothing is begun
    whole("trials", trials, 1)
    whole("seeds", seeds, 1)
    folder, base = place("folder", folder), base.with_(evaluate="validation")
    wanted = _wanted(base, spaces)
    if not (folder / RESULT).exists():
        check_writable(folder)
        with enough_memory():
            build(base)  # data, device, model: whatever is missing is found before anything is made
    header = {"experiment": base.id(), "rounds": base.rounds, "trials": trials, "seeds": seeds}
    header |= {key: str(one) for key, one in wanted.items()}
    _refuse_another(folder, header)
    if choices := _choices(list(wanted.values())):
        trials = min(trials, len(choices))  # more would repeat some

    study, found = _study(base, wanted, trials), []
    for number in range(1, trials + 1):
        found.append(_tried(study, base, wanted, seeds, folder, partial(progress, f"trial {number}/{trials}")))
        log(describe(found[-1], base.rounds * seeds))
    if all(trial.failed for trial in found):
        raise InputError(f"every trial failed; the first: {found[0].failed}")
    result = Result(base.with_(evaluate="test"), wanted, found)
    _write(folder, header, result)
    return result


def _wanted(base: Experiment, spaces: Mapping[str, Space | str]) -> dict[str, Space]:
    """The spaces to search; what no trial could take is refused before the first."""
    wanted = {key: _as_space(key, one) for key, one in spaces.items()}
    if fixed := [key for key in wanted if key in ("evaluate", "seed", *EXECUTION)]:
        raise InputError(f"{fixed[0]} cannot be searched: every trial is judged on the validation split, alike")
    if not wanted:
        raise InputError("nothing to search: give a range such as receiver.C=0.01:10:log")
    for key, one in wanted.items():
        for value in one.ends():
            base.with_(**{key: value})
    return wanted


def _study(base: Experiment, wanted: dict[str, Space], trials: int) -> Any:
    """Optuna's: half of the trials spread evenly, the others placed by what those found, the hopeless given up."""
    optuna, even = _optuna(), trials - trials // 2
    sampler = optuna.samplers.TPESampler(seed=base.seed, n_startup_trials=even)
    pruner = optuna.pruners.PercentilePruner(75.0, n_startup_trials=3, n_warmup_steps=base.rounds // 3)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    for point in _spread(list(wanted.values()), even):
        study.enqueue_trial(dict(zip(wanted, point, strict=True)))
    return study


def _tried(
    study: Any, base: Experiment, wanted: dict[str, Space], seeds: int, folder: Path, show: Callable[[int], OnRound]
) -> Trial:
    """The study's next values, played with each seed; it is told what came of them."""
    optuna, trial = _optuna(), study.ask()
    values = {key: one.suggest(trial, key) for key, one in wanted.items()}
    judge = _Judge(trial, base.rounds * seeds)
    try:
        for candidate in over_seeds(base.with_(**values), seeds):
            _play(candidate, folder, judge, show(candidate.rounds))
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return Trial(values, judge.score, judge.rounds, stopped=True)
    except Overflow as error:  # such as a learning rate that overflows at once: the others may do
        study.tell(trial, 0.0)
        return Trial(values, 0.0, judge.rounds, failed=str(error))
    study.tell(trial, judge.score)
    return Trial(values, judge.score, judge.rounds)


def _choices(spaces: list[Space]) -> list[tuple[Any, ...]]:
    """All combinations, where there are mere choices."""
    values = [one.values for one in spaces if isinstance(one, OneOf)]
    return list(product(*values)) if len(values) == len(spaces) else []


def _spread(spaces: list[Space], n: int) -> list[tuple[Any, ...]]:
    """Where to begin: the combinations of mere choices, well mixed, else n points spread evenly over the spaces."""
    if every := _choices(spaces):
        return [every[i] for i in generator(0, "search").permutation(len(every)).tolist()]
    from scipy.stats import qmc  # a second to import

    sequence = qmc.Halton(len(spaces), scramble=False)
    sequence.fast_forward(1)  # its first point is a corner
    shares = sequence.random(n)
    return [tuple(one.at(share) for one, share in zip(spaces, point, strict=True)) for point in shares]


def describe(trial: Trial, rounds: int) -> str:
    """A trial in one line."""
    values = "  ".join(f"{key}={value}" for key, value in trial.values.items())
    if trial.failed:
        return f"{values}  failed: {trial.failed}"
    early = f", stopped after {trial.rounds} of {rounds} rounds" if trial.stopped else ""
    return f"{values}  validation accuracy {trial.score:.4f}{early}"


class _Judge:
    """Sees the rounds of a trial, one seed after the other, and gives up on it when it is hopeless."""

    def __init__(self, trial: Any, rounds: int):
        self.trial, self.most = trial, rounds
        self.runs: list[Run] = []
        self.rounds = 0

    def begin(self, experiment: Experiment) -> None:
        self.runs.append(Run(experiment.to_dict(), []))

    def see(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["round"] >= len(self.runs[-1]):  # else seen already: a run that was killed may repeat its last round
                self._judge(row)

    def _judge(self, row: dict[str, Any]) -> None:
        self.runs[-1].rounds.append(row)
        self.trial.report(self.score, self.rounds)
        self.rounds += 1
        if self.rounds < self.most and self.trial.should_prune():
            import optuna

            raise optuna.TrialPruned

    @property
    def score(self) -> float:
        """Mean over the seeds of the accuracy over the last rounds."""
        scores = [one.settled(METRIC) for one in self.runs if one.rounds]
        return sum(scores) / len(scores) if scores else math.nan


def _play(experiment: Experiment, folder: Path, judge: _Judge, show: OnRound) -> None:
    """Show the judge every round of a run: the recorded ones, then the others as they are computed.

    Whoever else makes the same search may be at it: then it is waited for, or gone on with where it was left.
    """
    judge.begin(experiment)
    place = folder / experiment.name

    def begin(experiment: Experiment) -> OnRound:
        if (place / EXPERIMENT).exists():
            judge.see(load(place).rounds[: experiment.rounds])
        return on_round

    def on_round(row: dict[str, Any]) -> None:
        show(row)
        if row["round"] > len(judge.runs[-1]):  # somebody else's were added before this process had the lock
            judge.see(load(place).rounds[: row["round"]])
        judge.see([row])

    for _, outcome in taken([experiment], folder, begin):
        if isinstance(outcome, InputError):
            raise outcome
        judge.see(outcome.rounds)


def _refuse_another(folder: Path, header: dict[str, Any]) -> None:
    """Keep the folder to one search, from its beginning."""
    path = folder / RESULT
    if path.exists():
        try:
            there = dict(json.loads(read_plain(path))["search"])
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is corrupted ({type(error).__name__}); delete it", hint="folder") from None
        if different := [key for key in header | there if header.get(key) != there.get(key)]:
            text = f"{folder} holds another search, with another {', '.join(different)}"
            raise InputError(text, hint="folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"search": header}, indent=2) + "\n").encode())


def _write(folder: Path, header: dict[str, Any], result: Result) -> None:
    rows = [trial._asdict() for trial in result.trials]
    content = {"search": header, "trials": rows, "best": result.winner._asdict()}
    write_whole(folder / RESULT, (json.dumps(content, indent=2) + "\n").encode())


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("a search needs Optuna: pip install 'stableair[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def draw(found: Result) -> "Figure":
    """The score of every trial of a search over each of its parameters; those stopped early are hollow."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(max(6.4, 4.2 * len(found.spaces)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found.spaces), squeeze=False, sharey=True)[0]
    for axes, (key, space) in zip(panels, found.spaces.items(), strict=True):
        for stopped, style in ((False, {}), (True, {"markerfacecolor": "none"})):
            some = [trial for trial in found.trials if trial.stopped == stopped]
            text = "stopped early" if stopped else "all rounds"
            if some:
                x = [trial.values[key] for trial in some]
                axes.plot(x, [t.score for t in some], "o", color="tab:blue", label=text, **style)
        best = found.winner
        axes.plot(best.values[key], best.score, "*", color="tab:red", markersize=14, label=f"best: {best.values[key]}")
        log = isinstance(space, Range) and space.log
        if log:
            axes.set_xscale("log")
        if all(isinstance(trial.values[key], int) for trial in found.trials):  # there is nothing between 1 and 2
            axes.xaxis.set_major_locator(
                LogLocator(subs=(1, 2, 5)) if log else MaxNLocator(integer=True, min_n_ticks=1)
            )
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("validation accuracy")
    figure.suptitle(f"{found.base.data}, {found.base.rounds} rounds", fontsize="medium")
    return figure
