"""A network as an ordered list of layers, with what each one holds and what crosses a cut after it.

A layer is a call of one of torch's own modules (or of a module without submodules), with the plain torch functions that
follow it. A cut comes after a layer. Whatever was computed before it and is used after it crosses it: the activation,
residual connections, masks. What can be computed again from the inputs is, if the inputs are smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from shoal.errors import GraphError, PlaceError
from shoal.graphs.calls import ROWS, Calls, Extent, Value
from shoal.graphs.parts import Parts
from shoal.graphs.recording import record_calls


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, and its costs that do not depend on a device."""

    name: str
    """The name of the module, with "#2" for its second call."""
    kind: str
    """The module's class."""
    parameters: tuple[str, ...]
    """Names in the user's network; a tied weight belongs to the first layer that uses it."""
    parameter_bytes: int
    trained_bytes: int
    """Bytes of parameters that are trained; their gradients have the same size."""
    buffer_bytes: int
    output: tuple[Value, ...]
    """Results that a later layer uses, or that are the output."""
    activation: tuple[Value, ...]
    """All tensors that it creates; training holds them until the backward pass."""
    operations: Extent
    """Multiplications and additions of the forward pass, as a function of the rows."""
    factors: tuple[Value, ...]
    """For a linear layer, the tensors whose product is its weight's gradient: its input, and (as large as its output)
    the gradient of its output. Empty for other layers."""
    channels: int
    """For a batch norm, whose statistics cover all rows, its channels; 0 for other layers."""
    first: int
    """The index of its first call in the recorded list."""
    end: int
    """The index after its last call."""

    def output_bytes(self, rows: int = 1) -> int:
        return sum(value.bytes_at(rows) for value in self.output)

    def factor_bytes(self, rows: int = 1) -> int:
        return sum(value.bytes_at(rows) for value in self.factors)

    def activation_bytes(self, rows: int = 1) -> int:
        return sum(value.bytes_at(rows) for value in self.activation)


@dataclass(frozen=True, slots=True)
class Cut:
    """The position after the first `index` layers."""

    index: int
    name: str
    """The name of the last layer before it."""
    values: tuple[Value, ...]
    """What crosses it, in the order in which the front returns it and the back takes it."""
    problem: str = ""
    """Why the network cannot be cut here; empty if it can."""

    def bytes_up(self, rows: int) -> int:
        """Return the bytes from a worker to the server for so many rows."""
        return sum(value.bytes_at(rows) for value in self.values)

    def bytes_down(self, rows: int) -> int:
        """Return the bytes of gradients from the server to a worker."""
        return sum(value.bytes_at(rows) for value in self.values if value.has_gradient)


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """A network's layers, in the order of computation."""

    calls: Calls
    layers: tuple[Layer, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    _parts: Parts = field(repr=False)
    _uses: tuple[dict[int, str], ...] = field(repr=False)
    """For each layer, the weights and buffers that it uses: id -> name."""
    _split_networks: dict[int, tuple[nn.Module, nn.Module, nn.Module]] = field(repr=False, default_factory=dict)
    """For each cut, the network that was last cut there and its two parts."""

    @property
    def model(self) -> nn.Module:
        """The user's own network; the parts that `split` returns share its parameters."""
        return self.calls.model

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """All positions between two layers, including those where it cannot be cut."""
        return tuple(self._cut(index) for index in range(1, len(self.layers)))

    def cut_named(self, name: str) -> Cut:
        """Return the cut after a layer, or after the last layer of a module, such as a block."""
        for cut in self.cuts:
            if cut.name == name:
                return cut
        inside = [index for index, layer in enumerate(self.layers) if layer.name.startswith(f"{name}.")]
        if inside and inside[-1] < len(self.cuts):
            return self.cuts[inside[-1]]
        names = ", ".join(cut.name for cut in self.cuts[:8]) + (", ..." if len(self.cuts) > 8 else "")
        raise PlaceError(f"cut {name!r}: there is no such layer to cut after; there are {names}")

    def tensors_of(self, sample: Any) -> tuple[Tensor, ...]:
        """Return a sample's tensors in the order in which the front takes them."""
        return self.calls.tensors_of(sample)

    def split(self, index: int, model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
        """Return the first `index` layers and the others, as ordinary modules with the names of the network's
        parameters.

        `front(*graph.tensors_of(sample))` returns a tuple of tensors, `back(*tensors)` the network's output. Both share
        their parameters and modules with the network, or with `model`, another one of the same class. Repeated calls
        return the same modules.

        Examples:
            >>> graph = trace_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 4))
            >>> front, back = graph.split(2)
            >>> [name for name, _ in back.named_parameters()], back(*front(torch.zeros(5, 4))).shape
            (['2.weight', '2.bias'], torch.Size([5, 2]))
        """
        if not 1 <= index < len(self.layers):
            raise PlaceError(f"cut {index}: the network has {len(self.layers)} layers; use 1 to {len(self.layers) - 1}")
        cut, network = self.cuts[index - 1], model if model is not None else self.model
        if cut.problem:
            raise PlaceError(f"cut after {cut.name!r}: {cut.problem}")
        known = self._split_networks.get(index)
        if known is None or known[0] is not network:
            known = self._split_networks[index] = (network, *self._split(index, network))
        return known[1:]

    def _split(self, index: int, network: nn.Module) -> tuple[nn.Module, nn.Module]:
        border, parts = self.layers[index].first, self._parts
        front, back = fx.Graph(), fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        parts.copy(front, 0, border, known)
        front.output(tuple(known[node] for node in parts.crossing(border)))
        try:
            parts.copy(back, border, len(self.calls.nodes), parts.entering(back, border))
        except GraphError as error:
            raise PlaceError(str(error)) from error
        return parts.module(front, network), parts.module(back, network)

    # --- what crosses -----------------------------------------------------------------------------------------------

    def _cut(self, index: int) -> Cut:
        border, name = self.layers[index].first, self.layers[index - 1].name
        try:
            crossing = self._parts.crossing(border)
        except GraphError as error:
            return Cut(index, name, (), str(error))
        return Cut(index, name, tuple(node.meta["value"] for node in crossing), self._problem(index, crossing))

    def _problem(self, index: int, crossing: Sequence[fx.Node]) -> str:
        shared = self._shared_at(index)
        if shared:
            return f"{shared!r} is used on both sides, so it must stay in one place; cut where both uses are together"
        for node in self._parts.changed_after(self.layers[index].first).intersection(crossing):
            if any(other is not node and other.meta["storage"] == node.meta["storage"] for other in crossing):
                return f"{node.name} is changed in place after it crosses, and another tensor shares its memory"
        return ""

    def _shared_at(self, index: int) -> str | None:
        """Return the name of a weight or buffer that both sides use, or None."""
        before = {key: name for uses in self._uses[:index] for key, name in uses.items()}
        after = {key for uses in self._uses[index:] for key in uses}
        return next((name for key, name in before.items() if key in after), None)


def trace_layers(model: nn.Module, sample: Any) -> LayerGraph:
    """List a network's layers. `sample` is its input: a tensor, a tuple or a dict, batch dimension first.

    It works on tensors without data, also for a network on the meta device.

    Examples:
        >>> graph = trace_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 4))
        >>> [(layer.name, layer.kind, layer.parameter_bytes) for layer in graph.layers]
        [('0', 'Linear', 60), ('1', 'ReLU', 0), ('2', 'Linear', 32)]

    Raises:
        PlaceError: If the network cannot be traced.
    """
    _check_network(model)
    try:
        calls = record_calls(model, sample)
    except GraphError as error:
        raise PlaceError(str(error)) from error
    borders = [i for i, node in enumerate(calls.nodes) if node.op == "call_module"]
    if not borders:
        raise PlaceError("the network calls no modules, so it has no layers to place")
    weights = _Weights(model)
    layers = [
        _layer(calls, weights, first, end)
        for first, end in zip([0, *borders[1:]], [*borders[1:], len(calls.nodes)], strict=True)
    ]
    inputs = tuple(node.meta["value"] for node in calls.nodes if node.op == "placeholder")
    last = calls.nodes[-1].all_input_nodes
    last = last[0].all_input_nodes if len(last) == 1 and "value" not in last[0].meta else last
    outputs = tuple(node.meta["value"] for node in last if "value" in node.meta)
    return LayerGraph(calls, tuple(layers), inputs, outputs, Parts(calls), tuple(weights.uses))


def _check_network(model: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise PlaceError(f"model is {what}; pass the network itself, an nn.Module")


class _Weights:
    """Records which layer uses which of a network's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.first_names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.calls: dict[str, int] = {}
        self.uses: list[dict[int, str]] = []
        self._counted: set[int] = set()

    def label(self, name: str) -> str:
        """Return the name of a module's next call."""
        self.calls[name] = self.calls.get(name, 0) + 1
        return name if self.calls[name] == 1 else f"{name}#{self.calls[name]}"

    def add(self, nodes: Sequence[fx.Node]) -> list[tuple[str, Tensor]]:
        """Record what a layer uses, and return what no earlier layer uses."""
        used: dict[int, Tensor] = {}
        for node in nodes:
            tensors: list[Tensor] = []
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                tensors = [*module.parameters(), *module.buffers()]
            fetched = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
            tensors += [self.parameters[name] for name in fetched if name in self.parameters]
            used.update({id(tensor): tensor for tensor in tensors})
        self.uses.append({key: self.first_names[key] for key in used})
        fresh = {key: tensor for key, tensor in used.items() if key not in self._counted}
        self._counted |= set(fresh)
        return [(self.first_names[key], tensor) for key, tensor in fresh.items()]


def _layer(calls: Calls, weights: _Weights, first: int, end: int) -> Layer:
    nodes = calls.nodes[first:end]
    inside = set(nodes)
    own_tensors = weights.add(nodes)
    params = [(name, tensor) for name, tensor in own_tensors if isinstance(tensor, nn.Parameter)]
    computed = [node for node in nodes if "value" in node.meta and node.op not in ("placeholder", "get_attr")]
    output = [node for node in computed if leaves(node, inside)]
    fresh = {node.meta["storage"]: node.meta["value"] for node in reversed(computed)}
    operations = [node.meta["operations"] for node in nodes if "operations" in node.meta]
    call = next(node for node in nodes if node.op == "call_module")
    module = str(call.target)
    return Layer(
        name=weights.label(module),
        kind=type(weights.modules[module]).__name__,
        parameters=tuple(name for name, _ in params),
        parameter_bytes=sum(p.nbytes for _, p in params),
        trained_bytes=sum(p.nbytes for _, p in params if p.requires_grad),
        buffer_bytes=sum(t.nbytes for _, t in own_tensors) - sum(p.nbytes for _, p in params),
        output=tuple(node.meta["value"] for node in output),
        activation=tuple(fresh.values()),
        operations=Extent.through([sum(o.at(rows) for o in operations) for rows in ROWS]),
        channels=_channels(weights.modules[module]),
        factors=_factors(weights.modules[module], call, params),
        first=first,
        end=end,
    )


def leaves(node: fx.Node, layer: Collection[fx.Node]) -> bool:
    """Whether something after these nodes uses it, or it is part of the output."""
    return any(user not in layer or user.op == "output" or user.target is pytree.tree_unflatten for user in node.users)


def _channels(module: nn.Module) -> int:
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    return sum(norm.num_features for norm in norms)


def _factors(module: nn.Module, call: fx.Node, params: Sequence[tuple[str, Tensor]]) -> tuple[Value, ...]:
    if not isinstance(module, nn.Linear) or len(call.args) != 1 or len(params) != len(list(module.parameters())):
        return ()
    if not all(p.requires_grad for _, p in params):
        return ()
    (source,) = call.all_input_nodes
    return (source.meta["value"], call.meta["value"])
