"""The commands of the data folder: data list, data prepare, data check, data show."""

from pathlib import Path
from typing import Annotated

import typer

from stableair.cli.options import DataDir, Force, Plugin, load_plugins, out_option, use_data_folder
from stableair.errors import StableairError

app = typer.Typer(help="List, prepare, check and show data sets.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(help="cifar10, cifar100, femnist, an image folder, or a spec: 'hf(\"user/set\", image=img)'.")
]


@app.command("list")
def list_files(data_dir: DataDir = None) -> None:
    """List the named data sets of the hub, and the files of the data folder."""
    use_data_folder(data_dir)
    from stableair.data import hub

    print(hub.folder())
    others = sorted({path.stem for path in hub.folder().glob("*.safetensors")} - hub.NAMED.keys())
    for name in (*hub.NAMED, *others):
        print(f"  {name:<10}  {describe_file(name)}")


def describe_file(name: str) -> str:
    """Return the size of a data file, or the reason why it cannot be used."""
    from stableair.data import hub

    path = hub.file(name)
    if not path.exists():
        return "not found"
    try:
        hub.check(name)
    except StableairError as error:
        return f"unusable: {error}"
    unchecked = "" if has_description(name) else ", unchecked"
    return f"{path.stat().st_size / 1e6:.1f} MB{unchecked}"


def has_description(name: str) -> bool:
    """Return whether the description of a data file exists."""
    from stableair.data import hub

    return hub.description_file(name).exists()


@app.command()
def prepare(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Convert again and replace an existing file.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Convert a data set of the Hugging Face hub, or an image folder, into a file of the data folder.

    Example: `stableair data prepare cifar10`.
    """
    use_data_folder(data_dir)
    from stableair.data import datasets, hub

    file, source = datasets.stored(name)
    print(hub.prepare(file, source, again=again))


@app.command()
def check(
    name: Name,
    describe: Annotated[
        bool, typer.Option("--describe", help="Write the description of the file if it is missing.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Compare a data file with its description, and an image folder with the files that were converted."""
    use_data_folder(data_dir)
    from stableair.data import datasets, hub

    file, _ = datasets.stored(name)
    digest = hub.check(file, contents=True)
    if describe and not has_description(file):
        hub.describe(file, None, "described as found")
    verdict = "matches its description" if has_description(file) else "unchecked: it has no description"
    print(f"{hub.file(file)}: SHA-256 {digest}, {verdict}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Any data set, such as digits or cifar10.")],
    partition: Annotated[str, typer.Option(help="Partition over the clients, such as 'dirichlet(0.3)'.")] = "iid()",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path, out_option("Image file to write.")] = Path("labels.png"),
    force: Force = False,
    data_dir: DataDir = None,
    plugin: Plugin = None,
) -> None:
    """Draw the label distribution over the clients, and print the range of samples and classes.

    Example: `stableair data show digits --partition 'dirichlet(0.3)'`.
    """
    use_data_folder(data_dir)
    load_plugins(plugin)
    from stableair.builder import label_counts
    from stableair.experiment import Experiment
    from stableair.results import plot

    experiment = Experiment(data=name, partition=partition, clients=clients, seed=seed)
    counts = label_counts(experiment)
    samples, classes = counts.sum(1), (counts > 0).sum(1)
    print(f"{samples.sum()} samples, {counts.shape[1]} classes, {clients} clients by {experiment.partition}")
    print(f"samples per client: {samples.min()} to {samples.max()}", end="; ")
    print(f"classes per client: {classes.min()} to {classes.max()}")
    print(plot.save(plot.labels(counts, f"{experiment.data}, {experiment.partition}, seed {seed}"), out, force))
