"""A module run for many clients at once: their weights stacked, the clients as groups of one operation.

Images travel as (B, N C, H, W): the clients are groups of a convolution, and a batch norm over N C channels is exactly
each client's own. Vectors travel as (N, B, F), and a linear layer is a batched matrix product.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

Tensors = dict[str, Tensor]  # a parameter or buffer of every client by its name: (N, *shape)


KEYS = "weight", "bias", "running_mean", "running_var"


class Unsupported(Exception):
    """What the module has that cannot be stacked."""


class Stacked:
    """A module's forward pass for N clients: program(parameters, buffers, x, mask) -> logits (N, B, classes)."""

    def __init__(self, module: nn.Module):
        try:
            self.traced = fx.symbolic_trace(module)
        except Exception as error:  # whatever a module's own code does with a stand-in for a tensor
            raise Unsupported(f"its code cannot be traced: {str(error).partition(chr(10))[0]}") from error
        self.modules = dict(self.traced.named_modules())
        for node in self.traced.graph.nodes:
            self._check(node)
        self.normalises = any(isinstance(m, nn.BatchNorm2d) for m in self.modules.values())
        self.convolves = any(isinstance(m, nn.Conv2d) for m in self.modules.values())

    def _check(self, node: fx.Node) -> None:
        if node.op == "call_module":
            layer = self.modules[node.target]
            if type(layer) not in LAYERS and type(layer) not in ELEMENTWISE:
                raise Unsupported(f"layer {node.target} is a {type(layer).__name__}")
            if reason := _obstacle(layer):
                raise Unsupported(f"layer {node.target} is a {type(layer).__name__} with {reason}")
        elif node.op == "call_function" and node.target not in FUNCTIONS:
            raise Unsupported(f"it calls {getattr(node.target, '__name__', node.target)}")
        elif node.op == "call_method" and node.target not in METHODS:
            raise Unsupported(f"it calls .{node.target}()")
        elif node.op == "get_attr":
            raise Unsupported(f"it uses {node.target} outside a layer")

    def __call__(self, parameters: Tensors, buffers: Tensors, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (N, B, c, h, w). Where the mask (N, B) is 0 there is no sample; it must leave the others untouched."""
        n = len(x)
        values: dict[fx.Node, Any] = {}
        for node in self.traced.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                layer = self.modules[node.target]
                if type(layer) in ELEMENTWISE:
                    values[node] = layer(*args)
                    continue
                own = {key: group[name] for group in (parameters, buffers) for key in KEYS
                       if (name := f"{node.target}.{key}") in group}  # fmt: skip
                values[node] = LAYERS[type(layer)](layer, args[0], n, own, mask)
            elif node.op == "call_function":
                values[node] = FUNCTIONS[node.target](n, *args, **kwargs)
            else:
                values[node] = METHODS[node.target](n, *args, **kwargs)
        raise AssertionError("a traced module has an output")


def _obstacle(layer: nn.Module) -> str:
    """What of a known layer is not."""
    if isinstance(layer, nn.Conv2d):
        return "" if layer.padding_mode == "zeros" else f"padding_mode={layer.padding_mode}"
    if isinstance(layer, nn.BatchNorm2d):
        if layer.momentum is None:
            return "momentum=None"
        return "" if layer.track_running_stats else "track_running_stats=False"
    if isinstance(layer, nn.Flatten):
        return "" if (layer.start_dim, layer.end_dim) == (1, -1) else "other axes than all but the first"
    if isinstance(layer, nn.MaxPool2d):
        return "return_indices" if layer.return_indices else ""
    return ""


def _images(x: Tensor) -> Tensor:
    """(N, B, c, h, w) as they come, or images already, as (B, N c, h, w)."""
    if x.ndim == 5:
        n, b, *rest = x.shape
        return x.transpose(0, 1).reshape(b, n * rest[0], *rest[1:]).contiguous(memory_format=torch.channels_last)
    return x


def _vectors(n: int, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Whatever there is, as (N, B, F)."""
    if x.ndim == 5:
        return x.flatten(2)
    return x if x.ndim == 3 else x.reshape(len(x), n, -1).transpose(0, 1)


def _conv(layer: nn.Conv2d, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    x = _images(x)
    weight = own["weight"].flatten(0, 1).to(x.dtype)
    bias = own["bias"].flatten().to(x.dtype) if "bias" in own else None
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, n * layer.groups)


def _batch_norm(layer: nn.BatchNorm2d, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    x = _images(x)
    weight, bias = own.get("weight"), own.get("bias")
    if mask is None and x[:, 0].numel() == 1:
        mask = x.new_ones(n, 1)  # one number has no variance: torch refuses it, and the masked form does not
    if mask is None:
        flat = [None if t is None else t.flatten() for t in (own["running_mean"], own["running_var"], weight, bias)]
        return F.batch_norm(x, *flat, training=True, momentum=layer.momentum, eps=layer.eps)
    # Statistics over the samples that are there; a client with none keeps its running ones.
    apart = x.to(own["running_mean"].dtype).unflatten(1, (n, -1))  # (B, N, C, H, W)
    there = mask.t()[:, :, None, None, None]
    count = mask.sum(1)[:, None] * apart[0, 0, 0].numel()  # (N, 1)
    mean = (apart * there).sum((0, 3, 4)) / count.clamp(min=1)  # (N, C)
    centred = (apart - mean[:, :, None, None]) * there  # zero where there is no sample: it must not grow
    var = centred.square().sum((0, 3, 4)) / count.clamp(min=1)
    with torch.no_grad():
        share = layer.momentum * (count > 0).to(mean.dtype)
        own["running_mean"].lerp_(mean, share)
        own["running_var"].lerp_(var * count / (count - 1).clamp(min=1), share)
    scale = (var + layer.eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = centred * scale[:, :, None, None]
    out = out if bias is None else out + bias[:, :, None, None]
    return out.flatten(1, 2).to(x.dtype)


def _group_norm(layer: nn.GroupNorm, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    affine = [own[key].flatten().to(x.dtype) if key in own else None for key in ("weight", "bias")]
    return F.group_norm(_images(x), n * layer.num_groups, *affine, layer.eps)


def _linear(layer: nn.Linear, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    x, weight = _vectors(n, x), own["weight"].transpose(1, 2)
    weight = weight.to(x.dtype)
    return x @ weight if "bias" not in own else torch.baddbmm(own["bias"][:, None].to(x.dtype), x, weight)


def _on_images(layer: nn.Module, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    return layer(_images(x))


def _mean(n: int, x: Tensor, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    axes = kwargs.get("dim", axes)
    if not isinstance(axes, tuple | list) or sorted(axes) not in ([2, 3], [-2, -1]) or x.ndim == 3:
        raise Unsupported(f"it takes a mean over the axes {axes}, not over height and width")
    return _images(x).mean((2, 3), keepdim=True) if keepdim else _vectors(n, _images(x).mean((2, 3)))


def _plain(function: Callable) -> Callable:
    """A function of each entry by itself; the first argument, the number of clients, is not its business."""

    def apply(n: int, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if {t.ndim for t in tensors} == {4, 5}:  # the network's input, and images made of it
            args = tuple(_images(a) if isinstance(a, Tensor) else a for a in args)
        return function(*args, **kwargs)

    return apply


def _flattened(n: int, x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    if (start, end) != (1, -1):
        raise Unsupported("it flattens other axes than all but the first")
    return _vectors(n, x)


ELEMENTWISE = {nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity}
LAYERS: dict[type, Callable[..., Tensor]] = {
    nn.Conv2d: _conv,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.Linear: _linear,
    nn.MaxPool2d: _on_images,
    nn.AvgPool2d: _on_images,
    nn.AdaptiveAvgPool2d: _on_images,
    nn.Flatten: lambda layer, x, n, own, mask: _vectors(n, x),
}
FUNCTIONS: dict[Callable, Callable[..., Tensor]] = {
    F.relu: _plain(F.relu),
    torch.relu: _plain(torch.relu),
    torch.tanh: _plain(torch.tanh),
    F.gelu: _plain(F.gelu),
    F.silu: _plain(F.silu),
    operator.add: _plain(operator.add),
    operator.iadd: _plain(operator.add),
    torch.add: _plain(torch.add),
    operator.mul: _plain(operator.mul),
    torch.flatten: _flattened,
    F.max_pool2d: lambda n, x, *args, **kwargs: F.max_pool2d(_images(x), *args, **kwargs),
    F.avg_pool2d: lambda n, x, *args, **kwargs: F.avg_pool2d(_images(x), *args, **kwargs),
    F.adaptive_avg_pool2d: lambda n, x, size: F.adaptive_avg_pool2d(_images(x), size),
}
METHODS: dict[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "flatten": _flattened,
    "relu": _plain(torch.relu),
    "tanh": _plain(torch.tanh),
}
