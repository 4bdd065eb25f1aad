"""The two seams of a split: a method says what the parts are, a crew carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from torch import nn

from shoal.jobs.job import Job
from shoal.split.core.parts import Outcome, Part, Slice, Task, Tensors


@dataclass(frozen=True, slots=True)
class Worker:
    """Somebody who can take a part in the coming round."""

    number: int
    """Its own, for as long as it is there."""
    speed: float = 1.0
    """Steps of one and the same part in a second, relative to the others; 1.0 until it has been measured."""
    shard: int | None = None
    """The one shard of the rows that it holds, where data never moves; None: it can read all."""


class Method(ABC):
    """One way to split a job: pure decisions, from the seed and the round's number.

    Every process of a run makes its own from the same job and the same settings, so only numbers and tensors travel.
    """

    name: str
    rounds: int
    """How many rounds the job takes."""
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

    @abstractmethod
    def parts(self, number: int, executor: Sequence[Worker]) -> list[Part]:
        """The parts of a round, the i-th for the i-th of the crew (SIL may need fewer)."""

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

    def settled(self, number: int, model: nn.Module) -> None:  # noqa: B027  # most have nothing to do
        """Called on the merged whole network before it is evaluated, such as to estimate its normalisation again."""

    # --- what only some ways need -----------------------------------------------------------------------------------

    def companions(self) -> Tensors:
        """Tensors that train beside the network's own and are kept in the same state, such as local heads: by names
        that no tensor of the network has. Parameters and buffers alike; the whole network is built without them."""
        return {}

    def job(self, job: Job, part: Part) -> Job:
        """The job by whose optimizer and settings the part trains."""
        return job

    def extras(self, number: int, part: Part) -> Tensors:
        """What goes along with the part's task, such as another part's activations. Asked where the state is."""
        return {}

    def batches(self, task: Task, read: Iterator[Any]) -> Iterator[Any]:
        """A task's batches, as its step takes them, from those that were read. Asked where the part is trained."""
        return read

    def yields(self, task: Task, network: nn.Module, read: Callable[[], Iterator[Any]]) -> Tensors:
        """The extras of the outcome, from the trained network; `read()` gives the batches again that it had."""
        return {}

    def see(self, number: int, parts: Sequence[Part], outcomes: Sequence[Outcome | None]) -> None:  # noqa: B027
        """Called where the state is with what came of a round, before it is evaluated."""

    def stored(self) -> Tensors:
        """What `see` has kept that later rounds need: written into every checkpoint."""
        return {}

    def restore(self, tensors: Tensors) -> None:  # noqa: B027
        """Be as when `stored` gave these."""


class TaskExecutor(Protocol):
    """Those who carry tasks out: this process, a pack, or workers elsewhere."""

    def roll(self, number: int) -> Sequence[Worker]:
        """Who is there for this round. May wait until there is somebody."""
        ...

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Carry the tasks out, the i-th by the i-th of the last roll; None for one that was lost."""
        ...
