"""A module run for many clients at once: their weights stacked, the clients as groups of one operation.

Images have the shape (B, N C, H, W): the clients are groups of a convolution, and a batch norm over N C channels
normalises each client separately. The network's input and the outputs of layers with kernels have the shape
(N, B, C, H, W). Vectors have the shape (N, B, F), and a linear layer is a batched matrix product. `stacked_layer`
registers custom layers.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from stableair.engine.privates import forward_hook
from stableair.errors import InputError

Tensors = dict[str, Tensor]  # a parameter or buffer of every client by its name: (N, *shape)
Function = TypeVar("Function", bound=Callable[..., Tensor])


class StackedLayer(NamedTuple):
    """The function that computes a type of layer for N clients."""

    function: Callable[..., Tensor]  # (layer, x, n, tensors, mask) -> Tensor
    mixes_samples: bool  # whether it mixes the samples of a batch, as a batch norm does


class FusedStep(NamedTuple):
    """The SGD step of a layer's weights from the layer's input and the gradient of its output.

    The gradient of the weights is never stored: storing it takes longer than computing it.
    """

    inputs: Callable[[int, Tensor], Tensor]  # (n, x) -> x in the layout for the layer and its step
    step: Callable[[Any, Tensor, Tensor, Tensor, float, Tensor | None], None]  # (layer, weights, x, dy, lr, operand)
    by_kernels: bool = False  # whether our kernels compute the step, with weights in their layout and a copy as operand


class Tap(NamedTuple):
    """A layer in a forward pass whose weights take a fused step."""

    layer: nn.Module
    fused: FusedStep
    weight: str  # name of the weights
    x: Tensor  # the layer's input
    output: GradientEdge  # edge of the graph with the gradient dy of the layer's output

    def step(self, weights: Tensor, dy: Tensor, lr: float, operand: Tensor | None = None) -> None:
        """Take the step in place, also in `operand`, the weights in the precision of the products."""
        self.fused.step(self.layer, weights, self.x, dy, lr, operand)


class Taps(list[Tap]):
    """The tapped layers of a forward pass.

    Args:
        operands: Weights by name, in the precision of the products, for layers that would cast them in each step.
    """

    def __init__(self, operands: Tensors | None = None):
        super().__init__()
        self.operands = operands or {}


ELEMENTWISE = {nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity}
LAYERS: dict[type[nn.Module], StackedLayer] = {}


class Unsupported(InputError):
    """An engine cannot compute this module; the message has the reason."""

    default_code = "unsupported-model"


def stacked_layer(*kinds: type[nn.Module], mixes_samples: bool = False) -> Callable[[Function], Function]:
    """Register types of layers: `@stacked_layer(nn.LayerNorm)` on a function (layer, x, n, tensors, mask) -> Tensor.

    The function computes the layer for n clients at once. `x` is the output of the previous layer; `as_images` and
    `as_vectors` reshape it. `tensors` has the layer's parameters and norm buffers by name, (N, *shape) each; cast
    them to x's dtype. `mask` (N, B) is 0 for padding; None for full batches, and if no layer mixes the samples of a
    batch.
    """
    for kind in kinds or (None,):
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            text = f"stacked_layer needs classes of layers, as in stacked_layer(nn.LayerNorm): got {kind}"
            raise InputError(text, code="wrong-type", value=kind)

    def register(function: Function) -> Function:
        for kind in kinds:
            known = LAYERS.get(kind)
            again_in_notebook = known and known.function.__module__ == function.__module__ == "__main__"
            if kind in ELEMENTWISE or (known and not again_in_notebook):
                text = f"the stacked layer {kind.__name__} is already registered"
                raise InputError(text, code="name-taken", name=kind.__name__)
        LAYERS.update(dict.fromkeys(kinds, StackedLayer(function, mixes_samples)))
        return function

    return register


class _Tracer(fx.Tracer):
    """Registered layers are leaves of the graph; buffers outside layers appear in it."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYERS or super().is_leaf_module(m, module_qualified_name)


class Stacked:
    """A module's forward pass for N clients: program(parameters, buffers, x, mask, taps) -> logits (N, B, classes)."""

    def __init__(self, module: nn.Module):
        if hook := forward_hook(module):  # the trace would not see it
            raise Unsupported(hook)
        try:
            self.graph = _Tracer().trace(module)
        except Exception as error:  # the module's code may raise anything on a proxy
            raise Unsupported(f"its code cannot be traced: {str(error).partition(chr(10))[0]}") from error
        self.code = str(self.graph)
        called = [str(node.target) for node in self.graph.nodes if node.op == "call_module"]
        self.layers = {name: module.get_submodule(name) for name in called}
        for node in self.graph.nodes:
            self._check(node)
        self.tensors = {  # names of each layer's parameters and buffers
            name: [key for key, _ in (*layer.named_parameters(), *layer.named_buffers())]
            for name, layer in self.layers.items()
        }
        known = {name: LAYERS[type(layer)] for name, layer in self.layers.items() if type(layer) in LAYERS}
        self.functions = {name: layer.function for name, layer in known.items()}
        self.fused = {name: DENSE for name, layer in self.layers.items() if type(layer) is nn.Linear}
        self.mixes_samples = any(layer.mixes_samples for layer in known.values())
        self.has_user_layers = any(layer.function.__module__ != __name__ for layer in known.values())
        self.has_kernels = False  # whether our kernels compute some of its layers
        self.has_convolutions = any(isinstance(m, nn.Conv2d) for layer in self.layers.values() for m in layer.modules())

    def _check(self, node: fx.Node) -> None:
        if node.op == "call_module":
            layer = self.layers[str(node.target)]
            if type(layer) not in LAYERS and type(layer) not in ELEMENTWISE:
                raise Unsupported(f"layer {node.target} is a {type(layer).__name__}")
            if reason := _unsupported_option(layer):
                raise Unsupported(f"layer {node.target} is a {type(layer).__name__} with {reason}")
        elif node.op == "call_function" and node.target not in FUNCTIONS:
            raise Unsupported(f"it calls {getattr(node.target, '__name__', node.target)}")
        elif node.op == "call_method" and node.target not in METHODS:
            raise Unsupported(f"it calls .{node.target}()")
        elif node.op == "get_attr":
            raise Unsupported(f"it uses {node.target} outside a layer")

    def __call__(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, mask: Tensor | None = None, taps: Taps | None = None
    ) -> Tensor:
        """Compute the logits for the inputs x: (N, B, c, h, w) or (N, B, f) -> (N, B, classes).

        The mask (N, B) is 0 for padding, which must not change the other samples. With `taps`, the weights of layers
        with a fused step get no gradient; these layers are appended to the list.
        """
        n = len(x)
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
            if node.op == "placeholder":
                if x.ndim not in (3, 5):
                    raise Unsupported(f"its inputs have {x.ndim - 2} axes: only vectors and images can be stacked")
                values[node] = x
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                if node.target in self.functions:
                    tensors = {key: group[name] for group in (parameters, buffers) for key in self.tensors[node.target]
                           if (name := f"{node.target}.{key}") in group}  # fmt: skip
                    values[node] = self._layer(node.target, args[0], n, tensors, mask, taps)
                else:
                    values[node] = self.layers[node.target](*args)
            elif node.op == "call_function":
                values[node] = FUNCTIONS[node.target](n, *args, **kwargs)
            else:
                values[node] = METHODS[node.target](n, *args, **kwargs)
        raise AssertionError("a traced module has an output")

    def _layer(self, name: str, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None, taps: Taps | None) -> Tensor:
        """Compute a registered layer; add it to `taps` if it has a fused step and another input needs a gradient."""
        layer, function, fused = self.layers[name], self.functions[name], self.fused.get(name)
        others = [x, *(t for key, t in tensors.items() if key != "weight")]
        learns = fused and tensors["weight"].requires_grad and any(t.requires_grad for t in others)
        if taps is None or not fused or not learns:
            return function(layer, x, n, tensors, mask)
        weight, x = f"{name}.weight", fused.inputs(n, x)
        operand = taps.operands.get(weight, tensors["weight"].detach())
        y = function(layer, x, n, tensors | {"weight": operand}, mask)
        taps.append(Tap(layer, fused, weight, x.detach(), get_gradient_edge(y)))
        return y


def _unsupported_option(layer: nn.Module) -> str:
    """Return the unsupported option of a supported layer, or an empty string."""
    if type(layer) is nn.Conv2d:
        return "" if layer.padding_mode == "zeros" else f"padding_mode={layer.padding_mode}"
    if type(layer) is nn.BatchNorm2d:
        if layer.momentum is None:
            return "momentum=None"
        return "" if layer.track_running_stats else "track_running_stats=False"
    if type(layer) is nn.Flatten:
        return (
            ""
            if (layer.start_dim, layer.end_dim) == (1, -1)
            else f"start_dim={layer.start_dim}, end_dim={layer.end_dim}"
        )
    if type(layer) is nn.MaxPool2d:
        return "return_indices" if layer.return_indices else ""
    return ""


def as_images(x: Tensor) -> Tensor:
    """Convert images (N, B, c, h, w) or (B, N c, h, w) to (B, N c, h, w), channels last; keep other tensors."""
    if x.ndim == 5:
        x = x.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)  # one copy
        return x.contiguous(memory_format=torch.channels_last)
    return x


def as_vectors(n: int, x: Tensor) -> Tensor:
    """Reshape inputs or images to vectors (N, B, F); vectors stay unchanged."""
    if x.ndim == 5:
        return x.flatten(2)
    return x if x.ndim == 3 else x.reshape(len(x), n, -1).transpose(0, 1)


def _flat(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Reshape a tensor (N, C) of a layer to the channels of images: (N C,)."""
    return None if t is None else t.flatten().to(dtype or t.dtype)


@stacked_layer(nn.Conv2d)
def _conv2d(layer: nn.Conv2d, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    x = as_images(x)
    if layer.kernel_size == (1, 1) and not x.is_cuda:
        x = x.contiguous()  # channels last, oneDNN's weight gradient writes out of bounds on CPUs without AVX-512
    weight = tensors["weight"].flatten(0, 1).to(x.dtype)
    bias = _flat(tensors.get("bias"), x.dtype)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, n * layer.groups)


@stacked_layer(nn.BatchNorm2d, mixes_samples=True)
def _batch_norm(layer: nn.BatchNorm2d, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    x = as_images(x)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    assert layer.momentum is not None  # `_unsupported_option` refuses it
    if mask is None:
        mean, var = tensors["running_mean"].flatten(), tensors["running_var"].flatten()
        return F.batch_norm(x, mean, var, _flat(weight), _flat(bias), True, layer.momentum, layer.eps)
    # Statistics over the samples without padding; a client without samples keeps its running statistics.
    apart = x.to(tensors["running_mean"].dtype).unflatten(1, (n, -1))  # (B, N, C, H, W)
    present = mask.t()[:, :, None, None, None]
    count = mask.sum(1)[:, None] * apart[0, 0, 0].numel()  # (N, 1)
    mean = (apart * present).sum((0, 3, 4)) / count.clamp(min=1)  # (N, C)
    centred = (apart - mean[:, :, None, None]) * present  # padding stays zero
    var = centred.square().sum((0, 3, 4)) / count.clamp(min=1)
    with torch.no_grad():
        share = layer.momentum * (count > 0).to(mean.dtype)
        tensors["running_mean"].lerp_(mean, share)
        tensors["running_var"].lerp_(var * count / (count - 1).clamp(min=1), share)
    scale = (var + layer.eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = centred * scale[:, :, None, None]
    out = out if bias is None else out + bias[:, :, None, None]
    return out.flatten(1, 2).to(x.dtype)


@stacked_layer(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    weight, bias = _flat(tensors.get("weight"), x.dtype), _flat(tensors.get("bias"), x.dtype)
    return F.group_norm(as_images(x), n * layer.num_groups, weight, bias, layer.eps)


@stacked_layer(nn.Linear)
def _linear(layer: nn.Linear, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    x, weight = as_vectors(n, x), tensors["weight"].transpose(1, 2)
    weight = weight.to(x.dtype)
    return x @ weight if "bias" not in tensors else torch.baddbmm(tensors["bias"][:, None].to(x.dtype), x, weight)


def _dense_step(layer: nn.Linear, weights: Tensor, x: Tensor, dy: Tensor, lr: float, operand: Tensor | None) -> None:
    weights.baddbmm_(dy.mT.to(weights.dtype), x.to(weights.dtype), alpha=-lr)


DENSE = FusedStep(as_vectors, _dense_step)


def _pooled(pool: Callable[[Tensor], Tensor], n: int, x: Tensor) -> Tensor:
    """Pool images in either layout: neither samples nor channels are mixed."""
    return pool(x.flatten(0, 1)).unflatten(0, (n, -1)) if x.ndim == 5 else pool(x)


@stacked_layer(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
def _pool2d(layer: nn.Module, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    return _pooled(layer, n, x)


@stacked_layer(nn.Flatten)
def _flatten_layer(layer: nn.Flatten, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    return as_vectors(n, x)


def _mean(n: int, x: Tensor, axes: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    axes = kwargs.get("dim", axes)
    if not isinstance(axes, tuple | list) or sorted(axes) not in ([2, 3], [-2, -1]) or x.ndim == 3:
        raise Unsupported(f"it takes a mean over the axes {axes}, not over height and width")
    if x.ndim == 5:
        return x.mean((3, 4), keepdim=keepdim)
    return x.mean((2, 3), keepdim=True) if keepdim else as_vectors(n, x.mean((2, 3)))


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an entry-wise function; the wrapper ignores its first argument, the number of clients."""

    def apply(n: int, *args: Any, **kwargs: Any) -> Tensor:
        if {a.ndim for a in args if isinstance(a, Tensor)} == {4, 5}:  # images in both layouts
            args = tuple(as_images(a) if isinstance(a, Tensor) else a for a in args)
        return function(*args, **kwargs)

    return apply


def _flatten(n: int, x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    if (start, end) != (1, -1):
        raise Unsupported(f"it flattens with start_dim={start}, end_dim={end}")
    return as_vectors(n, x)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.relu: _elementwise(F.relu),
    torch.relu: _elementwise(torch.relu),
    torch.tanh: _elementwise(torch.tanh),
    F.gelu: _elementwise(F.gelu),
    F.silu: _elementwise(F.silu),
    operator.add: _elementwise(operator.add),
    operator.iadd: _elementwise(operator.add),
    torch.add: _elementwise(torch.add),
    operator.mul: _elementwise(operator.mul),
    torch.flatten: _flatten,
    F.max_pool2d: lambda n, x, *args, **kwargs: _pooled(lambda t: F.max_pool2d(t, *args, **kwargs), n, x),
    F.avg_pool2d: lambda n, x, *args, **kwargs: _pooled(lambda t: F.avg_pool2d(t, *args, **kwargs), n, x),
    F.adaptive_avg_pool2d: lambda n, x, size: _pooled(lambda t: F.adaptive_avg_pool2d(t, size), n, x),
}
METHODS: dict[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "flatten": _flatten,
    "relu": _elementwise(torch.relu),
    "tanh": _elementwise(torch.tanh),
}
