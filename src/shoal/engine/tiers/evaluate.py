"""Validation of a unit's members: val_loss and metrics. Validation data is read once for all members that share it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data import View
from shoal.data.pool import batch_rows
from shoal.data.source import TensorSource, cloned
from shoal.engine.members.member import Member, draws
from shoal.engine.members.step import autocast, call_model, evaluating, number, run_step, targets_of
from shoal.engine.python_state.module_modes import own_train_methods
from shoal.engine.tiers.unit import Unit, Unlike, context_lost, evaluated, map_fields, member_output, out_of_memory
from shoal.errors import METRIC_NOTE, MemberError
from shoal.jobs.job import Job
from shoal.utils.randomness import generator_at


def evaluate(unit: Unit, slots: list[int]) -> dict[int, dict[str, float] | MemberError]:
    """Return the validation values of these members, or the error that ended one, by slot.

    val_loss is the mean of the batch losses weighted by their rows, over batches of the job's batch size; metrics get
    all outputs and targets at once.
    """
    values: dict[int, dict[str, float] | MemberError] = {}
    waiting = list(slots)
    while waiting:
        view = unit.members[waiting[0]].val
        assert view is not None
        group = [slot for slot in waiting if view.same(unit.members[slot].val)]
        waiting = [slot for slot in waiting if slot not in group]
        try:
            with torch.no_grad():
                values |= _together(unit, view, group) or _one_by_one(unit, view, group)
        except MemberError as error:
            values[error.slot] = error
            waiting = [*(slot for slot in group if slot != error.slot), *waiting]
    return values


def _together(unit: Unit, view: View, slots: list[int]) -> dict[int, dict[str, float]] | None:
    """Evaluate all these members with one program; None if each must be evaluated separately."""
    undo = unit.undo_validation()
    values: dict[int, dict[str, float]] | None = None
    try:
        values = _all_at_once(unit, view, slots)
    finally:
        if values is None:
            undo()
    for slot in slots if values is not None else ():
        model = unit.members[slot].model
        if any(own_train_methods(model)):  # they are called as if each were evaluated separately
            with _errors_of(slot), evaluating(model):
                pass
    return values


def _all_at_once(unit: Unit, view: View, slots: list[int]) -> dict[int, dict[str, float]] | None:
    members = [unit.members[slot] for slot in slots]
    all_totals = [ValidationTotals(member.job) for member in members]
    outputs: list[Any] = []
    targets: list[Any] = []
    for batch in view.feed(members[0].job.batch_size):
        try:
            findings = unit.validate(batch, slots)
        except Exception:  # it may be one member's error, which shows when each is evaluated separately
            return None
        if findings is None or isinstance(findings.outputs, Unlike):
            return None
        losses, logs = findings.losses.tolist(), {name: column.tolist() for name, column in findings.logs.items()}
        rows = batch_rows(batch)
        for i, totals in enumerate(all_totals):
            totals.add_loss(losses[i], {name: numbers[i] for name, numbers in logs.items()}, rows)
        if findings.outputs is not None:
            outputs.append(findings.outputs)
            targets.append(targets_of(batch))
    all_outputs, all_targets = (join_batches(outputs, dim=1), join_batches(targets)) if outputs else (None, None)
    values = {slot: totals.means() for slot, totals in zip(slots, all_totals, strict=True)}
    for i, (slot, member) in enumerate(zip(slots, members, strict=True)):
        if member.job.metrics:
            with _errors_of(slot), draws(member, keep=False), autocast(member.job, member.device):
                own_targets = all_targets if len(slots) == 1 else cloned(all_targets)  # a metric may write to them
                values[slot] |= _compute_metrics(member.job, member_output(all_outputs, i), own_targets)
    return values


def _one_by_one(unit: Unit, view: View, slots: list[int]) -> dict[int, dict[str, float]]:
    """Evaluate each member's own model with its own random stream, which is restored for training."""
    unit.write_back(slots)
    all_totals = {slot: ValidationTotals(unit.members[slot].job) for slot in slots}
    twins = {slot: _with_own_stream(unit.members[slot]) for slot in slots}
    devices = {slot: _device_of(unit.members[slot].model) for slot in slots}
    try:
        for slot in slots:
            unit.members[slot].model.to(unit.members[slot].device)
        first = unit.members[slots[0]]
        # reading this data draws no random numbers
        once = len(slots) == 1 and first.device.type == "cpu" and isinstance(view.source, TensorSource)
        records_gradients = torch.is_grad_enabled()
        with ExitStack() as modes:
            for slot in slots:
                modes.enter_context(_in_eval_mode(slot, twins[slot]))
            with _own_draws(twins[slots[0]]) if once else nullcontext():
                for batch in _read(view.feed(first.job.batch_size), records_gradients):
                    for slot in slots:
                        # a step may write to its batch
                        own_batch = batch if len(slots) == 1 else cloned(batch)
                        with _errors_of(slot), nullcontext() if once else _own_draws(twins[slot]):
                            all_totals[slot].add(twins[slot].model, own_batch)
            values = {}
            for slot in slots:
                with _errors_of(slot), _own_draws(twins[slot]):
                    values[slot] = all_totals[slot].values()
        unit.adopt_state(slots)
    finally:
        for slot, device in devices.items():
            unit.members[slot].model.to(device)
    return values


def _read(batches: Iterator[Any], records_gradients: bool) -> Iterator[Any]:
    """Yield batches that are read with or without recording gradients, as a Dataset's own code may need."""
    while True:
        with torch.set_grad_enabled(records_gradients):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _with_own_stream(member: Member) -> Member:
    """Return the member with a copy of its random stream."""
    member_copy = copy.copy(member)
    member_copy.rng, member_copy.modules = generator_at(member.rng.get_state()), copy.copy(member.modules)
    return member_copy


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


@contextmanager
def _in_eval_mode(slot: int, member: Member) -> Iterator[None]:
    """Put a member's network into eval mode once for a validation, since `train()` and `eval()` may be the user's."""
    mode = evaluating(member.model)
    with _errors_of(slot), draws(member):
        mode.__enter__()
    try:
        yield
    finally:
        with _errors_of(slot), draws(member):
            mode.__exit__(None, None, None)


@contextmanager
def _own_draws(member: Member) -> Iterator[None]:
    """Use a member's own random stream and precision inside this context."""
    with draws(member), autocast(member.job, member.device):
        yield


@contextmanager
def _errors_of(slot: int) -> Iterator[None]:
    """Turn an exception inside this context into the slot's MemberError."""
    try:
        yield
    except MemberError:  # of another slot
        raise
    except Exception as error:
        raise MemberError(slot, error) from error


class ValidationTotals:
    """Accumulates one job's validation over batches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.wants_outputs = job.step is None or bool(job.metrics)
        self.gradients = False
        """Whether the job is known to need gradients for its validation."""
        self.rows = 0
        self.sums: dict[str, float] = {}
        self.outputs: list[Any] = []
        self.targets: list[Any] = []

    def add_loss(self, loss: float, logs: dict[str, float], rows: int) -> None:
        """Add the loss and the logs of a batch of so many rows."""
        self.rows += rows
        for name, value in {"val_loss": loss, **{f"val_{name}": value for name, value in logs.items()}}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * rows

    def add(self, model: nn.Module, batch: Any) -> None:
        """Add the results of this model, in eval mode, on one more batch."""
        (loss, logs, outputs), self.gradients = evaluated(model, partial(self._step, model, batch), self.gradients)
        self.add_loss(loss, logs, batch_rows(batch))
        if self.job.metrics:
            self.outputs.append(outputs)
            self.targets.append(targets_of(batch))

    def _step(self, model: nn.Module, batch: Any) -> tuple[float, dict[str, float], Any]:
        """Return loss, logs and outputs of one batch."""
        job = self.job
        if job.step is not None:
            inputs = cloned(batch) if self.wants_outputs else None  # the step may write to its batch
            loss, logs = run_step(job, model, batch)
            numbers = {name: number(value) for name, value in logs.items()}
            return number(loss), numbers, call_model(model, inputs) if self.wants_outputs else None
        outputs = call_model(model, batch)
        assert job.loss is not None
        return number(job.loss(outputs, targets_of(batch))), {}, outputs

    def means(self) -> dict[str, float]:
        """Return the mean loss and logs over all rows."""
        return {name: total / self.rows for name, total in self.sums.items()}

    def values(self) -> dict[str, float]:
        """Return the means and the metrics."""
        values = self.means()
        if self.job.metrics:
            values |= _compute_metrics(self.job, join_batches(self.outputs), join_batches(self.targets))
        return values


def _compute_metrics(job: Job, outputs: Any, targets: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, metric in job.metrics.items():
        try:
            value = measure(metric, outputs, targets)
            if isinstance(value, Mapping):
                values |= {f"{name}_{key}": number(part) for key, part in value.items()}
            else:
                values[name] = number(value)
        except Exception as error:
            error.add_note(f"{METRIC_NOTE}{name!r}")
            raise
    return values


def metric_columns(job: Job) -> list[str]:
    """Return the names that a job's metrics have in its history; a collection of several has one for each."""
    names: list[str] = []
    for name, metric in job.metrics.items():
        keys = getattr(metric, "keys", None)
        names += [f"{name}_{key}" for key in keys()] if callable(keys) else [name]
    return names


def measure(metric: Any, outputs: Any, targets: Any) -> Any:
    """Return a metric of all outputs and targets.

    A metric object with state, as in torchmetrics, is copied first, so that validations of different members or epochs
    do not affect each other.
    """
    if not all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")):
        return metric(outputs, targets)
    fresh = copy.deepcopy(metric)
    first = next((leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)), None)
    if isinstance(fresh, nn.Module) and first is not None:
        fresh = fresh.to(first.device)
    fresh.reset()
    fresh.update(outputs, targets)
    return fresh.compute()


def join_batches(batches: list[Any], dim: int = 0) -> Any:
    """Join the outputs of all batches, pytrees or dataclasses: tensors along their rows, and scalars, such as an
    auxiliary loss, into a tensor with one entry for each batch.

    Plain values that are the same for all batches, and None, stay as they are. What cannot be joined, such as outputs
    that are padded to other lengths, becomes a list with one entry for each batch.
    """
    flat = [pytree.tree_flatten(batch) for batch in batches]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(batches)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(list(column), dim) for column in columns], flat[0][1])


def _join(values: list[Any], dim: int) -> Any:
    """Join one leaf of the outputs of all batches."""
    first = values[0]
    if dataclasses.is_dataclass(first):
        return map_fields(lambda parts: join_batches(parts, dim), values)
    if all(isinstance(value, bool | int | float | str | None) for value in values):
        return first if all(value == first for value in values) else values
    if not all(isinstance(value, Tensor) for value in values):
        return values
    if all(value.dim() == dim for value in values):
        return torch.stack(values, dim)
    try:
        return torch.cat(values, dim)
    except RuntimeError as error:
        if out_of_memory(error) or context_lost(error):
            raise
        return values
