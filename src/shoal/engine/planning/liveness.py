"""What a step holds in memory, without using any: the step is run once on fake tensors (shapes without data), and a
ledger counts what is alive after every operator. Forward, backward and the optimizer are the real ones, so that what
autograd keeps, gradients and temporaries are all in it. What kernels take inside themselves is not.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine.members.evaluation_weights import averaged_tensors
from shoal.engine.members.member import Member
from shoal.engine.optim.hparams import rule_for
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.stack.fused_update import FusedAdam
from shoal.engine.stack.stack import Stack
from shoal.engine.stack.stacked_optimizer import StackedOptimizer
from shoal.engine.tracing.trace import Trace, autocast


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one unit."""

    state: int
    """Weights, buffers and optimizer state: held from the first step to the last."""
    working: int
    """The most that a step holds besides: the batch, activations, gradients, temporaries."""
    sizes: tuple[int, ...] = ()
    """The tensors that make up `working`."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes when every tensor that an operator makes comes to be, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        """(number of the tensor's memory, its bytes; negative when it is gone)."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._alive:
            return
        size, number = _blocks(storage.nbytes()), self._count
        self._count += 1

        def gone(_: Any) -> None:
            if self._alive.pop(place, None) is not None:
                self.events.append((number, -size))

        self._alive[place] = weakref.ref(storage, gone)
        self.events.append((number, size))

    def know(self, tensors: Iterable[Tensor]) -> int:
        """Tensors that are there already: operators that write into them, or look at them, make nothing new.

        Gives the moment after which `held` counts.
        """
        for tensor in tensors:
            self._see(tensor)
        return self.mark()

    def mark(self) -> int:
        """This moment."""
        return len(self.events)

    def held(self, start: int) -> Held:
        """What was alive at that moment, and the most there was beyond it afterwards."""
        state, now, most, at = sum(size for _, size in self.events[:start]), 0, 0, start
        for place, (_, size) in enumerate(self.events[start:], start + 1):
            now += size
            if now > most:
                most, at = now, place
        alive: dict[int, int] = {}
        for number, size in self.events[start:at]:
            if size > 0:
                alive[number] = size
            else:
                alive.pop(number, None)
        return Held(state, most, tuple(sorted(alive.values())))


def _blocks(size: int) -> int:
    """Rounded up, since allocators give out whole blocks."""
    return -(-size // 512) * 512


def stacked_step(recipe: Recipe, rows: int) -> Held:
    """What a stack of so many rows holds: state, and the most during a step."""
    graph = recipe.steps[max(recipe.steps)]
    member, device = recipe.member, recipe.member.device
    leaves = graph.batch_spec.num_leaves
    program = Program([graph] * rows, device=device, stacked_batch=[True] * leaves, shared=recipe.shared)
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        warnings.simplefilter("ignore")
        stack = Stack([recipe], size=rows)
        start = ledger.mark()
        batch = [torch.empty((rows, *s), dtype=d, device=device) for s, d in batch_shapes(graph)]
        noise = [torch.empty((rows, *draw.shape), dtype=draw.dtype, device=device) for draw in program.draws]
        before = stack.saved_buffers()
        with torch.enable_grad(), autocast(member.job.precision, device):
            (losses, _), after = program(stack.state, batch, noise.__getitem__)
        grads: list[Tensor | None] = list(torch.autograd.grad(losses.sum(), stack.leaves, allow_unused=True))
        with torch.no_grad():
            stack.set_buffers({k: v.detach() for k, v in after.items()}, None, before)
            del losses, after, noise
            _update(stack, grads)
        held: Held = ledger.held(start)
        return held


def _update(stack: Stack, grads: list[Tensor | None]) -> None:
    """The optimizer's step, but for kernels that work in place."""
    (optimizer,) = stack.optimizer.parts
    stack.averages = None  # they are updated in place, and were counted when the stack was made
    if isinstance(optimizer, StackedOptimizer) and any(isinstance(f, FusedAdam) for f in optimizer._fused):
        optimizer._fused = [None] * len(optimizer.groups)
        if stack.device.type == "cpu":
            return
    stack.apply(grads, None if stack.device.type == "cpu" else stack.active)


def solo_step(recipe: Recipe) -> Held:
    """What one member holds alone, in a plain loop."""
    graph = recipe.steps[max(recipe.steps)]
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    count, owned, device = len(graph.params), len(graph.params) + len(graph.buffers), recipe.member.device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), mode, Ledger() as ledger:
        warnings.simplefilter("ignore")
        made = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in inputs[:owned]]
        params = [p.requires_grad_(t) for p, t in zip(made[:count], graph.trainable, strict=True)]
        wanted = [p for p in params if p.requires_grad]
        start = ledger.mark()
        batch = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in inputs[owned:]]
        with torch.enable_grad(), autocast(graph.precision, device):
            loss = graph.module([*made, *batch])[0]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        held = ledger.held(start)
        sizes = [nbytes(g) for g in grads if g is not None]
    state = held.state + optimizer_bytes(recipe) + average_bytes(recipe.member)
    update = [*sizes, *[max(sizes, default=0)] * 2]  # a plain optimizer makes a temporary or two for each weight
    if sum(update) > held.working:
        return Held(state, sum(update), tuple(sorted(update)))
    return Held(state, held.working, held.sizes)


def optimizer_bytes(recipe: Recipe) -> int:
    """State of one member's optimizer, from its rule; classes without one are taken to keep two numbers a weight."""
    plan, params = recipe.optimizer, list(recipe.member.model.parameters())
    if plan.flags is None:
        return 2 * sum(nbytes(p) for p in params if p.requires_grad)
    used = next(iter(recipe.steps.values())).used
    total = 0
    for positions, flags in zip(plan.groups, plan.flags, strict=True):
        rule = rule_for(plan.kind, flags)
        for position in positions:
            p = params[position]
            if p.requires_grad and used[position]:
                total += len(rule.buffers()) * nbytes(p)
    return total


def average_bytes(member: Member) -> int:
    """The average of one member's weights, where its job has one."""
    rule = member.job.average
    if rule is None:
        return 0
    return sum(nbytes(t) for t in averaged_tensors(member.model, rule).values() if not torch.nn.parameter.is_lazy(t))


def batch_shapes(graph: Trace) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The leaves of a batch."""
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [(tuple(v.shape), v.dtype) for v in inputs[len(graph.params) + len(graph.buffers) :]]


def model_bytes(member: Member) -> int:
    """Weights and buffers of a member's own model."""
    tensors = [*member.model.parameters(), *member.model.buffers()]
    return sum(nbytes(t) for t in tensors if not torch.nn.parameter.is_lazy(t))


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor's elements, also where it has none in memory."""
    return int(math.prod(tensor.shape) * tensor.element_size())
