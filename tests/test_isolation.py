"""A run gives the same bits for all modes of torch that its caller may set."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

import stableair as sa
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.engine import accelerate, choose
from stableair.isolation import isolated, isolated_steps


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": default_dtype,
    "default device": default_device,
    "device": lambda: torch.device("meta"),
}


def modes():
    """The modes of torch that `isolated` sets."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.empty(0).device,  # get_default_device() fails in torch 2.6 after set_default_device(None)
    )


@pytest.fixture
def normed(tiny):
    """An experiment with convolutions, which autocast rounds, and norm statistics."""
    return tiny.with_(
        data="synthetic(samples=40, classes=3, shape=(1, 8, 8))", model="resnet18(norm=batch)", rounds=1,
        clients=2, local_epochs=1, batch_size=20,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_run_does_not_depend_on_the_modes_of_its_caller(tiny, mode, engine):
    e = tiny.with_(rounds=2, engine=engine)
    expected = sa.run(e)
    with MODES[mode]():
        before = modes()
        run = sa.run(e)
        assert modes() == before, "the run restores the modes of its caller"
    assert torch.equal(run.state.model.w, expected.state.model.w)
    assert run["test/loss"] == expected["test/loss"]


@pytest.mark.slow
def test_a_run_of_a_resnet_does_not_depend_on_the_modes_of_its_caller(normed):
    expected = sa.run(normed)
    with ExitStack() as stack:
        for mode in MODES.values():
            stack.enter_context(mode())
        run = sa.run(normed)
    assert torch.equal(run.state.model.w, expected.state.model.w)


@pytest.mark.parametrize("mode", MODES)
def test_build_choose_accelerate_and_simulate_do_not_depend_on_the_callers_modes(tiny, mode):
    def final(context):
        with context():
            sim = build(tiny)
            fast = accelerate(sim, choose(sim, "auto"))
            rounds = [(one.state.model.w, modes()) for one in simulate(fast, fast.start, 2)]
            return rounds[-1]

    expected, _ = final(isolated)
    w, inside = final(MODES[mode])
    with MODES[mode]():
        assert inside == modes(), "the modes of the caller apply between two rounds"
    assert torch.equal(w, expected)


def test_the_steps_of_a_generator_are_isolated_and_it_is_closed():
    closed = []

    @isolated_steps
    def steps(n):
        try:
            for _ in range(n):
                yield torch.is_grad_enabled()
        finally:
            closed.append(torch.is_grad_enabled())

    with torch.no_grad():
        assert list(steps(2)) == [True, True]
        open_generator = steps(2)
        next(open_generator)
        assert not torch.is_grad_enabled()
        open_generator.close()
    assert len(closed) == 2


def test_an_error_restores_the_callers_modes():
    with torch.no_grad():
        before = modes()
        with pytest.raises(RuntimeError), isolated():
            raise RuntimeError
        assert modes() == before
