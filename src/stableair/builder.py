"""From an experiment to the parts of Algorithm 1."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stableair import vector
from stableair.algorithm import Simulation
from stableair.channels.kinds import channel, fading, noise, power
from stableair.channels.power import Power
from stableair.checks import InputError, Note, nearest, shown, typed
from stableair.contracts import Dataset, Split, Work, as_update
from stableair.data.partitions import divide, labels, partition
from stableair.data.sets import dataset, hold_out
from stableair.evaluation import Averaged, Evaluate, calibration_sample, norm_layers
from stableair.experiment import HOMES, Experiment, registry
from stableair.local import CHUNK, Reference
from stableair.models import model
from stableair.participants import divisor, participants, participation
from stableair.receivers import assemble, receiver
from stableair.servers import server
from stableair.spec import line_of
from stableair.streams import generator

VALIDATION = 0.2  # share of the training data that evaluate="validation" holds out


def device(name: str) -> torch.device:
    """The device of that name, which must be there; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.zeros(1, device=found, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        there = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError(f"device {name!r} is not there; {nearest(name, there)}") from None
    return found


@contextmanager
def own_parts_named(experiment: Experiment) -> Iterator[None]:
    """A mistake inside a component of the user's own, or in what it returns, is told with its file and line."""
    try:
        yield
    except InputError as error:
        if error.part and (homes := _own_parts(experiment, [error.part])):
            raise InputError(f"{homes}: {error}", hint=error.hint) from error
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if where := line_of(error):
            raise InputError(where) from error
        if homes := _own_parts(experiment, HOMES):  # ours cannot work with what it returned
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(f"{homes}: what is made there does not fit: {said}") from error
        raise


def _own_parts(experiment: Experiment, settings: Iterable[str]) -> str:
    """Where the components of these settings are made that are the user's own."""
    texts = [(name, getattr(experiment, name)) for name in settings]
    calls = [call for name, text in texts if text != "auto" for call in registry(name).parse(text)]
    return " or ".join(f"{home[0]}, line {home[1]}" for call in calls if (home := call.entry.home))


def _check_data(data: Any, splits: Iterable[str]) -> None:
    """Refuse what is no data set, in the splits that are used: images of one shape, each with a label."""
    if not isinstance(data, Dataset):
        raise InputError(f"the data set must be a Dataset: got {type(data).__name__}", part="data")
    if isinstance(data.classes, bool) or not isinstance(data.classes, int) or data.classes < 2:
        text = f"the data set's classes must be a whole number, 2 or more: got {shown(data.classes)}"
        raise InputError(text, part="data")
    for name in splits:
        split = getattr(data, name)
        if not isinstance(split, Split) or not _is_labelled(split, data.train.x, data.classes):
            wanted = f"x (m, c, h, w) of one shape, and y (m,) int64 in 0 ... {data.classes - 1}"
            raise InputError(f"the data set's {name} split must be {wanted}", part="data")
    if data.inputs(data.train.x[:1]).shape != data.train.x[:1].shape:
        raise InputError("the data set's mean and std must be a number, or one for each channel", part="data")
    try:
        model.one(data.model)
    except InputError as error:
        raise InputError(f"the data set's own model: {error}", part="data") from None


def _is_labelled(split: Split, like: Any, classes: int) -> bool:
    """Whether each image has a label below `classes`, and a writer where there are any."""
    x, y, writer = split
    if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.is_complex() or not len(x) or x.shape[1:] != like.shape[1:]:
        return False
    numbers = [y] if writer is None else [y, writer]
    if any(not isinstance(t, torch.Tensor) or t.dtype != torch.int64 or t.shape != x.shape[:1] for t in numbers):
        return False
    return min(int(t.min()) for t in numbers) >= 0 and int(y.max()) < classes


@torch.no_grad()
def _check_model(module: Any, data: Dataset) -> None:
    """Refuse a model that cannot tell the classes of these data apart, or has nothing to learn."""
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module: got {type(module).__name__}", part="model")
    x = data.inputs(data.train.x[:2])
    try:
        out = copy.deepcopy(module).eval()(x)
    except Exception as error:  # whatever the model's own code raises
        said = line_of(error) or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InputError(f"the model cannot take inputs of shape {tuple(x.shape)}: {said}", part="model") from error
    wanted = len(x), data.classes
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
        found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        text = f"the model must give a tensor of shape {wanted}, a logit for each class: got {found}"
        raise InputError(text, part="model")
    if not out.is_floating_point():
        raise InputError(f"the model must give real numbers, such as float32: got {out.dtype}", part="model")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameter that learns", part="model")


@typed
def build(experiment: Experiment) -> Simulation:
    """Make every part of the experiment: data, clients, model, channel, receiver, server."""
    with own_parts_named(experiment):
        return _build(experiment)


def _build(e: Experiment) -> Simulation:
    place = device(e.device)
    data = dataset.one(e.data)()
    _check_data(data, ("train",) if e.evaluate == "validation" else ("train", "test"))
    if e.evaluate == "validation":
        data = hold_out(data, VALIDATION, e.seed)
    parts = divide(partition.one(e.partition)(), data.train, e.clients, generator(e.seed, "partition").numpy())

    with torch.random.fork_rng(devices=[]):  # torch's own initialisation, on the CPU: the same w_0 on every device
        torch.manual_seed(generator(e.seed, "init").key[0])
        module = model.one(data.model if e.model == "auto" else e.model)()(tuple(data.train.x.shape[1:]), data.classes)
        _check_model(module, data)
    module, data = module.to(place), data.to(place)

    if e.norm_stats != "clients" and not norm_layers(module):
        warnings.warn(
            f"norm_stats={e.norm_stats} changes nothing: the model keeps no norm statistics", Note, stacklevel=2
        )
    layout = vector.parameters(module)
    samples = [torch.from_numpy(part) for part in parts]
    work = Work(
        module,
        data,
        [part.to(place) for part in samples],
        epochs=e.local_epochs,
        batch_size=e.batch_size,
        lr=e.lr,
        payload=e.payload,
        seed=e.seed,
        augment=e.augment,
    )
    receive = assemble(e.receiver, layout, e.blocks)
    asked = [call.full().arguments.get("pilot", 0) for call in receiver.parse(e.receiver)]  # by name, as in mac
    wanted = [number for number in asked if isinstance(number, int)]
    who = participation.one(e.participation)()
    of_round = participants(who, work.sizes, e.seed)
    of_round(0)  # a rule that asks for more clients than there are says so before anything is computed
    rule = power.one(e.power)()
    if not isinstance(rule, Power):
        raise InputError(f"power {e.power} must return a Power: got {type(rule).__name__}", part="power")
    air = channel.one(e.channel)()(
        fading=fading.one(e.fading)(),
        noise=noise.one(e.noise)(),
        power=rule,
        pilots=max(receive.pilots, 0, *wanted),
        norms=work.norms,
        divisor=divisor(who, e.clients),
    )
    if not all(callable(getattr(air, method, None)) for method in ("draw", "superpose")):
        text = f"channel {e.channel} must make what has draw and superpose: got {type(air).__name__}"
        raise InputError(text, part="channel")
    update = server.one(e.server)
    if "lr" in update.parameters and update.full().arguments["lr"] is None:
        update = update.with_("lr", e.lr if e.payload == "gradient" else 1.0)
    evaluate = Evaluate(module, data, e.evaluate, e.norm_stats, calibration_sample(samples, e.seed).to(place))
    return Simulation(
        n=e.clients,
        seed=e.seed,
        start=vector.state(module),
        layout=layout,
        train=Reference(work, e.chunk or CHUNK),
        channel=air,
        receive=receive,
        update=as_update(update()),
        evaluate=Averaged(evaluate, e.average) if e.average else evaluate,
        participants=of_round,
        labels=labels(parts, data.train, data.classes),
        files=dict(data.files),
        snr_blocks=vector.NOTHING if e.snr_blocks == "none" else layout.merge(e.snr_blocks),
    )
