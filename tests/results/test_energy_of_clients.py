"""The energy that each client has transmitted since the first round, and the largest of them: `energy_max`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import stableair as sa
from helpers import ROOT
from helpers.callbacks import Hooks
from helpers.errors import refused
from helpers.runs import Stop, same, stop_after
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.contracts import State, Upload
from stableair.memory import non_finite_parts
from stableair.participants import participation
from stableair.results import report
from stableair.results.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from stableair.results.lock import locked
from stableair.results.run import Run
from stableair.vector import ModelState

TOTAL = "channel/energy_total_max"
SETTINGS = {
    "plain": {"participation": "sample(m=2)"},
    "inversion": {"power": "inversion(P=1, threshold=0.5)", "channel": "flat(noise_on=sum)"},
    "waveform": {"participation": "bernoulli(q=0.4)", "channel": "waveform()", "symbol_energy": 3.0},
    "digital": {"channel": "digital(quantize='qsgd(s=3, coding=elias)')", "noise": "none()", "receiver": "none()",
                "power": "inversion(P=1, threshold=0.5)"},
    "bursty": {"participation": "bernoulli(q=0.05)", "server": "momentum()"},
}  # fmt: skip


def observed(experiment):
    """The rounds, and the energy of each client in each round: (rounds, n), from what the channel reports."""
    sim = build(experiment)
    reported = np.zeros((experiment.rounds, experiment.clients))

    class Observed:
        draw = sim.channel.draw

        def superpose(self, uploads, draw):
            received = sim.channel.superpose(uploads, draw)
            for client, energy in received.resources.energies.items():
                reported[draw.k, client] = experiment.symbol_energy * energy
            return received

    return list(simulate(replace(sim, channel=Observed()), sim.start, experiment.rounds)), reported


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_largest_total_is_that_of_one_client(tiny, settings):
    """The client that sends most may change; the largest total is at most the sum of the largest energies."""
    experiment = tiny.with_(rounds=8, engine="reference", **settings)
    rounds, reported = observed(experiment)
    totals = np.cumsum(reported, axis=0)  # adds round by round, as a run does
    assert [each.metrics[TOTAL] for each in rounds] == totals.max(1).tolist()
    assert [each.state.energies.tolist() for each in rounds] == totals.tolist()
    run = sa.run(experiment)
    assert run["energy_max"] == totals.max(1).tolist()
    assert run["energy"][-1] < run["energy_max"][-1] < sum(run["channel/energy_max"])


def test_a_round_without_senders_keeps_the_largest_total(tiny, registries):
    participation("skips_a_round")(lambda: lambda n, source: torch.arange(0 if source.round == 1 else n))
    run = sa.run(tiny.with_(participation="skips_a_round()"))
    first, silent, third, _ = run["energy_max"]
    assert first == silent < third
    assert run["channel/energy_max"][1] == 0


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3], [4, 1]])
def test_chunks_change_no_energy(tiny, sizes):
    sim = build(tiny)

    def chunked(model, k, clients):
        (upload,) = sim.train(model, k, clients)
        for parts in zip(*(field.split(sizes) for field in upload[:4]), strict=True):
            yield Upload(*parts)

    whole, divided = (list(simulate(each, sim.start, 3)) for each in (sim, replace(sim, train=chunked)))
    assert [each.metrics for each in divided] == [each.metrics for each in whole]
    assert torch.equal(divided[-1].state.energies, whole[-1].state.energies)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_resumed_run_continues_the_totals(tiny, tmp_path, settings):
    experiment = tiny.with_(rounds=5, **settings)
    whole = sa.run(experiment)
    with pytest.raises(Stop):
        sa.run(experiment, tmp_path, callbacks=[Hooks(round=stop_after(2))])
    resumed = sa.run(experiment, tmp_path, resume=True)
    assert same(resumed, whole)
    assert torch.equal(resumed.state.energies, whole.state.energies)
    assert torch.equal(read_checkpoint(tmp_path).state.energies, whole.state.energies)


def test_a_diverged_round_transmits_nothing(tiny):
    run = sa.run(tiny.with_(receiver="none()", noise="sas(alpha=0.5, tau=1e30)", rounds=9))
    assert run.diverged
    assert run[TOTAL][-1] is None
    assert run["energy_max"][-1] == run["energy_max"][-2] > 0


def test_an_infinite_energy_is_no_divergence():
    model = ModelState(torch.ones(2), torch.zeros(0))
    assert not non_finite_parts(State(model, energies=torch.tensor([torch.inf, 0.0])))


def test_units_only_scale_the_total(tiny):
    base, scaled = sa.run(tiny), sa.run(tiny.with_(symbol_energy=4.0, bandwidth=2e6))
    assert scaled["energy_max"] == [4 * total for total in base["energy_max"]]
    assert torch.equal(scaled.state.model.w, base.state.model.w)


def test_a_channel_that_does_not_name_the_clients_is_refused(tiny, registries):
    @sa.channel("anonymous", uses=("fading", "noise"))
    def anonymous():
        """A channel whose energies do not belong to clients."""

        def make(fading, noise, **others):
            inner = build(tiny).channel

            class Anonymous:
                draw = inner.draw

                def superpose(self, uploads, draw):
                    received = inner.superpose(uploads, draw)
                    energies = tuple(received.resources.energies.values())
                    return received._replace(resources=received.resources._replace(energies=energies))

            return Anonymous()

        return make

    error = refused("wrong-type", sa.run, tiny.with_(channel="anonymous()"))
    assert "must be a dict, client index 0 ... 4 to energy" in str(error)


def test_runs_are_limited_compared_and_stopped_by_energy_max(tiny, tmp_path):
    runs = [sa.run(tiny), sa.run(tiny.with_(receiver="none()"))]
    total = runs[0]["energy_max"]
    assert len(runs[0].within("energy_max", total[1])) == 2
    found = sa.compare(runs, equal="energy_max")
    assert found.budget.amount == min(run["energy_max"][-1] for run in runs)
    assert "J at most per client" in str(found)
    assert sa.plot(runs, x="energy_max").axes[0].get_xlabel() == "largest transmitted energy of a client in J"
    assert sa.table(runs)["energy_max"].tolist() == [run["energy_max"][-1] for run in runs]
    assert len(sa.run(tiny, stop=f"energy_max >= {total[1]!r}")) == 2


# ---------------------------------------------------------------------------------------------------- earlier versions


def test_a_checkpoint_without_energies_continues_without_the_total(tiny, tmp_path):
    """In a development version of 0.3. The earlier energies are unknown, so no later total is recorded."""
    with pytest.raises(Stop):
        sa.run(tiny, tmp_path, callbacks=[Hooks(round=stop_after(1))])
    rounds, state = read_checkpoint(tmp_path)
    content = {"rounds": rounds} | state._asdict() | {"model": state.model._asdict()}
    del content["energies"]

    class Old:
        def _asdict(self):
            return {name: content[name] for name in State._fields if name != "energies"}

        model = state.model

    with locked(tmp_path) as folder:
        save_checkpoint(folder, Checkpoint(rounds, Old()))
    assert read_checkpoint(tmp_path).state.energies is None
    whole, resumed = sa.run(tiny), sa.run(tiny, tmp_path, resume=True)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)
    assert resumed["energy"] == whole["energy"]
    assert resumed[TOTAL][2:] == [None, None]
    assert sa.load(tmp_path).state.energies is None
    refused("resource-not-recorded", lambda: resumed["energy_max"])


PUBLISHED = {  # run folders without the total: of version 0.2, with symbols only; and of a development version of 0.3
    "0.2": ROOT / "bench/reproduction/cifar10-noniid-tau0.1-seed0",
    "0.3": ROOT / "bench/reproduction/cifar10-noniid-tau0.3-Cauto-seed0",
}


@pytest.mark.parametrize(
    ("version", "recorded"), [("0.2", ["symbols"]), ("0.3", ["symbols", "airtime", "energy", "bits"])]
)
def test_a_published_run_is_read_drawn_and_compared_without_the_total(version, recorded):
    run = sa.load(PUBLISHED[version])
    assert [name for name in ("symbols", "airtime", "energy", "energy_max", "bits") if run.has(name)] == recorded
    assert sa.plot(run).axes
    assert sa.plot(run, x="symbols").axes
    message = str(refused("unknown-metric", sa.plot, run, x="energy_max"))
    assert not any(
        f" {name}" in message.partition(";")[2] for name in ("airtime", "energy", "bits") if name not in recorded
    )
    other = replace(run, record=sa.Experiment.from_record(run.record).with_(receiver="none()").to_record())
    assert sa.compare([run, other]).to_pandas()["energy_max"].isna().all()
    refused("resource-not-recorded", sa.compare, [run, other], equal="energy_max")
    assert "energy_max" not in sa.table(run)
    assert "<h2>Resources</h2>" in report.page([run])


def test_an_old_run_that_diverged_in_its_first_round_has_the_total_zero():
    row = {"round": 0, "diverged": True, "test/accuracy": None}
    assert Run(sa.Experiment().to_record(), [row])["energy_max"] == [0]
