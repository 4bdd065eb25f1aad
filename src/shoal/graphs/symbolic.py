"""A network's forward pass as a list of calls, with the places between them where it can be cut.

The forward pass is recorded by torch.fx: layers stay calls of the user's own modules, so that a part keeps their names,
their modes and their hooks. A module whose forward cannot be recorded (control flow on values) stays whole, as one
call. Where the user's own code asks a module in training for its mode, as in `F.dropout(x, training=self.training)`,
the question is recorded, and the part is asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

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
    """Whether it depends on nothing but itself: no input, no weight, no random number. Each part has its own mode."""
    if is_mode(node):
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    if node.is_impure() or getattr(node.target, "__name__", "") in ("rand", "randn", "randint", "randperm", "normal"):
        return False
    return all(constant(source) for source in node.all_input_nodes)


def is_mode(node: fx.Node) -> bool:
    """Whether this asks if the network is in training."""
    return node.op == "get_attr" and node.target == "training"


class _Tracer(fx.Tracer):
    """Notes where each module's calls begin and end."""

    mode: fx.Proxy

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
            with nullcontext() if self.is_leaf_module(m, name) else self.recording_mode(m):
                out = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        self.after.setdefault(name, []).append(len(self.graph.nodes))
        return out

    @contextmanager
    def recording_mode(self, module: nn.Module) -> Iterator[None]:
        """Inside: a module that is in training answers the question for its mode by the recorded one."""
        before = module.training
        module.__dict__["training"] = self.mode if before else False
        try:
            yield
        finally:
            module.__dict__["training"] = before

    def to_bool(self, obj: fx.Proxy) -> bool:
        if is_mode(obj.node):
            raise SplitError(OTHER_MODE)
        return super().to_bool(obj)


def record(model: nn.Module, inputs: Sequence[Any]) -> Recorded:
    """Record `model(*inputs)`; a module that cannot be recorded stays whole, and it is tried again.

    Raises:
        SplitError: when the network's own forward cannot be recorded.
    """
    twin = copy.deepcopy(model)
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            nodes = list(tracer.trace(_called(twin, len(inputs), tracer)).nodes)
            return Recorded(twin, nodes, tracer.before, tracer.after)
        except Exception as error:
            if not tracer.failed or tracer.failed in opaque or len(opaque) >= MOST_OPAQUE:
                raise SplitError(
                    f"the network cannot be traced ({describe(error)}); it can be cut only where its forward calls "
                    "modules one after another, without branches on values"
                ) from error
            opaque.add(tracer.failed)


def _called(model: nn.Module, num_inputs: int, tracer: _Tracer) -> nn.Module:
    """The network with a forward of exactly so many arguments: those it has defaults for are left to it."""
    kind, twin = type(model), copy.copy(model)

    def run(network: nn.Module, *inputs: Any) -> Any:
        tracer.mode = tracer.create_proxy("get_attr", "training", (), {})
        with tracer.recording_mode(network):
            return kind.forward(network, *inputs)

    names = ", ".join(f"input_{i}" for i in range(num_inputs))
    forward = eval(f"lambda self, {names}: run(self, {names})", {"run": run})
    twin.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return twin


def copy_node(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in another graph, with all it needs that is in `known` or can be computed again."""
    if node not in known:
        known[node] = graph.node_copy(node, lambda source: copy_node(graph, source, known))
    return known[node]
