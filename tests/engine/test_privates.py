"""The private names of torch that the engine uses. If one of these tests fails, torch has changed.

`without_vmap_fallback`: find the new switch, or vmapped runs become slow without a message.
`forward_hook` and `gradient_hook`: find where torch keeps hooks, or hooked models are stacked and train without them.
"""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from stableair.engine.privates import forward_hook, forward_hook_functions, gradient_hook, without_vmap_fallback


def test_vmap_refuses_operations_without_a_batching_rule():
    x, w, b = torch.randn(3, 2, 4), torch.randn(3, 5, 4, 4), torch.randn(3, 5)
    bilinear = torch.vmap(torch.nn.functional.bilinear)
    with without_vmap_fallback(), pytest.raises(RuntimeError, match="vmap fallback"):
        bilinear(x, x, w, b)
    with pytest.warns(UserWarning, match="performance drop"):
        bilinear(x, x, w, b)


def identity(*args):
    return None


HOOKS = {
    "register_forward_hook": (forward_hook, gradient_hook),
    "register_forward_pre_hook": (forward_hook, gradient_hook),
    "register_full_backward_hook": (gradient_hook, forward_hook),
    "register_full_backward_pre_hook": (gradient_hook, forward_hook),
    "register_backward_hook": (gradient_hook, forward_hook),
}


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("layer", ["", "1"])
def test_a_hook_on_any_layer_is_found_until_it_is_removed(register, layer):
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    handle = getattr(module.get_submodule(layer), register)(identity)
    has, has_not = HOOKS[register]
    assert "hook" in has(module)
    assert not has_not(module)
    assert forward_hook_functions(module.get_submodule(layer)) == ([identity] if has is forward_hook else [])
    handle.remove()
    assert not has(module)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_on_all_modules_is_found(register):
    handle = getattr(torch_module, register.replace("register_", "register_module_"))(identity)
    try:
        assert HOOKS[register][0](nn.Linear(2, 2)).startswith("all modules have a ")
    finally:
        handle.remove()
    assert not HOOKS[register][0](nn.Linear(2, 2))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_found(register):
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    handle = getattr(module[1].bias, register)(identity)
    assert gradient_hook(module) == "parameter 1.bias has a gradient hook"
    handle.remove()
    assert not gradient_hook(module)
