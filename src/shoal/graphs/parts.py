"""Split a recorded forward pass into parts: which tensors cross a border between two calls, and the calls between two
borders as a module.

A border is the number of calls before it. What needs neither inputs nor weights, such as a constant, is computed again
on the other side of a border. A tensor that depends on the inputs alone is too, if the inputs are smaller than it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from shoal.errors import GraphError
from shoal.graphs.calls import Calls, Extent, rows_in

NOMINAL_ROWS = 32
"""Sizes of tensors are compared for a batch of this many rows."""
RANDOM = ("rand", "randn", "randint", "randperm", "normal", "dropout", "bernoulli", "multinomial")


class Parts:
    """The parts of a recorded forward pass."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._kinds = _kinds_of(calls)
        index_of = {node: i for i, node in enumerate(calls.nodes)}
        self._last_use = {node: max((index_of[user] for user in node.users), default=-1) for node in calls.nodes}

    def crossing(self, border: int) -> list[fx.Node]:
        """Return the tensors that cross a border, in the order of their calls, or raise a GraphError if something
        else crosses."""
        used = [
            node for node in self.calls.nodes[:border] if self._kinds[node] != "free" and self._last_use[node] >= border
        ]
        cheap = [node for node in used if self._kinds[node] == "inputs"]
        sources = _sources_of(cheap)
        if _total_bytes(sources) <= _total_bytes(cheap):
            used = [node for node in used if node not in cheap]
            used = [*sources, *(node for node in used if node not in sources)]
        for node in used:
            if "value" not in node.meta:
                raise GraphError(f"{node.name} crosses it, which is not a tensor; cut at another layer")
        return used

    def changed_after(self, border: int) -> set[fx.Node]:
        """Return the calls whose results are changed in place after a border."""
        return {changed for node in self.calls.nodes[border:] for changed in node.meta.get("changes", ())}

    def entering(self, graph: fx.Graph, border: int) -> dict[fx.Node, fx.Node]:
        """Give `graph` an input for each tensor that crosses, and return the nodes that stand for the calls before
        the border."""
        crossing = self.crossing(border)
        known = {node: graph.placeholder(node.name) for node in crossing}
        pairs = list(zip(crossing, list(known.values()), strict=True))
        for node in self.calls.nodes[:border]:
            if node.op == "call_function" and node.target is rows_in:
                known[node] = _rows_from(graph, pairs)
            elif _is_size(node):
                known[node] = graph.call_function(getattr, (pairs[0][1], "device"))
        changed = self.changed_after(border)
        for node, entering in pairs:
            if node in changed:  # autograd forbids changing a leaf in place
                known[node] = graph.call_method("clone", (entering,))
        return known

    def copy(self, graph: fx.Graph, start: int, end: int, known: dict[fx.Node, fx.Node]) -> None:
        """Copy the calls between two borders, with everything that they need and that can be computed again."""
        for node in self.calls.nodes[start:end]:
            _copy_into(graph, node, known)

    def module(self, graph: fx.Graph, network: nn.Module) -> nn.Module:
        """Return a module that makes these calls, with the parameters and modules of `network` under their own
        names."""
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op in ("get_attr", "call_function") and "changes" not in node.meta:
                graph.erase_node(node)
        root = copy.copy(network)
        root.__dict__.update(self.calls.constants)
        part = fx.GraphModule(root, graph, type(network).__name__)
        for name in self.calls.constants:
            if name in part._buffers:
                part._non_persistent_buffers_set.add(name)
        for prefix, module in part.named_modules():
            original = network.get_submodule(prefix) if prefix and hasattr(network, prefix.split(".")[0]) else network
            module._non_persistent_buffers_set |= original._non_persistent_buffers_set & set(module._buffers)
        return part


def _kinds_of(calls: Calls) -> dict[fx.Node, str]:
    """Return for each node "free" (computable anywhere), "inputs" (computable from the inputs alone), or "computed"."""
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


def _sources_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the inputs from which these nodes are computed."""
    known: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in known or ("value" not in node.meta and node.target is rows_in):
            continue
        known[node] = None
        stack += [source for source in node.all_input_nodes if not _is_size(source)]
    return [node for node in known if node.op == "placeholder"]


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target is rows_in or (node.target is getattr and node.args[1] == "device")
    )


def _total_bytes(nodes: Sequence[fx.Node]) -> int:
    return sum(node.meta["value"].bytes_at(NOMINAL_ROWS) if "value" in node.meta else 0 for node in nodes)


def _copy_into(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in known:
        known[node] = graph.node_copy(node, lambda source: _copy_into(graph, source, known))
    return known[node]


def _rows_from(graph: fx.Graph, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> fx.Node:
    """Return the number of rows, from the size of a tensor that crosses."""
    best: tuple[Any, ...] | None = None
    for node, entering in pairs:
        for dimension, extent in enumerate(node.meta["value"].shape):
            if extent.numerator and (best is None or extent == Extent(0, 1)):
                best = (entering, dimension, extent.fixed, extent.numerator, extent.denominator)
                if extent == Extent(0, 1):
                    return graph.call_function(rows_in, best)
    if best is None:
        raise GraphError("no tensor that crosses has the rows of the batch; cut at another layer")
    return graph.call_function(rows_in, best)
