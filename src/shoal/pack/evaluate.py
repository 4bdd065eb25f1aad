"""Validation of a unit's members: val_loss and metrics, with the validation data read once for all who share it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.data import View
from shoal.data.pool import batch_rows
from shoal.errors import MemberError
from shoal.job import Job
from shoal.pack.members import autocast, number
from shoal.pack.unit import Unit, member_output


def evaluate(unit: Unit, slots: list[int]) -> dict[int, dict[str, float] | MemberError]:
    """The validation values of these members, or the error that ended one.

    val_loss is the mean of the batch losses weighted by their rows, over batches of the job's batch size; metrics see
    all outputs and targets at once.
    """
    found: dict[int, dict[str, float] | MemberError] = {}
    waiting = list(slots)
    while waiting:
        view = unit.members[waiting[0]].val
        assert view is not None
        group = [slot for slot in waiting if view.same(unit.members[slot].val)]
        waiting = [slot for slot in waiting if slot not in group]
        found.update(_group(unit, view, group))
    return found


def _group(unit: Unit, view: View, slots: list[int]) -> dict[int, dict[str, float] | MemberError]:
    found: dict[int, dict[str, float] | MemberError] = {}
    while slots:
        try:
            found.update(_pass(unit, view, slots))
            break
        except MemberError as error:
            found[error.slot] = error
            slots = [slot for slot in slots if slot != error.slot]
    return found


def _pass(unit: Unit, view: View, slots: list[int]) -> dict[int, dict[str, float]]:
    """One pass over the validation data for these members."""
    sheets = {slot: Sheet(unit.members[slot].job) for slot in slots}
    own_step = [slot for slot in slots if unit.members[slot].job.step is not None]
    forward = [slot for slot in slots if sheets[slot].wants_outputs]
    with torch.no_grad():
        for batch in view.feed(unit.members[slots[0]].job.batch_size):
            rows = batch_rows(batch)
            if own_step:
                for slot, (loss, logs) in zip(own_step, unit.evaluate(batch, own_step), strict=True):
                    sheets[slot].add_loss(loss, logs, rows)
            if forward:
                outputs = _outputs(unit, batch, forward)
                for place, slot in enumerate(forward):
                    with _blame(slot), autocast(unit.members[slot].job, unit.members[slot].device):
                        sheets[slot].add_outputs(member_output(outputs, place), batch[-1], rows)
        found = {}
        for slot in slots:
            with _blame(slot):
                found[slot] = sheets[slot].values()
    return found


def _outputs(unit: Unit, batch: Any, slots: list[int]) -> Any:
    try:
        return unit.outputs(batch[:-1], slots)
    except MemberError:
        raise
    except Exception as error:
        raise MemberError(slots[0], error) from error


class _blame:
    """Turns an exception inside into this slot's MemberError."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise MemberError(self.slot, error) from error


class Sheet:
    """One job's validation as it adds up over batches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.wants_outputs = job.step is None or bool(job.metrics)
        self.rows = 0
        self.sums: dict[str, float] = {}
        self.outputs: list[Any] = []
        self.targets: list[Any] = []

    def add_loss(self, loss: float, logs: dict[str, float], rows: int) -> None:
        self.rows += rows
        for name, value in {"val_loss": loss, **{f"val_{name}": value for name, value in logs.items()}}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * rows

    def add_outputs(self, outputs: Any, targets: Any, rows: int) -> None:
        if self.job.step is None:
            assert self.job.loss is not None
            self.add_loss(number(self.job.loss(outputs, targets)), {}, rows)
        if self.job.metrics:
            self.outputs.append(outputs)
            self.targets.append(targets)

    def values(self) -> dict[str, float]:
        values = {name: total / self.rows for name, total in self.sums.items()}
        if self.job.metrics:
            outputs, targets = _joined(self.outputs), _joined(self.targets)
            values |= {name: number(metric(outputs, targets)) for name, metric in self.job.metrics.items()}
        return values


def _joined(batches: list[Any]) -> Any:
    """Batches of a pytree, joined along their rows."""
    flat = [pytree.tree_flatten(batch) for batch in batches]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([torch.cat(list(column)) for column in columns], flat[0][1])
