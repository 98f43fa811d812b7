"""Build the parts of Algorithm 1 from an experiment."""

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from stableair import vector
from stableair.algorithm import Simulation
from stableair.channels import assembly
from stableair.channels.digital import Digital, enough_clients
from stableair.client_tests import client_tests
from stableair.contracts import Channel, Dataset, Rule, ServerRule, Split, State, holds_tokens
from stableair.data.datasets import hold_out
from stableair.data.partitions import divide, labels
from stableair.errors import InputError, StableairError
from stableair.evaluation import Evaluate, calibration_sample, model_average, norm_layers
from stableair.experiment import COMPONENT_SETTINGS, Experiment
from stableair.isolation import isolated
from stableair.memory import check_memory
from stableair.models import model
from stableair.objects import check_model_function
from stableair.participants import divisor, participants
from stableair.receivers import assemble
from stableair.schedules import Schedule, full_rate
from stableair.servers import as_server_rule
from stableair.spec import Call, traceback_location
from stableair.streams import generator
from stableair.training.local_rules import as_local_rule
from stableair.training.local_training import LocalTraining
from stableair.training.reference import CHUNK, Reference
from stableair.validation import short_repr, suggest, typed
from stableair.vector import Layout, ModelState

log = logging.getLogger("stableair")

CHANNEL_SETTINGS = "clients", "participation", "receiver", "channel", *assembly.PARTS  # all that `check_channels` reads
VALIDATION = 0.2  # share of the training data that evaluate="validation" holds out


def device(name: str) -> torch.device:
    """Return the torch device of a name; "auto" is a GPU if there is one.

    Raises:
        InputError: The device is not available (`unknown-device`).
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        devices = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        text = f"device {name!r} is not available; {suggest(name, devices)}"
        raise InputError(text, code="unknown-device", name="device", value=name, allowed=devices) from None
    return chosen


@contextmanager
def attribute_plugin_errors(experiment: Experiment) -> Iterator[None]:
    """Add the file and line of a user-defined component to an error that the component or its output causes."""
    try:
        yield
    except StableairError as error:
        if error.setting and (locations := _user_locations(experiment, [error.setting])):
            raise error.with_message(f"{locations}: {error}") from error
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if location := traceback_location(error):
            raise InputError(location, code="component-failed") from error
        if where := _user_locations(experiment, COMPONENT_SETTINGS) or _installed_objects(experiment):
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            text = f"{where}: stableair cannot process the output of this component: {reason}"
            raise InputError(text, code="component-failed") from error
        raise


def _user_locations(experiment: Experiment, settings: Iterable[str]) -> str:
    """The files and lines of the user-defined components among some settings."""
    calls = [call for name in settings for call in experiment.calls(name)]
    return " or ".join(f"{file[0]}, line {file[1]}" for call in calls if (file := call.user_location))


def _installed_objects(experiment: Experiment) -> str:
    """The names of the functions and classes of installed packages, such as torch, that were passed to the run."""
    calls = [call for name in COMPONENT_SETTINGS if name != "data" for call in experiment.calls(name)]
    return " or ".join(call.title for call in calls if call.is_object and not call.user_location)


def _check_data(data: Any, splits: Iterable[str]) -> None:
    """Refuse an invalid data set: the splits in use need samples of one shape and kind, each with a label."""
    if not isinstance(data, Dataset):
        text = f"the data set must be a Dataset: got {type(data).__name__}"
        raise InputError(text, code="invalid-data", setting="data")
    if isinstance(data.classes, bool) or not isinstance(data.classes, int) or data.classes < 2:
        text = f"the data set's classes must be a whole number, 2 or more: got {short_repr(data.classes)}"
        raise InputError(text, code="invalid-data", setting="data")
    for name in splits:
        split = getattr(data, name)
        if not isinstance(split, Split) or not _is_labelled(split, data.train.x, data.classes):
            wanted = f"x (m, ...) of one shape and dtype, and y (m,) int64 in 0 ... {data.classes - 1}"
            text = f"the data set's {name} split must hold {wanted}"
            raise InputError(text, code="invalid-data", setting="data")
    try:
        fits = data.inputs(data.train.x[:1]).shape == data.train.x[:1].shape
    except RuntimeError:  # the numbers of columns differ
        fits = False
    if not fits:
        text = "the data set's mean and std must be a number, or one for each channel or column"
        raise InputError(text, code="invalid-data", setting="data")


def _default_model(data: Dataset) -> Call:
    """Parse the default model of a data set.

    Raises:
        InputError: The data set has no default model (`no-default-model`), or its spec is invalid (`invalid-data`).
    """
    if data.model is None:
        kind = "token ids" if holds_tokens(data.train.x) else "samples"
        text = f"the data set has no default model for its {kind} of shape {tuple(data.train.x.shape[1:])}"
        advice = "set model=...; pass integers that are measurements as floats"
        raise InputError(text, code="no-default-model", advice=advice)
    try:
        return model.one(data.model)
    except StableairError as error:
        text = f"the data set's default model: {error}"
        raise InputError(text, code="invalid-data", setting="data") from None


def _is_labelled(split: Split, like: Any, classes: int) -> bool:
    """Whether a split has samples of the shape and kind of `like`, valid labels, and valid writers if it has any."""
    x, y, writer = split
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or x.is_complex() or not len(x):
        return False
    if x.shape[1:] != like.shape[1:] or holds_tokens(x) != holds_tokens(like):
        return False
    numbers = [y] if writer is None else [y, writer]
    if any(not isinstance(t, torch.Tensor) or t.dtype != torch.int64 or t.shape != x.shape[:1] for t in numbers):
        return False
    return min(int(t.min()) for t in numbers) >= 0 and int(y.max()) < classes


def _trial_samples(data: Dataset) -> torch.Tensor:
    """Return two samples for the check of a model; of token ids, the second one has the largest id of both splits."""
    x = data.train.x
    if not holds_tokens(x):
        return x[:2]
    largest = max((split.x for split in (data.train, data.test)), key=torch.max)
    return torch.stack([x[0], largest[largest.flatten(1).amax(1).argmax()]])


@torch.no_grad()
def _check_model(module: Any, data: Dataset) -> None:
    """Refuse a model that does not return one logit per class for these data, or has no parameters to train."""
    if not isinstance(module, nn.Module):
        text = f"the model must be a torch.nn.Module: got {type(module).__name__}"
        raise InputError(text, code="invalid-model", setting="model")
    x = data.inputs(_trial_samples(data))
    try:
        out = copy.deepcopy(module).eval()(x)
    except Exception as error:  # the code of the model may raise anything
        reason = traceback_location(error) or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        kind = "token ids" if holds_tokens(x) else "inputs"
        text = f"the model does not accept the data: {kind} of shape {tuple(x.shape)}, two samples: {reason}"
        raise InputError(text, code="invalid-model", setting="model") from error
    wanted = len(x), data.classes
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
        output = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        text = f"the model must return a tensor of shape {wanted}, one logit per class: got {output}"
        raise InputError(text, code="invalid-model", setting="model")
    if not out.is_floating_point():
        text = f"the model must return real numbers, such as float32: got {out.dtype}"
        raise InputError(text, code="invalid-model", setting="model")
    if not any(p.requires_grad for p in module.parameters()):
        text = "the model has no parameter with requires_grad=True"
        raise InputError(text, code="invalid-model", setting="model")


@typed
@isolated()
def build(experiment: Experiment) -> Simulation:
    """Build all parts of an experiment: data, clients, model, channel, receiver and server.

    Args:
        experiment: The experiment.

    Returns:
        The parts, for `sa.simulate`.

    Raises:
        InputError: A component is invalid (`invalid-data`, `invalid-model`, `component-failed`, ...), or a setting does
            not fit the data (`not-images`, `out-of-range`).
        MissingExtraError: A component needs a package that is not installed.

    >>> import stableair as sa
    >>> sim = sa.build(sa.Experiment(data="synthetic()", clients=5))
    >>> sim.labels.shape  # samples of each of 10 classes at each client
    (5, 10)
    """
    with attribute_plugin_errors(experiment):
        return _build(experiment)


def _build(e: Experiment) -> Simulation:
    target = device(e.device)
    data, parts = _data_of_clients(e)
    if e.augment != "none" and (data.train.x.ndim != 4 or holds_tokens(data.train.x)):
        text = f"augment={e.augment} needs images (m, c, h, w): got samples of shape {tuple(data.train.x.shape[1:])}"
        raise InputError(text, code="not-images", name="augment", value=e.augment)
    module, data = _new_module(e, data).to(target), data.to(target)

    if e.norm_stats != "clients" and not norm_layers(module):
        log.warning("norm_stats=%s changes nothing: the model keeps no norm statistics", e.norm_stats)
    layout = vector.parameters(module)
    samples = [torch.from_numpy(part) for part in parts]
    work = LocalTraining(
        module,
        data,
        [part.to(target) for part in samples],
        epochs=e.local_epochs,
        batch_size=e.batch_size,
        lr=e.lr,
        payload=e.payload,
        seed=e.seed,
        augment=e.augment,
        rule=as_local_rule(e.call("local")()),
        lr_share=e.call("lr_decay")(),
        label_smoothing=e.label_smoothing,
    )
    participation = e.call("participation")()
    draw_participants = participants(participation, work.sizes, e.seed)
    draw_participants(0)  # refuse a rule that needs too many clients before anything is computed
    side = receiving_side(e, layout, work.norms, divisor(participation, e.clients))
    calibration = calibration_sample(samples, e.seed).to(target)
    tests = client_tests(data, samples).to(target) if e.evaluate_clients else None
    evaluate = Evaluate(module, data, e.evaluate, e.norm_stats, calibration, tests)
    return Simulation(
        n=e.clients,
        seed=e.seed,
        start=start_state(vector.state(module), side),
        layout=layout,
        train=Reference(work, e.chunk or CHUNK),
        **side._asdict(),
        evaluate=evaluate,
        average=model_average(e.average) if e.average else None,
        participants=draw_participants,
        labels=labels(parts, data.train, data.classes),
        files=dict(data.files),
    )


def _data_of_clients(e: Experiment) -> tuple[Dataset, list[np.ndarray]]:
    """Return the data set, and the indices of each client's training samples."""
    data = e.call("data")()
    _check_data(data, ("train",) if e.evaluate == "validation" else ("train", "test"))
    if e.evaluate == "validation":
        data = hold_out(data, VALIDATION, e.seed)
    return data, divide(e.call("partition")(), data.train, e.clients, generator(e.seed, "partition").numpy())


def label_counts(experiment: Experiment) -> np.ndarray:
    """Count the samples of each class at each client; no model is built.

    Args:
        experiment: The experiment.

    Returns:
        Number of samples of each class at each client, (clients, classes).
    """
    with attribute_plugin_errors(experiment):
        data, parts = _data_of_clients(experiment)
        return labels(parts, data.train, data.classes)


@isolated()
def network(experiment: Experiment) -> nn.Module:
    """Return the network of an experiment with its initial parameters, on the CPU; the data set is read."""
    with attribute_plugin_errors(experiment):
        data = experiment.call("data")()
        _check_data(data, ("train",))
        return _new_module(experiment, data)


def _new_module(e: Experiment, data: Dataset) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # torch initialises on the CPU: the same w_0 on every device
        torch.manual_seed(generator(e.seed, "init").key[0])
        call = _default_model(data) if e.model == "auto" else e.call("model")
        module: nn.Module = check_model_function(call())(tuple(data.train.x.shape[1:]), data.classes)
        _check_model(module, data)
    return module


class ReceivingSide(NamedTuple):
    """The parts of a `Simulation` after the local training: the stages of Eqs. (3) to (8), and their metrics."""

    channel: Channel
    receiver: Rule
    server: ServerRule
    server_share: Schedule
    bandwidth: float
    symbol_energy: float
    snr_blocks: Layout


def receiving_side(e: Experiment, layout: Layout, norms: Layout, divisor: float | None = None) -> ReceivingSide:
    """Build the parts of an experiment after the local training: channel, receiver, server rule and their settings.

    Args:
        e: The experiment.
        layout: Layout of the model's parameters.
        norms: Layout of the model's norm buffers.
        divisor: Divisor of the sum over the clients; None for the number of senders.

    Returns:
        The parts.
    """
    receiver = assemble(e.calls("receiver"), layout, e.blocks)
    step = e.call("server")
    if _uses_clients_lr(step):
        step = step.with_("lr", e.lr if e.payload == "gradient" else 1.0)
    return ReceivingSide(
        _channel(e, receiver.pilots, norms, divisor),
        receiver,
        as_server_rule(step()),
        server_share=_server_share(e),
        bandwidth=e.bandwidth,
        symbol_energy=e.symbol_energy,
        snr_blocks=vector.NOTHING if e.snr_blocks == "none" else layout.merge(e.snr_blocks),
    )


def _channel(e: Experiment, pilots: int, norms: Layout, divisor: float | None) -> Channel:
    return assembly.assemble({name: e.call(name) for name in ("channel", *assembly.PARTS)}, pilots, norms, divisor)


@isolated()
def check_channels(experiments: Iterable[Experiment]) -> None:
    """Refuse experiments whose channel cannot work, before anything is computed; no data are read.

    Args:
        experiments: The experiments. Equal channels are checked once.

    Raises:
        InputError: The parts of a channel do not work together, as for `assembly.assemble`, or the clients are too few
            for the participation (`out-of-range`) or the aggregator (`too-few-clients`). The error names the
            experiment.
    """
    different: dict[tuple[object, ...], Experiment] = {}
    for e in experiments:
        different.setdefault(tuple(getattr(e, name) for name in CHANNEL_SETTINGS), e)
    for e in different.values():
        try:
            with attribute_plugin_errors(e):
                _check_channel(e)
        except StableairError as error:
            raise error.with_message(f"{e.name} with channel={e.channel}: {error}") from error


def _check_channel(e: Experiment) -> None:
    participation = e.call("participation")()
    participants(participation, [1] * e.clients, e.seed)(0)
    pilots = assemble(e.calls("receiver"), vector.NOTHING, e.blocks).pilots
    channel = _channel(e, pilots, vector.NOTHING, divisor(participation, e.clients))
    if isinstance(channel, Digital):
        enough_clients(channel.aggregator, 0, e.clients, e.clients)


def _server_share(e: Experiment) -> Schedule:
    """Return the factor of g in the server's step: a server rule whose `lr` is not set follows the clients' schedule.

    With payload "gradient", w_k - w_{k,n} is eta_k times the payload, so the server multiplies by the same eta_k.
    """
    follows = _uses_clients_lr(e.call("server")) and e.payload == "gradient"
    share: Schedule = e.call("lr_decay")() if follows else full_rate
    return share


def _uses_clients_lr(server: Call) -> bool:
    """Whether a server rule uses the clients' learning rate: it has an argument `lr`, which is not set."""
    return "lr" in server.parameters and server.full().arguments["lr"] is None


def start_state(model: ModelState, side: ReceivingSide) -> State:
    """Return the state before the first round: a model, and the initial memories of the receiver and the server."""
    receiver, server = side.receiver.init(model.w), side.server.init(model.w)
    return State(model, check_memory("receiver", receiver), check_memory("server", server))
