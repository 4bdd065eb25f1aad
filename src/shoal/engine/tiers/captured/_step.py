"""A whole training step as one function of tensors: gather, forward, backward, clip, optimizer, NaN guard.

It reads and writes only the tensors it is given and never asks Python for a value, so it can be traced into one graph,
compiled as a whole (forward, backward and update are fused) and captured. The arithmetic is that of `stacked.unit`,
with decisions of the host (is the loss finite?) turned into masks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from shoal.engine.kernels import gathering
from shoal.engine.optim.compile_fence import fence, is_traced
from shoal.engine.recipes.program import Program
from shoal.engine.stack.optimizers import Optimizers, Span
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.captured import _ending
from shoal.engine.tiers.captured.fusion.fused import Fused
from shoal.engine.tiers.captured.fusion.recording import Recording
from shoal.engine.tiers.unit import context_lost
from shoal.engine.tracing.trace import autocast
from shoal.utils import cuda_kernels
from shoal.utils.randomness import MASKS, Draw, DrawSource, counter_draw, draw_columns, site_numbers

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""How far fused kernels may be from the operators themselves, by the lowest precision in the step, so that a mistake
shows and different rounding does not."""

NUDGE = 0.02
"""The scale of the noise that is added to weights for that comparison."""


@dataclass(slots=True)
class Inputs:
    """What a step needs besides the stack: where the data is, and how far every member is."""

    data: list[Tensor]
    """The leaves of the whole data set, or those of a batch if the data is streamed."""
    orders: Tensor | None
    """The rows of this epoch, [M, n], or [n] if all members read the same; None if `data` is the batch itself."""
    place: Tensor
    """Each member's next batch within its epoch, [M] int64, or [] if all read the same."""
    tick: Tensor
    """The number of batches since the host last read the results, [] int64."""
    moving: Tensor
    """[M] bool: whether a row takes this step. Other rows do not change, including their batch counts."""
    count: Tensor
    """The number of batches that each member has had, [M] int64, which numbers its random draws."""
    seeds: Tensor
    """The members' seeds, [M] int64."""
    losses: Tensor
    """[batches, M]: the step writes the loss of every batch here, until the host reads them."""
    logs: Tensor | None = None
    """[batches, names, M] float64: what the step logs, in the same way; None if it logs nothing."""
    tables: list[Tensor | None] = field(default_factory=list)
    """For each part of the optimizer its scheduled numbers of every step until the host reads the results, [steps +
    1, G, names, M]; None if they do not change."""

    def tensors(self) -> list[Tensor]:
        tensors = [*self.data, self.place, self.tick, self.moving, self.count, self.seeds, self.losses]
        return tensors + [t for t in (self.orders, self.logs, *self.tables) if t is not None]

    def bind(self, tensors: list[Tensor]) -> Inputs:
        rest = list(tensors)
        data = [rest.pop(0) for _ in self.data]
        place, tick, moving, count, seeds, losses = (rest.pop(0) for _ in range(6))
        orders = rest.pop(0) if self.orders is not None else None
        logs = rest.pop(0) if self.logs is not None else None
        tables = [None if table is None else rest.pop(0) for table in self.tables]
        return Inputs(data, orders, place, tick, moving, count, seeds, losses, logs, tables)


def stack_tensors(stack: Stack) -> list[Tensor]:
    """Return every tensor of a stack that a step reads or writes."""
    scaler = [] if stack.scaler is None else [stack.scaler.scale_M, stack.scaler.growth_tracker_M]
    norm = [] if stack.clip_limits is None else [stack.clip_limits]
    return [
        *stack.params,
        *stack.buffers,
        *stack.optimizer.tensors(),
        *(part.columns.packed for part in stack.optimizer.ruled()),
        stack.active,
        *scaler,
        *norm,
    ]


def bind_stack(stack: Stack, tensors: list[Tensor]) -> Stack:
    """Return the same stack with other tensors, those of a trace."""
    rest = list(tensors)
    bound = copy.copy(stack)
    bound.params = [rest.pop(0).detach().requires_grad_(p.requires_grad) for p in stack.params]
    bound.buffers = [rest.pop(0) for _ in stack.buffers]
    moved = {id(t): rest.pop(0) for t in stack.optimizer.tensors()}
    bound.optimizer = Optimizers(
        [
            part.bound(Span(bound, part.span.start, part.span.stop), moved, rest.pop(0))
            for part in stack.optimizer.ruled()
        ]
    )
    bound.active = rest.pop(0)
    if stack.scaler is not None:
        bound.scaler = stack.scaler.on(rest.pop(0), rest.pop(0))
    bound.clip_limits = rest.pop(0) if stack.clip_limits is not None else None
    return bound


def can_fuse(device: torch.device) -> bool:
    """Return whether kernels can be compiled for this device."""
    return device.type == "cuda" and cuda_kernels.available()


class StepDraws:
    """The random draws of a step, with everything they need on the device in advance."""

    def __init__(self, draws: Sequence[Draw], members: int, device: torch.device) -> None:
        self._draws = draws
        self._columns = [draw_columns(draw, members, device) for draw in draws]
        numbers = site_numbers(draws, members)
        self._sites = [torch.tensor(row, dtype=torch.int64, device=device) for row in numbers]

    def of(self, seeds: Tensor, counts: Tensor, *, solo: bool = False) -> CounterNoise:
        """Return the draws of members with these seeds at these batches.

        Args:
            solo: Values of the one member have no member axis.
        """
        return CounterNoise(self._draws, self._columns, self._sites, seeds, counts, solo)


@dataclass(frozen=True, slots=True)
class CounterNoise:
    """The random draws of one batch, by their number in the step."""

    draws: Sequence[Draw]
    columns: Sequence[list[Any]]
    sites: Sequence[Tensor]
    seeds: Tensor
    counts: Tensor
    solo: bool

    def __call__(self, index: int) -> Tensor:
        """Return the values of a draw, members first."""
        value = counter_draw(self.draws[index], self.seeds, self.counts, self.sites[index], self.columns[index])
        return value[0] if self.solo else value

    def source(self, index: int) -> DrawSource | None:
        """Return what the elements of a mask are made of; None for other draws."""
        if self.draws[index].kind not in MASKS:
            return None
        limits, scales = self.columns[index]
        return DrawSource(self.seeds, self.counts, self.sites[index], limits, scales)


class Step:
    """One batch of a fixed shape for a stack, with an optimizer step after it."""

    def __init__(self, stack: Stack, program: Program, *, rows: int, batch_size: int) -> None:
        self.stack, self.program = stack, program
        self.rows, self.batch_size = rows, batch_size
        self.log_names = program.trace.log_names
        self.draws = StepDraws(program.draws, len(stack.rows), stack.device)
        self.fused: Fused | None = None
        """Forward and backward with their elementwise operators fused, once `fuse` has made it."""

    def __call__(self, tensors: list[Tensor], inputs: Inputs) -> None:
        """Run on these tensors, in place: `stack_tensors` of a stack of this shape, then those of the inputs."""
        count = len(stack_tensors(self.stack))
        self.run(bind_stack(self.stack, tensors[:count]), inputs.bind(tensors[count:]))

    def run(self, stack: Stack, inputs: Inputs) -> None:
        """Run the step."""
        batch = self._gather(inputs)
        for part, table in zip(stack.optimizer.ruled(), inputs.tables, strict=True):
            if table is not None:
                part.columns.packed.copy_(table.index_select(0, inputs.tick.view(1)).squeeze(0))
        before = stack.saved_buffers()
        losses, logs, after, grads = self._gradients(stack, batch, inputs)
        with torch.no_grad():
            if _has_kernels(stack.device) and _ending.suits(inputs, losses):
                _write_logs(inputs, logs)
                stepping = _ending.end_step(inputs, stack.active, losses)
                stack.set_buffers(after, stepping, before)
                stack.apply(grads, stepping)
                return
            finite, moving = torch.isfinite(losses), inputs.moving
            stack.active.copy_(stack.active & (finite | ~moving))
            stepping = stack.active & moving
            stack.set_buffers(after, stepping, before)
            stack.apply(grads, stepping)
            known = inputs.losses.index_select(0, inputs.tick.view(1)).squeeze(0)
            seen = torch.where(stack.active | ~finite, losses, float("nan")).to(inputs.losses.dtype)
            seen = torch.where(moving, seen, known)
            inputs.losses.index_copy_(0, inputs.tick.view(1), seen.unsqueeze(0))
            _write_logs(inputs, logs)
            inputs.place.add_(moving.any() if inputs.place.dim() == 0 else moving)
            inputs.count.add_(moving)
            inputs.tick.add_(1)

    def fuse(self, stack: Stack, inputs: Inputs) -> None:
        """Run forward and backward once, on tensors that may be written to, and use fused kernels from then on.

        The operators are used unfused if fusing fails or gives different results.
        """
        if not can_fuse(stack.device):
            return
        batch = self._gather(inputs)
        given = self._fused_inputs(stack, batch, inputs)
        before = stack.saved_buffers()
        if stack.scaler is not None:  # on a copy: at the initial scale gradients overflow
            stack.scaler.scale_M.fill_(256.0)
        try:
            _nudge(stack.leaves)
            with Recording(given) as recording:
                losses, logs, after, grads = self._gradients(stack, batch, inputs)
            expected = [losses, *logs, *after.values(), *grads]
            numbers = [None if tensor is None else recording.find(tensor) for tensor in expected]
            numbers = self._gradients_in_half(stack, recording, numbers)
            fused = Fused(recording, numbers, stack.device, cuda_kernels.load)
            with torch.no_grad():
                expected = [None if tensor is None else tensor.clone() for tensor in expected]
                stack.restore_buffers(before)
                tolerance = TOLERANCE[min(recording.floating, key=lambda d: d.itemsize)]
                results = _in_dtypes_of(expected, fused(given))
            same = _close(results, expected, tolerance)
            if not same:  # the gradient of a bias before a batch norm is only rounding
                results = [None if tensor is None else tensor.clone() for tensor in results]
                same = _close(results, expected, tolerance, self._disturbed(stack, batch, inputs, before, tolerance))
        except Exception as error:
            if context_lost(error):
                raise
            return  # if memory is full, the warm-up that follows raises the error
        self.fused = fused if same else None

    def _gradients_in_half(self, stack: Stack, recording: Recording, numbers: list[int | None]) -> list[int | None]:
        """Return the numbers of a recording's results, and start to compile the update.

        If nothing but the update reads gradients, its kernel makes float32 of those that autocast has made so.
        """
        first = len(numbers) - len(stack.leaves)
        results, grads = numbers[:first], numbers[first:]
        if stack.scaler is None and stack.clip_limits is None and stack.optimizer.reads_half():
            grads = [None if number is None else recording.before_cast(number) for number in grads]
        dtypes = [None if number is None else recording.values[number].dtype for number in grads]
        stack.optimizer.prepare_kernels(dtypes)
        return [*results, *grads]

    def _disturbed(
        self, stack: Stack, batch: list[Tensor], inputs: Inputs, buffers: list[Tensor], size: float
    ) -> list[Tensor | None]:
        """Return the results of the operators after a small change of every weight."""
        stack.restore_buffers(buffers)
        with torch.no_grad():
            for param in stack.leaves:
                if param.is_floating_point():
                    param.mul_(1 + size / 10 * torch.empty_like(param).normal_(generator=_generator(param)))
        losses, logs, after, grads = self._gradients(stack, batch, inputs)
        return [losses, *logs, *after.values(), *grads]

    def _gradients(
        self, stack: Stack, batch: list[Tensor], inputs: Inputs
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor], list[Tensor | None]]:
        """Return every member's loss, its logs, its buffers afterwards, and the gradients."""
        if self.fused is not None and not is_traced():
            values = self.fused(self._fused_inputs(stack, batch, inputs))
            first = 1 + len(self.log_names)
            (losses, *logs), rest = [value for value in values[:first] if value is not None], values[first:]
            buffers = {n: v for n, v in zip(stack.buffer_names, rest, strict=False) if v is not None}
            return losses, logs, buffers, rest[len(stack.buffer_names) :]
        losses, logs, after = self._forward(stack, batch, inputs)
        total = losses if stack.scaler is None else stack.scaler.scale(losses)
        grads = torch.autograd.grad(total.sum(), stack.leaves, allow_unused=True)
        return losses.detach(), logs, {name: after[name].detach() for name in stack.buffer_names}, list(grads)

    def _fused_inputs(self, stack: Stack, batch: list[Tensor], inputs: Inputs) -> list[Tensor]:
        scale = [] if stack.scaler is None else [stack.scaler.scale_M]
        return [*(t.detach() for t in stack.state), *batch, *scale, inputs.seeds, inputs.count]

    def _gather(self, inputs: Inputs) -> list[Tensor]:
        """Return the batch of every member, gathered from the data set by its order."""
        if inputs.orders is None:
            return inputs.data
        if _has_kernels(inputs.place.device) and gathering.suits(inputs.data, inputs.orders, self.rows):
            return gathering.gather(inputs.data, inputs.orders, inputs.place, self.rows, self.batch_size)
        at = inputs.place.unsqueeze(-1) * self.batch_size + torch.arange(self.rows, device=inputs.place.device)
        at = at.clamp(0, inputs.orders.shape[-1] - 1)  # a row that takes no step may be at a short batch
        rows = inputs.orders.index_select(0, at) if inputs.orders.dim() == 1 else inputs.orders.gather(1, at)
        if rows.dim() == 2 and rows.shape[0] > 1:
            rows = fence(rows)  # otherwise every element of the batch would compute its row again
        flat = rows.reshape(-1)
        return [leaf.index_select(0, flat).view(*rows.shape, *leaf.shape[1:]) for leaf in inputs.data]

    def _forward(
        self, stack: Stack, batch: list[Tensor], inputs: Inputs
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Run the forward pass, and return losses, logs and buffers."""
        solo = not self.program.members
        noise = self.draws.of(inputs.seeds, inputs.count, solo=solo)
        state = stack.state
        if solo:
            state = [_laid_out(t[0]) for t in state[: len(stack.params)]] + [t[0] for t in stack.buffers]
            batch = [_laid_out(b[0] if inputs.orders is not None and inputs.orders.dim() == 2 else b) for b in batch]
        with autocast(stack.members[0].job.precision, stack.device):
            (losses, logs), after = self.program(state, batch, noise)
        if solo:
            losses, after = losses.reshape(1), {k: v.unsqueeze(0) for k, v in after.items()}
        return losses, [_column(logs[name], losses) for name in self.log_names], after


def _has_kernels(device: torch.device) -> bool:
    """Return whether kernels can be launched now."""
    return not is_traced() and can_fuse(device)


def _write_logs(inputs: Inputs, logs: Sequence[Tensor]) -> None:
    """Write what the members that move have logged in this batch."""
    if inputs.logs is not None:
        known = inputs.logs.index_select(0, inputs.tick.view(1)).squeeze(0)
        seen = torch.where(inputs.moving, torch.stack([log.to(known.dtype) for log in logs]), known)
        inputs.logs.index_copy_(0, inputs.tick.view(1), seen.unsqueeze(0))


def _in_dtypes_of(expected: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [a if a is None or b is None else a.to(b.dtype) for a, b in zip(results, expected, strict=True)]


def _column(log: Any, losses: Tensor) -> Tensor:
    """Return one number of a log for each member. Unlike `as_column` it never reads a value from the device."""
    if isinstance(log, Tensor):
        return log.detach().reshape(len(losses))
    return torch.full(losses.shape, float(log), dtype=torch.float64, device=losses.device)


@torch.no_grad()
def _nudge(params: Sequence[Tensor]) -> None:
    """Add noise to every weight: after a layer that begins with zeros all gradients are zero, and mistakes would not
    show."""
    for param in params:
        if param.is_floating_point():
            param.add_(torch.empty_like(param).normal_(generator=_generator(param)), alpha=NUDGE)


def _generator(param: Tensor) -> torch.Generator:
    return torch.Generator(param.device).manual_seed(param.numel())


def _close(
    tensors: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    tolerance: float,
    disturbed: Sequence[Tensor | None] = (),
) -> bool:
    """Return whether tensors differ only by rounding, each as a whole, or by no more than a disturbance changes."""
    for a, b, other in zip_longest(tensors, expected, disturbed):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        a, b = a.double(), b.double()
        known = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), known):
            return False
        a, b = a[known], b[known]
        allowed = tolerance * b.norm()
        if other is not None:
            allowed += (other.double()[known] - b).norm()
        if not bool((a - b).norm() <= allowed):
            return False
    return True


def _laid_out(x: Tensor) -> Tensor:
    """Return images and filters with channels last, which a GPU's convolutions prefer."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.is_cuda else x


def inputs_like(inputs: Inputs) -> Inputs:
    """Return the same inputs with copies of everything that a step writes."""
    same: dict[str, Any] = {name: getattr(inputs, name) for name in ("data", "orders", "moving", "seeds", "tables")}
    copied = {name: getattr(inputs, name).clone() for name in ("place", "tick", "count", "losses")}
    return Inputs(**same, **copied, logs=None if inputs.logs is None else inputs.logs.clone())
