"""Clipping and power limits on the client."""

import pytest
import torch
from flwr.app import Message, RecordDict

from helpers.flower import averaging, nodes_with_our_app, reply, start_arrays
from stableair.errors import InputError
from stableair.flower import OverTheAir, limited
from stableair.flower.arrays import flat, layouts


def limited_reply(message, **bounds):
    """The reply of a stock client behind the mod."""
    return limited(**bounds)(message, None, lambda message, context: reply(message))


def update_and_stats(message, back):
    layout, norms = layouts(message.content["arrays"])
    u = flat(back.content["arrays"], layout) - flat(message.content["arrays"], layout)
    return u, flat(back.content["arrays"], norms)


def test_the_mod_clips_and_limits_the_power():
    message = Message(RecordDict({"arrays": start_arrays()}), dst_node_id=17, message_type="train")
    u, stats = update_and_stats(message, reply(message))
    assert u.norm() > 0.3
    short, same_stats = update_and_stats(message, limited_reply(message, norm=0.25))
    torch.testing.assert_close(short, u * (0.25 / u.norm()), rtol=1e-4, atol=1e-6)
    assert torch.equal(same_stats, stats)
    weak, _ = update_and_stats(message, limited_reply(message, power=1e-4, norm=10))
    assert weak.square().mean().item() == pytest.approx(1e-4, rel=1e-3)
    assert torch.equal(update_and_stats(message, limited_reply(message, norm=1e3))[0], u), (
        "a short update keeps its bits"
    )
    with pytest.raises(InputError) as error:
        limited(norm=0)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "norm")


def test_the_mod_limits_payloads_too(small):
    quiet = small.with_(noise="none()", fading="unit()")
    result = OverTheAir(averaging(), quiet).start(nodes_with_our_app(quiet, mods=[limited(norm=0.5)]), num_rounds=1)
    assert 0.1 < result.train_metrics_clientapp[1]["gradient/norm"] <= 0.5
    free = OverTheAir(averaging(), quiet).start(nodes_with_our_app(quiet), num_rounds=1)
    assert free.train_metrics_clientapp[1]["gradient/norm"] > 1
