"""A local rule for many clients at once, by `torch.vmap` over their stacked parameters."""

import torch
from torch import Tensor
from torch.func import vmap

from stableair.contracts import LocalRule, Memory
from stableair.engine.privates import without_vmap_fallback
from stableair.engine.stacked import Tensors, Unsupported
from stableair.errors import first_line
from stableair.memory import map_tensors, tensors, unchanged
from stableair.training.local_rules import SGDStep

EXACT = 1e-9  # largest relative distance in float64
STEPS = 3  # local steps of a trial


class StackedRule:
    """A local rule with the memories of N clients.

    An entry-wise rule is applied to one parameter tensor after the other, any other rule to the whole vectors (N, d).

    Args:
        rule: The optimiser.
        names: The trained parameters, in the order of the model.
    """

    def __init__(self, rule: LocalRule, names: list[str]):
        self.rule, self.in_place = rule, rule.entrywise and isinstance(rule.step, SGDStep)
        self.groups = [[name] for name in names] if rule.entrywise else [names]
        self.memories: list[Memory] = []  # one per group; every tensor has a row for each client

    def restart(self, parameters: Tensors) -> None:
        """Reset the memories at the start of a round with these parameters; overwrite existing memories in place."""
        with without_vmap_fallback():
            fresh = [vmap(self.rule.init)(_joined(parameters, group)) for group in self.groups]
        if not self.memories:
            self.memories = map_tensors(torch.clone, fresh)  # the parameters change in place
        else:
            _write(self.memories, slice(None), fresh)  # a captured graph refers to these tensors

    def step(
        self, parameters: Tensors, gradients: Tensors, lr: float, active: Tensor, rows: slice | Tensor = slice(None)
    ) -> None:
        """Take a local step in place.

        Args:
            parameters: Stacks of the parameters of some clients.
            gradients: Stacks of their gradients.
            lr: Learning rate.
            active: Whether each client takes the step, bool (N,); the other clients stay unchanged.
            rows: Rows of the clients in the memories.
        """
        all_active = not active.is_cuda and bool(active.all())  # on a GPU the test would wait for the device
        finished = None if all_active else ~active
        if self.in_place and isinstance(rows, slice):
            self._step_in_place(parameters, gradients, lr, finished, rows)
        else:
            self._step_by_vmap(parameters, gradients, lr, finished, rows)

    def _step_in_place(
        self, parameters: Tensors, gradients: Tensors, lr: float, finished: Tensor | None, rows: slice
    ) -> None:
        """Take a step of SGD on all parameter tensors, as `SGDStep` does, but without copies."""
        rule: SGDStep = self.rule.step  # type: ignore[assignment]  # `in_place`
        names = [name for (name,) in self.groups]
        w, g = [parameters[name] for name in names], [gradients[name] for name in names]
        memories = [
            {key: t[rows].view_as(stack) for key, t in memory.items()}
            for stack, memory in zip(w, self.memories, strict=True)
        ]
        if rule.weight_decay:
            g = list(torch._foreach_add(g, w, alpha=rule.weight_decay))
        if rule.mu:
            drift = torch._foreach_sub(w, [memory["start"] for memory in memories])
            g = list(torch._foreach_add(g, drift, alpha=rule.mu))
        if rule.momentum:
            v = [memory["velocity"] for memory in memories]
            torch._foreach_mul_(v, rule.momentum)
            torch._foreach_add_(v, g)
            g = list(torch._foreach_add(g, v, alpha=rule.momentum)) if rule.nesterov else v
        if finished is not None:
            g = [t.masked_fill(finished.view(-1, *[1] * (t.ndim - 1)), 0.0) for t in g]
        torch._foreach_add_(w, g, alpha=-lr)

    def _step_by_vmap(
        self, parameters: Tensors, gradients: Tensors, lr: float, finished: Tensor | None, rows: slice | Tensor
    ) -> None:
        """Take a step of any rule, group by group."""
        for group, memories in zip(self.groups, self.memories, strict=True):
            w, g = _joined(parameters, group), _joined(gradients, group)
            memory = map_tensors(lambda t: t[rows], memories)
            with without_vmap_fallback():
                new, memory = vmap(self.rule.step, in_dims=(0, 0, 0, None))(w, g, memory, lr)
            _write(memories, rows, memory)
            new = new if finished is None else torch.where(finished[:, None], w, new)
            sizes = [parameters[name][0].numel() for name in group]
            for name, part in zip(group, new.split(sizes, 1), strict=True):
                parameters[name].copy_(part.view_as(parameters[name]))


def _write(memories: Memory, rows: slice | Tensor, values: Memory) -> None:
    """Copy the memories of some clients into their rows."""
    for memory, value in zip(tensors(memories), tensors(values), strict=True):
        memory[rows] = value


def _joined(stacks: Tensors, names: list[str]) -> Tensor:
    """Join the stacked tensors of these names to one vector per client: (N, d)."""
    flat = [stacks[name].flatten(1) for name in names]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def check_rule(rule: LocalRule, w: Tensor) -> None:
    """Check that a rule gives the same results for stacked clients as for one client after the other.

    Args:
        rule: The optimiser.
        w: A vector of the model's length, (d,).

    Raises:
        Unsupported: The results differ, or the rule fails or cannot be computed by vmap (`unsupported-rule`).
    """
    source = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, 2, len(w), generator=source, dtype=torch.float64).to(w.device)
    half = len(w) // 2

    def split(stack: Tensor) -> Tensors:
        return {"first": stack[:, :half].clone(), "second": stack[:, half:].clone()}

    try:
        stacked, parameters = StackedRule(rule, ["first", "second"]), split(start)
        stacked.restart(parameters)
        for g in gradients:
            stacked.step(parameters, split(g), 0.1, torch.ones(2, dtype=torch.bool, device=w.device))
    except Exception as error:  # raised by the rule's own code on stacked tensors
        reason = first_line(error).partition(". ")[0]
        raise Unsupported(f"its local rule cannot be vmapped: {reason}", code="unsupported-rule") from error
    for n, result in enumerate(_joined(parameters, ["first", "second"])):
        expected, memory = start[n], rule.init(start[n])
        for g in gradients:
            try:
                with unchanged("local rule", expected, g, memory):
                    expected, memory = rule.step(expected, g[n], memory, 0.1)
            except Exception as error:  # the reference raises it again
                raise Unsupported(f"its local rule fails: {first_line(error)}", code="unsupported-rule") from error
        if not torch.dist(result, expected) <= EXACT * expected.norm():
            fault = "is not entry-wise" if rule.entrywise else "gives other results for stacked clients"
            raise Unsupported(f"its local rule {fault}", code="unsupported-rule")
