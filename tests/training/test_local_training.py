import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stableair.data.datasets import synthetic
from stableair.errors import InputError
from stableair.streams import generator
from stableair.training.local_training import LocalTraining
from stableair.training.reference import Reference
from stableair.vector import state

DATA = synthetic(samples=53, classes=3, shape=(1, 2, 2))
PARTS = list(torch.arange(53).split([10, 1, 25, 17]))  # unequal, one with a single sample, one with a short last batch


def network(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), *layers, nn.ReLU(), nn.Linear(6, 3))


def trainer(module, **changes):
    settings = {"epochs": 2, "batch_size": 10, "lr": 0.1, "payload": "gradient", "seed": 5} | changes
    chunk, parts = settings.pop("chunk", 3), settings.pop("parts", PARTS)
    return Reference(LocalTraining(module, DATA, parts, **settings), chunk)


def uploads(train, start, k=0):
    chunks = list(train(start, k, torch.arange(len(train.work.parts))))
    return [torch.cat(column) for column in zip(*(chunk[:4] for chunk in chunks), strict=True)]


@pytest.mark.parametrize(("payload", "scale"), [("gradient", 1 / 0.1), ("delta", 1.0)])
def test_a_client_does_plain_sgd(payload, scale):
    module, k = network(), 3
    start = state(module)
    clients, update, _, loss = uploads(trainer(module, payload=payload), start, k)
    assert clients.tolist() == [0, 1, 2, 3]
    for n, part in enumerate(PARTS):
        net, order, losses = network(), generator(5, "batches", k, n), []
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            for batch in part[order.permutation(len(part))].split(10):
                optimiser.zero_grad()
                losses.append(F.cross_entropy(net(DATA.train.x[batch]), DATA.train.y[batch]))
                losses[-1].backward()
                optimiser.step()
        torch.testing.assert_close(update[n], (start.w - state(net).w) * scale, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(loss[n], torch.stack(losses).detach().mean())


def test_training_keeps_the_start_model_and_does_not_depend_on_the_chunk():
    module = network()
    start = state(module)
    before = start.w.clone()
    small, large = (uploads(trainer(module, chunk=chunk), start) for chunk in (1, 4))
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))
    assert torch.equal(start.w, before)
    assert [len(u.clients) for u in trainer(module, chunk=3)(start, 0, torch.arange(4))] == [3, 1]


def test_batches_differ_between_rounds_clients_and_seeds():
    module = network()
    start = state(module)
    base = uploads(trainer(module), start, 0)[1]
    assert not torch.equal(base, uploads(trainer(module), start, 1)[1])
    assert not torch.equal(base, uploads(trainer(module, seed=6), start, 0)[1])
    twins = trainer(module, parts=[PARTS[2], PARTS[2]], epochs=1, payload="delta", chunk=2)
    one, other = uploads(twins, start, 0)[1]
    assert not torch.equal(one, other)


def test_norm_buffers_are_sent_with_the_update():
    module = network(nn.BatchNorm1d(6, track_running_stats=True))
    start = state(module)
    train = trainer(module, parts=[PARTS[0], PARTS[2]], epochs=1, batch_size=5, chunk=1)
    _, update, stats, _ = uploads(train, start)
    assert stats.shape == (2, 12)
    assert update.shape == (2, len(start.w))
    assert not torch.equal(stats[0], stats[1])
    assert start.stats.tolist() == [0.0] * 6 + [1.0] * 6, "the buffers of the server do not change"


def test_training_mode_and_threads_are_set_and_restored():
    module = network(nn.BatchNorm1d(6))
    module.eval()
    before = torch.get_num_threads()
    start = state(module)
    train = trainer(module, parts=[PARTS[2]], epochs=1, batch_size=5, lr=0.1, payload="delta", seed=0, chunk=1)
    _, _, stats, _ = uploads(train, start)
    assert not torch.equal(stats[0], start.stats), "batch norm was in training mode"
    assert torch.get_num_threads() == before


def test_counters_of_batch_norm_are_reset_for_every_client():
    module = network(nn.BatchNorm1d(6, momentum=None))  # its running mean depends on the number of batches
    start = state(module)
    train = trainer(module, parts=[PARTS[2]], epochs=1, batch_size=5, lr=0.1, payload="delta", seed=0, chunk=1)
    assert torch.equal(uploads(train, start)[2], uploads(train, start)[2])


def test_a_model_that_cannot_train_names_round_and_client():
    module = network(nn.BatchNorm1d(6))
    with pytest.raises(InputError) as error:
        uploads(trainer(module), state(module), 7)
    assert (error.value.code, error.value.fields) == ("client-cannot-train", {"round": 7, "client": 1})


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), FunctionalDropout()])
def test_dropout_depends_on_round_and_client_only(layer):
    module = network(layer)
    start = state(module)
    first = uploads(trainer(module), start, 2)
    torch.rand(17)  # another draw from the generator of torch
    before = torch.get_rng_state()
    again = uploads(trainer(module), start, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before), "training does not change the generator of torch"
    assert not torch.equal(first[1], uploads(trainer(network()), start, 2)[1]), "dropout has an effect"


def test_moves_are_uniform_and_independent_between_batches():
    data = synthetic(samples=400, classes=3, shape=(1, 4, 4))
    train = LocalTraining(nn.Identity(), data, [torch.arange(400)], 5, 10, 0.1, "gradient", 1, augment="crop_flip")
    moves = train.moves(0, [0])[0].flatten(0, 1)
    assert train.moves(0, [0]).shape == (*train.orders(0, [0]).shape, 3)
    for column, values in zip(moves.T, (range(-4, 5), range(-4, 5), range(2)), strict=True):
        assert column.unique().tolist() == list(values)
        expected = len(moves) / len(values)
        assert column.add(4 if len(values) > 2 else 0).bincount().sub(expected).abs().max() < 5 * expected**0.5
    assert moves.double().T.corrcoef().sub(torch.eye(3)).abs().max() < 0.1, "the components are independent"
    assert not torch.equal(moves[:400], moves[400:800])
    assert not torch.equal(moves, train.moves(1, [0])[0].flatten(0, 1))
    assert LocalTraining(nn.Identity(), data, [torch.arange(400)], 1, 200, 0.1, "delta", 1).moves(0, [0]) is None
