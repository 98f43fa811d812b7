"""A Flower strategy whose nodes transmit over the air.

The nodes are the clients of Algorithm 1, and the strategy is its server. Flower samples the nodes and collects their
replies. `simulate` uses the replies as the uploads of a round. The channel and the receiver compute one model from
them, which the wrapped strategy gets as its only reply.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import flwr
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

import stableair
from stableair.algorithm import Simulation
from stableair.builder import build, receiving_side
from stableair.contracts import Metrics
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.flower.arrays import describe_network, flat, layouts, to_array_record, with_vectors
from stableair.flower.client_metrics import aggregate_metrics, common_metrics, evaluation_replies
from stableair.flower.client_numbers import ClientNumbers, recorded_owners
from stableair.flower.replies import DroppedNode, ReplyFormat, metric_record, one_line
from stableair.flower.round_replies import RoundReplies
from stableair.flower.rounds import payload_scales, remote_simulation, rounds_from_replies
from stableair.flower.server_rule import check_uses_mean, describe_strategy, server_step
from stableair.results.checksums import EXPERIMENT
from stableair.results.environment import environment
from stableair.results.lock import locked
from stableair.results.recorder import RunMetadata, recorded
from stableair.results.resume import NEW_RUN, ResumePoint, check_same_data, restored_state, resume_point
from stableair.results.run_files import read_record
from stableair.training.reference import Reference, threads
from stableair.validation import choice, integer, pluralize
from stableair.vector import NOTHING, Layout, ModelState

REMOTE = "remote()"  # the clients hold the data and the model, and may train in any way
AIR_SETTINGS = (
    "lr", "lr_decay", "payload", "blocks", "power", "channel", "fading", "noise", "receiver", "server", "bandwidth",
    "symbol_energy", "snr_blocks", "seed",
)  # fmt: skip

Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]


class OverTheAir(Strategy):
    """A Flower strategy whose clients transmit over the air to the wrapped strategy.

    The weights w_{k,n} (or payloads u_n) that the nodes return become Eq. (3): g = (1/N) sum_n h_n u_n + xi with u_n =
    (w_k - w_{k,n}) / lr. They are summed in the order of the clients (most samples first, then by number), not in the
    order of arrival. The receiver's g gives the model of Eq. (4), which the strategy gets as its only reply; norm
    buffers use the noiseless side link. An unusable reply is dropped, logged and listed in `left_out`. [Deployment with
    Flower](../flower.md) is the guide.

    Args:
        strategy: A strategy that uses only the mean of the replies: FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam,
            FedYogi.
        experiment: Model, data and evaluation of the run. None: the clients hold the data and the model.
        folder: Run folder. Every round is recorded there; the next start continues after the last recorded round.
        clients: Number of clients. None: the number of nodes that are connected at the start.
        enough: Minimum number of replies. With fewer replies in a round, the model stays unchanged.
        loss: Name of the metric of the replies that contains the training loss.
        **settings: Settings of the `experiment`; without an experiment, settings of the channel, the receiver and the
            server: `lr`, `lr_decay`, `payload`, `blocks`, `power`, `channel`, `fading`, `noise`, `receiver`, `server`,
            `bandwidth`, `symbol_energy`, `snr_blocks`, `seed`.

    Raises:
        InputError: The strategy compares individual replies, a setting is unknown or invalid, or `participation` is set
            (`unsupported-participation`).

    ```python
    strategy = OverTheAir(FedAvg(), noise="sas(tau=0.1)", receiver="mac(C=auto)", lr=0.03)
    arrays = ArrayRecord(model.state_dict())
    result = strategy.start(grid, initial_arrays=arrays, num_rounds=20)
    ```
    """

    def __init__(
        self,
        strategy: Strategy,
        experiment: Experiment | None = None,
        folder: str | Path | None = None,
        *,
        clients: int | None = None,
        enough: int = 1,
        loss: str = "train_loss",
        **settings: Any,
    ):
        if isinstance(strategy, OverTheAir):
            text = "the strategy is an OverTheAir already; wrap a strategy such as FedAvg(), and set the channel once"
            raise InputError(text, code="wrong-type")
        self.strategy = check_uses_mean(strategy)
        self.folder = None if folder is None else Path(folder)
        self.enough, self.loss = integer("enough", enough, 1), loss
        self.clients = None if clients is None else integer("clients", clients, 1)
        for key in settings if experiment is None else ():
            choice("setting", key.partition(".")[0], AIR_SETTINGS)
        self.experiment = (experiment or Experiment(data=REMOTE)).with_(**settings)
        if self.experiment.participation != "all()":
            fix = "the strategy samples the clients, such as FedAvg(fraction_train=0.5)"
            text = f"participation={self.experiment.participation}: {fix}"
            raise InputError(text, code="unsupported-participation", setting="participation")
        if experiment is not None:
            self.clients = self.clients or self.experiment.clients
        receiving_side(self.experiment, Layout(("w",), ((1,),), (0, 1)), NOTHING)  # report invalid settings here
        self.left_out: list[DroppedNode] = []
        self.diverged = False  # whether the model is no longer finite

    # ------------------------------------------------------------------------------------------------------- the run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluation | None = None,
    ) -> Result:
        """Run Flower's loop over the rounds that the folder does not contain yet.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: The initial model, such as its state_dict; None if the `experiment` has the model.
            num_rounds: Number of rounds of the whole run.
            timeout: Seconds to wait for nodes at the start, and for replies in each round.
            train_config: Values that the strategy sends to the clients for training.
            evaluate_config: Values that the strategy sends to the clients for evaluation.
            evaluate_fn: (round, model) -> metrics of the model, evaluated on the server. They are recorded as
                `test/...`.

        Returns:
            The final model, and the metrics by round.

        Raises:
            InputError: The initial model is missing (`missing-model`), too few nodes connect in time (`missing-nodes`),
                no reply of the first round can be used, or the folder holds another run.
            RunBusyError: Another process has locked the folder.
        """
        with ExitStack() as stack:
            lock = stack.enter_context(locked(self.folder)) if self.folder else None
            min_nodes = int(getattr(self.strategy, "min_available_nodes", 1))
            nodes = _wait_for_nodes(grid, self.clients or min_nodes, timeout)
            e = self.experiment.with_(clients=self.clients or self._recorded_clients() or nodes, rounds=num_rounds)
            resume = resume_point(self.folder, e, resume=True) if self.folder else NEW_RUN
            stack.enter_context(threads(resume.environment.get("threads")))
            self.first, self.evaluate_fn = resume.rounds, evaluate_fn
            sim = self._simulation(e, initial_arrays, _client_numbers(e, resume, grid), timeout)
            metadata = self._metadata(e, sim, resume)
            state = restored_state(sim.start, resume.checkpoint, self.folder)
            self.broadcast, self.diverged = self._array_record(state.model), resume.diverged
            last_row = resume.rows[resume.rounds - 1] if resume.rounds else {}
            rounds = rounds_from_replies(sim, state, range(self.first, num_rounds), self.replies, last_row)
            self.rounds = recorded(rounds, lock, metadata, resume)
            stack.enter_context(closing(self.rounds))
            remaining = 0 if self.diverged else max(0, num_rounds - self.first)
            result = super().start(
                grid, self.broadcast, remaining, timeout, train_config, evaluate_config, self._server_evaluation
            )
        return _renumbered(result, self.first, self.broadcast)

    def _recorded_clients(self) -> int | None:
        """Return the number of clients of the run in the folder; None for a new run."""
        if self.folder is None or not (self.folder / EXPERIMENT).exists():
            return None
        return int(read_record(self.folder)["clients"])

    def _simulation(
        self, e: Experiment, arrays: ArrayRecord | None, numbers: ClientNumbers, timeout: float
    ) -> Simulation:
        """Build Algorithm 1 with the nodes' replies as its uploads and the strategy as its server."""
        sim = None
        if e.data != REMOTE:
            sim = build(e)
            assert isinstance(sim.train, Reference)
            layout, norms = sim.layout, sim.train.work.norms
            arrays = to_array_record(sim.start.model, layout, norms)
        elif arrays is None:
            text = "start needs the initial_arrays: the model of the clients, such as its state_dict"
            raise InputError(text, code="missing-model", name="initial_arrays")
        else:
            layout, norms = layouts(arrays)
        self.expected = ReplyFormat(arrays, layout, norms, payload_scales(e), self.weight, self.loss)
        self.replies = RoundReplies(self.expected, numbers, self.enough, timeout)
        sim = sim or remote_simulation(e, self.replies)
        self.experiment_evaluation = sim.evaluate
        step = server_step(sim.server, self.strategy, self._apply_strategy)
        return replace(
            sim,
            start=sim.start._replace(server=step.init(sim.start.model.w)),
            train=self.replies.uploads,
            participants=self.replies.senders,
            server=step,
            evaluate=self._evaluate,
        )

    def _metadata(self, e: Experiment, sim: Simulation, resume: ResumePoint) -> RunMetadata:
        """Collect the run's metadata; refuse a folder whose run used another strategy, network or data files."""
        flower = {"strategy": describe_strategy(self.strategy)}
        if e.data == REMOTE:
            flower["network"] = describe_network(self.expected.layout, self.expected.norms)
        for name, actual in flower.items():
            if (recorded := resume.environment.get(name, actual)) != actual:
                text = f"{self.folder} holds a run of {recorded}, not of {actual}; use another folder"
                code = "other-strategy" if name == "strategy" else "other-network"
                raise InputError(text, code=code, recorded=recorded, actual=actual)
        check_same_data(resume, sim.files, self.folder)
        engine = {"engine": "reference", "precision": "fp32", "chunk": 1, "why": "Flower's nodes train"}
        versions = {"data": sim.files, "flwr": flwr.__version__} | flower
        labels = None if sim.labels is None else sim.labels.tolist()
        return RunMetadata(e, environment(sim.start.model.w.device) | versions | engine, labels)

    # ------------------------------------------------------------------------------------------------------- a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample nodes, and number the connected nodes; called by `start`."""
        if self.diverged:
            return []
        self.broadcast = arrays
        if self.experiment.data != REMOTE:  # stableair's client app compares them with its settings
            config["stableair"], config["experiment"] = stableair.__version__, self.experiment.to_json()
        messages = list(self.strategy.configure_train(self.first + server_round, arrays, config, grid))
        self.replies.sampled = [message.metadata.dst_node_id for message in messages]
        self.replies.numbers.assign(grid.get_node_ids())
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run one round of Algorithm 1 with these replies; called by `start`."""
        if self.diverged:
            return None, None
        k = self.first + server_round - 1
        self.replies.read(replies, self.broadcast, k)
        try:
            if server_round == 1:  # no valid reply in the first round means a wrong set-up, not lost nodes
                self.replies.check_any()
            _, state, row = next(self.rounds)
        finally:
            dropped = self.replies.log_dropped()
            self.left_out += dropped
        if len(self.replies.used) < self.enough:
            log(WARNING, "round %d: fewer than %d replies can be used", k, self.enough)
        if row.get("diverged"):
            log(WARNING, "round %d: the model is no longer finite; the run stops", k)
            self.diverged = True
            return None, None
        self.broadcast = self._array_record(state.model)
        metrics = {name: value for name, value in row.items() if value is not None}
        metrics |= {"clients/left_out": len(dropped)}
        return self.broadcast, MetricRecord(self._client_metrics() | metrics)

    @property
    def weight(self) -> str:
        """Name of the metric that contains a client's number of samples."""
        return str(getattr(self.strategy, "weighted_by_key", "num-examples"))

    def _apply_strategy(self, w: Tensor) -> Tensor:
        """Apply the strategy to the model as its only reply: (d,) -> (d,).

        The strategy gets the norm buffers that it sent, so that it does not change them.
        """
        arrays = with_vectors(self.broadcast, [(self.expected.layout, w)])
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({self.weight: 1})})
        reply = Message(content, metadata=self.replies.used[0].message.metadata)  # type: ignore[call-overload]
        if isinstance(getattr(self.strategy, "current_arrays", None), ArrayRecord):
            self.strategy.current_arrays = self.broadcast  # type: ignore[attr-defined] # FedAvgM's changes in each call
        result, _ = self.strategy.aggregate_train(self.replies.k + 1, [reply])
        if result is None:
            raise InputError(f"{type(self.strategy).__name__} returned no model", code="no-model")
        return flat(result, self.expected.layout)

    def _client_metrics(self) -> dict[str, Any]:
        """Aggregate the metrics of the clients with the strategy's function; they use the side link."""
        aggregate = getattr(self.strategy, "train_metrics_aggr_fn", None)
        used, k = self.replies.used, self.replies.k
        if not aggregate or not sum(reply.samples for reply in used):
            return {}
        records = common_metrics({reply.node: metric_record(reply.message) for reply in used}, k)
        return aggregate_metrics(aggregate, records.values(), self.weight, k)

    def _array_record(self, state: ModelState) -> ArrayRecord:
        """Return the model with the names and types of the clients' arrays."""
        return with_vectors(self.expected.model, [(self.expected.layout, state.w), (self.expected.norms, state.stats)])

    # -------------------------------------------------------------------------------------------------- the evaluation

    def _evaluate(self, state: ModelState, averaged: ModelState | None) -> Metrics:
        """Evaluate with the experiment's evaluation and with `evaluate_fn`; names without a group become test/..."""
        ours, record = self.experiment_evaluation(state, averaged), None
        if self.evaluate_fn:
            record = self.evaluate_fn(self.replies.k + 1, self._array_record(state))
        numbers = {name: value for name, value in (record or {}).items() if isinstance(value, int | float)}
        both: dict[str, Any] = {name: value for name, value in ours.items() if value is not None} | numbers
        self.evaluation = MetricRecord(both) if both else None
        return ours | {name if "/" in name else f"test/{name}": value for name, value in numbers.items()}

    def _server_evaluation(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the evaluation of a completed round for Flower; before the first round, evaluate the initial model."""
        if server_round:
            return None if self.diverged else self.evaluation
        return self.evaluate_fn(self.first, arrays) if self.evaluate_fn else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample nodes for the evaluation; called by `start`."""
        if self.diverged:
            return []
        return self.strategy.configure_evaluate(self.first + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the strategy aggregate the valid metrics of the evaluation; called by `start`."""
        if self.diverged:
            return None
        valid = evaluation_replies(replies, self.weight, self.replies.k)
        try:
            return self.strategy.aggregate_evaluate(self.first + server_round, valid)
        except Exception as error:  # the values that nodes send can make it fail
            log(WARNING, "round %d: the evaluations cannot be aggregated: %s", self.replies.k, one_line(error))
            return None

    def summary(self) -> None:
        """Log the channel, the receiver and the strategy's summary."""
        e = self.experiment
        log(INFO, "\t├──> Over the air: %s, %s, %s", e.fading, e.noise, e.receiver)
        if self.folder:
            log(INFO, "\t├──> Recorded in %s, from round %d", self.folder, self.first)
        self.strategy.summary()


def _client_numbers(e: Experiment, resume: ResumePoint, grid: Grid) -> ClientNumbers:
    """Return the client numbers of the nodes; those of a resumed run are bound to their nodes."""
    memory = resume.checkpoint.state.clients if resume.checkpoint else ()
    return ClientNumbers(e.clients, recorded_owners(memory, grid.get_node_ids()))


def _wait_for_nodes(grid: Grid, wanted: int, timeout: float) -> int:
    """Wait until `wanted` nodes are connected; return the number of connected nodes."""
    deadline = time.monotonic() + timeout
    while (connected := len(list(grid.get_node_ids()))) < wanted:
        if time.monotonic() > deadline:
            text = f"{connected} of {pluralize(wanted, 'node')} have connected within {timeout:g} s"
            raise InputError(text, code="missing-nodes", connected=connected, wanted=wanted)
        time.sleep(0.2)
    return connected


def _renumbered(result: Result, first: int, arrays: ArrayRecord) -> Result:
    """Return Flower's result with the round numbers of the whole run."""
    kinds = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"
    metrics = {kind: {first + k: value for k, value in getattr(result, kind).items()} for kind in kinds}
    return Result(arrays=arrays, **metrics)
