"""A forward pass as plain data: its calls in order, the tensors between them, and sizes that depend on the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.errors import GraphError

ROWS = (4, 6)
"""The numbers of rows with which a network is recorded."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A size that may depend on the number of rows: `fixed + rows * numerator / denominator`."""

    fixed: int
    numerator: int = 0
    denominator: int = 1

    def at(self, rows: int) -> int:
        return self.fixed + rows * self.numerator // self.denominator

    @staticmethod
    def through(values: Sequence[int], rows: Sequence[int] = ROWS) -> Extent:
        """Return the linear function through two sizes."""
        factor = Fraction(values[1] - values[0], rows[1] - rows[0])
        fixed = values[0] - factor * rows[0]
        if fixed.denominator != 1:
            raise GraphError(
                f"a size is {values[0]} for {rows[0]} rows and {values[1]} for {rows[1]}; "
                "sizes must be a constant plus a share of the rows"
            )
        return Extent(int(fixed), factor.numerator, factor.denominator)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the forward pass, without its data."""

    name: str
    shape: tuple[Extent, ...]
    dtype: torch.dtype
    has_gradient: bool
    """Whether it depends on a trained weight, so that its gradient is needed."""

    @property
    def batched(self) -> bool:
        """Whether its first dimension is the rows of the batch, so that tensors of several workers can be joined."""
        return bool(self.shape) and self.shape[0] == Extent(0, 1)

    def bytes_at(self, rows: int) -> int:
        return math.prod(extent.at(rows) for extent in self.shape) * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one forward pass, in order."""

    model: nn.Module
    """The user's network, whose modules the nodes call."""
    nodes: list[fx.Node]
    """The calls. `meta["value"]` is the resulting tensor, if it is one; `meta["operations"]` counts those of the
    forward."""
    opaque: tuple[str, ...]
    """Modules that stay one call, since their code cannot be recorded."""
    input_structure: pytree.TreeSpec
    input_places: tuple[int, ...]
    """The indices of those leaves of the sample that are tensors."""
    constants: dict[str, Any]
    """Attributes that the nodes refer to and the network does not have."""
    before: dict[str, list[int]]
    """Module -> for each of its calls, the number of nodes before it, in the order of the first calls."""
    after: dict[str, list[int]]
    """Module -> for each of its calls, the number of nodes when it has returned."""

    def tensors_of(self, sample: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a sample, in the order in which the recorded calls take them."""
        leaves, structure = pytree.tree_flatten(as_arguments(sample))
        if structure != self.input_structure:
            raise GraphError(
                f"inputs are {_shown(structure)}; the network was recorded with {_shown(self.input_structure)}"
            )
        return tuple(leaves[i] for i in self.input_places)

    def evaluate(self, node: fx.Node, values: dict[fx.Node, Any], model: nn.Module) -> Any:
        """Compute one node from the values of those before it, with the modules of `model`."""
        if node.op == "get_attr":
            name = str(node.target)
            return self.constants[name] if name in self.constants else _attribute(model, name)
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.op == "call_module":
            return model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "output":
            return args[0]
        assert callable(node.target)
        return node.target(*args, **kwargs)


def as_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for calling a model with a sample: a tensor, a tuple of arguments, or a dict of named
    ones."""
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    if hasattr(sample, "keys") and not isinstance(sample, Tensor):
        return (), {str(name): sample[name] for name in sample.keys()}  # noqa: SIM118 - transformers' BatchEncoding
    return (sample,), {}


def tensors_in(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in the order in which the recorded calls take them."""
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def rows_of(sample: Any) -> int:
    """Return the batch size of a sample: the first dimension of its first tensor."""
    for leaf in pytree.tree_leaves(as_arguments(sample)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0]:
            return int(leaf.shape[0])
    raise GraphError("the sample has no tensor with rows; give what the model is called with, batch dimension first")


def size_for(rows: int, fixed: int, numerator: int, denominator: int) -> int:
    """Return a size that depends on the number of rows."""
    return fixed + rows * numerator // denominator


def rows_in(tensor: Tensor, dimension: int, fixed: int, numerator: int, denominator: int) -> int:
    """Return the number of rows that a tensor's size implies, the inverse of `size_for`."""
    return (tensor.shape[dimension] - fixed) * denominator // numerator


def _attribute(model: nn.Module, name: str) -> Any:
    prefix, _, field = name.rpartition(".")
    return getattr(model.get_submodule(prefix), field)


def _shown(structure: pytree.TreeSpec) -> str:
    return str(structure).replace("TreeSpec", "").replace("*", "tensor")
