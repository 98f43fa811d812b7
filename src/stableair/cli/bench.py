"""The command that times the engines: bench."""

from pathlib import Path
from typing import Annotated

import typer

from stableair.checks import InputError, choice
from stableair.cli.display import print_line
from stableair.cli.options import DataDir, use_data_folder


def bench(
    workload: Annotated[str, typer.Argument(help="digits, cnn, resnet18, cifar10 or femnist.")] = "digits",
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
    try:
        from stableair.engine import bench as engines
    except ModuleNotFoundError as error:
        if error.name != "stableair.engine":
            raise
        raise InputError("bench needs the fast engine: this installation has no stableair.engine") from None
    use_data_folder(data_dir)
    choice("workload", workload, engines.WORKLOADS)
    if scaling and (only or peers):
        raise InputError("--scaling times what auto chooses, at several sizes: leave out --only and --peers")
    if peers and (workload != "digits" or not (peers / "work.py").exists()):
        raise InputError("--peers needs the workload digits and the folder bench/peers of the source")
    if record:
        engines.check_record(record)
    if scaling:
        import torch

        sizes = engines.SIZES_ON_GPU if torch.cuda.is_available() else engines.SIZES
        table = engines.scaling((10, 100, 1000), sizes, rounds, print_line)
    else:
        experiment = engines.WORKLOADS[workload]
        rows = engines.measure(experiment, rounds, print_line, only or [""])
        if not rows:
            raise InputError(
                f"no mode here begins with {' or '.join(only or [])}; there are reference, stacked and vmapped, "
                "kernels for convolutions on a GPU, and processes on a CPU"
            )
        if workload == "cifar10":
            rows.append(engines.recorded(experiment, rounds))
        if peers:
            rows += engines.peers(peers, rounds, print_line)
        table = engines.table(workload, rows)
    print(table)
    if record:
        print(engines.append(record, table))
