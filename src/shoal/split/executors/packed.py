"""Train parts of equal shapes as one pack, with many narrow networks in one step.

A pack is reused from round to round: the units change, their number does not, so new weights are loaded into its
members and nothing is traced again. Parts that cannot be packed are trained one after another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.source import TensorSource
from shoal.engine.members.member import seeded
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.planning.liveness import Ledger
from shoal.errors import SplitError
from shoal.split.core.memory import step_of
from shoal.split.core.method import Method
from shoal.split.core.moments import moments_in, order_of, state_of
from shoal.split.core.parts import Outcome, Task, Tensors
from shoal.split.core.reading import Reading
from shoal.split.core.state import named_state, tensors_of
from shoal.split.executors.local import Serial, all_finite, to_result_device
from shoal.user_loop.pack import Pack


class Packed(Serial):
    """Trains parts of equal shapes as one pack, on one device in this process."""

    tier = "packed"
    MOST = 4
    """How many packs are kept for reuse: those of usual rounds, of the last ones, and where widths do not divide."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packs: dict[Hashable, _PackedParts] = {}
        self._refusal = _refusal(self)

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        all_outcomes: list[Outcome | None] = [None] * len(tasks)
        for key, indices in self._alike(tasks).items():
            alike = [tasks[index] for index in indices]
            outcomes = super().run(alike) if key is None or len(alike) == 1 else self._together(key[1:], alike)
            for index, outcome in zip(indices, outcomes, strict=True):
                all_outcomes[index] = outcome
        return all_outcomes

    def _alike(self, tasks: Sequence[Task]) -> dict[tuple[Hashable, ...] | None, list[int]]:
        """Return the indices of tasks that can be one pack; those that are trained alone are under None."""
        groups: dict[tuple[Hashable, ...] | None, list[int]] = {}
        for index, task in enumerate(tasks):
            groups.setdefault(None if self._refusal else _key(task), []).append(index)
        return groups

    def _together(self, shapes: Hashable, tasks: list[Task]) -> Sequence[Outcome | None]:
        """Train tasks of equal shapes as one pack, which is kept for later rounds."""
        key = (shapes, len(tasks))
        pack = self._packs.pop(key, None)
        if pack is None:
            pack = _PackedParts(self, tasks)
        outcomes = pack.train(tasks)
        self._packs[key] = pack
        while len(self._packs) > self.MOST:
            self._packs.pop(next(iter(self._packs)))
        return outcomes


def _key(task: Task) -> tuple[Hashable, ...] | None:
    """Return a key that is equal for parts with the same computation and steps, or None for a part that is trained
    alone."""
    clocks = {float(value) for name, value in task.moments.items() if name.endswith("/step")}
    if task.part.learn is not None or not task.part.steps or len(clocks) > 1:
        return None
    shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in task.tensors.items())
    return task.part.steps, task.part.role, shapes


def _refusal(executor: Serial) -> str:
    """Return why nothing of this job can be packed, or "" if it can."""
    method, job = executor.method, executor.job
    if method.merge == "gradients":
        return "its parts give gradients back"
    if any(getattr(type(method), name) is not getattr(Method, name) for name in ("job", "batches", "yields")):
        return "its method trains parts in its own way"
    if job.accumulate > 1:
        return "it accumulates gradients over batches"
    return ""


class _PackedParts:
    """A pack, and the networks of its members."""

    def __init__(self, executor: Serial, tasks: list[Task]) -> None:
        self.executor = executor
        job, method = executor.job, executor.method
        self.networks = [method.network(task.part) for task in tasks]
        self.names = [_state_names(network) for network in self.networks]
        optimizers = [make_optimizer(job, network) for network in self.networks]
        self.orders = [order_of(optimizer, n) for optimizer, n in zip(optimizers, self.networks, strict=True)]
        self.settings = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
        self.held = 0
        """The bytes that the pack itself occupies on a GPU between rounds."""
        self.working: int | None = None
        """The bytes that a step needs besides state, for one member; measured once on a CPU."""
        self.logs = bool(job.step) and self._has_logs(tasks[0])
        self.steps_per_epoch = [reading.steps for reading in self._readings(tasks)]
        steps = [self._step_of(task) for task in tasks]
        has_step = job.step is not None or type(method).step is not Method.step
        self.pack = Pack(
            self.networks,
            optimizer=job.optimizer,
            hparams=job.hparams,
            loss=None if has_step else job.loss,
            step=steps if has_step else None,
            params=job.params,
            clip_norm=job.clip_norm,
            clip_value=job.clip_value,
            precision=job.precision,
            schedule=None if job.schedule is None else [self._schedule(i) for i in range(len(tasks))],
            device=executor.device,
            seeds=[task.part.seed for task in tasks],
        )

    def _step_of(self, task: Task) -> Any:
        step = step_of(self.executor.job, self.executor.method, task.part)
        return lambda network, batch: step(network, batch)[0]

    def _has_logs(self, task: Task) -> bool:
        """Return whether the job's step logs numbers, which a pack does not return."""
        data = self.executor.data
        network = self.executor.method.network(task.part).to(self.executor.device)
        with torch.no_grad(), seeded(0, self.executor.device):
            batch = data.take(0, min(2, len(data)))
            return bool(step_of(self.executor.job, self.executor.method, task.part)(network, batch)[1])

    def _schedule(self, index: int) -> Any:
        job = self.executor.job
        assert job.schedule is not None
        factor = job.schedule
        if job.schedule_every == "step":
            return factor
        return lambda step: factor(step // self.steps_per_epoch[index])

    def _readings(self, tasks: Sequence[Task]) -> list[Reading]:
        return [Reading(self.executor.job, len(self.executor.data), task.part.shard) for task in tasks]

    # --- one round ------------------------------------------------------------------------------------------------

    def train(self, tasks: list[Task]) -> Sequence[Outcome | None]:
        """Load the tasks into the members, train, and read the outcomes."""
        if self.logs:
            return Serial.run(self.executor, tasks)
        readings = self._readings(tasks)
        self._load(tasks, readings)
        started = time.perf_counter()
        with self._metered() as peak:
            losses, rows = self._train(tasks, readings)
            values = torch.stack(losses, 1).double().tolist()
        seconds = time.perf_counter() - started
        failed = [self.pack.errors[id] for id, status in self.pack.status.items() if status == "failed"]
        if failed:
            raise SplitError(f"a part's step raised {failed[0]}; run it with tier='serial' to see where")
        return [
            self._outcome(index, task, values[index], rows[index], seconds / len(tasks), sum(peak) // len(tasks))
            for index, task in enumerate(tasks)
        ]

    @contextmanager
    def _metered(self) -> Iterator[list[int]]:
        """Yield a list that will contain the peak bytes of the pack on a GPU, without other things there."""
        device, peak = self.executor.device, list[int]()
        if device.type != "cuda":
            yield peak
            return
        old_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(device) - old_bytes + self.held)
        self.held += torch.cuda.memory_allocated(device) - old_bytes

    def _load(self, tasks: list[Task], readings: list[Reading]) -> None:
        """Load the tasks' weights and optimizer state into the members."""
        job = self.executor.job
        for index, (id, task, reading) in enumerate(zip(self.pack.ids, tasks, readings, strict=True)):
            weights = {name: task.tensors[part_name] for name, part_name in self.names[index].items()}
            state: dict[str, Any] | None = None
            if task.moments:
                state = {
                    "state": state_of(task.moments, self.orders[index]),
                    "param_groups": [dict(group) for group in self.settings[index]],
                }
            first = reading.step_at(task.part.start)
            self.pack.load(id, weights, state, step=first if job.schedule else None, seed=task.part.seed)

    def _train(self, tasks: list[Task], readings: list[Reading]) -> tuple[list[Tensor], list[int]]:
        """Step all members together; members whose last batch has another size step after the others."""
        ids, losses = self.pack.ids, list[Tensor]()
        streams = [reading.groups(t.part.start, t.part.steps) for t, reading in zip(tasks, readings, strict=True)]
        turns = [[(epoch, group[0]) for epoch, group in turn] for turn in zip(*streams, strict=True)]
        feed = self._full(turns)
        for turn in turns:
            sizes: dict[int, list[int]] = {}
            for index, (_, rows) in enumerate(turn):
                sizes.setdefault(len(rows), []).append(index)
            if feed is not None and len(sizes) == 1 and len(turn[0][1]) == self.executor.job.batch_size:
                losses.append(
                    self._watched(next(feed)) if len(losses) == 1 else self.pack.step(next(feed), per_member=True)
                )
                continue
            step_losses: dict[int, Tensor] = {}
            for indices in sizes.values():
                batch = self._batch([turn[index] for index in indices])
                group_losses = self.pack.step(batch, per_member=True, members=[ids[index] for index in indices])
                step_losses |= dict(zip(indices, group_losses, strict=True))
            losses.append(torch.stack([step_losses[index] for index in range(len(tasks))]))
        return losses, [sum(len(turn[index][1]) for turn in turns) for index in range(len(tasks))]

    def _watched(self, batch: Any) -> Tensor:
        """Take a step, and measure its memory on a CPU."""
        if self.executor.device.type == "cuda" or self.working is not None:
            return self.pack.step(batch, per_member=True)
        with Ledger() as ledger:
            losses = self.pack.step(batch, per_member=True)
        self.working = ledger.held(0).working // len(self.networks)
        return losses

    def _full(self, turns: list[list[tuple[int, Tensor]]]) -> Iterator[Any] | None:
        """Return the turns in which every member has a full batch, with their rows moved to the device at once."""
        source, size = self.executor.data.source, self.executor.job.batch_size
        full = [turn for turn in turns if all(len(rows) == size for _, rows in turn)]
        if not full or not isinstance(source, TensorSource):
            return None
        order = torch.stack([torch.stack([rows for _, rows in turn]) for turn in full])
        return map(source.take, self.executor.data.rows(order).to(self.executor.device))

    def _batch(self, member_rows: list[tuple[int, Tensor]]) -> Any:
        """Return members' batches of equal size, members first."""
        data, job = self.executor.data, self.executor.job
        if isinstance(data.source, TensorSource):
            return data.source.take(data.rows(torch.stack([rows for _, rows in member_rows])))
        batches = [data.source.take(data.rows(rows), seed=job.order_seed, epoch=epoch) for epoch, rows in member_rows]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *batches)

    def _outcome(self, index: int, task: Task, losses: list[float], rows: int, seconds: float, peak: int) -> Outcome:
        tensors, moments = self._result(index) if all(map(math.isfinite, losses)) else ({}, {})
        if not all_finite(tensors):
            tensors, moments, losses = {}, {}, [*losses[:-1], math.nan]
        if not peak and self.working is not None:
            peak = self.working + sum(t.nbytes for t in (*task.tensors.values(), *moments.values()))
        return Outcome(
            round=task.round,
            number=task.part.number,
            tensors=tensors,
            moments=moments if self.executor.method.moments == "travel" else {},
            losses=tuple(losses),
            rows=rows,
            seconds=seconds,
            peak_bytes=peak,
        )

    def _result(self, index: int) -> tuple[Tensors, Tensors]:
        """Return a member's weights and moments where it is trained; without moments if they are not sent."""
        id = self.pack.ids[index]
        tensors = {
            name: tensor.to(self.executor.result_device) for name, tensor in tensors_of(self.pack.member(id)).items()
        }
        if self.executor.method.moments == "fresh" and self.executor.device.type == "cuda":
            return tensors, {}
        moments = moments_in(self.pack.optimizer_state(id)["state"], self.orders[index])
        return tensors, to_result_device(moments, self.executor.result_device)


def _state_names(network: nn.Module) -> dict[str, str]:
    """Return for each entry of a network's state_dict the name of its tensor in the parts, where tied tensors have
    one name."""
    first = {id(tensor): name for name, tensor in named_state(network).items()}
    return {
        name: first[id(tensor)] for name, tensor in network.state_dict(keep_vars=True).items() if id(tensor) in first
    }
