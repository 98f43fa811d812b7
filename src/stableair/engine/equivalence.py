"""Checks that a fast program computes the same as the module, before a run uses it.

Two trial clients take two local steps on fixed random inputs, once with the reference trainer and once with the
program. In float64 a correct program agrees to about 1e-13 and a wrong one does not, so the result of the check
depends only on the model, not on the seed of the experiment or on rounding. Kernels compute in bfloat16 and have a
separate tolerance: a multiple of the rounding error of bfloat16 in the stacked program.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from stableair import vector
from stableair.contracts import Split, Upload
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.trainer import StackedTrainer
from stableair.engine.vmapped import Vmapped
from stableair.errors import first_line
from stableair.training.local_training import LocalTraining, Trainer
from stableair.training.reference import Reference

Program = Stacked | Vmapped

LR = 0.02  # learning rate of a trial
SMALLEST_BATCH = 8  # of a trial: batch norm over two or three values amplifies rounding errors
EXACT = 1e-9  # largest relative distance in float64
ROUNDING_FACTOR = 10  # tolerance as a multiple of the rounding error of the module itself
# Relative rounding error of the module, by precision, above which a trial is inconclusive.
LARGEST_ROUNDING = {torch.float64: 1e-5, torch.float32: 0.05}
SMALLEST_TOLERANCE = 1e-5  # lower limit of the tolerance in float32
KERNEL_FACTOR, KERNEL_TOLERANCE = 6.0, 2.0**-7  # factor of bfloat16's error in the stacked program, plus one rounding
NORM_BIAS = 2.0  # bias of the norms in a trial of kernels: most inputs of the ReLUs are positive


class Trial:
    """Two clients with fixed random samples that train a perturbed copy of a module.

    Args:
        work: The local training of the experiment. The trial uses a copy of its module, its batch size, and the
            shape of its data.
        dtype: Precision of the weights and inputs.
        missing: Number of samples by which the batches of the second client are smaller.
        steps: Local steps of each client.
        norm_bias: Number that is added to the bias of every norm.
    """

    def __init__(
        self, work: LocalTraining, dtype: torch.dtype, missing: int = 0, steps: int = 2, norm_bias: float = 0.0
    ):
        batch = max(SMALLEST_BATCH, work.largest_batch)
        device = work.parts[0].device
        module = trial_module(work.module, norm_bias).to(dtype)
        inputs, labels = _random_samples(work, 2 * batch)
        data = work.data._replace(train=Split(inputs.to(device), labels.to(device)))
        parts = [torch.arange(batch), torch.arange(batch, 2 * batch - missing)]
        self.work = replace(
            work,
            module=module,
            data=data,
            parts=[part.to(device) for part in parts],
            epochs=steps,
            batch_size=batch,
            lr=LR,
            payload="gradient",
            seed=0,
            augment="none",
        )
        self.state = vector.state(module)

    def by_module(self) -> Upload:
        """Return the uploads of the reference trainer."""
        return Reference(self.work).train(self.state, 0, torch.arange(2))

    def by_permuted_module(self) -> Upload:
        """Return the same uploads with the samples of each batch in reverse order: they differ by rounding."""
        reverse = replace(self.work, parts=[part.flip(0) for part in self.work.parts])
        return Reference(reverse).train(self.state, 0, torch.arange(2))

    def by_program(self, program: Program, precision: str = "fp32", resnet: bool = False) -> Upload:
        """Return the uploads of a program."""
        trainer: Trainer = StackedTrainer(self.work, program, precision, 2, resnet)
        return next(iter(trainer(self.state, 0, torch.arange(2))))


def _random_samples(work: LocalTraining, number: int) -> tuple[Tensor, Tensor]:
    """Draw samples of the shape and type of the stored samples, and labels, from a fixed generator."""
    source = torch.Generator().manual_seed(0)
    stored = work.data.train.x
    shape = number, *stored.shape[1:]
    if stored.is_floating_point():
        x = torch.randn(shape, generator=source).to(stored.dtype)
    else:
        x = torch.randint(int(stored.max()) + 1, shape, generator=source).to(stored.dtype)
    return x, torch.randint(work.data.classes, (number,), generator=source)


@torch.no_grad()
def trial_module(module: nn.Module, norm_bias: float = 0.0) -> nn.Module:
    """Return a copy in training mode with weights that do not depend on the experiment's seed.

    Layers with `reset_parameters` are initialised from a fixed generator; then all weights are perturbed, because a
    weight that starts at zero may not stay there. `norm_bias` is added to the bias of every norm.
    """
    device = next(module.parameters()).device
    other = copy.deepcopy(module).cpu().train()  # on the CPU: the same weights on every device
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would move the GPUs' generators too
        for layer in other.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    for p in other.parameters():
        p.mul_(0.9).add_(torch.arange(p.numel()).cos().view_as(p), alpha=0.05)
    for layer in other.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) and layer.bias is not None:
            layer.bias.add_(norm_bias)
    return other.to(device)


PARTS = {"update": "updates", "stats": "norm statistics", "loss": "losses"}  # of an upload


def distances(upload: Upload, reference: Upload) -> dict[str, float]:
    """Compute the relative distances of the updates, norm statistics and losses of two uploads."""
    pairs = {part: (getattr(upload, name).double(), getattr(reference, name).double()) for name, part in PARTS.items()}
    return {part: ((a - b).norm() / (b.norm() + 1e-30)).item() for part, (a, b) in pairs.items() if b.numel()}


def checked_program(make: Callable[[nn.Module], Program], work: LocalTraining) -> Program:
    """Build the program of a module and verify that it computes the same as the module.

    Args:
        make: Builds the program of a module, or raises Unsupported.
        work: The local training of the experiment.

    Raises:
        Unsupported: The program cannot be built, fails, or computes other results.
    """
    program = make(copy.deepcopy(work.module).train())  # tracing runs the module's code, which may change the module

    def make_equal(module: nn.Module) -> Program:
        other = make(module)
        if other.code != program.code:
            raise Unsupported("its code takes a different path each time it is traced")
        return other

    for missing in (0, 1):
        _check(make_equal, work, missing)
    return program


def _check(make: Callable[[nn.Module], Program], work: LocalTraining, missing: int) -> None:
    """Compare program and module in float64, or in float32 if the module cannot compute in float64."""
    for dtype in (torch.float64, torch.float32):
        trial = Trial(work, dtype, missing)
        try:
            expected = trial.by_module()
        except Exception as error:  # raised by the module's code, or by a device without float64
            if dtype == torch.float64:
                continue
            raise Unsupported(f"the module fails in a trial: {first_line(error)}") from error
        try:
            distance = max(distances(trial.by_program(make(trial.work.module)), expected).values())
        except Unsupported:
            raise
        except Exception as error:  # raised by the module's code on tensors of another shape
            raise Unsupported(f"it fails: {first_line(error).partition('. ')[0]}") from error
        if distance <= EXACT:
            return
        rounding = max(distances(trial.by_permuted_module(), expected).values())
        if rounding > LARGEST_ROUNDING[dtype]:
            if dtype == torch.float64:
                continue  # some layer computes in a lower precision
            raise Unsupported("its results depend on the order of the samples in a batch")
        smallest = EXACT if dtype == torch.float64 else SMALLEST_TOLERANCE
        if not distance <= max(smallest, ROUNDING_FACTOR * rounding):
            raise Unsupported(f"its results differ (relative distance {distance:.1e})")
        return


@torch.no_grad()
def mixes_samples(work: LocalTraining) -> bool:
    """Whether the output for a sample depends on the other samples of its batch, or a forward pass changes a buffer."""
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, 1e-3)):
        trial = Trial(work, dtype)
        module = trial.work.module
        x = trial.work.data.inputs(trial.work.data.train.x, dtype)[: trial.work.batch_size]
        before = [b.clone() for b in module.buffers()]
        try:
            whole, fewer, fewest = module(x), module(x[1:]), module(x[: work.smallest_batch])
        except Exception as error:
            if dtype == torch.float64:
                continue
            raise Unsupported(f"the module fails in a trial: {first_line(error)}") from error
        if any(not torch.equal(a, b) for a, b in zip(module.buffers(), before, strict=True)):
            return True
        pairs = (whole[1:], fewer), (whole[: work.smallest_batch], fewest)
        return not all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)
    raise AssertionError("float32 is always tried")


def check_kernels(work: LocalTraining, program: Stacked, by_kernels: Stacked, resnet: bool) -> None:
    """Compare the kernels with the stacked program in float32, allowing for the rounding of bfloat16.

    One step detects wrong gradients, two steps detect wrong updates. Norms with large biases keep the rounding error
    small. With small biases, rounding moves entries across the kinks of the ReLUs, and bfloat16 gradients of a deep
    network are mostly noise.

    Args:
        work: The local training of the experiment.
        program: The stacked program of its module.
        by_kernels: The same program with layers computed by kernels; unused for a ResNet.
        resnet: Whether the kernels compute every layer, as they do for our ResNets.

    Raises:
        Unsupported: The kernels differ from the stacked program by more than the rounding of bfloat16 explains.
    """
    precision = "bf16" if work.parts[0].is_cuda else "fp32"  # Triton's interpreter has no bfloat16
    for missing, steps in ((0, 1), (1, 2)):
        trial = Trial(work, torch.float32, missing, steps, NORM_BIAS)
        exact = trial.by_program(program)
        rounding = distances(trial.by_program(program, precision), exact)
        distance = distances(trial.by_program(by_kernels, precision, resnet), exact)
        check_distances(distance, rounding)


def check_distances(distance: dict[str, float], rounding: dict[str, float]) -> None:
    """Check that the distances of kernels from the stacked program are rounding of bfloat16, each on its own scale.

    Raises:
        Unsupported: A distance is larger than the rounding explains.
    """
    for part, value in distance.items():
        if not value <= KERNEL_FACTOR * rounding[part] + KERNEL_TOLERANCE:
            raise Unsupported(f"its {part} differ by {value:.2g}, and bf16 explains {rounding[part]:.2g}")
