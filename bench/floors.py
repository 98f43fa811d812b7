"""Compute the least time of a local step of all clients on a GPU, from shapes, products and bandwidth alone.

    python bench/floors.py --tflops 790 --terabytes 4.8         (an H200 in bf16; needs no GPU)

The products are those of the forward and the backward pass. The memory traffic is the least that local SGD in bf16 with
float32 weights needs: 14 bytes for each weight (4 to read and 4 to write it, 2 to write its bf16 copy, 2 + 2 to read
the copy in both passes), and 6 bytes for each input of a convolution or dense layer (2 to write it, 2 + 2 to read it in
both passes), and the same for its gradient. A step takes at least the longer of the two times.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stableair.builder import network
from stableair.experiment import Experiment
from stableair.spec import passed_objects
from stableair.workloads import OBJECTS, WORKLOADS

WEIGHT_BYTES, ENTRY_BYTES = 14, 6
NAMES = [name for name, experiment in WORKLOADS.items() if str(experiment.data).startswith("synthetic")]


def step_costs(experiment: Experiment) -> tuple[int, int]:
    """Return the floating-point operations and the bytes of a local step of all clients."""
    data = experiment.call("data")()
    module = network(experiment).to("meta")
    inputs: dict[int, Tensor] = {}  # of the layers with weights; a tensor that two layers read counts once
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda layer, args, output: inputs.update({id(args[0]): args[0]}))
    x = torch.empty(experiment.batch_size, *data.train.x.shape[1:], device="meta")
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    weights = sum(p.numel() for p in module.parameters())
    entries = sum(t.numel() * (1 + t.requires_grad) for t in inputs.values())  # with those of the gradients
    each = WEIGHT_BYTES * weights + ENTRY_BYTES * entries
    return experiment.clients * counter.get_total_flops(), experiment.clients * each


@passed_objects(OBJECTS)
def table(names: list[str], clients: int, tflops: float, terabytes: float) -> str:
    """Return the costs of the workloads as a Markdown table."""
    rates = f"TFLOP per step | ms at {tflops:g} TFLOP/s | GB per step | ms at {terabytes:g} TB/s"
    lines = [f"| workload | clients | {rates} | least ms per step |", "|---|---|---|---|---|---|---|"]
    for name in names:
        experiment = WORKLOADS[name].with_(clients=clients or WORKLOADS[name].clients)
        flops, size = step_costs(experiment)
        compute, memory = flops / tflops / 1e9, size / terabytes / 1e9
        figures = f"{flops / 1e12:.3f} | {compute:.2f} | {size / 1e9:.2f} | {memory:.2f} | {max(compute, memory):.2f}"
        lines.append(f"| {name} | {experiment.clients} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workloads", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--clients", type=int, default=0, help="0 for those of the workload")
    parser.add_argument("--tflops", type=float, default=790, help="TFLOP/s that a large product reaches")
    parser.add_argument("--terabytes", type=float, default=4.8, help="TB/s of the memory")
    arguments = parser.parse_args()
    print(table(arguments.workloads or NAMES, arguments.clients, arguments.tflops, arguments.terabytes))
