"""Join two recordings of a forward pass, with two numbers of rows, into one list of calls for any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import GraphError
from shoal.graphs.calls import Extent, Value, rows_in, size_for

OTHER_ROWS = "the network makes other calls for another number of rows, so its calls cannot be listed"


def join(model: nn.Module, recordings: Sequence[fx.Graph]) -> tuple[list[fx.Node], list[int]]:
    """Return one list of calls that holds for any number of rows, and the index in it of each recorded call."""
    first, second = (list(recording.nodes) for recording in recordings)
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    if len(first) != len(second):
        raise GraphError(OTHER_ROWS)
    arguments = _ArgumentJoiner(graph, known)
    for one, other in zip(first, second, strict=True):
        if (one.op, one.target) != (other.op, other.target):
            raise GraphError(OTHER_ROWS)
        args, kwargs = arguments.arguments((one.args, one.kwargs), (other.args, other.kwargs))
        node = graph.create_node(one.op, one.target, args, kwargs, one.name)
        known[one] = node
        node.meta = _meta(one, other, known)
        if one.op == "placeholder":
            arguments.add_source(node)
    nodes = list(graph.nodes)
    _mark_gradients(model, nodes)
    index_of = {node: i for i, node in enumerate(nodes)}
    return nodes, [index_of[known[node]] for node in first]


class _ArgumentJoiner:
    """Joins the arguments of two recordings: numbers that differ depend on the rows, devices on the inputs."""

    def __init__(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> None:
        self.graph, self.known = graph, known
        self.rows: fx.Node | None = None
        self.device: fx.Node | None = None

    def add_source(self, node: fx.Node) -> None:
        """Add an input; the first input whose first dimension is the rows provides their number."""
        value = node.meta["value"]
        if self.rows is None and value.batched:
            self.rows = self.graph.call_function(rows_in, (node, 0, 0, 1, 1))
        if self.device is None:
            self.device = self.graph.call_function(getattr, (node, "device"))

    def arguments(self, one: Any, other: Any) -> Any:
        """Return the joined arguments, or raise a GraphError if the recordings differ otherwise."""
        if isinstance(one, fx.Node):
            if not isinstance(other, fx.Node) or one.name != other.name:
                raise GraphError(OTHER_ROWS)
            return self.known[one]
        if type(one) is not type(other):
            raise GraphError(OTHER_ROWS)
        if isinstance(one, (tuple, list)):
            if len(one) != len(other):
                raise GraphError(OTHER_ROWS)
            return type(one)([self.arguments(a, b) for a, b in zip(one, other, strict=True)])
        if isinstance(one, dict):
            return {name: self.arguments(one[name], other[name]) for name in one}
        if isinstance(one, slice):
            parts = zip((one.start, one.stop, one.step), (other.start, other.stop, other.step), strict=True)
            return slice(*(self.arguments(a, b) for a, b in parts))
        if isinstance(one, torch.device) and self.device is not None:
            return self.device
        if isinstance(one, int) and not isinstance(one, bool) and one != other:
            extent = Extent.through((one, other))
            size_arguments = (self.rows, extent.fixed, extent.numerator, extent.denominator)
            return self.graph.call_function(size_for, size_arguments)
        if isinstance(one, float | bool) and one != other:
            raise GraphError(OTHER_ROWS)
        return one


def _meta(one: fx.Node, other: fx.Node, known: dict[fx.Node, fx.Node]) -> dict[str, Any]:
    """Return the metadata of a joined call, with sizes that depend on the rows."""
    meta: dict[str, Any] = {
        "operations": Extent.through((one.meta.get("operations", 0), other.meta.get("operations", 0)))
    }
    meta["changes"] = [known[node] for node in one.meta.get("changes", ())]
    if "tensor" in one.meta:
        (shape, dtype), (larger, _) = one.meta["tensor"], other.meta["tensor"]
        if len(shape) != len(larger):
            raise GraphError(OTHER_ROWS)
        extents = tuple(Extent.through(sizes) for sizes in zip(shape, larger, strict=True))
        meta["value"] = Value(one.name, extents, dtype, False)
        meta["storage"] = one.meta["storage"]
    return meta


def _mark_gradients(model: nn.Module, nodes: Sequence[fx.Node]) -> None:
    """Mark the floating-point tensors that depend on a trained weight, which have a gradient."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    modules = dict(model.named_modules())
    with_gradient: set[fx.Node] = set()
    for node in nodes:
        weights = node.op == "get_attr" and node.target in trained
        if node.op == "call_module":
            weights = any(p.requires_grad for p in modules[str(node.target)].parameters())
        detached = node.op == "call_method" and node.target == "detach"
        if not detached and (weights or any(source in with_gradient for source in node.all_input_nodes)):
            with_gradient.add(node)
        value = node.meta.get("value")
        if value is not None and node in with_gradient and value.dtype.is_floating_point:
            node.meta["value"] = replace(value, has_gradient=True)
