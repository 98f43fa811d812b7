"""A ready app: our own models, data and partitions on Flower's nodes, a client a node.

`server` and `client` take their settings from Flower's run config, so that a pyproject.toml which names them is a whole
app. A simulation or a deployment of it gives the bits of `sa.run(experiment.with_(engine="reference"))`.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

import stableair
from stableair.algorithm import Simulation
from stableair.builder import build
from stableair.checks import InputError, positive, whole
from stableair.experiment import EXECUTION, Experiment
from stableair.flower.arrays import PAYLOAD, flat, record_of
from stableair.flower.strategy import CLIENT, OverTheAir
from stableair.local import Reference
from stableair.vector import State

OPTIONS = "folder", "enough", "timeout"  # in a run config, beside the settings


def server_app(
    experiment: Experiment | None = None,
    folder: str | Path | None = None,
    strategy: Strategy | None = None,
    enough: int = 1,
    timeout: float = 3600.0,
) -> ServerApp:
    """A ServerApp that runs an experiment, or without one that of the run config.

    `enough` is the number of replies that a round takes, `timeout` how many seconds it waits for nodes and replies.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told: dict[str, Any] = {} if experiment else dict(context.run_config)
        e = experiment or experiment_of(told)
        place, least = told.get("folder", folder) or None, whole("enough", told.get("enough", enough), 1)
        inner = strategy or FedAvg(fraction_evaluate=0.0, min_train_nodes=least, min_available_nodes=least)
        patience = positive("timeout", told.get("timeout", timeout))
        OverTheAir(inner, e, place, enough=least).start(grid, num_rounds=e.rounds, timeout=patience)

    return app


def client_app(experiment: Experiment | None = None, mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that is one client of an experiment, or without one of that of the run config.

    Its number is the node's `partition-id`, which a simulation sets, and a SuperNode's --node-config.
    """
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        e = experiment or experiment_of(context.run_config)
        config = next(iter(message.content.config_records.values()))
        _agree(config, e)
        n, sim = _number(context, e.clients), _built(e)
        assert isinstance(sim.train, Reference)
        work = sim.train.work
        arrays = next(iter(message.content.array_records.values()))
        place = sim.start.w.device
        state = State(flat(arrays, sim.layout).to(place), flat(arrays, work.norms).to(place))
        upload = sim.train.train(state, whole("server-round", config.get("server-round"), 1) - 1, torch.tensor([n]))
        sent = record_of(State(upload.update[0], upload.stats[0]), sim.layout, work.norms)
        metrics = MetricRecord({"train_loss": upload.loss.item(), "num-examples": work.sizes[n], CLIENT: n})
        return Message(RecordDict({PAYLOAD: sent, "metrics": metrics}), reply_to=message)

    return app


def experiment_of(run_config: Mapping[str, Any]) -> Experiment:
    """The experiment of a run config: each key is a setting, save for the options of the server."""
    return Experiment().with_(**{key: value for key, value in run_config.items() if key not in OPTIONS})


@lru_cache(1)
def _built(experiment: Experiment) -> Simulation:
    """Once a process, and not once a round."""
    return build(experiment)


def _agree(config: ConfigRecord, experiment: Experiment) -> None:
    """Refuse a server that has another version than this node, or another experiment."""
    theirs = str(config.get("stableair"))
    if theirs != stableair.__version__:
        raise InputError(f"the server has stableair {theirs}, this node {stableair.__version__}")
    server, here = Experiment.from_json(str(config["experiment"])), experiment.to_dict()
    if server.id() != experiment.id():
        pairs = {key: (value, here[key]) for key, value in server.to_dict().items() if key not in EXECUTION}
        different = (f"{key} {there}, this node {mine}" for key, (there, mine) in pairs.items() if there != mine)
        raise InputError(f"the server has {'; '.join(different)}")


def _number(context: Context, clients: int) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < clients:
        way = f"start it with --node-config 'partition-id=0', and so on to {clients - 1}"
        raise InputError(f"the partition-id of this node must be a client's number: got {number}; {way}")
    return number


server = server_app()
client = client_app()
