"""Which nodes can be computed again on the other side of a cut, and from what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from shoal.errors import PlaceError
from shoal.graphs.calls import Calls, Extent, rows_in

NOMINAL_ROWS = 32
"""The number of rows for which sizes of tensors are compared."""
RANDOM = ("rand", "randn", "randint", "randperm", "normal", "dropout", "bernoulli", "multinomial")


def kinds_of(calls: Calls) -> dict[fx.Node, str]:
    """Return for each node: "free" (can be computed anywhere), "inputs" (from the inputs alone), or "computed"."""
    changed = {node for other in calls.nodes for node in other.meta.get("changes", ())}
    kinds: dict[fx.Node, str] = {}
    for node in calls.nodes:
        sources = {kinds[source] for source in node.all_input_nodes}
        random = any(word in str(getattr(node.target, "__name__", node.target)) for word in RANDOM)
        if node.op == "get_attr" or (node.op == "call_function" and "value" not in node.meta and not _is_tuple(node)):
            kinds[node] = "free"
        elif node.op == "call_module" or node in changed or node.meta.get("changes") or random or "computed" in sources:
            kinds[node] = "computed"
        elif node.op == "placeholder" or "inputs" in sources:
            kinds[node] = "inputs"
        else:
            kinds[node] = "free"
    return kinds


def _is_tuple(node: fx.Node) -> bool:
    """Return whether other nodes take elements of its result."""
    return (
        node.target is not rows_in
        and "operations" in node.meta
        and any(getattr(user.target, "__name__", "") == "getitem" for user in node.users)
    )


def leaves(node: fx.Node, layer: Collection[fx.Node]) -> bool:
    """Return whether nodes outside `layer` use the node, or it is part of the output."""
    return any(user not in layer or user.op == "output" or user.target is pytree.tree_unflatten for user in node.users)


def sources_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the inputs from which these nodes are computed."""
    visited: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in visited or ("value" not in node.meta and node.target is rows_in):
            continue
        visited[node] = None
        stack += [source for source in node.all_input_nodes if not is_size(source)]
    return [node for node in visited if node.op == "placeholder"]


def is_size(node: fx.Node) -> bool:
    """Return whether the node is the number of rows, or a tensor's device."""
    return node.op == "call_function" and (
        node.target is rows_in or (node.target is getattr and node.args[1] == "device")
    )


def total_bytes(nodes: Sequence[fx.Node]) -> int:
    """Return the bytes of these nodes' tensors at the nominal number of rows."""
    return sum(node.meta["value"].bytes_at(NOMINAL_ROWS) if "value" in node.meta else 0 for node in nodes)


def copy_into(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node and what it depends on into a graph, and return the copy. `known` holds the copies made so far."""
    if node not in known:
        known[node] = graph.node_copy(node, lambda source: copy_into(graph, source, known))
    return known[node]


def rows_from(graph: fx.Graph, crossing: Sequence[tuple[fx.Node, fx.Node]]) -> fx.Node:
    """Return a node that computes the number of rows from the size of a tensor that crosses the cut."""
    best: tuple[Any, ...] | None = None
    for node, entering in crossing:
        for dimension, extent in enumerate(node.meta["value"].shape):
            if extent.numerator and (best is None or extent == Extent(0, 1)):
                best = (entering, dimension, extent.fixed, extent.numerator, extent.denominator)
                if extent == Extent(0, 1):
                    return graph.call_function(rows_in, best)
    if best is None:
        raise PlaceError("no tensor that crosses has the rows of the batch; cut at another layer")
    return graph.call_function(rows_in, best)
