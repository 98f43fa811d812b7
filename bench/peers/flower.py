"""Flower's simulation: a ServerApp with FedAvg, a ClientApp per supernode, on Ray with one core per client."""

import os
import time
from itertools import pairwise

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from work import network, print_result, read

work = read()
client_app, server_app = ClientApp(), ServerApp()
found = {}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    part = work.parts[context.node_config["partition-id"]]
    module = network(work)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=work.lr)
    for _ in range(work.epochs):
        for batch in part[torch.randperm(len(part))].split(work.batch):
            optimiser.zero_grad()
            loss = F.cross_entropy(module(work.x[batch]), work.y[batch])
            loss.backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": 1, "loss": loss.item()})  # all clients weigh the same
    return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    stamps = []

    def stamp(round_: int, arrays: ArrayRecord) -> MetricRecord:
        stamps.append(time.perf_counter())
        return MetricRecord({})

    nodes = {"min_train_nodes": len(work.parts), "min_available_nodes": len(work.parts), "fraction_evaluate": 0.0}
    result = FedAvg(fraction_train=1.0, **nodes).start(
        grid, ArrayRecord(network(work).state_dict()), num_rounds=work.rounds + 1, evaluate_fn=stamp
    )
    found["seconds"] = [b - a for a, b in pairwise(stamps)]
    found["state"] = result.arrays.to_torch_state_dict()


run_simulation(server_app, client_app, len(work.parts), backend_config={"client_resources": {"num_cpus": 1}})
module = network(work)
module.load_state_dict(found["state"])
print_result(found["seconds"], module, work)
