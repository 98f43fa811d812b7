"""A Flower app that runs an experiment, with one client per node.

`server` and `client` read their settings from Flower's run config: a pyproject.toml that refers to them is a complete
app. The results of a simulation or a deployment are bit-identical to `sa.run(experiment.with_(engine="reference"))`.
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
from stableair.errors import InputError
from stableair.experiment import EXECUTION, Experiment
from stableair.flower.arrays import PAYLOAD, flat, to_array_record
from stableair.flower.replies import CLIENT
from stableair.flower.strategy import OverTheAir
from stableair.training.reference import Reference
from stableair.validation import integer, positive
from stableair.vector import ModelState

OPTIONS = "folder", "enough", "timeout"  # keys of a run config that are not settings of an experiment


def server_app(
    experiment: Experiment | None = None,
    folder: str | Path | None = None,
    strategy: Strategy | None = None,
    enough: int = 1,
    timeout: float = 3600.0,
) -> ServerApp:
    """Return a ServerApp that runs an experiment over the air.

    Args:
        experiment: The experiment. None: the run config contains its settings, and also `folder`, `enough` and
            `timeout`.
        folder: Run folder; None records nothing.
        strategy: The strategy that `OverTheAir` wraps; None: FedAvg.
        enough: Minimum number of replies per round.
        timeout: Seconds to wait for nodes at the start, and for replies in each round.

    Returns:
        The app, for Flower's `run_simulation` or as the component `serverapp` of a pyproject.toml.

    ```python
    from flwr.simulation import run_simulation

    experiment = sa.Experiment(clients=10, rounds=20)
    run_simulation(server_app(experiment, "runs/x"), client_app(experiment), num_supernodes=10)
    ```
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config: dict[str, Any] = {} if experiment else dict(context.run_config)
        e = experiment or experiment_from_config(config)
        min_nodes = integer("enough", config.get("enough", enough), 1)
        inner = strategy or FedAvg(fraction_evaluate=0.0, min_train_nodes=min_nodes, min_available_nodes=min_nodes)
        over_the_air = OverTheAir(inner, e, config.get("folder", folder) or None, enough=min_nodes)
        seconds = positive("timeout", config.get("timeout", timeout))
        over_the_air.start(grid, num_rounds=e.rounds, timeout=seconds)

    return app


def client_app(experiment: Experiment | None = None, mods: list[Mod] | None = None) -> ClientApp:
    """Return a ClientApp that trains one client of an experiment per node.

    The number of the client is the `partition-id` of the node. A simulation sets it; for a SuperNode, set it with
    --node-config.

    Args:
        experiment: The experiment. None: the run config contains its settings.
        mods: Flower's mods, such as `limited`.

    Returns:
        The app, for Flower's `run_simulation` or as the component `clientapp` of a pyproject.toml.
    """
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        e = experiment or experiment_from_config(context.run_config)
        config = next(iter(message.content.config_records.values()))
        _check_same_experiment(config, e)
        n, sim = _client_number(context, e.clients), _cached_build(e)
        assert isinstance(sim.train, Reference)
        work = sim.train.work
        arrays = next(iter(message.content.array_records.values()))
        device = sim.start.model.w.device
        state = ModelState(flat(arrays, sim.layout).to(device), flat(arrays, work.norms).to(device))
        upload = sim.train.train(state, integer("server-round", config.get("server-round"), 1) - 1, torch.tensor([n]))
        payload = to_array_record(ModelState(upload.update[0], upload.stats[0]), sim.layout, work.norms)
        metrics = MetricRecord({"train_loss": upload.loss.item(), "num-examples": work.sizes[n], CLIENT: n})
        return Message(RecordDict({PAYLOAD: payload, "metrics": metrics}), reply_to=message)

    return app


def experiment_from_config(run_config: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a run config: all keys except `OPTIONS` are settings."""
    return Experiment().with_(**{key: value for key, value in run_config.items() if key not in OPTIONS})


@lru_cache(1)
def _cached_build(experiment: Experiment) -> Simulation:
    """Build an experiment once per process, not once per round."""
    return build(experiment)


def _check_same_experiment(config: ConfigRecord, experiment: Experiment) -> None:
    """Refuse a server with another version of stableair or another experiment."""
    version = str(config.get("stableair"))
    if version != stableair.__version__:
        text = f"the server has stableair {version}, this node has {stableair.__version__}; install the same version"
        raise InputError(text, code="other-version", server=version, node=stableair.__version__)
    server = Experiment.from_json(str(config["experiment"]))
    if server.id() != experiment.id():
        ours = experiment.to_dict()
        pairs = {key: (value, ours[key]) for key, value in server.to_dict().items() if key not in EXECUTION}
        different = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        text = "; ".join(f"{key} {theirs}, this node has {mine}" for key, (theirs, mine) in different.items())
        raise InputError(f"the server has {text}", code="other-experiment", settings=list(different))


def _client_number(context: Context, clients: int) -> int:
    """Return the node's partition-id, which must be a client number."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < clients:
        fix = f"start it with --node-config 'partition-id=0', and so on to {clients - 1}"
        text = f"the partition-id of this node must be a client number, 0 ... {clients - 1}: got {number}; {fix}"
        raise InputError(text, code="unknown-client", name="partition-id", value=number)
    return number


server = server_app()
client = client_app()
