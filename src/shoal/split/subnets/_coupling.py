"""The axes of every tensor of a forward pass, and the table of rules that relate them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.split.subnets._axes import Axis, find, unify
from shoal.split.subnets._record import Op, Record


@dataclass(slots=True, eq=False)
class Sum:
    """A place where an axis is summed over with the weights of a parameter: the parameter reads the units."""

    axis: Axis
    tensor: str
    """The name of the parameter."""
    dim: int
    """The parameter's dimension that is summed over."""
    op: Op
    normalised: bool = False
    """Whether only a normalisation reads the result, so that a factor would change nothing."""


@dataclass(slots=True, eq=False)
class Coupling:
    """The axes of all tensors of a recorded forward pass."""

    record: Record
    axes: dict[int, list[Axis]] = field(default_factory=dict)
    origin: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """For views of a parameter: the parameter's name, and which of its dimensions each dimension is."""
    sums: list[Sum] = field(default_factory=list)

    def of(self, tensor: Tensor) -> list[Axis]:
        """Return a tensor's axes. A tensor that no operator made is a constant of the user's code and stays whole."""
        if id(tensor) not in self.axes:
            self.axes[id(tensor)] = [Axis(n, "a constant of the network's code has its size") for n in tensor.shape]
        return self.axes[id(tensor)]

    def give(self, tensor: Tensor, axes: Sequence[Axis]) -> None:
        """Set the axes of an operator's result."""
        if id(tensor) in self.axes:  # the operator works in place, or returns its argument
            for old, new in zip(self.axes[id(tensor)], axes, strict=True):
                unify(old, new)
        else:
            self.axes[id(tensor)] = list(axes)

    def align(self, out: Sequence[Axis], axes: Sequence[Axis]) -> None:
        """Unify axes as in broadcasting: dimensions match from the last."""
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
