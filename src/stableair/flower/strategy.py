"""The air under any strategy of Flower: its nodes are the clients of Algorithm 1, and it is the server's step.

Flower asks the nodes and hands over their replies; `simulate` takes them as the uploads of the round, `recorded` writes
the round down, and what the air and the receiver leave of all replies is the one reply that the strategy sees.
"""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Result, Strategy
from torch import Tensor

import stableair
from stableair.algorithm import Simulation, simulate
from stableair.builder import build, receiving_side
from stableair.checks import InputError, choice, count, whole
from stableair.contracts import Metrics, Round, Update, Upload, payload_scale
from stableair.experiment import Experiment
from stableair.flower.arrays import PAYLOAD, flat, layouts, record_of, with_vectors
from stableair.local import Reference
from stableair.results.folder import Circumstances, ResumePoint, environment, locked, recorded, restored, resume_point
from stableair.results.run import read_record
from stableair.results.sealed import EXPERIMENT, read_environments
from stableair.vector import NOTHING, Layout, State, moments

REMOTE = "remote()"  # data, model and local training are the clients' own
AIR = "lr", "payload", "blocks", "power", "channel", "fading", "noise", "receiver", "server", "seed"  # ours even then
MEANS = FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi  # all that they aggregate is the mean of the replies
MEMORY = "m_t", "v_t", "momentum_vector"  # what these keep between rounds
LONGEST = 300  # characters of a node's own words
CLIENT = "client"  # the metric in which a client may tell its number

Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]


class LeftOut(NamedTuple):
    """A node that was asked in round k and not heard, and why."""

    k: int
    node: int
    why: str


class Reply(NamedTuple):
    """What a node sent, once it is known to be usable."""

    client: int
    samples: float
    update: Tensor  # (d,), the payload
    stats: Tensor  # (b,) float64, the moments of its norm buffers
    loss: float | None
    message: Message


class Step(Update):
    """Eq. (4), and then what a strategy of Flower makes of the model that this gives."""

    def __init__(self, update: Update, strategy: Strategy, aggregate: Callable[[Tensor], Tensor]):
        self.update, self.strategy, self.aggregate = update, strategy, aggregate

    def apply(self, w: Tensor, g: Tensor) -> Tensor:
        return self.aggregate(self.update(w, g)).to(w)

    def metrics(self) -> Metrics:
        return self.update.metrics()

    def state_dict(self) -> dict[str, Any]:
        """What the step remembers, and the strategy."""
        kept = {name: _each(value, torch.as_tensor) for name in MEMORY if (value := getattr(self.strategy, name, None))}
        return self.update.state_dict() | ({"strategy": kept} if kept else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update.load_state_dict({name: value for name, value in state.items() if name != "strategy"})
        for name, value in state.get("strategy", {}).items():
            setattr(self.strategy, choice("memory", name, MEMORY), _each(value, lambda t: t.cpu().numpy()))


class OverTheAir(Strategy):
    """A strategy of Flower whose clients are heard over the air: OverTheAir(FedAvg(), noise="sas(tau=0.1)", lr=0.03).

    The weights w_{k,n} (or payloads u_n) that the nodes return become Eq. (3): g = (1/N) sum_n h_n u_n + xi with
    u_n = (w_k - w_{k,n}) / lr. They are added up in the order of the clients (most samples first, then by number) and
    not of arrival. The receiver's g makes the model of Eq. (4), and the strategy sees that as its only reply; norm
    buffers go by the side link. A reply that cannot be used is left out and named in `left_out`.

    With a `folder` every round is recorded there as any other run is, and another start goes on from the last one. The
    settings are those of an Experiment; with an `experiment` the model, the data and the evaluation are its own too.
    """

    def __init__(
        self,
        strategy: Strategy,
        experiment: Experiment | None = None,
        folder: str | Path | None = None,
        *,
        clients: int | None = None,  # how many there are; else as many as are there when it starts
        enough: int = 1,  # replies: with fewer in a round the model stays as it is
        loss: str = "train_loss",  # the metric of the replies that is the training loss
        **settings: Any,
    ):
        self.strategy = _needs_the_mean_alone(strategy)
        self.folder = None if folder is None else Path(folder)
        self.enough, self.loss = whole("enough", enough, 1), loss
        self.clients = None if clients is None else whole("clients", clients, 1)
        for key in settings if experiment is None else ():
            choice("setting", key.partition(".")[0], AIR)
        self.experiment = (experiment or Experiment(data=REMOTE)).with_(**settings)
        if self.experiment.participation != "all()":
            why = "who takes part is the strategy's to say, such as FedAvg(fraction_train=0.5)"
            raise InputError(f"participation={self.experiment.participation}: {why}")
        if experiment is not None:
            self.clients = self.clients or self.experiment.clients
        receiving_side(self.experiment, Layout(("w",), ((1,),), (0, 1)), NOTHING)  # what cannot be is refused here
        self.left_out: list[LeftOut] = []
        self.numbers: dict[int, int] = {}  # of the nodes, for those that do not tell their client's
        self.over = False  # the model is no longer finite

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
        """Flower's own loop over the rounds that the folder does not hold yet."""
        with ExitStack() as stack:
            if self.folder:
                stack.enter_context(locked(self.folder))
            least = int(getattr(self.strategy, "min_available_nodes", 1))
            nodes = _connected(grid, self.clients or least, timeout)
            e = self.experiment.with_(clients=self.clients or self._recorded_clients() or nodes, rounds=num_rounds)
            begin = resume_point(self.folder, e, resume=True) if self.folder else ResumePoint([], None)
            self.first, self.k, self.timeout = begin.rounds, begin.rounds, timeout
            sim = self._simulation(e, initial_arrays)
            self.evaluate_fn = evaluate_fn
            about = self._circumstances(e, sim, begin)
            state = restored(sim.start, about.rules, begin.checkpoint, self.folder)
            self.sent, self.over = self._record(state), begin.diverged
            before = begin.rows[begin.rounds - 1] if begin.rounds else {}
            path = self._told(simulate(sim, state, num_rounds, self.first), before)
            self.rounds = recorded(path, self.folder, about, begin)
            stack.enter_context(closing(self.rounds))
            left = 0 if self.over else max(0, num_rounds - self.first)
            found = super().start(grid, self.sent, left, timeout, train_config, evaluate_config, self._evaluated)
        return _shifted(found, self.first, self.sent)

    def _recorded_clients(self) -> int | None:
        """How many clients the run in the folder has, where there is one."""
        there = self.folder is not None and (self.folder / EXPERIMENT).exists()
        return int(read_record(self.folder)["clients"]) if self.folder and there else None

    def _simulation(self, e: Experiment, arrays: ArrayRecord | None) -> Simulation:
        """Algorithm 1, whose uploads are the nodes' replies and whose server is the strategy."""
        if e.data != REMOTE:
            sim = build(e)
            assert isinstance(sim.train, Reference)
            self.layout, self.norms = sim.layout, sim.train.work.norms
            self.model = record_of(sim.start, self.layout, self.norms)
        elif arrays is None:
            raise InputError("start needs the initial_arrays: the model of the clients, such as its state_dict")
        else:
            self.model = arrays
            self.layout, self.norms = layouts(arrays)
            begin = State(flat(arrays, self.layout), flat(arrays, self.norms))
            sim = Simulation(
                n=e.clients,
                seed=e.seed,
                start=begin,
                layout=self.layout,
                train=self._uploads,
                **receiving_side(e, self.layout, self.norms)._asdict(),
                evaluate=lambda state: {},
                participants=self._senders,
            )
        self.scale, self.device, self.n = payload_scale(e.payload, e.lr), sim.start.w.device, e.clients
        self.own_evaluation = sim.evaluate
        step = Step(sim.update, self.strategy, self._by_the_strategy)
        self.rules = sim.rules | {"server": step}
        return replace(sim, train=self._uploads, participants=self._senders, update=step, evaluate=self._evaluate)

    def _circumstances(self, e: Experiment, sim: Simulation, begin: ResumePoint) -> Circumstances:
        """What the folder keeps beside the rounds; a run that was begun with another strategy is refused."""
        strategy = _described(self.strategy)
        past = read_environments(self.folder) if self.folder and begin.rounds else []
        if past and past[-1].get("strategy", strategy) != strategy:
            raise InputError(f"{self.folder} was begun with {past[-1]['strategy']}, and not with {strategy}")
        how = {"engine": "reference", "precision": "fp32", "chunk": 1, "why": "the clients are Flower's"}
        here = environment(self.device) | {"data": sim.files, "flwr": flwr.__version__, "strategy": strategy} | how
        labels = None if sim.labels is None else sim.labels.tolist()
        return Circumstances(e, here, labels, self.rules)

    def _told(self, rounds: Iterable[Round], before: dict[str, Any]) -> Iterator[Round]:
        """The rounds, each with a name for all that an earlier one told; None where there is nothing to tell."""
        names: Metrics = dict.fromkeys(name for name in before if name not in ("round", "seconds"))
        for k, state, metrics in rounds:
            if any(reply.loss is None for reply in self.heard):
                metrics = metrics | {"train/loss": None}
            names |= dict.fromkeys(metrics)
            yield Round(k, state, names | metrics)

    # ------------------------------------------------------------------------------------------------------- a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy asks whom it wants to; the nodes that are there are numbered."""
        if self.over:
            return []
        self.sent = arrays
        if self.experiment.data != REMOTE:  # for our own client app, which compares them with what it has
            config["stableair"], config["experiment"] = stableair.__version__, self.experiment.to_json()
        messages = list(self.strategy.configure_train(self.first + server_round, arrays, config, grid))
        self.asked = [message.metadata.dst_node_id for message in messages]
        here = sorted(grid.get_node_ids())
        self.numbers = {node: n for node, n in self.numbers.items() if node in here}
        free = (n for n in itertools.count() if n not in self.numbers.values())
        for node in here:
            if node not in self.numbers:
                self.numbers[node] = next(free)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One round of Algorithm 1 with these replies."""
        if self.over:
            return None, None
        self.k = self.first + server_round - 1
        before = len(self.left_out)
        self.heard = self._usable(list(replies))
        missing = self.left_out[before:]
        for _, node, why in missing:
            log(WARNING, "round %d: node %d is left out: %s", self.k, node, why)
        if not self.heard and server_round == 1:  # nothing has come over the air yet: it is no accident
            why = f"the first: {missing[0].why}" if missing else "the strategy asked nobody"
            raise InputError(f"round {self.k}: of {count(len(self.asked), 'node')} none can be heard; {why}")
        if len(self.heard) < self.enough:
            log(WARNING, "round %d: %d of the %d replies that it takes", self.k, len(self.heard), self.enough)
            self.heard = []
        _, state, row = next(self.rounds)
        if row.get("diverged"):
            log(WARNING, "round %d: the model is no longer finite; the run ends here", self.k)
            self.over = True
            return None, None
        self.sent = self._record(state)
        told = {name: value for name, value in row.items() if value is not None}
        return self.sent, MetricRecord(told | {"clients/left_out": len(missing)} | self._client_metrics())

    def _usable(self, replies: list[Message]) -> list[Reply]:
        """The replies that can be used, in the order in which they are added up; the others are noted."""
        found, faults = [], {}
        for message in replies:
            node = message.metadata.src_node_id
            try:
                found.append(self._read(node, message))
            except Exception as error:  # whatever a node may have sent
                faults[node] = " ".join(str(error).split()) or type(error).__name__
        claims = Counter(reply.client for reply in found)
        for reply in found:
            if claims[reply.client] > 1:  # which of them it is nobody can tell
                others = f"{count(claims[reply.client], 'node')} say that they are client {reply.client}"
                faults[reply.message.metadata.src_node_id] = others
        replied = {message.metadata.src_node_id for message in replies}
        for_others = [faults.pop(node) for node in sorted(faults) if node not in self.asked]  # by the SuperLink
        silent = for_others[0] if for_others else f"no reply within {self.timeout:g} s"
        faults |= {node: silent for node in self.asked if node not in replied}
        self.left_out += [LeftOut(self.k, node, faults[node]) for node in sorted(faults)]
        good = [reply for reply in found if reply.message.metadata.src_node_id not in faults]
        return sorted(good, key=lambda reply: (-reply.samples, reply.client))

    def _read(self, node: int, message: Message) -> Reply:
        """A reply as an upload; what is wrong with it is an error of one line."""
        if message.has_error():
            raise InputError(_said(message.error))
        if len(message.content.array_records) != 1 or len(message.content.metric_records) != 1:
            raise InputError("a reply holds one record of arrays and one of metrics")
        (name, arrays), metrics = next(iter(message.content.array_records.items())), _metrics(message)
        if strange := arrays.keys() - self.model.keys():
            raise InputError(f"the model has no array {min(strange)}")
        if name == PAYLOAD:
            update, stats = flat(arrays, self.layout), flat(arrays, self.norms, torch.float64)
        else:
            weights = flat(self.sent, self.layout) - flat(arrays, self.layout)
            update, stats = weights.mul_(self.scale), moments(flat(arrays, self.norms), self.norms)
        loss = metrics.get(self.loss)
        client, samples = metrics.get(CLIENT, self.numbers.get(node, -1)), metrics.get(self.weight)
        for what, values in (("weights", update), ("norm buffers", stats), (self.loss, loss), (self.weight, samples)):
            if values is not None and not torch.as_tensor(values).isfinite().all():
                raise InputError(f"its {what} must be finite")
        if not isinstance(samples, int | float) or samples < 0:
            raise InputError(f"its metrics must hold {self.weight}, how many samples it has")
        if not isinstance(client, int) or not 0 <= client < self.n:
            raise InputError(f"its number must be one of the {self.n} clients, from 0: got {client}")
        return Reply(client, samples, update, stats, loss if isinstance(loss, int | float) else None, message)

    @property
    def weight(self) -> str:
        """The metric that tells how many samples a client has."""
        return str(getattr(self.strategy, "weighted_by_key", "num-examples"))

    def _senders(self, k: int) -> Tensor:
        """The clients whose replies are used, in their order: (m,)."""
        return torch.tensor([reply.client for reply in self.heard], dtype=torch.int64)

    def _uploads(self, state: State, k: int, who: Tensor) -> Iterator[Upload]:
        """The replies of the round, as a trainer gives them."""
        for reply in self.heard:
            rows = reply.update[None], reply.stats[None], torch.tensor([reply.loss or 0.0])
            yield Upload(torch.tensor([reply.client]), *(row.to(self.device) for row in rows))

    def _by_the_strategy(self, w: Tensor) -> Tensor:
        """What the strategy makes of the model, when that is the only reply: (d,) -> (d,).

        Some strategies return float64; norm buffers come back to it as it sent them, so that they are none of its.
        """
        arrays = with_vectors(self.sent, [(self.layout, w)])
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({self.weight: 1})})
        one = Message(content, metadata=self.heard[0].message.metadata)  # type: ignore[call-overload]
        made, _ = self.strategy.aggregate_train(self.k + 1, [one])
        if made is None:
            raise InputError(f"{type(self.strategy).__name__} made no model of the round")
        return flat(made, self.layout)

    def _client_metrics(self) -> dict[str, Any]:
        """The metrics of the clients, put together as the strategy does it; they go by the side link."""
        records = [_metrics(reply.message) for reply in self.heard]
        common = set.intersection(*(set(record) for record in records)) - {CLIENT} if records else set()
        aggregate = getattr(self.strategy, "train_metrics_aggr_fn", None)
        if not aggregate or not records or not sum(reply.samples for reply in self.heard):
            return {}
        contents = [RecordDict({"metrics": MetricRecord({n: r[n] for n in r if n in common})}) for r in records]
        return dict(aggregate(contents, self.weight))

    def _record(self, state: State) -> ArrayRecord:
        """A state as the clients know it."""
        return with_vectors(self.model, [(self.layout, state.w), (self.norms, state.stats)])

    # -------------------------------------------------------------------------------------------------- the evaluation

    def _evaluate(self, state: State) -> Metrics:
        """The experiment's own evaluation, and the server's: a name without a group is one of test/..."""
        own, found = self.own_evaluation(state), None
        if self.evaluate_fn:
            found = self.evaluate_fn(self.k + 1, self._record(state))
        told = {name: value for name, value in (found or {}).items() if isinstance(value, int | float)}
        both: dict[str, Any] = {name: value for name, value in own.items() if value is not None} | told
        self.evaluation = MetricRecord(both) if both else None
        return own | {name if "/" in name else f"test/{name}": value for name, value in told.items()}

    def _evaluated(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """For Flower: the evaluation of a round has been done with it, that of the model it starts from has not."""
        if server_round:
            return None if self.over else self.evaluation
        return self.evaluate_fn(self.first, arrays) if self.evaluate_fn else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does it."""
        return [] if self.over else self.strategy.configure_evaluate(self.first + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does it."""
        return None if self.over else self.strategy.aggregate_evaluate(self.first + server_round, replies)

    def summary(self) -> None:
        """What is under the strategy, and the strategy's own summary."""
        e = self.experiment
        log(INFO, "\t├──> Over the air: %s, %s, %s", e.fading, e.noise, e.receiver)
        if self.folder:
            log(INFO, "\t├──> Recorded in %s, from round %d", self.folder, self.first)
        self.strategy.summary()


# --------------------------------------------------------------------------------------------------------------- parts


def _needs_the_mean_alone(strategy: Strategy) -> Strategy:
    """Refuse a strategy that looks at the individual replies: over the air there are none."""
    if not isinstance(strategy, Strategy):
        raise InputError(f"OverTheAir wraps a strategy of flwr.serverapp.strategy: got {type(strategy).__name__}")
    home = next(kind for kind in type(strategy).__mro__ if "aggregate_train" in vars(kind))
    if home not in MEANS and not getattr(strategy, "over_the_air", False):
        why = "over the air the server hears their sum alone, and of that one reply it would make what FedAvg makes"
        way = f"take one of {', '.join(kind.__name__ for kind in MEANS)} and a receiver such as mac(C=auto)"
        own = "a strategy of your own that works on one reply says so with over_the_air = True"
        raise InputError(f"{home.__name__} compares the replies of the clients: {why}; {way}; {own}")
    return strategy


def _described(strategy: Strategy) -> str:
    """A strategy and the numbers that it has beyond FedAvg's."""
    numbers = {name: value for name, value in vars(strategy).items() if isinstance(value, float)}
    own = sorted(numbers.keys() - {"fraction_train", "fraction_evaluate"})
    return f"{type(strategy).__name__}({', '.join(f'{name}={numbers[name]:g}' for name in own)})"


def _connected(grid: Grid, wanted: int, patience: float) -> int:
    """Wait until so many nodes are there; how many are."""
    end = time.monotonic() + patience
    while (there := len(list(grid.get_node_ids()))) < wanted:
        if time.monotonic() > end:
            raise InputError(f"{there} of {count(wanted, 'node')} have connected within {patience:g} s")
        time.sleep(0.2)
    return there


def _shifted(found: Result, first: int, last: ArrayRecord) -> Result:
    """What Flower has collected, under the numbers of the rounds of the whole run."""
    kinds = "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"
    moved = {kind: {first + k: metrics for k, metrics in getattr(found, kind).items()} for kind in kinds}
    return Result(arrays=last, **moved)


def _said(error: Error) -> str:
    """What went wrong at a node, in one line: Flower wraps it as <class 'module.Kind'>:<'text'>, in Ray's own twice."""
    text = " ".join((error.reason or f"error {error.code}").split()).removesuffix("'>")
    text = re.sub(r"^<class '(?:[\w.]*\.)?(\w+)'>:<'", r"\1: ", text).rpartition(" occurred. Message: ")[2]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _metrics(message: Message) -> MetricRecord:
    return next(iter(message.content.metric_records.values()))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict or list with every array changed."""
    if isinstance(value, dict):
        return {name: change(array) for name, array in value.items()}
    return [change(array) for array in value]
