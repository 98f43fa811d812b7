"""A Flower strategy whose nodes transmit over the air: they are the clients of Algorithm 1, the strategy is the server.

Flower samples the nodes and collects their replies. `simulate` takes the replies as the uploads of a round, and the
strategy gets the model that the channel and the receiver leave of them as its only reply.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

import stableair
from stableair.algorithm import Simulation, simulate
from stableair.builder import build, receiving_side, server_share, start_state
from stableair.contracts import Metrics, Round, State, Upload
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.flower.arrays import flat, layouts, to_array_record, with_vectors
from stableair.flower.client_metrics import aggregate_metrics, common_metrics, evaluation_replies
from stableair.flower.client_numbers import ClientNumbers, recorded_owners
from stableair.flower.replies import DroppedNode, Reply, ReplyFormat, error_text, metric_record, one_line, read_reply
from stableair.flower.server_rule import check_uses_mean, describe_strategy, server_step
from stableair.memory import non_finite_parts
from stableair.results.checksums import EXPERIMENT, read_environments
from stableair.results.environment import environment
from stableair.results.lock import locked
from stableair.results.recorder import RunMetadata, recorded
from stableair.results.resume import NEW_RUN, ResumePoint, restored_state, resume_point
from stableair.results.run import read_record
from stableair.schedules import share_in_round
from stableair.training.local_training import payload_scale
from stableair.training.reference import Reference
from stableair.validation import choice, integer, pluralize
from stableair.vector import NOTHING, Layout, ModelState

REMOTE = "remote()"  # the clients hold the data and the model, and train as they like
AIR_SETTINGS = (
    "lr", "lr_decay", "payload", "blocks", "power", "channel", "fading", "noise", "receiver", "server", "seed",
)  # fmt: skip

Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]


class OverTheAir(Strategy):
    """A Flower strategy whose clients transmit over the air: OverTheAir(FedAvg(), noise="sas(tau=0.1)", lr=0.03).

    The weights w_{k,n} (or payloads u_n) that the nodes return become Eq. (3): g = (1/N) sum_n h_n u_n + xi with
    u_n = (w_k - w_{k,n}) / lr. They are summed in the order of the clients (most samples first, then by number), not
    in the order of arrival. The receiver's g gives the model of Eq. (4), which the strategy gets as its only reply;
    norm buffers use the side link. A reply that cannot be used is dropped, logged and listed in `left_out`.

    Args:
        strategy: A strategy that uses only the mean of the replies.
        experiment: Model, data and evaluation of the run. None: the clients hold the data and the model.
        folder: Run folder. Every round is recorded there; the next start resumes after the last one.
        clients: Number of clients. None: the number of nodes that are connected at the start.
        enough: Minimum number of replies. With fewer replies in a round, the model stays unchanged.
        loss: The metric of the replies that holds the training loss.
        settings: Settings of the `experiment`; without one, settings of the channel, the receiver and the server.
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
        self.replies: list[Reply] = []  # the valid replies of the round
        self.received: list[Reply] = []  # those of them that are used, in the order of summation
        self.diverged = False  # the model is no longer finite

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
        """Run Flower's loop over the rounds that the folder does not hold yet."""
        with ExitStack() as stack:
            lock = stack.enter_context(locked(self.folder)) if self.folder else None
            min_nodes = int(getattr(self.strategy, "min_available_nodes", 1))
            nodes = _wait_for_nodes(grid, self.clients or min_nodes, timeout)
            e = self.experiment.with_(clients=self.clients or self._recorded_clients() or nodes, rounds=num_rounds)
            resume = resume_point(self.folder, e, resume=True) if self.folder else NEW_RUN
            self.first, self.k, self.timeout = resume.rounds, resume.rounds, timeout
            sim = self._simulation(e, initial_arrays)
            self.evaluate_fn = evaluate_fn
            metadata = self._metadata(e, sim, resume)
            state = restored_state(sim.start, resume.checkpoint, self.folder)
            self.broadcast, self.diverged = self._array_record(state.model), resume.diverged
            last_row = resume.rows[resume.rounds - 1] if resume.rounds else {}
            self.numbers = ClientNumbers(self.n, recorded_owners(state.clients, grid.get_node_ids()))
            rounds = self._with_all_metrics(self._simulate(sim, state, num_rounds), last_row)
            self.rounds = recorded(rounds, lock, metadata, resume)
            stack.enter_context(closing(self.rounds))
            remaining = 0 if self.diverged else max(0, num_rounds - self.first)
            result = super().start(
                grid, self.broadcast, remaining, timeout, train_config, evaluate_config, self._server_evaluation
            )
        return _renumbered(result, self.first, self.broadcast)

    def _recorded_clients(self) -> int | None:
        """The number of clients of the run in the folder; None for a new run."""
        if self.folder is None or not (self.folder / EXPERIMENT).exists():
            return None
        return int(read_record(self.folder)["clients"])

    def _simulation(self, e: Experiment, arrays: ArrayRecord | None) -> Simulation:
        """Build Algorithm 1 with the nodes' replies as its uploads and the strategy as its server."""
        if e.data != REMOTE:
            sim = build(e)
            assert isinstance(sim.train, Reference)
            layout, norms = sim.layout, sim.train.work.norms
            self.model = to_array_record(sim.start.model, layout, norms)
        elif arrays is None:
            text = "start needs the initial_arrays: the model of the clients, such as its state_dict"
            raise InputError(text, code="missing-model", name="initial_arrays")
        else:
            self.model = arrays
            layout, norms = layouts(arrays)
            sim = self._remote_simulation(e, layout, norms)
        model = sim.start.model
        self.device, self.n, self.experiment_evaluation = model.w.device, e.clients, sim.evaluate
        self.lr_share = e.call("lr_decay")()
        self.expected = ReplyFormat(self.model, layout, norms, 1.0, self.weight, self.loss)
        step = server_step(sim.server, self.strategy, self._apply_strategy)
        return replace(
            sim,
            start=sim.start._replace(server=step.init(model.w)),
            train=self._uploads,
            participants=self._senders,
            server=step,
            evaluate=lambda model, averaged: {},  # see `_simulate`
        )

    def _remote_simulation(self, e: Experiment, layout: Layout, norms: Layout) -> Simulation:
        """Build the server part of Algorithm 1; the clients hold the model and the data."""
        model = ModelState(flat(self.model, layout), flat(self.model, norms))
        side = receiving_side(e, layout, norms)
        return Simulation(
            n=e.clients,
            seed=e.seed,
            start=start_state(model, side),
            layout=layout,
            train=self._uploads,
            **side._asdict(),
            evaluate=lambda model, averaged: {},
            participants=self._senders,
            server_share=server_share(e),
        )

    def _metadata(self, e: Experiment, sim: Simulation, resume: ResumePoint) -> RunMetadata:
        """Collect the run's metadata; refuse a folder whose run used another strategy."""
        strategy = describe_strategy(self.strategy)
        past = read_environments(self.folder) if self.folder and resume.rounds else []
        if past and past[-1].get("strategy", strategy) != strategy:
            text = f"{self.folder} holds a run of {past[-1]['strategy']}, not of {strategy}; use another folder"
            raise InputError(text, code="other-strategy", recorded=past[-1]["strategy"], strategy=strategy)
        engine = {"engine": "reference", "precision": "fp32", "chunk": 1, "why": "Flower's nodes train"}
        versions = {"data": sim.files, "flwr": flwr.__version__, "strategy": strategy}
        labels = None if sim.labels is None else sim.labels.tolist()
        return RunMetadata(e, environment(self.device) | versions | engine, labels)

    def _with_all_metrics(self, rounds: Iterable[Round], last_row: dict[str, Any]) -> Iterator[Round]:
        """Give each round the metrics of all earlier rounds: None where it has no value."""
        names: Metrics = dict.fromkeys(name for name in last_row if name not in ("round", "seconds"))
        for k, state, metrics in rounds:
            losses = [reply.loss for reply in self.received if reply.loss is not None]
            if len(losses) < len(self.received):  # the mean over the clients that sent one
                metrics = metrics | {"train/loss": sum(losses) / len(losses) if losses else None}
            names |= dict.fromkeys(metrics)
            yield Round(k, state, names | metrics)

    def _simulate(self, sim: Simulation, state: State, rounds: int) -> Iterator[Round]:
        """Run Algorithm 1; a state is checked before it is evaluated and adopted."""
        for k in range(self.first, rounds):
            adopted, metrics = self._finite_round(sim, state, k)
            averaged = sim.average(state.average, adopted.model)[1] if sim.average else None
            self.numbers.bind(self.received)
            state = adopted._replace(clients=self.numbers.memory() or adopted.clients)
            yield Round(k, state, self._evaluate(state.model, averaged) | metrics)

    def _finite_round(self, sim: Simulation, state: State, k: int) -> tuple[State, Metrics]:
        """Compute round k; drop replies that make the state non-finite, the largest payload first.

        If the state is non-finite with every choice of replies, the interference is the cause and all replies are used.
        """
        before = non_finite_parts(state)
        by_norm = sorted(self.replies, key=lambda reply: torch.linalg.vector_norm(reply.update, dtype=torch.float64))
        for count in range(len(by_norm), 0, -1):
            self._select(by_norm[:count])
            if not self.received:  # fewer than `enough` replies: no single one is the cause
                break
            new = self._attempt(sim, state, k)
            if new and non_finite_parts(new.state) <= before:
                overflow = "its weights are too large: the model or a memory of the server would not be finite"
                self.faults |= {reply.node: overflow for reply in by_norm[count:]}
                return new.state, new.metrics
        self._select(self.replies)
        _, new_state, metrics = next(simulate(sim, state, k + 1, k))
        return new_state, metrics

    def _attempt(self, sim: Simulation, state: State, k: int) -> Round | None:
        """Compute round k with the selected replies; None if their sum cannot be computed."""
        try:
            return next(simulate(sim, state, k + 1, k))
        except InputError as error:
            if error.code != "nan-in-channel":
                raise
            return None

    # ------------------------------------------------------------------------------------------------------- a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample nodes, and number the nodes that are connected."""
        if self.diverged:
            return []
        self.broadcast = arrays
        if self.experiment.data != REMOTE:  # stableair's client app compares them with its settings
            config["stableair"], config["experiment"] = stableair.__version__, self.experiment.to_json()
        messages = list(self.strategy.configure_train(self.first + server_round, arrays, config, grid))
        self.sampled = [message.metadata.dst_node_id for message in messages]
        self.numbers.assign(grid.get_node_ids())
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run one round of Algorithm 1 with these replies."""
        if self.diverged:
            return None, None
        self.k, e = self.first + server_round - 1, self.experiment
        scale = payload_scale(e.payload, e.lr * share_in_round(self.lr_share, self.k))
        self.expected = self.expected._replace(scale=scale)
        before = len(self.left_out)
        self.replies = self._read(list(replies))
        try:
            self._select(self.replies)
            if len(self.refused) == len(self.replies) and server_round == 1:  # a wrong setup, not a lost node
                raise self._no_replies()
            _, state, row = next(self.rounds)
        finally:
            self._list_dropped()
        if len(self.received) < self.enough:
            log(WARNING, "round %d: fewer than %d replies can be used", self.k, self.enough)
        if row.get("diverged"):
            log(WARNING, "round %d: the model is no longer finite; the run ends here", self.k)
            self.diverged = True
            return None, None
        self.broadcast = self._array_record(state.model)
        metrics = {name: value for name, value in row.items() if value is not None}
        metrics |= {"clients/left_out": len(self.left_out) - before}
        return self.broadcast, MetricRecord(self._client_metrics() | metrics)

    def _read(self, messages: list[Message]) -> list[Reply]:
        """Read the replies of the sampled nodes; the reasons why others cannot be used are in `faults`."""
        replies: dict[int, Reply] = {}
        self.faults: dict[int, str] = {}
        silent = f"no reply within {self.timeout:g} s"
        for message in messages:
            node = message.metadata.src_node_id
            if node not in self.sampled:
                if message.has_error():  # the SuperLink replies for a node that it has lost
                    silent = error_text(message.error)
                else:
                    self.faults[node] = "it was not sampled in this round"
            elif node in replies:
                self.faults[node] = "it replied more than once"
            else:
                try:
                    replies[node] = read_reply(message, self.broadcast, self.expected)
                except Exception as error:  # a node may send anything
                    self.faults[node] = one_line(error) or type(error).__name__
        self.faults |= {node: silent for node in self.sampled if node not in replies and node not in self.faults}
        return [reply for node, reply in replies.items() if node not in self.faults]

    def _select(self, replies: Iterable[Reply]) -> None:
        """Use the replies with valid client numbers in the round; with fewer than `enough` of them, use none."""
        numbered, self.refused = self.numbers.resolve(replies)
        enough = len(numbered) >= self.enough
        self.received = sorted(numbered, key=lambda reply: (-reply.samples, reply.client)) if enough else []

    def _list_dropped(self) -> None:
        """Log the nodes whose replies are not used in this round, and list them in `left_out`."""
        reasons = self.faults | self.refused
        for node in sorted(reasons):
            log(WARNING, "round %d: node %d is left out: %s", self.k, node, reasons[node])
            self.left_out.append(DroppedNode(self.k, node, reasons[node]))

    def _no_replies(self) -> InputError:
        """The error of a first round without replies."""
        reasons = self.faults | self.refused
        reason = f"the first: {reasons[min(reasons)]}" if reasons else "the strategy sampled no node"
        text = f"round {self.k}: none of {pluralize(len(self.sampled), 'node')} can be used; {reason}"
        return InputError(text, code="no-replies", k=self.k, nodes=len(self.sampled))

    @property
    def weight(self) -> str:
        """The metric that holds a client's number of samples."""
        return str(getattr(self.strategy, "weighted_by_key", "num-examples"))

    def _senders(self, k: int) -> Tensor:
        """The clients whose replies are used, in the order of summation: (m,)."""
        return torch.tensor([reply.client for reply in self.received], dtype=torch.int64)

    def _uploads(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        """Yield the replies of the round as uploads."""
        for reply in self.received:
            rows = reply.update[None], reply.stats[None], torch.tensor([reply.loss or 0.0])
            yield Upload(torch.tensor([reply.client]), *(row.to(self.device) for row in rows))

    def _apply_strategy(self, w: Tensor) -> Tensor:
        """Apply the strategy to the model as its only reply: (d,) -> (d,).

        The strategy gets the norm buffers that it sent, so that it does not change them.
        """
        arrays = with_vectors(self.broadcast, [(self.expected.layout, w)])
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({self.weight: 1})})
        reply = Message(content, metadata=self.received[0].message.metadata)  # type: ignore[call-overload]
        if isinstance(getattr(self.strategy, "current_arrays", None), ArrayRecord):
            self.strategy.current_arrays = self.broadcast  # type: ignore[attr-defined] # FedAvgM's changes in each call
        result, _ = self.strategy.aggregate_train(self.k + 1, [reply])
        if result is None:
            raise InputError(f"{type(self.strategy).__name__} returned no model", code="no-model")
        return flat(result, self.expected.layout)

    def _client_metrics(self) -> dict[str, Any]:
        """Aggregate the metrics of the clients with the strategy's function; they use the side link."""
        aggregate = getattr(self.strategy, "train_metrics_aggr_fn", None)
        if not aggregate or not sum(reply.samples for reply in self.received):
            return {}
        records = common_metrics({reply.node: metric_record(reply.message) for reply in self.received}, self.k)
        return aggregate_metrics(aggregate, records.values(), self.weight, self.k)

    def _array_record(self, state: ModelState) -> ArrayRecord:
        """The model with the names and types of the clients' arrays."""
        return with_vectors(self.model, [(self.expected.layout, state.w), (self.expected.norms, state.stats)])

    # -------------------------------------------------------------------------------------------------- the evaluation

    def _evaluate(self, state: ModelState, averaged: ModelState | None) -> Metrics:
        """Evaluate with the experiment's evaluation and with `evaluate_fn`; a metric without a group gets test/..."""
        ours, record = self.experiment_evaluation(state, averaged), None
        if self.evaluate_fn:
            record = self.evaluate_fn(self.k + 1, self._array_record(state))
        numbers = {name: value for name, value in (record or {}).items() if isinstance(value, int | float)}
        both: dict[str, Any] = {name: value for name, value in ours.items() if value is not None} | numbers
        self.evaluation = MetricRecord(both) if both else None
        return ours | {name if "/" in name else f"test/{name}": value for name, value in numbers.items()}

    def _server_evaluation(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return Flower the evaluation of a completed round; evaluate the model before the first round."""
        if server_round:
            return None if self.diverged else self.evaluation
        return self.evaluate_fn(self.first, arrays) if self.evaluate_fn else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample nodes for the evaluation."""
        if self.diverged:
            return []
        return self.strategy.configure_evaluate(self.first + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the strategy aggregate the metrics of the evaluation, as far as they are valid."""
        if self.diverged:
            return None
        valid = evaluation_replies(replies, self.weight, self.k)
        try:
            return self.strategy.aggregate_evaluate(self.first + server_round, valid)
        except Exception as error:  # the values that nodes send can make it fail
            log(WARNING, "round %d: the evaluations cannot be aggregated: %s", self.k, one_line(error))
            return None

    def summary(self) -> None:
        """Log the channel, the receiver and the strategy's summary."""
        e = self.experiment
        log(INFO, "\t├──> Over the air: %s, %s, %s", e.fading, e.noise, e.receiver)
        if self.folder:
            log(INFO, "\t├──> Recorded in %s, from round %d", self.folder, self.first)
        self.strategy.summary()


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
    """Flower's result with the round numbers of the whole run."""
    kinds = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"
    metrics = {kind: {first + k: value for k, value in getattr(result, kind).items()} for kind in kinds}
    return Result(arrays=arrays, **metrics)
