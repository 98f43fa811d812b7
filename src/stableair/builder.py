"""From an experiment to the parts of Algorithm 1."""

import copy
import warnings
from typing import Any

import torch
from torch import nn

from stableair import vector
from stableair.algorithm import Simulation
from stableair.channels.kinds import channel, fading, noise, power
from stableair.channels.power import Power
from stableair.checks import InputError, Note, nearest
from stableair.contracts import Dataset, Work, as_update
from stableair.data.partitions import divide, labels, partition
from stableair.data.sets import dataset, hold_out
from stableair.evaluation import Averaged, Evaluate, calibration_sample, norm_layers
from stableair.experiment import Experiment
from stableair.local import CHUNK, Reference
from stableair.models import model
from stableair.participants import divisor, participants, participation
from stableair.receivers import assemble, receiver
from stableair.servers import server
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


@torch.no_grad()
def _check_model(module: Any, data: Dataset) -> None:
    """Refuse a model that cannot tell the classes of these data apart, or has nothing to learn."""
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module: got {type(module).__name__}")
    x = data.inputs(data.train.x[:2])
    try:
        out = copy.deepcopy(module).eval()(x)
    except Exception as error:  # whatever the model's own code raises
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the model cannot take inputs of shape {tuple(x.shape)}: {type(error).__name__}: {said}"
        ) from error
    wanted = len(x), data.classes
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
        found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InputError(f"the model must give a tensor of shape {wanted}, a logit for each class: got {found}")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the model has no parameter that learns")


def build(experiment: Experiment) -> Simulation:
    """Make every part of the experiment: data, clients, model, channel, receiver, server."""
    e, place = experiment, device(experiment.device)
    data = dataset.one(e.data)()
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
        raise InputError(f"power {e.power} must return a Power: got {type(rule).__name__}")
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
        channel=channel.one(e.channel)()(
            fading=fading.one(e.fading)(),
            noise=noise.one(e.noise)(),
            power=rule,
            pilots=max(receive.pilots, 0, *wanted),
            norms=work.norms,
            divisor=divisor(who, e.clients),
        ),
        receive=receive,
        update=as_update(update()),
        evaluate=Averaged(evaluate, e.average) if e.average else evaluate,
        participants=of_round,
        labels=labels(parts, data.train, data.classes),
        files=dict(data.files),
        snr_blocks=vector.NOTHING if e.snr_blocks == "none" else layout.merge(e.snr_blocks),
    )
