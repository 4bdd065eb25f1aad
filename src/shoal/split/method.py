"""The two seams of a split: a method says what the parts are, a crew carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from shoal.split.parts import Outcome, Part, Slice, Task


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
    merge: Literal["weights", "gradients"] = "weights"
    """What outcomes hold: trained weights, averaged over the parts that own them (a block with one owner is copied); or
    the gradients of one step, averaged and followed once by the job's optimizer."""

    @abstractmethod
    def parts(self, number: int, crew: Sequence[Worker]) -> list[Part]:
        """The parts of a round, the i-th for the i-th of the crew (SIL may need fewer)."""

    @abstractmethod
    def network(self, part: Part) -> nn.Module:
        """A network of the part's own shapes; its weights are loaded from the task."""

    @abstractmethod
    def slices(self, part: Part) -> Mapping[str, Slice]:
        """For each parameter and buffer of the part's network, by name: where it lies in the whole network's state."""

    def step(self, part: Part) -> Callable[[nn.Module, Any], Any]:
        """The part's own step, (network, batch) -> loss; as in a job."""
        raise NotImplementedError

    def settled(self, number: int, model: nn.Module) -> None:
        """Called on the merged whole network before it is evaluated, such as to estimate its normalisation again."""


class Crew(Protocol):
    """Those who carry tasks out: this process, a pack, or workers elsewhere."""

    def roll(self, number: int) -> Sequence[Worker]:
        """Who is there for this round. May wait until there is somebody."""
        ...

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Carry the tasks out, the i-th by the i-th of the last roll; None for one that was lost."""
        ...
