"""The command `bench`, which times the engines."""

from pathlib import Path
from typing import Annotated

import typer

from stableair.cli.display import print_line
from stableair.cli.options import DataDir, use_data_folder
from stableair.errors import InputError
from stableair.validation import choice


def bench(
    workload: Annotated[
        str, typer.Argument(help="digits, cnn, resnet18, resnet18-group, resnet34, plugin, cifar10 or femnist.")
    ] = "digits",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time, after one warm-up round.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Time only the modes whose name starts with this text; may be repeated.")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(help="Path of bench/peers: also time other simulators (digits only).")
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Time different numbers of clients and models instead.")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Append the table to this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Check that each engine computes the same as the reference, then time all engines.

    WORKLOAD is one of digits, cnn, resnet18, resnet18-group, resnet34, plugin,
    cifar10, and femnist.
    """
    from stableair import bench as engines
    from stableair.workloads import WORKLOADS

    use_data_folder(data_dir)
    choice("workload", workload, WORKLOADS)
    if scaling and (only or peers):
        raise InputError("--scaling times the default engine only: leave out --only and --peers")
    if peers and (workload != "digits" or not (peers / "work.py").exists()):
        raise InputError("--peers needs the workload digits and the folder bench/peers of the source")
    if record:
        engines.check_record(record)
    if scaling:
        import torch

        sizes = engines.SIZES_ON_GPU if torch.cuda.is_available() else engines.SIZES
        table = engines.scaling((10, 100, 1000), sizes, rounds, print_line)
    else:
        experiment = WORKLOADS[workload]
        rows = engines.measure(experiment, rounds, print_line, only or [""])
        if not rows:
            raise InputError(
                f"no available mode starts with {' or '.join(only or [])}; the modes are reference, stacked, "
                "vmapped, kernels for convolutions on a GPU, and processes on a CPU"
            )
        if workload == "cifar10":
            rows.append(engines.recorded(experiment, rounds))
        if peers:
            rows += engines.peers(peers, rounds, print_line)
        table = engines.table(workload, rows)
    print(table)
    if record:
        print(engines.append(record, table))
