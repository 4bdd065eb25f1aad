"""A network's forward pass as a list of calls, with the places between them where it can be cut.

The forward pass is recorded by torch.fx: layers stay calls of the user's own modules, so that a part keeps their names,
their modes and their hooks. A module whose forward cannot be recorded (control flow on values) stays whole, as one
call. Python that asks for the mode, such as `F.dropout(x, training=self.training)`, is recorded in both modes, and what
differs is asked again in the part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import evaluating
from shoal.errors import SplitError, describe

OTHER_MODE = (
    "the network does other things in training than in evaluation (if self.training: ...), so it cannot be cut; use "
    "modules that know their mode, such as nn.Dropout"
)
MOST_OPAQUE = 200
"""Modules that stay whole because they cannot be recorded, at the most."""


@dataclass(slots=True, eq=False)
class Recorded:
    """The calls of one forward pass, in order."""

    model: nn.Module
    """A copy of the user's network, which the nodes refer to."""
    nodes: list[fx.Node]
    before: dict[str, list[int]] = field(default_factory=dict)
    """Module -> for each of its calls, how many nodes came before it."""
    after: dict[str, list[int]] = field(default_factory=dict)
    """Module -> for each of its calls, how many nodes there were after it."""

    modes: dict[fx.Node, list[int]] = field(default_factory=dict)
    """Calls that take the mode -> which of their arguments it is."""

    def crossing(self, border: int) -> list[fx.Node]:
        """What is computed before this place and used after it, constants left out: those can be computed again."""
        place = {node: i for i, node in enumerate(self.nodes)}
        return [
            node
            for node in self.nodes[:border]
            if any(place[user] >= border for user in node.users) and not constant(node)
        ]

    def names(self) -> list[str]:
        """Modules that are called, in order of their first call."""
        return sorted(self.before, key=lambda name: self.before[name][0])


def constant(node: fx.Node) -> bool:
    """Whether it depends on nothing but itself: no input, no weight, no random number."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.is_impure() or getattr(node.target, "__name__", "") in ("rand", "randn", "randint", "randperm", "normal"):
        return False
    return all(constant(source) for source in node.all_input_nodes)


class _Tracer(fx.Tracer):
    """Notes where each module's calls begin and end."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__()
        self.opaque = opaque
        self.before: dict[str, list[int]] = {}
        self.after: dict[str, list[int]] = {}
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        self.before.setdefault(name, []).append(len(self.graph.nodes))
        try:
            out = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        self.after.setdefault(name, []).append(len(self.graph.nodes))
        return out


def record(model: nn.Module, inputs: Sequence[Any]) -> Recorded:
    """Record `model(*inputs)`, in the modes its modules are in and in eval mode.

    Raises:
        SplitError: when the network's own forward cannot be recorded.
    """
    twin = copy.deepcopy(model)
    opaque: set[str] = set()
    tracer, nodes = _trace(twin, len(inputs), opaque)
    with evaluating(twin):
        _, still = _trace(twin, len(inputs), opaque)
    if len(nodes) != len(still):
        raise SplitError(OTHER_MODE)
    modes = {node: arguments for node, other in zip(nodes, still, strict=True) if (arguments := _by_mode(node, other))}
    return Recorded(twin, nodes, tracer.before, tracer.after, modes)


def _trace(model: nn.Module, num_inputs: int, opaque: set[str]) -> tuple[_Tracer, list[fx.Node]]:
    """One recording; a module that cannot be recorded joins `opaque`, and it is tried again."""
    while True:
        tracer = _Tracer(opaque)
        try:
            return tracer, list(tracer.trace(_called(model, num_inputs)).nodes)
        except Exception as error:
            if not tracer.failed or tracer.failed in opaque or len(opaque) >= MOST_OPAQUE:
                raise SplitError(
                    f"the network cannot be traced ({describe(error)}); it can be cut only where its forward calls "
                    "modules one after another, without branches on values"
                ) from error
            opaque.add(tracer.failed)


def _called(model: nn.Module, num_inputs: int) -> nn.Module:
    """The network with a forward of exactly so many arguments: those it has defaults for are left to it."""
    names = ", ".join(f"input_{i}" for i in range(num_inputs))
    kind = type(model)
    forward = eval(f"lambda self, {names}: forward(self, {names})", {"forward": kind.forward})
    twin = copy.copy(model)
    twin.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return twin


def _by_mode(node: fx.Node, other: fx.Node) -> list[int]:
    """Which of a call's arguments are the mode: True in training, False in evaluation."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    still, other_spec = pytree.tree_flatten((other.args, other.kwargs))
    if (node.op, str(node.target), spec) != (other.op, str(other.target), other_spec):
        raise SplitError(OTHER_MODE)
    arguments = []
    for i, (a, b) in enumerate(zip(leaves, still, strict=True)):
        if a is True and b is False:
            arguments.append(i)
        elif (a.name != b.name) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else repr(a) != repr(b):
            raise SplitError(OTHER_MODE)
    return arguments


def copy_node(graph: fx.Graph, node: fx.Node, recorded: Recorded, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in another graph, with all it needs that is in `known` or can be computed again."""

    def there(source: fx.Node) -> fx.Node:
        if source not in known:
            known[source] = copy_node(graph, source, recorded, known)
        return known[source]

    made = graph.node_copy(node, there)
    if node in recorded.modes:
        leaves, spec = pytree.tree_flatten((made.args, made.kwargs))
        with graph.inserting_before(made):
            mode = graph.create_node("get_attr", "training")
        for i in recorded.modes[node]:
            leaves[i] = mode
        made.args, made.kwargs = pytree.tree_unflatten(leaves, spec)
    known[node] = made
    return made
