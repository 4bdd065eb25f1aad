"""Train a task with the plain loop, on the part's network and the part's rows.

The outcome depends only on the task and the job: the network is built again, its weights and optimizer state are the
task's, its rows are a pure function of (shard, start), and its random draws follow the part's seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data import View
from shoal.data.pool import batch_rows
from shoal.engine.members.member import counted, seeded
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.members.step import autocast, number
from shoal.engine.optim.gradients import clip_gradients
from shoal.jobs.job import Job
from shoal.split.core.checks import check_count
from shoal.split.core.memory import Meter, step_of
from shoal.split.core.method import Method, Worker
from shoal.split.core.moments import load_moments, moment_slice, moments_of
from shoal.split.core.parts import Outcome, Part, Slice, Task, Tensors
from shoal.split.core.reading import Reading
from shoal.split.core.state import load_tensors, tensors_of

CPU = torch.device("cpu")


def train_task(
    job: Job,
    method: Method,
    task: Task,
    device: torch.device,
    data: View,
    *,
    private: bool = False,
    result_device: torch.device = CPU,
) -> Outcome:
    """Train a part on this device as its task says.

    Args:
        data: The job's data, opened on the device.
        private: The data is only the part's shard.
        result_device: The device that the resulting tensors are moved to.

    A loss or a weight that is not finite ends the training: the outcome then has no tensors, and its last loss says
    why.
    """
    part, job = task.part, method.job(job, task.part)
    if not part.steps:
        return Outcome(round=task.round, number=part.number, tensors={})
    meter = Meter(method, task, device)
    with seeded(part.seed, device):
        network = method.network(part).to(device)
        load_tensors(network, task.tensors)
        torch.manual_seed(part.seed)
        training = _PartTraining(job, method, part, network, device)
        load_moments(training.optimizer, network, task.moments)
        started = time.perf_counter()
        reading = Reading(job, len(data), part.shard, private)
        training.train(reading, method.batches(task, _read(reading, data, part)), meter)
        losses = torch.stack(training.losses).double().tolist()
        seconds = time.perf_counter() - started
    finite = all(math.isfinite(loss) for loss in losses)
    tensors = {name: value.to(result_device) for name, value in training.result().items()} if finite else {}
    if not all_finite(tensors):
        tensors, losses = {}, [*losses[:-1], math.nan]
    extras = {f"log/{name}": torch.tensor(values, dtype=torch.float64) for name, values in training.logs.items()}
    if tensors:
        extras |= method.yields(task, network, lambda: method.batches(task, _read(reading, data, part)))
    return Outcome(
        round=task.round,
        number=part.number,
        tensors=tensors,
        moments=to_result_device(training.moments(), result_device)
        if tensors and method.merge == "weights" and method.moments == "travel"
        else {},
        extras={name: value.cpu() for name, value in extras.items()},
        losses=tuple(losses),
        rows=training.rows,
        seconds=seconds,
        peak_bytes=meter.peak(network),
    )


def diverged(outcome: Outcome | None) -> bool:
    """Return whether a part was trained and its loss is not finite."""
    return outcome is not None and bool(outcome.losses) and not math.isfinite(sum(outcome.losses))


class _PartTraining:
    """A part's network with everything that trains it."""

    def __init__(self, job: Job, method: Method, part: Part, network: nn.Module, device: torch.device) -> None:
        self.job, self.method, self.part, self.network, self.device = job, method, part, network, device
        self.optimizer = make_optimizer(job, network)
        self.base = [group.get("lr") for group in self.optimizer.param_groups]
        self.step_of = step_of(job, method, part)
        self.masks = Masks(network, method.returns(part)) if part.learn is not None else None
        self.losses: list[Tensor] = []
        self.logs: dict[str, list[float]] = {}
        self.rows = 0

    def train(self, reading: Reading, read: Iterator[Any], meter: Meter) -> None:
        first, batches = reading.step_at(self.part.start), 0
        for index, (_, group) in enumerate(reading.groups(self.part.start, self.part.steps)):
            set_rates(self.job, self.optimizer, self.base, first + index, reading.steps)
            with meter.at(index, self.part.steps, self.network, self.optimizer):
                self._step(list(islice(read, len(group))), batches)
            batches += len(group)

    def _step(self, group: list[Any], batches: int) -> None:
        """Take one optimizer step over a group of batches, or only compute gradients if these are merged."""
        self.optimizer.zero_grad()
        self.network.zero_grad()  # also parameters that the optimizer does not have
        losses = []
        for index, batch in enumerate(group):
            with _drawing(self.part.seed, self.device, batches + index):
                with autocast(self.job, self.device):
                    loss, logs = self.step_of(self.network, batch)
                (loss / len(group) if len(group) > 1 else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            self.rows += batch_rows(batch)
            for name, value in logs.items():
                self.logs.setdefault(name, []).append(number(value))
        self.losses.append(torch.stack(losses).mean() if len(losses) > 1 else losses[0])
        if self.method.merge == "gradients":
            return
        if self.masks is not None:
            self.masks.gradients()
        clip_gradients(self.job, self.network)
        self.optimizer.step()
        if self.masks is not None:
            self.masks.weights()

    def result(self) -> Tensors:
        """Return what is sent back: weights or gradients, and buffers."""
        tensors = tensors_of(self.network)
        if self.method.merge == "gradients":
            grads = {name: p.grad for name, p in self.network.named_parameters()}
            tensors = {name: grads.get(name, value) for name, value in tensors.items()}  # type: ignore[misc]
        if self.part.learn is not None:
            tensors = {name: piece.take(tensors[name]) for name, piece in self.method.returns(self.part).items()}
        return {name: value for name, value in tensors.items() if value is not None}

    def moments(self) -> Tensors:
        """Return the optimizer state of the tensors that are sent back."""
        moments = moments_of(self.optimizer, self.network)
        if self.masks is not None:
            moments = self.masks.moments(moments)
        return moments


def to_result_device(moments: Tensors, result_device: torch.device) -> Tensors:
    """Move moments to the device of the state; numbers (an optimizer's step count) to the CPU, where optimizers
    expect them."""
    return {name: value.to(result_device) if value.dim() else value.cpu() for name, value in moments.items()}


def all_finite(tensors: Tensors) -> bool:
    """Return whether all numbers are finite, with one synchronization with the device."""
    finite = [torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point()]
    return not finite or bool(torch.stack(finite).all())


def _read(reading: Reading, data: View, part: Part) -> Iterator[Any]:
    """Yield a part's batches. Their order is computed now, so that its memory is not counted as the training's."""
    batches = [(epoch, rows) for epoch, group in reading.groups(part.start, part.steps) for rows in group]
    return (data.source.take(data.rows(rows), seed=reading.job.order_seed, epoch=epoch) for epoch, rows in batches)


def set_rates(job: Job, optimizer: Optimizer, base: list[Any], step: int, steps_per_epoch: int) -> None:
    """Set the learning rates of a local step, counted from the first step of the run."""
    if job.schedule is None:
        return
    factor = float(job.schedule(step if job.schedule_every == "step" else step // steps_per_epoch))
    for group, rate in zip(optimizer.param_groups, base, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(float(rate) * factor)
        else:
            group["lr"] = rate * factor


@contextmanager
def _drawing(seed: int, device: torch.device, batches: int) -> Iterator[None]:
    """Number the random calls on a GPU, where each draw is a function of (seed, batches so far, call, element)."""
    with counted(seed, device) if device.type == "cuda" else nullcontext() as mode:
        if mode is not None:
            mode.begin(batches)
        yield


class Masks:
    """Keeps the parameters of a network unchanged outside of the learning slices."""

    def __init__(self, network: nn.Module, learning: Mapping[str, Slice]) -> None:
        self.learning = learning
        self.shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        self._kept = []
        for name, parameter in network.named_parameters():
            piece = learning.get(name)
            if piece is not None and piece.whole:
                continue
            mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
            if piece is not None:
                piece.put(mask, torch.ones(piece.shape(parameter.shape), dtype=torch.bool, device=mask.device))
            self._kept.append((parameter, mask, parameter.detach().clone()))

    def gradients(self) -> None:
        """Set the gradients outside of the learning slices to zero."""
        for parameter, mask, _ in self._kept:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(~mask, 0.0)

    @torch.no_grad()
    def weights(self) -> None:
        """Restore weights that an optimizer changes without a gradient, by weight decay or momentum."""
        for parameter, mask, start in self._kept:
            parameter.copy_(torch.where(mask, parameter, start))

    def moments(self, moments: Tensors) -> Tensors:
        """Return the optimizer state of the learning slices."""
        out: Tensors = {}
        for key, value in moments.items():
            parameter = key.rpartition("/")[0]
            piece = self.learning.get(parameter)
            location = moment_slice(piece, self.shapes[parameter], value.shape) if piece is not None else None
            if location is not None:
                out[key] = location.take(value)
        return out


class Serial:
    """Trains the parts in this process, one after another: the reference for every other executor."""

    tier = "serial"
    result_device: torch.device
    """Where outcomes are: on the device itself, so that the state stays there and rounds copy nothing."""

    def __init__(self, job: Job, method: Method, workers: int, device: torch.device | str = "cpu") -> None:
        check_count("workers", workers)
        self.job, self.method = job, method
        self.device = self.result_device = torch.device(device)
        self.data = method.data_on(self.device)
        self.workers = [Worker(number) for number in range(workers)]

    def workers_of_round(self, number: int) -> Sequence[Worker]:
        return self.workers

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        return [
            train_task(self.job, self.method, task, self.device, self.data, result_device=self.result_device)
            for task in tasks
        ]
