"""The two interfaces of a split: a method says what the parts are, an executor trains them."""

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
    """One that can train a part in the coming round."""

    number: int
    """The same for as long as it stays."""
    speed: float = 1.0
    """Steps of one and the same part in a second, relative to the others; 1.0 until it has been measured."""
    shard: int | None = None
    """The one shard of the rows that it holds, where data never moves; None: it can read all."""


class Method(ABC):
    """One way to split a job: pure decisions, from the seed and the round's number.

    Every process of a run makes one from the same job and the same settings, so only numbers and tensors travel.
    """

    name: str
    member: Member
    """The prepared job: checked, its network built and its data opened, once for all that a split does."""
    options: type
    """The dataclass of its settings."""
    num_workers: int
    """How many workers it is made for."""
    rounds: int
    """How many rounds the job takes."""
    recovery: int = 0
    """How many of the last rounds train the whole network."""
    local_steps: int = 1
    """A part's steps in a round."""
    shards: int = 1
    """In how many shards the rows are read."""
    merge: Literal["weights", "gradients"] = "weights"
    """What outcomes hold: trained weights, averaged over the parts that own them (a block with one owner is copied); or
    the gradients of one step, averaged and followed once by the job's optimizer."""
    moments: Literal["travel", "fresh"] = "travel"
    """Whether optimizer state travels with the weights that it belongs to, or every part starts with none."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """What makes two splits of one job the same, as plain data: a run folder remembers it."""

    @property
    def model(self) -> nn.Module:
        """The whole network as the job builds it, on the CPU. It must not be trained: copy it."""
        return self.member.model

    @property
    def data(self) -> View:
        """The job's rows, on the CPU."""
        return self.member.data

    def data_on(self, device: torch.device) -> View:
        """The job's rows on a device."""
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
        """The parts of a round, the i-th for the i-th worker (SIL may need fewer)."""

    @abstractmethod
    def network(self, part: Part) -> nn.Module:
        """A network of the part's own shapes; its weights are loaded from the task."""

    @abstractmethod
    def slices(self, part: Part) -> Mapping[str, Slice]:
        """For each parameter and buffer of the part's network, by name: where it lies in the whole network's state."""

    def returns(self, part: Part) -> Mapping[str, Slice]:
        """Of these, what comes back changed; where a part holds more than it trains, less than `slices`."""
        return self.slices(part)

    def step(self, part: Part) -> Callable[[nn.Module, Any], Any]:
        """The part's own step, (network, batch) -> loss; as in a job."""
        raise NotImplementedError

    def finish_merge(self, model: nn.Module, tensors: Tensors) -> None:  # noqa: B027  # most have nothing to do
        """Called on the merged whole network before it is evaluated, such as to estimate its normalisation again;
        `tensors` are all that train, companions too."""

    # --- what only some methods need --------------------------------------------------------------------------------

    def companions(self) -> Tensors:
        """Tensors that train beside the network's own and are part of the same state, such as local heads: by names
        that no tensor of the network has. Parameters and buffers alike; the whole network is built without them."""
        return {}

    def job(self, job: Job, part: Part) -> Job:
        """The job by whose optimizer and settings the part trains."""
        return job

    def extras(self, number: int, part: Part) -> Tensors:
        """What is sent with the part's task, such as another part's activations. Called where the state is."""
        return {}

    def example(self, part: Part, batch: Any) -> Any:
        """What the part's step gets in place of this batch of the job's: for the forecast of memory and operations."""
        return batch

    def predicted_extras(self, part: Part) -> tuple[Tensors, Tensors]:
        """The extras of the part's task and of its outcome, on the meta device: for the forecast of bytes."""
        return {}, {}

    def batches(self, task: Task, read: Iterator[Any]) -> Iterator[Any]:
        """A task's batches, as its step takes them, from those that were read. Called where the part is trained."""
        return read

    def yields(self, task: Task, network: nn.Module, read: Callable[[], Iterator[Any]]) -> Tensors:
        """The extras of the outcome, from the trained network; `read()` gives the batches again that it had."""
        return {}

    def see(self, number: int, parts: Sequence[Part], outcomes: Sequence[Outcome | None]) -> None:  # noqa: B027
        """Called where the state is with what came of a round, before it is evaluated."""

    def stored(self) -> dict[str, Any]:
        """What `see` has stored that later rounds need, plain data and tensors: written into every checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `stored` returned."""


class TaskExecutor(Protocol):
    """Trains tasks: in this process, as a pack, or by workers elsewhere."""

    def roll(self, number: int) -> Sequence[Worker]:
        """The workers of this round. May wait until there is one."""
        ...

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Train the tasks, the i-th by the i-th worker of the last roll; None for one that was lost."""
        ...
