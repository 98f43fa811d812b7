"""The command line. Nothing heavy is imported before a command needs it."""

import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stableair.checks import InputError, Note, positive

app = typer.Typer(
    name="stableair",
    help="Federated learning over the air under heavy-tailed interference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer brings its own click from 0.21 on; either way this is the class of its complaints about a command line.
ClickException = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
KINDS = (
    "receivers", "noises", "fadings", "channels", "powers", "participations", "partitions", "models", "data", "servers",
)  # fmt: skip

DataDir = Annotated[
    Path | None, typer.Option(help="Where the data files are (default: $STABLEAIR_DATA, else the user's cache).")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Plugin = Annotated[list[Path] | None, typer.Option(help="A Python file that registers components of your own.")]


OnRound = Callable[[dict[str, Any]], Any]


FLAGS = {"resume": "add --resume or choose another --out", "folder": "choose another --out"}


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def main() -> NoReturn:
    """Run the command; whatever the user got wrong is one line on standard error and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads stall each other
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _note
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        _fail("; ".join(filter(None, [str(error), FLAGS.get(error.hint, "")])))
    except ClickException as error:
        code = 2
        if message := error.format_message():  # empty where the help was asked for by giving no command
            _fail(message)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        _fail(f"{error.filename or 'writing'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort) as stop:
        code = 143 if any(isinstance(s, Terminated) for s in (stop, stop.__cause__, stop.__context__)) else 130
    sys.exit(code or 0)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _note(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Our own warnings in one line; those of the libraries below are not for the user of a command."""
    if issubclass(category, Note):
        print(f"note: {message}", file=sys.stderr)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        import stableair

        print(stableair.__version__)
        raise typer.Exit


@app.command()
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]...", help="What to run: `stableair list presets`, `list settings`."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: one under runs/ with its name).")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run seed, seed+1, ..., each in a folder of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete round.")] = False,
    device: Device = None,
    engine: Annotated[str | None, typer.Option(help="auto, reference or fast.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between two checkpoints.")] = 1,
    track: Annotated[str | None, typer.Option(help="Tell a tracker as well: tensorboard, wandb or mlflow.")] = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Run an experiment and record it in a folder."""
    _use(data_dir)
    _load(plugin)
    from stableair.experiment import from_words
    from stableair.results.track import check_installed as needed
    from stableair.results.track import track as tracking
    from stableair.runner import resume_point as standing
    from stableair.runner import run as record_run

    needed(track)
    experiment = from_words(words or [])
    given = {"device": device, "engine": engine}
    experiment = experiment.with_(**{key: value for key, value in given.items() if value})

    each = [experiment.with_(seed=seed) for seed in range(experiment.seed, experiment.seed + seeds)]
    for this in each:
        standing(_folder(this, out, seeds), this, resume)  # none is begun where one would be refused
    for this in each:
        folder = _folder(this, out, seeds)
        hint = f"{folder} holds every complete round, --resume goes on from there"
        with _stop_politely(hint), _display() as watch, tracking(track, this, folder) as tell:
            on_round = _both(watch(f"seed {this.seed}", this.rounds), tell)
            how = {"resume": resume, "checkpoint_every": checkpoint_every, "on_round": on_round, "on_start": _computed}
            result = record_run(this, folder, **how)
        print(_summary(result, this.evaluate))


def _computed(how: dict[str, Any]) -> None:
    many = f", {how['chunk']} client{'s' * (how['chunk'] > 1)} at a time" if how["engine"] != "reference" else ""
    print(f"engine {how['engine']}, {how['precision']}{many}: {how['why']}", flush=True)


def _both(one: OnRound, other: OnRound) -> OnRound:
    return lambda row: (one(row), other(row))


def _use(data_dir: Path | None) -> None:
    """Make the folder the one of this process and of what it starts."""
    if data_dir:
        os.environ["STABLEAIR_DATA"] = str(data_dir)


def _load(plugin: list[Path] | None) -> None:
    from stableair.spec import load_plugin

    for file in plugin or []:
        load_plugin(file)


def _folder(experiment: Any, out: Path | None, seeds: int) -> Path:
    if out is None:
        return Path("runs") / experiment.name
    return out / f"seed{experiment.seed}" if seeds > 1 else out


@contextmanager
def _stop_politely(hint: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        print(f"stopped; {hint}", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None


def _summary(result: Any, split: str) -> str:
    if result.diverged is not None:
        kept = "; the last good checkpoint is kept" if result.diverged else ""
        return f"{result.folder}: diverged at round {result.diverged}{kept}"
    accuracy = result[f"{split}/accuracy"]
    done = f"{len(result)} round{'s' * (len(result) > 1)}"
    return f"{result.folder}: {done}, {split} accuracy {accuracy[-1]:.4f} (best {max(accuracy):.4f})"


def _figures(row: dict[str, Any]) -> str:
    """A round in words."""
    if row.get("diverged"):
        return "diverged"
    split, accuracy = next((k.partition("/")[0], v) for k, v in row.items() if k.endswith("/accuracy"))
    snr = "none" if row["channel/snr_db"] is None else f"{row['channel/snr_db']:.1f} dB"
    return f"{split} accuracy {accuracy:.4f}  train loss {row['train/loss']:.4g}  SNR {snr}"


@contextmanager
def _display(every_round: bool = True) -> Iterator[Callable[[str, int], OnRound]]:
    """A live line of the run at work on a terminal; where the output is piped, a plain line per round."""
    if not (sys.stdout and sys.stdout.isatty()):

        def watch_plainly(title: str, rounds: int) -> OnRound:
            if not every_round:
                return lambda row: None
            return lambda row: print(f"{title}  {row['round'] + 1}/{rounds}  {_figures(row)}", flush=True)

        yield watch_plainly
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")
    with Progress(*columns, TimeRemainingColumn(), transient=not every_round) as progress:

        def watch(title: str, rounds: int) -> OnRound:
            for past in progress.task_ids:
                progress.remove_task(past)
            task = progress.add_task(title, total=rounds, figures="")
            return lambda row: progress.update(task, completed=row["round"] + 1, figures=_figures(row))

        yield watch


@app.command()
def search(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PRESET|FILE.toml] [KEY=VALUE]... KEY=LOW:HIGH[:log|:int]...",
            help="The experiment, and what to search of it, such as receiver.C=0.01:10:log or local_epochs=1,2,5.",
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, help="How many values to try.")] = 12,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds each value is judged over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The search's folder (default: one under runs/).")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Search any parameters on a validation split of the training data; the test data stay unseen."""
    _use(data_dir)
    _load(plugin)
    from stableair import searches as the
    from stableair.experiment import from_words
    from stableair.results import plot as draw

    pairs = [word.partition("=") for word in words]
    if twice := {key for key, equals, _ in pairs if equals and [k for k, *_ in pairs].count(key) > 1}:
        raise InputError(f"{', '.join(sorted(twice))} is given twice")
    spaces = {key: space for key, _, text in pairs if (space := the.space(key, text))}
    plain = [word for word, (key, *_) in zip(words, pairs, strict=True) if key not in spaces]
    base = from_words(plain)
    if device:
        base = base.with_(device=device)
    folder = out or Path("runs") / f"search-{base.name}"
    with _stop_politely("the same command goes on from here"), _display(every_round=False) as watch:
        found = the.search(base, spaces, folder, trials=trials, seeds=seeds, progress=watch, log=_say)
    print(f"best: {the.describe(found.winner, base.rounds * seeds)}")
    for key in found.at_boundary:
        print(f"note: the best {key} is at the end of {found.spaces[key]}; the best may lie beyond")
    again = ["stableair", "run", *plain, *(f"{key}={value}" for key, value in found.winner.values.items())]
    for option, values in {"--plugin": plugin or [], "--data-dir": [data_dir], "--device": [device]}.items():
        again += [word for value in values if value for word in (option, str(value))]
    print(shlex.join(again))
    print(f"{folder / the.RESULT}\n{draw.save(the.draw(found), folder / 'search.png')}")


def _say(line: str) -> None:
    print(line, flush=True)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="fig2, fig3a to fig3f, fig4a to fig4c, interval.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of your own.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the picture and its runs go (default: runs, with --smoke runs/smoke)."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The same figure, very small: about a minute.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Communication rounds.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds; two or more give a band.")] = 1,
    trials: Annotated[int | None, typer.Option(min=1, help="Values to try in the search for a threshold.")] = None,
    search_rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to judge each of them by.")] = None,
    c: Annotated[float | None, typer.Option("--C", help="MAC's threshold, instead of searching it.")] = None,
    max_norm: Annotated[float | None, typer.Option(help="GNC's threshold, instead of searching it.")] = None,
    search_each: Annotated[bool, typer.Option("--search-each", help="Fig. 4: a searched C for every curve.")] = False,
    device: Device = None,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Make a figure of the paper: compute the runs that are missing, then draw NAME.png and NAME.pdf."""
    _use(data_dir)
    _load(plugin)
    from stableair.experiment import settings_of
    from stableair.paper import figures
    from stableair.results import plot as draw

    out = out or Path("runs/smoke" if smoke else "runs")
    if name in figures.DRAWINGS:
        if words:
            raise InputError(f"{name} takes no settings: got {' '.join(words)}")
        picture = figures.drawing(name)
    else:
        settings = settings_of(words or [])
        settings |= {key: value for key, value in {"rounds": rounds, "device": device}.items() if value is not None}
        given = {method: value for method, value in {"MAC": c, "GNC": max_norm}.items() if value is not None}
        budget = {"trials": trials, "search_rounds": search_rounds}
        budget = {key: value for key, value in budget.items() if value is not None}
        how = figures.plan(name, settings, smoke=smoke, seeds=seeds, given=given, search_each=search_each, **budget)
        with _stop_politely("the same command goes on from here"), _display(every_round=False) as watch:
            runs, notes = figures.compute(how, out, watch, _say)
        picture = figures.draw(how, runs, notes)
        for label, each in runs.items():
            for one in each:
                print(f"{label:<16} {_summary(one, how.base.evaluate)}")
    for ending in ("png", "pdf"):
        print(draw.save(picture, out / f"{name}.{ending}"))


@app.command()
def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture, as .png, .pdf or .svg.")] = Path("curves.png"),
    metric: Annotated[str, typer.Option(help="What to draw, as named in rounds.jsonl.")] = "test/accuracy",
    log: Annotated[bool, typer.Option("--log", help="A logarithmic axis for it.")] = False,
) -> None:
    """Draw a metric of one or more runs; runs that differ in the seed alone become one line with a band."""
    from stableair.results import plot as draw
    from stableair.results import run as finding

    found, unreadable = finding.find(folders)
    runs, others = finding.with_metric(found, metric)
    for line in (*unreadable, *(f"{run.folder} has no {metric}" for run in others)):
        print(f"left out: {line}", file=sys.stderr)
    print(draw.save(draw.curves(finding.group(runs), metric, log=log), out))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """One self-contained page of one or more runs: curves, tables, a paired comparison."""
    from stableair.results import report as the
    from stableair.results import run as finding

    runs, unreadable = finding.find(folders)
    for line in unreadable:
        print(f"left out: {line}", file=sys.stderr)
    print(the.write(the.page(runs, unreadable), out))


data_app = typer.Typer(help="The data folder: what is there, fetch it, check it, look at it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Name = Annotated[str, typer.Argument(help="cifar10, cifar100, femnist, or a spec: 'hf(\"user/set\", image=img)'.")]


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """The image sets that come from the hub, and the files of the data folder."""
    _use(data_dir)
    from stableair.data import hub

    print(hub.folder())
    others = sorted({path.stem for path in hub.folder().glob("*.safetensors")} - hub.NAMED.keys())
    for name in (*hub.NAMED, *others):
        state = "not there"
        if (path := hub.file(name)).exists():
            try:
                hub.check(name)
                state = f"{path.stat().st_size / 1e6:.1f} MB" + ", unchecked" * (not hub.described(name).exists())
            except InputError as error:
                state = f"damaged: {error}"
        print(f"  {name:<10}  {state}")


@data_app.command()
def prepare(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Make the file anew where it is there already.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Fetch a set from the hub, once, and write its file into the data folder."""
    _use(data_dir)
    from stableair.data import hub
    from stableair.data import sets as data

    print(hub.prepare(*data.stored(name), again=again))


@data_app.command()
def check(
    name: Name,
    describe: Annotated[
        bool, typer.Option("--describe", help="Write the description of a file that has none.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Compare a data file with its description."""
    _use(data_dir)
    from stableair.data import hub
    from stableair.data import sets as data

    file, _ = data.stored(name)
    digest = hub.check(file)
    if describe and not hub.described(file).exists():
        hub.describe(file, None, "described as found")
    good = "as its description tells" if hub.described(file).exists() else "unchecked: it has no description"
    print(f"{hub.file(file)}: SHA-256 {digest}, {good}")


@data_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Any data set, such as digits or cifar10.")],
    partition: Annotated[str, typer.Option(help="How it is divided, such as 'dirichlet(0.3)'.")] = "iid()",
    clients: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture.")] = Path("labels.png"),
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Draw how the labels are distributed over the clients, and say how unequal it is."""
    _use(data_dir)
    _load(plugin)
    from stableair.builder import build
    from stableair.experiment import Experiment
    from stableair.results import plot as draw

    experiment = Experiment(data=name, partition=partition, clients=clients, seed=seed, model="logistic()")
    counts = build(experiment).labels
    sizes, kinds = counts.sum(1), (counts > 0).sum(1)
    print(f"{sizes.sum()} samples, {counts.shape[1]} classes, {clients} clients by {experiment.partition}")
    print(f"samples a client: {sizes.min()} to {sizes.max()}; classes a client: {kinds.min()} to {kinds.max()}")
    print(draw.save(draw.labels(counts, f"{experiment.data}, {experiment.partition}, seed {seed}"), out))


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}, presets, settings; by default all.")] = None,
    plugin: Plugin = None,
) -> None:
    """List the components: each with its signature and what it is."""
    from stableair.checks import choice
    from stableair.experiment import PRESETS, Experiment
    from stableair.spec import REGISTRIES

    _load(plugin)
    kinds = [*KINDS, "presets", "settings"]
    kinds = kinds if kind is None else [choice("kind", kind, kinds)]
    for one in kinds:
        if one == "presets":
            rows = [(name, " ".join(f"{k}={v!r}" for k, v in settings.items())) for name, settings in PRESETS.items()]
        elif one == "settings":
            rows = list(Experiment().to_dict().items())
        else:
            rows = [(entry.signature, entry.summary) for entry in REGISTRIES[one]]
        print(one)
        for left, right in rows:
            print(f"  {left:<{max(len(name) for name, _ in rows)}}  {right}".rstrip())


@app.command()
def theory(
    alpha: Annotated[float, typer.Option(help="Tail index of the interference, in [0.5, 2].")] = 1.5,
    tau: Annotated[float, typer.Option(help="Scale of the interference.")] = 0.1,
    C: Annotated[float, typer.Option("--C", help="Clipping threshold.")] = 1.0,
    eta: Annotated[float, typer.Option(help="Step size.")] = 0.03,
    L: Annotated[float, typer.Option("--L", help="Smoothness of the objective.")] = 10.0,
    G: Annotated[float, typer.Option("--G", help="Bound on every client's gradient norm.")] = 0.5,
    d: Annotated[int, typer.Option("--d", help="Entries of the gradient.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Communication rounds K.")] = 100,
    gap: Annotated[float, typer.Option(help="f(w_0) - f(w*).")] = 1.0,
    check: Annotated[bool, typer.Option("--check", help="Compare Theorem 1 with a simulation (some seconds).")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it: the picture's file, as .png, .pdf or .svg.")] = None,
) -> None:
    """Lemma 1, Theorem 1 and the best threshold, as the paper prints them and corrected."""
    from stableair import theory as the
    from stableair.results import plot as draw

    positive("tau", tau)
    if check:
        from stableair.paper import theorem

        rows = [theorem.check(*case) for case in theorem.CHECKS]
        print("Theorem 1 on pseudo-Huber losses with L = G = 1: the mean over the rounds of |grad f(w_k)|^2")
        print("alpha   tau     C    eta    measured            printed   corrected")
        for row in rows:
            verdict = "  the printed bound is broken" if row.measured > row.printed else ""
            print(
                f"{row.alpha:<5g} {row.tau:>5g} {row.C:>5g} {row.eta:>6g}    {row.measured:.5f} +- {row.error:.5f}"
                f"   {row.printed:.5f}   {row.corrected:.5f}{verdict}"
            )
    else:
        best = the.best_threshold(alpha)
        lines = [(f"p_C {form}", the.unclipped(C, alpha, tau, G, form)) for form in the.FORMS]
        lines += [
            (f"bound {form}", the.bound(rounds, C, alpha, tau, eta, L, G, d, gap, form)) for form in the.FORMS[:2]
        ]
        for name, (value, notes) in lines:
            print(f"{name:<16} {value:<12.6g} {'; '.join(notes)}".rstrip())
        print(f"{'C* weak signal':<16} {best * tau:<12.6g} C*/tau = {best:.4g}")
    if plot:
        from stableair.paper import theory_plots

        print(draw.save(theory_plots.checks(rows) if check else theory_plots.overview(alpha, tau, C, G), plot))


@app.command()
def bench(
    workload: Annotated[str, typer.Argument(help="digits, cnn, resnet18 or cifar10.")] = "digits",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time, after one that warms up.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Time only the modes whose name begins with this; may be repeated.")
    ] = None,
    peers: Annotated[Path | None, typer.Option(help="bench/peers: time other simulators too, on the digits.")] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Over the number of clients and the size instead.")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Append the table to this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Compare every way to compute a round with the reference, then time them in one run."""
    from stableair.checks import choice

    try:
        from stableair.engine import bench as the
    except ModuleNotFoundError as error:
        if error.name != "stableair.engine":
            raise
        raise InputError("bench needs the fast engine: this installation has no stableair.engine") from None
    _use(data_dir)
    choice("workload", workload, the.WORKLOADS)
    if scaling and (only or peers):
        raise InputError("--scaling times what auto chooses, at several sizes: leave out --only and --peers")
    if peers and (workload != "digits" or not (peers / "work.py").exists()):
        raise InputError("--peers needs the workload digits and the folder bench/peers of the source")
    if record:
        the.check_record(record)
    if scaling:
        import torch

        sizes = the.SIZES_ON_GPU if torch.cuda.is_available() else the.SIZES
        text = the.scaling((10, 100, 1000), sizes, rounds, _say)
        print(text)
    else:
        rows = the.measure(the.WORKLOADS[workload], rounds, _say, only or [""])
        if not rows:
            raise InputError(
                f"no mode here begins with {' or '.join(only)}; there are reference, stacked and vmapped, kernels for "
                "the ResNets on a GPU, and processes on a CPU"
            )
        if workload == "cifar10":
            rows.append(the.recorded(the.WORKLOADS[workload], rounds))
        text = the.table(workload, rows + (the.peers(peers, rounds, _say) if peers else []))
        print(text)
    if record:
        print(the.append(record, text))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for demo.png, demo.json and runs/demo.")] = Path("."),
) -> None:
    """The paper's four methods on the embedded data: a table, demo.png and demo.json in about half a minute."""
    from rich.console import Console
    from rich.table import Table

    from stableair.experiment import PRESETS, Experiment
    from stableair.paper.demo import LABELS
    from stableair.paper.demo import demo as run_demo
    from stableair.results import plot as draw
    from stableair.results.run import LAST

    base = Experiment(**PRESETS["demo"])
    folder = out / "runs" / "demo"
    print(f"{base.data}, {base.clients} clients, {base.rounds} rounds, {base.noise}; runs in {folder}", flush=True)
    with _stop_politely("the same command goes on from here"), _display(every_round=False) as watch:
        runs = run_demo(folder, _say, watch)
    final = {method: run["test/accuracy"][-1] for method, run in runs.items()}
    table = Table("method", "receiver", "test accuracy", f"mean of the last {LAST} rounds")
    for method, run in runs.items():
        mean = run.settled("test/accuracy")
        shown = ["diverged", ""] if run.diverged is not None else [f"{final[method]:.3f}", f"{mean:.3f}"]
        table.add_row(LABELS[method], run.settings["receiver"], *shown)
    Console().print(table)
    picture = draw.curves({LABELS[m]: [run] for m, run in runs.items()}, title=f"{base.data}, {base.noise}")
    draw.save(picture, out / "demo.png")
    (out / "demo.json").write_text(json.dumps(final, indent=2) + "\n")
    print(f"{out / 'demo.png'}\n{out / 'demo.json'}")
