"""The two interfaces of a split: a `Method` says what the parts are, a `TaskExecutor` trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import nn

from shoal.data import Pool, View
from shoal.engine.members.member import Member, open_data
from shoal.jobs.job import Job
from shoal.split.core.parts import Outcome, Part, Slice, Task, Tensors


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that can train a part in the coming round."""

    number: int
    """The worker's number, which it keeps for as long as it stays."""
    speed: float = 1.0
    """How many steps of the same part it takes in a second, relative to other workers; 1.0 until it has been
    measured."""
    shard: int | None = None
    """The only shard of the rows that the worker holds, if data never moves; None if it can read all rows."""


class Method(ABC):
    """One way to split a job, such as IST. Its decisions depend only on the seed and the number of the round.

    Every process of a run makes its own method from the same job and settings, so only numbers and tensors are sent.
    """

    name: str
    member: Member
    """The prepared job: checked once, with its network built and its data opened."""
    options: type
    """The dataclass of the method's settings."""
    num_workers: int
    """How many workers the method was made for."""
    rounds: int
    """How many rounds the job takes."""
    recovery: int = 0
    """How many of the last rounds train the whole network."""
    local_steps: int = 1
    """Optimizer steps of a part in one round."""
    shards: int = 1
    """How many shards the rows are divided into."""
    merge: Literal["weights", "gradients"] = "weights"
    """What outcomes hold. "weights": trained weights, which are averaged over the parts that own them (a block with one
    owner is copied). "gradients": the gradients of one step, which are averaged and applied once by the job's
    optimizer."""
    moments: Literal["travel", "fresh"] = "travel"
    """With "travel", optimizer state is sent with its weights; with "fresh", every part starts without any."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """The settings as plain data. A run folder stores them; two splits of a job with the same settings are the same."""

    @property
    def model(self) -> nn.Module:
        """The whole network as the job builds it, on the CPU. Copy it before training."""
        return self.member.model

    @property
    def data(self) -> View:
        """The job's rows, on the CPU."""
        return self.member.data

    def data_on(self, device: torch.device) -> View:
        """Return the job's rows on a device."""
        if device.type == "cpu":
            return self.data
        if device not in self._data:
            self._data[device] = open_data(Pool(device), self.member.job, "data")
        return self._data[device]

    @cached_property
    def _data(self) -> dict[torch.device, View]:
        return {}

    @abstractmethod
    def parts(self, number: int, workers: Sequence[Worker]) -> list[Part]:
        """Return the parts of a round; the i-th is for the i-th worker. SIL may return fewer parts than there are
        workers."""

    @abstractmethod
    def network(self, part: Part) -> nn.Module:
        """Build a network of the part's shapes. Its weights are loaded from the task afterwards."""

    @abstractmethod
    def slices(self, part: Part) -> Mapping[str, Slice]:
        """Say where each parameter and buffer of the part's network lies in the whole network's state, by name."""

    def returns(self, part: Part) -> Mapping[str, Slice]:
        """Return the slices that come back changed: fewer than `slices` if the part holds more than it trains."""
        return self.slices(part)

    def step(self, part: Part) -> Callable[[nn.Module, Any], Any]:
        """Return the part's step, `(network, batch) -> loss`, as in a job."""
        raise NotImplementedError

    def finish_merge(self, model: nn.Module, tensors: Tensors) -> None:  # noqa: B027  # most have nothing to do
        """Finish the merged network before it is evaluated, for example by estimating batch norm statistics again.

        `tensors` are all tensors that train, extra ones included.
        """

    # --- what only some methods need --------------------------------------------------------------------------------

    def extra_tensors(self) -> Tensors:
        """Return tensors that train beside the network's own, such as local heads, under names that the network does
        not use.

        They may be parameters or buffers and belong to the same state; the whole network is built without them.
        """
        return {}

    def job(self, job: Job, part: Part) -> Job:
        """Return the job whose optimizer and settings train the part."""
        return job

    def extras(self, number: int, part: Part) -> Tensors:
        """Return what is sent with the part's task, such as another part's activations. Called where the state is."""
        return {}

    def example(self, part: Part, batch: Any) -> Any:
        """Return what the part's step gets instead of this batch of the job; used to predict memory and operations."""
        return batch

    def predicted_extras(self, part: Part) -> tuple[Tensors, Tensors]:
        """Return the extras of the part's task and of its outcome on the meta device; used to predict bytes."""
        return {}, {}

    def batches(self, task: Task, read: Iterator[Any]) -> Iterator[Any]:
        """Turn the batches that were read into those that the task's step takes. Called where the part is trained."""
        return read

    def yields(self, task: Task, network: nn.Module, read: Callable[[], Iterator[Any]]) -> Tensors:
        """Return the extras of the outcome, from the trained network. `read()` gives the task's batches again."""
        return {}

    def see(self, number: int, parts: Sequence[Part], outcomes: Sequence[Outcome | None]) -> None:  # noqa: B027
        """Called with the outcomes of a round, where the state is, before the network is evaluated."""

    def stored(self) -> dict[str, Any]:
        """Return what `see` stored and later rounds need, as plain data and tensors. Every checkpoint holds it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `stored` returned."""


class TaskExecutor(Protocol):
    """Trains tasks: in this process, as a pack, or on workers elsewhere."""

    def workers_of_round(self, number: int) -> Sequence[Worker]:
        """Return the workers of this round. May wait until there is one."""
        ...

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Train the tasks, the i-th on the i-th worker of the round. A task that was lost gives None."""
        ...
