"""What a placed training checks before it begins: settings that it cannot have (`check_job`), and, on a few rows, that
the divided network computes what the job's own step computes (`check_agreement`).

Workers run the first layers on their own rows. That is exact only if none of these layers looks at other rows, and if
the step does nothing but pass its batch to the network and its outputs to the loss. Batch norm is joined, and dropout
drawn, apart from this; networks with either are checked in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.members.member import draws
from shoal.engine.members.optimizers import make_optimizer, trying
from shoal.engine.members.step import autocast, evaluating, run_step
from shoal.engine.optim.kinds import has_modes, needs_closure
from shoal.engine.python_state.preserve import preserved
from shoal.errors import PlaceError
from shoal.place.training.back import FEW, take_rows
from shoal.place.training.joined_batch import batch_norms
from shoal.place.training.roles import Built, Given

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}
"""How far a gradient may be off, relative to the largest one: mistakes are far larger than rounding."""
Gradients = list[Tensor]
"""The loss, and its gradient with respect to each trained parameter."""


def check_job(built: Built) -> None:
    """Raise a PlaceError for what a placed training cannot do, before any process is started."""
    job = built.job
    if job.precision == "fp16" and built.held_by_workers:
        raise PlaceError("precision is 'fp16', whose scaler sees gradients at the server alone; use 'bf16' or None")
    if job.average is not None:
        raise PlaceError("average is set, and placed training does not support it; leave it out")
    with trying(job):
        optimizer = make_optimizer(job, built.member.model)
    if needs_closure(optimizer):
        name = type(optimizer).__name__
        raise PlaceError(f"{name} evaluates the loss several times a step; use another optimizer")
    if has_modes(optimizer):
        name = type(optimizer).__name__
        raise PlaceError(
            f"{name} has a train and an eval mode, which placed training does not support; use another optimizer"
        )
    if built.roles.staleness is not None:
        _check_asynchronous(built)


def _check_asynchronous(built: Built) -> None:
    job, roles = built.job, built.roles
    if not isinstance(roles.staleness, int) or roles.staleness < 0:
        raise PlaceError(f"staleness is {roles.staleness!r}; use 0 or more steps, or None for synchronous training")
    if built.held_by_workers:
        raise PlaceError("asynchronous workers do not wait for each other: place with sync='server', not among workers")
    if built.joins_batch_norms:
        raise PlaceError("asynchronous workers have no joined batch: place with batch_norm='own'")
    if job.accumulate > 1 or job.precision == "fp16":
        raise PlaceError("asynchronous training takes a step after each batch, without accumulate or fp16")


def check_agreement(built: Built) -> None:
    """Raise a PlaceError if the divided network differs from the job's step. What cannot be compared is not."""
    member = built.member
    rows = min(FEW, member.batch_size, len(member.data))
    tolerance = TOLERANCE.get(next((p.dtype for p in built.member.model.parameters()), torch.float16))
    if built.whole or rows < 2 or tolerance is None or built.job.precision is not None:
        return
    roots = {"step": built.job.step, "loss": built.job.loss, "model": member.model}
    buffers = [(buffer, buffer.clone()) for buffer in member.model.buffers()]
    with draws(member, keep=False), preserved(roots, skip=member.model) as state:
        if state.unrestorable:
            return
        try:
            pairs = _compared(built, member.data.take(0, rows), rows)
        except Exception:  # the step needs its whole batch, or draws what cannot be drawn twice
            return
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
    if pairs is not None:
        _compare(built, *pairs, tolerance)


def _compared(built: Built, batch: Any, rows: int) -> tuple[Gradients, Gradients] | None:
    """Return the gradients of the job's step and those of the divided network, in train mode if they are repeatable,
    else in eval mode; None if they are repeatable in neither."""
    model = built.member.model
    modes: Sequence[Callable[[], AbstractContextManager[Any]]] = [nullcontext, lambda: evaluating(model)]
    for mode in modes[bool(batch_norms(model)) :]:
        with mode():
            ours, again = (_gradients(built, batch, model) for _ in range(2))
            if all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
                return ours, _gradients(built, batch, Given(model, lambda: _divided(built, batch, rows)))
    return None


def _divided(built: Built, batch: Any, rows: int) -> Any:
    """Return what the network gives for a batch if each half of its rows is computed by another worker."""
    front, back = built.parts(built.member.model)
    assert back is not None
    halves = [take_rows(batch, slice(0, rows // 2)), take_rows(batch, slice(rows // 2, rows))]
    given = [front(*built.graph.tensors_of(built.sample(half))) for half in halves]
    values = built.graph.cuts[built.roles.cut - 1].values
    joined = [torch.cat(parts) if value.batched else parts[0] for value, *parts in zip(values, *given, strict=True)]
    return back(*joined)


def _gradients(built: Built, batch: Any, network: nn.Module) -> Gradients:
    parameters = [p for p in built.member.model.parameters() if p.requires_grad]
    with torch.enable_grad(), autocast(built.job, built.member.device):
        loss, _ = run_step(built.job, network, batch)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]


def _compare(built: Built, ours: Gradients, divided: Gradients, tolerance: float) -> None:
    names = ["the loss"]
    names += [f"the gradient of {name}" for name, p in built.member.model.named_parameters() if p.requires_grad]
    largest = max([float(g.abs().max()) for g in ours[1:] if g.numel()], default=0.0)
    sizes = [float(ours[0].abs()), *([largest] * (len(ours) - 1))]
    cut = built.graph.layers[built.roles.cut - 1].name
    for name, a, b, size in zip(names, ours, divided, sizes, strict=True):
        difference = float((a - b).abs().max()) / max(size, 1e-6) if a.numel() else 0.0
        if difference > tolerance:
            raise PlaceError(
                f"the network divided after {cut!r} is not exact: {name} differs by {difference:.1g}; a layer of the "
                "workers looks at other rows of the batch, or the step does more than pass its batch to the network "
                "once: use another cut, or one machine"
            )
