"""The axes of every tensor of a forward pass, and the table of rules that say what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.split.subnets._axes import Axis, find, unify
from shoal.split.subnets._record import Op, Record


@dataclass(slots=True, eq=False)
class Sum:
    """A place where an axis is summed over with a parameter's weights: what reads the units."""

    axis: Axis
    tensor: str
    """The parameter."""
    dim: int
    """Its dimension that is summed over."""
    op: Op
    normalised: bool = False
    """Whether nothing but a normalisation reads the outcome, so that a factor would change nothing."""


@dataclass(slots=True, eq=False)
class Coupling:
    """The axes of every tensor of a recorded forward pass."""

    record: Record
    axes: dict[int, list[Axis]] = field(default_factory=dict)
    origin: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """Views of a parameter: its name, and for each dimension the parameter's."""
    sums: list[Sum] = field(default_factory=list)

    def of(self, tensor: Tensor) -> list[Axis]:
        """Its axes; a tensor that came from nowhere is a constant of the user's code, and stays whole."""
        if id(tensor) not in self.axes:
            self.axes[id(tensor)] = [Axis(n, "a constant of the network's code has its size") for n in tensor.shape]
        return self.axes[id(tensor)]

    def give(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        """Say what the axes of an operator's result are."""
        if id(tensor) in self.axes:  # in place, or handed through
            for old, new in zip(self.axes[id(tensor)], axes, strict=True):
                unify(old, new)
        else:
            self.axes[id(tensor)] = list(axes)

    def align(self, out: Sequence[Axis], axes: Sequence[Axis]) -> None:
        """Broadcasting: dimensions match from the last."""
        for a, b in zip(reversed(out), reversed(axes), strict=False):
            if find(a).size == find(b).size:
                unify(a, b)


Rule = Callable[[Coupling, Op], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter
