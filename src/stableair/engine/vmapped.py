"""The forward pass of any module for many clients at once, by `torch.vmap`: for modules that cannot be stacked."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from stableair.engine.privates import without_vmap_fallback
from stableair.engine.stacked import FusedStep, Taps, Tensors


class Vmapped:
    """A module's forward pass for N clients: program(parameters, buffers, x, mask, taps) -> logits (N, B, classes).

    Args:
        module: The network. Its buffers are arguments of the program too, so that each client has separate running
            statistics.
        mixes_samples: Whether the output for a sample depends on the other samples of its batch. Such a program
            gets batches without padding.
    """

    fused: Mapping[str, FusedStep] = {}
    has_kernels = False
    has_user_layers = False
    code = ""  # the module is not traced

    def __init__(self, module: nn.Module, mixes_samples: bool = True):
        self.module = module
        self.mixes_samples = mixes_samples
        self.has_convolutions = any(isinstance(m, nn.Conv2d) for m in module.modules())

    def __call__(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, mask: Tensor | None = None, taps: Taps | None = None
    ) -> Tensor:
        """Compute the logits for the inputs x: (N, B, ...) -> (N, B, classes).

        Buffers are updated in place. `taps` stays empty: every weight gets a gradient.
        """
        self.module.train()

        def one_client(p: Tensors, b: Tensors, x: Tensor) -> Tensor:
            return functional_call(self.module, (p, b), (x,))

        dtype = x.dtype if x.is_floating_point() else next(iter(parameters.values())).dtype  # token ids are integers
        p = {name: t.to(dtype) for name, t in parameters.items()}
        b = {name: t.to(dtype) if t.is_floating_point() else t for name, t in buffers.items()}
        with without_vmap_fallback():
            logits = vmap(one_client, randomness="error")(p, b, x)
        with torch.no_grad():
            for name, t in buffers.items():
                if b[name] is not t:
                    t.copy_(b[name])
        return logits
