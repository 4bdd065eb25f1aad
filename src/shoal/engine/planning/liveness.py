"""Compute the memory that a step holds, without allocating it.

The step runs once on fake tensors (shapes without data), and a ledger counts what is alive after every operator.
Forward, backward and the optimizer are the real ones, so activations, gradients and temporaries are included; memory
that kernels allocate internally is not.
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
    """The bytes that one unit holds."""

    state: int
    """Bytes of weights, buffers and optimizer state, held from the first step to the last."""
    working: int
    """The most bytes that a step holds in addition: batch, activations, gradients, temporaries."""
    sizes: tuple[int, ...] = ()
    """The sizes of the tensors that make up `working`."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records when each tensor that an operator makes is allocated and freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        """Pairs (number of the storage, bytes); the bytes are negative when it is freed."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        return out

    def _record(self, tensor: Tensor) -> None:
        """Record the tensor's storage unless it is known, and watch for when it is freed."""
        storage = tensor.untyped_storage()
        storage_id = storage._cdata
        if storage_id in self._alive:
            return
        size, number = _blocks(storage.nbytes()), self._count
        self._count += 1

        def freed(_: Any) -> None:
            if self._alive.pop(storage_id, None) is not None:
                self.events.append((number, -size))

        self._alive[storage_id] = weakref.ref(storage, freed)
        self.events.append((number, size))

    def know(self, tensors: Iterable[Tensor]) -> int:
        """Record tensors that exist already, so that operators that write to them or view them count as nothing new.

        Returns the moment after which `held` counts.
        """
        for tensor in tensors:
            self._record(tensor)
        return self.mark()

    def mark(self) -> int:
        """Return the current moment, for `held`."""
        return len(self.events)

    def held(self, start: int) -> Held:
        """Return the bytes that were alive at moment `start`, and the most that were held in addition afterwards."""
        state, now, peak, peak_at = sum(size for _, size in self.events[:start]), 0, 0, start
        for moment, (_, size) in enumerate(self.events[start:], start + 1):
            now += size
            if now > peak:
                peak, peak_at = now, moment
        alive: dict[int, int] = {}
        for number, size in self.events[start:peak_at]:
            if size > 0:
                alive[number] = size
            else:
                alive.pop(number, None)
        return Held(state, peak, tuple(sorted(alive.values())))


def _blocks(size: int) -> int:
    """Round up to whole blocks, which allocators use."""
    return -(-size // 512) * 512


def stacked_step(recipe: Recipe, rows: int) -> Held:
    """Return the bytes that a stack of so many rows holds: its state, and the peak during a step."""
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
        buffers_before = stack.saved_buffers()
        with torch.enable_grad(), autocast(member.job.precision, device):
            (losses, _), after = program(stack.state, batch, noise.__getitem__)
        grads: list[Tensor | None] = list(torch.autograd.grad(losses.sum(), stack.leaves, allow_unused=True))
        with torch.no_grad():
            stack.set_buffers({k: v.detach() for k, v in after.items()}, None, buffers_before)
            del losses, after, noise
            _update(stack, grads)
        held: Held = ledger.held(start)
        return held


def _update(stack: Stack, grads: list[Tensor | None]) -> None:
    """Run the optimizer's step, without kernels that work in place and need no extra memory."""
    (optimizer,) = stack.optimizer.parts
    stack.averages = None  # updated in place, and counted when the stack was made
    if isinstance(optimizer, StackedOptimizer) and any(isinstance(f, FusedAdam) for f in optimizer._fused):
        optimizer._fused = [None] * len(optimizer.groups)
        if stack.device.type == "cpu":
            return
    stack.apply(grads, None if stack.device.type == "cpu" else stack.active)


def solo_step(recipe: Recipe) -> Held:
    """Return the bytes that one member holds alone, in a plain loop."""
    graph = recipe.steps[max(recipe.steps)]
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    count, num_state, device = len(graph.params), len(graph.params) + len(graph.buffers), recipe.member.device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), mode, Ledger() as ledger:
        warnings.simplefilter("ignore")
        state_tensors = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in inputs[:num_state]]
        params = [p.requires_grad_(t) for p, t in zip(state_tensors[:count], graph.trainable, strict=True)]
        trained = [p for p in params if p.requires_grad]
        start = ledger.mark()
        batch = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in inputs[num_state:]]
        with torch.enable_grad(), autocast(graph.precision, device):
            loss = graph.module([*state_tensors, *batch])[0]
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        held = ledger.held(start)
        sizes = [nbytes(g) for g in grads if g is not None]
    state = held.state + optimizer_bytes(recipe) + average_bytes(recipe.member)
    update = [*sizes, *[max(sizes, default=0)] * 2]  # a plain optimizer makes a temporary or two for each weight
    if sum(update) > held.working:
        return Held(state, sum(update), tuple(sorted(update)))
    return Held(state, held.working, held.sizes)


def optimizer_bytes(recipe: Recipe) -> int:
    """Return the bytes of one member's optimizer state, from its rule; classes without a rule are assumed to keep two
    numbers per weight."""
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
    """Return the bytes of the average of one member's weights; 0 if its job has none."""
    rule = member.job.average
    if rule is None:
        return 0
    return sum(nbytes(t) for t in averaged_tensors(member.model, rule).values())


def batch_shapes(graph: Trace) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor of a batch."""
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [(tuple(v.shape), v.dtype) for v in inputs[len(graph.params) + len(graph.buffers) :]]


def model_bytes(member: Member) -> int:
    """Return the bytes of a member's weights and buffers."""
    tensors = [*member.model.parameters(), *member.model.buffers()]
    return sum(nbytes(t) for t in tensors if not torch.nn.parameter.is_lazy(t))


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, even if it has no memory."""
    return int(math.prod(tensor.shape) * tensor.element_size())
