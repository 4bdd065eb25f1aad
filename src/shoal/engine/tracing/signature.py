"""Find out which steps are the same computation, and which numbers in it differ between members.

Two traces can be stacked if their graphs are equal except for (a) floats, and integers in arguments that take a scalar
or a tensor, and (b) the contents of constant tensors. These become one value per member. If anything else differs
(shapes, other integers, flags, operators), the jobs are not stacked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.engine.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class PerMember:
    """The values of a number that differs between members, in the members' order."""

    values: tuple[float | int | bool, ...]


Path = tuple[int, str | int, tuple[Any, ...]]
"""The location of a number in a graph: the node's index, its argument, and the path inside that argument."""


def skeleton(trace: Trace) -> Hashable:
    """Return the graph as a hashable value, without its liftable numbers and the contents of its constants."""
    if trace.skeleton is None:
        trace.skeleton = _skeleton(trace)
    return trace.skeleton


def _skeleton(trace: Trace) -> Hashable:
    position = {node: index for index, node in enumerate(trace.nodes)}
    rows = []
    for node in trace.nodes:
        arguments = tuple(_frozen(value, slot, position) for slot, value in arguments_of(node))
        target = node.target if node.op == "call_function" else node.op
        rows.append((target, arguments, _meta(node)))
    return (tuple(rows), tuple(trace.params), tuple(trace.buffers), repr(trace.batch_spec), repr(trace.out_spec))


def numbers(trace: Trace) -> dict[Path, float | int | bool]:
    """Return every liftable number of the graph by its location."""
    if trace.numbers is None:
        trace.numbers = _numbers(trace)
    return trace.numbers


def _numbers(trace: Trace) -> dict[Path, float | int | bool]:
    table: dict[Path, float | int | bool] = {}
    for index, node in enumerate(trace.nodes):
        for slot, value in arguments_of(node):
            for path, leaf in _leaves(value):
                if liftable(leaf, slot.type):
                    table[(index, slot.key, path)] = leaf
    return table


def lift(traces: Sequence[Trace]) -> tuple[dict[Path, PerMember], dict[int, list[Tensor]]]:
    """Return the numbers, by location, and constants, by node index, that differ among traces of the same skeleton."""
    if all(other is traces[0] for other in traces):
        return {}, {}
    tables = [numbers(trace) for trace in traces]
    scalars = {
        path: PerMember(tuple(table[path] for table in tables))
        for path in tables[0]
        if any(repr(table[path]) != repr(tables[0][path]) for table in tables)
    }
    constants = {}
    for index, node in enumerate(traces[0].nodes):
        if node.op == "get_attr":
            values = [trace.constant(trace.nodes[index]) for trace in traces]
            if any(not torch.equal(value, values[0]) for value in values[1:] if value is not values[0]):
                constants[index] = values
    return scalars, constants


def difference(a: Trace, b: Trace) -> str:
    """Return in one line why two traces are not the same computation."""
    if a.params != b.params or a.buffers != b.buffers:
        names = sorted(set(a.params + a.buffers) ^ set(b.params + b.buffers))
        return f"parameters have other names ({', '.join(names[:3]) or 'another order'})"
    position_a = {node: i for i, node in enumerate(a.nodes)}
    position_b = {node: i for i, node in enumerate(b.nodes)}
    names = [*a.params, *a.buffers]
    for index, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=False)):
        where = names[index] if index < len(names) else ("the batch" if x.op == "placeholder" else str(x.target))
        if x.op != y.op or (x.op == "call_function" and x.target != y.target):
            return f"another operator ({x.target} against {y.target})"
        if _meta(x) != _meta(y):
            return f"other shapes or dtypes at {where} ({_describe_value(x)} against {_describe_value(y)})"
        for (slot, value), (_, other) in zip(arguments_of(x), arguments_of(y), strict=False):
            if _frozen(value, slot, position_a) != _frozen(other, slot, position_b):
                return f"{where} takes {slot.key}={value} against {other}"
    return "the graphs differ in length" if len(a.nodes) != len(b.nodes) else "inputs or outputs are folded differently"


@dataclass(frozen=True, slots=True)
class _Slot:
    key: str | int
    type: str


def arguments_of(node: Node) -> Iterator[tuple[_Slot, Any]]:
    """Yield all arguments of a call in the schema's order, including defaults, which a trace leaves out."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from ((_Slot(place, ""), value) for place, value in enumerate(node.args))
        yield from ((_Slot(name, ""), value) for name, value in node.kwargs.items())
        return
    for place, argument in enumerate(schema.arguments):
        value = argument.default_value if argument.has_default_value() else None
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, value)
        yield _Slot(argument.name, str(argument.type)), value


def liftable(value: Any, slot_type: str) -> bool:
    """Return whether a value is a number that may differ between members.

    Floats may; integers only where the operator's schema takes a scalar or a tensor.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float):
        return True
    return slot_type in ("Tensor", "Optional[Tensor]", "number", "Optional[number]", "Scalar")


def _leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Node):
        return
    for path, leaf in pytree.tree_leaves_with_path(value, is_leaf=lambda v: isinstance(v, Node)):
        if not isinstance(leaf, Node):
            yield tuple(path), leaf


def _frozen(value: Any, slot: _Slot, position: dict[Node, int]) -> Hashable:
    if isinstance(value, Node):
        return ("node", position[value])
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, slot, position) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item, slot, position)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(_frozen(v, slot, position) for v in (value.start, value.stop, value.step)))
    if liftable(value, slot.type):
        return "number"
    return (type(value), str(value))


def _meta(node: Node) -> Hashable:
    return tuple(
        (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else str(value)
        for value in pytree.tree_leaves(node.meta.get("val"))
    )


def _describe_value(node: Node) -> str:
    """Return the shapes and dtypes of a node's value as text, such as "[32, 16] float32"."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return ", ".join(
        f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" if isinstance(leaf, Tensor) else str(leaf)
        for leaf in leaves
    )
