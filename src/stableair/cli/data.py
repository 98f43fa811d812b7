"""The commands of the data folder: data list, data prepare, data check, data show."""

from pathlib import Path
from typing import Annotated

import typer

from stableair.checks import InputError
from stableair.cli.options import DataDir, Plugin, load_plugins, place, use_data_folder

app = typer.Typer(help="The data folder: what is there, fetch it, check it, look at it.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="cifar10, cifar100, femnist, or a spec: 'hf(\"user/set\", image=img)'.")]


@app.command("list")
def list_files(data_dir: DataDir = None) -> None:
    """The image sets that come from the hub, and the files of the data folder."""
    use_data_folder(data_dir)
    from stableair.data import hub

    print(hub.folder())
    others = sorted({path.stem for path in hub.folder().glob("*.safetensors")} - hub.NAMED.keys())
    for name in (*hub.NAMED, *others):
        print(f"  {name:<10}  {describe_file(name)}")


def describe_file(name: str) -> str:
    """What state a data file is in."""
    from stableair.data import hub

    path = hub.file(name)
    if not path.exists():
        return "not there"
    try:
        hub.check(name)
    except InputError as error:
        return f"damaged: {error}"
    unchecked = "" if has_description(name) else ", unchecked"
    return f"{path.stat().st_size / 1e6:.1f} MB{unchecked}"


def has_description(name: str) -> bool:
    from stableair.data import hub

    return hub.description_file(name).exists()


@app.command()
def prepare(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Make the file anew where it is there already.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Fetch a set from the hub, once, and write its file into the data folder."""
    use_data_folder(data_dir)
    from stableair.data import hub, sets

    file, source = sets.stored(name)
    print(hub.prepare(file, source, again=again))


@app.command()
def check(
    name: Name,
    describe: Annotated[
        bool, typer.Option("--describe", help="Write the description of a file that has none.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Compare a data file with its description."""
    use_data_folder(data_dir)
    from stableair.data import hub, sets

    file, _ = sets.stored(name)
    digest = hub.check(file)
    if describe and not has_description(file):
        hub.describe(file, None, "described as found")
    verdict = "as its description tells" if has_description(file) else "unchecked: it has no description"
    print(f"{hub.file(file)}: SHA-256 {digest}, {verdict}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Any data set, such as digits or cifar10.")],
    partition: Annotated[str, typer.Option(help="How it is divided, such as 'dirichlet(0.3)'.")] = "iid()",
    clients: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, place("The picture.", "-o")] = Path("labels.png"),
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Draw how the labels are distributed over the clients, and say how unequal it is."""
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.builder import build
    from stableair.experiment import Experiment
    from stableair.results import plot

    experiment = Experiment(data=name, partition=partition, clients=clients, seed=seed, model="logistic()")
    counts = build(experiment).labels
    assert counts is not None  # every experiment that is built knows its clients' data
    samples, classes = counts.sum(1), (counts > 0).sum(1)
    print(f"{samples.sum()} samples, {counts.shape[1]} classes, {clients} clients by {experiment.partition}")
    print(f"samples a client: {samples.min()} to {samples.max()}; classes a client: {classes.min()} to {classes.max()}")
    print(plot.save(plot.labels(counts, f"{experiment.data}, {experiment.partition}, seed {seed}"), out))
