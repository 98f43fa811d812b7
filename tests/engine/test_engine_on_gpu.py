"""The engines on a GPU against the reference."""

import gc
from dataclasses import replace

import pytest
import torch

import stableair as sa
import stableair.engine
from helpers.engine import (
    MODELS,
    Attentive,
    assert_uploads_agree,
    network,
    recorded_engines,
    reference,
    stacked,
    uploads,
)
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.contracts import State
from stableair.data.datasets import synthetic
from stableair.engine import EngineChoice, accelerate, choose
from stableair.vector import state


@pytest.mark.gpu
@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2, 13, 6]], ids=["equal", "unequal"])
def test_on_a_gpu_uploads_equal_those_of_the_reference(cuda, spec, sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 16, 16))
    slow = reference(network(spec, (3, 16, 16)).double(), data, sizes, device=cuda)
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "update", "rest"), [("fp32", 1e-5, 1e-6), ("tf32", 0.1, 1e-3), ("bf16", 0.3, 1e-2)]
)
@pytest.mark.parametrize("spec", MODELS)
def test_on_a_gpu_one_step_is_as_exact_as_the_precision(cuda, spec, precision, update, rest):
    """Losses and norm buffers are close; a gradient jumps where rounding changes the sign of an input of a relu."""
    data = synthetic(samples=24, classes=3, shape=(3, 16, 16))
    slow = reference(network(spec, (3, 16, 16)), data, [8, 8, 8], device=cuda, batch_size=8, epochs=1, lr=0.1)
    start = state(slow.work.module)
    pairs = zip(
        uploads(slow, start), uploads(stacked(slow, precision=precision), start), (update, rest, rest), strict=True
    )
    for a, b, tolerance in pairs:
        assert (a - b).norm() <= tolerance * a.norm(), (a - b).norm() / a.norm()


@pytest.mark.gpu
def test_on_a_gpu_a_resnet_uses_kernels_unless_they_fail(cuda, tiny, monkeypatch):
    sim = build(tiny.with_(device=cuda, model="resnet18()", data="synthetic(samples=60, classes=3, shape=(3, 8, 8))"))
    assert choose(sim, "auto")[:2] == ("kernels", "bf16")
    assert choose(sim, "auto", "tf32")[:2] == ("stacked", "tf32")
    broken = lambda device: (_ for _ in ()).throw(OSError("no compiler"))  # noqa: E731
    monkeypatch.setattr("stableair.engine.kernel_layers.try_kernels", broken)
    assert choose(sim, "auto")[:2] == ("stacked", "bf16")
    assert "our kernels do not run on it: OSError: no compiler" in choose(sim, "auto").why


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["resnet18()", "resnet18(norm=group)", "cnn(width=8)"])
def test_on_a_gpu_no_kernel_is_compiled_after_the_compilation(cuda, tiny, monkeypatch, spec):
    from triton.runtime.jit import JITFunction

    data = "synthetic(samples=60, classes=3, shape=(3, 24, 24))"  # a shape that no other test has
    sim = build(tiny.with_(device=cuda, model=spec, data=data))
    fast = accelerate(sim, choose(sim, "auto")).train
    assert fast._new_worker().has_kernels
    refuse = lambda *arguments: pytest.fail("a kernel was compiled after the compilation")  # noqa: E731
    monkeypatch.setattr(fast, "_worker", fast._new_worker())
    fast._worker._compile()
    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    assert next(iter(fast(sim.start.model, 0, torch.arange(sim.n)))).update.isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_out_of_memory_halves_the_number_of_clients(cuda, tiny, caplog):
    data = "synthetic(samples=200, classes=3, shape=(3, 16, 16))"
    sim = build(tiny.with_(device=cuda, model="resnet18()", data=data, clients=20, local_epochs=1))
    fast = accelerate(sim, EngineChoice("stacked", "fp32", 20, "")).train
    gc.collect()  # release the memory of other tests
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5 * 2**30) / total)
    try:
        trained = [n for upload in fast(sim.start.model, 0, torch.arange(20)) for n in upload.clients.tolist()]
        assert "out of memory: training 10 clients at a time" in caplog.text
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sorted(trained) == list(range(20))


@pytest.mark.gpu
def test_on_a_gpu_a_trajectory_in_fp32_equals_the_reference(cuda, tiny):
    data = "synthetic(samples=60, classes=3, shape=(1, 8, 8))"
    e = tiny.with_(device=cuda, data=data, model="cnn(width=8)", partition="dirichlet_by_class(1)", precision="fp32")
    slow, fast = build(e), accelerate(build(e), choose(build(e), "fast", "fp32"))
    for a, b in zip(simulate(slow, slow.start, 3), simulate(fast, fast.start, 3), strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w, rtol=1e-3, atol=1e-4)
        assert a.metrics["test/loss"] == pytest.approx(b.metrics["test/loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[8, 8, 8], [9, 4, 2, 13, 6]], ids=["equal", "unequal"])
def test_on_a_gpu_a_model_that_cannot_be_stacked_is_vmapped(cuda, sizes):
    data = synthetic(samples=sum(sizes), classes=3, shape=(3, 8, 8))
    train = reference(Attentive().double(), data, sizes, device=cuda)
    sim = replace(build(sa.Experiment(device=cuda)), train=train, n=len(sizes), start=State(state(train.work.module)))
    choice = choose(sim, "auto")
    assert choice[:2] == ("vmapped", "fp32")
    assert_uploads_agree(train, accelerate(sim, choice).train, sim.start.model)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["cnn(width=8)", "batch"])
def test_on_a_gpu_crop_and_flip_equal_the_reference(cuda, spec):
    data = synthetic(samples=24, classes=3, shape=(3, 16, 16))
    slow = reference(network(spec, (3, 16, 16)).double(), data, [8, 9, 7], device=cuda, augment="crop_flip")
    assert_uploads_agree(slow, stacked(slow), state(slow.work.module))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "engine"), [("mlp(width=4)", "stacked"), ("cnn(width=8)", "kernels"), ("resnet18()", "kernels")]
)
def test_on_a_gpu_a_resumed_run_equals_an_uninterrupted_one(cuda, tiny, tmp_path, model, engine):
    data = "synthetic(samples=60, classes=3, shape=(1, 8, 8))"
    e = tiny.with_(device=cuda, model=model, data=data, partition="dirichlet_by_class(1)")
    sa.run(e.with_(rounds=2), tmp_path / "a")
    resumed, whole = sa.run(e, tmp_path / "a", resume=True), sa.run(e)
    assert recorded_engines(tmp_path / "a")[0]["engine"] == engine, "the choice of auto"
    assert torch.equal(resumed.state.model.w, whole.state.model.w)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["resnet18()", "resnet34()", "resnet18(norm=group)", "cnn()"])
def test_on_a_gpu_the_choice_does_not_depend_on_the_seed(cuda, spec):
    data = "synthetic(samples=100, classes=100, shape=(3, 32, 32))"
    for seed in range(20):
        sim = build(sa.Experiment(data=data, model=spec, clients=5, device=cuda, seed=seed))
        assert choose(sim, "auto")[:2] == ("kernels", "bf16"), seed
