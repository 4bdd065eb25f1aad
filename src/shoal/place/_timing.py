"""Seconds of a network's layers on a device, within a limit of time whatever the size of the network.

A pass runs the layers one after another, with autograd cut between them. At sizes for which there is no time only the
layers that are quick enough run, on the tensors of a few rows, repeated; the seconds of others grow with the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.graphs.calls import as_arguments
from shoal.place.graph import Layer, LayerGraph, leaves

REPEATS = 5
FEW = 2
"""Rows with which a network is tried first; batch norm needs two."""
PASSES = 3
"""How many times a size runs at least: once unmeasured, layer by layer, and as a whole."""
Times = tuple[list[float], list[float]]
"""Seconds of each layer's forward and backward pass."""


def repeat_rows(tensor: Tensor, count: int) -> Tensor:
    """Repeat the tensor's rows until there are `count`."""
    if not tensor.dim():
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % len(tensor)]


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of every layer at a few batch sizes."""

    rows: tuple[int, ...]
    times: tuple[Times, ...]


def time_layers(
    timer: LayerTimer, sizes: Sequence[int], budget: float, beside: Callable[[Any], AbstractContextManager[Any]]
) -> Measured:
    """Time all layers at these batch sizes in about `budget` seconds.

    Where even the smallest size takes too long, a smaller one takes its place, of `FEW` rows or more.

    Args:
        beside: A context inside which a size is timed; it is called with the batch.
    """
    until = time.perf_counter() + budget
    each = budget / len(sizes)
    pass_seconds = timer.try_out() / FEW  # of a row
    first = min(sizes[0], max(FEW, int(each / (PASSES * pass_seconds))))
    rows, times = [first, *sizes[1:]], list[Times]()
    for number, count in enumerate(rows):
        share = max(0.0, until - time.perf_counter()) / (len(rows) - number)
        expected = timer.expected(times[-1], rows[number - 1], count) if times else []
        if PASSES * sum(expected) <= share:
            batch = timer.batch(count)
            with beside(batch):
                times.append(timer.run(batch, share))
            continue
        most = max(share, each / 2)
        chosen = timer.quick(expected, most / 2)
        with beside(timer.batch(FEW)):
            times.append(timer.extend(times[-1], rows[number - 1], count, chosen, most))
    return Measured(tuple(rows), tuple(times))


class LayerTimer:
    """Times a network layer by layer."""

    def __init__(self, graph: LayerGraph, model: nn.Module, sample: Any, device: torch.device) -> None:
        self.graph, self.model, self.sample, self.device = graph, model, sample, device
        self._scale = 1.0, 1.0
        """How many times longer the whole network's passes take than those of its layers together."""

    def batch(self, rows: int) -> Any:
        """Return the sample's rows on the device, repeated."""
        return pytree.tree_map_only(
            Tensor, lambda tensor: repeat_rows(tensor, rows).to(self.device), as_arguments(self.sample)
        )

    def try_out(self) -> float:
        """Return the seconds of the whole network on a few rows, after a pass that is not measured."""
        batch = self.batch(FEW)
        self.whole(batch)
        return max(1e-9, sum(self.whole(batch)))

    def run(self, batch: Any, budget: float) -> Times:
        """Return median seconds of each layer's forward and backward pass, scaled to those of the whole network."""
        until = time.perf_counter() + budget
        passes: list[Times] = []
        wholes: list[tuple[float, float]] = []
        self._one_pass(batch)  # warm-up: kernels are chosen and memory is allocated
        while len(passes) < REPEATS and (not passes or time.perf_counter() < until):
            passes.append(self._one_pass(batch))
            wholes.append(self.whole(batch))
        forward = [median(one[0][i] for one in passes) for i in range(len(self.graph.layers))]
        backward = [median(one[1][i] for one in passes) for i in range(len(self.graph.layers))]
        scale_forward = median(whole[0] for whole in wholes) / max(sum(forward), 1e-9)
        scale_backward = median(whole[1] for whole in wholes) / max(sum(backward), 1e-9)
        self._scale = scale_forward, scale_backward
        return [scale_forward * t for t in forward], [scale_backward * t for t in backward]

    def expected(self, earlier: Times, rows: int, count: int) -> list[float]:
        """Return about how long each layer's two passes take at `count` rows, given the seconds at `rows`.

        They grow with the rows, but not where reading the weights takes the time: then with the operations.
        """
        seconds, layers = [sum(both) for both in zip(*earlier, strict=True)], self.graph.layers
        per_operation = sum(seconds) / max(1, sum(layer.operations.at(rows) for layer in layers))
        result = []
        for layer, t in zip(layers, seconds, strict=True):
            more = per_operation * (layer.operations.at(count) - layer.operations.at(rows))
            result.append(min(t * count / rows, t + more) if layer.trained_bytes else t * count / rows)
        return result

    def quick(self, seconds: Sequence[float], most: float) -> set[int]:
        """Return layers that take no more than `most` seconds together: those with the most weights first."""
        chosen, total = set[int](), 0.0
        layers = self.graph.layers
        for index in sorted(range(len(layers)), key=lambda i: (-layers[i].trained_bytes, seconds[i])):
            if total + seconds[index] <= most:
                total += seconds[index]
                chosen.add(index)
        return chosen

    def extend(self, earlier: Times, rows: int, count: int, chosen: set[int], most: float) -> Times:
        """Return the seconds at `count` rows, given those at `rows`: layers that are not `chosen` are not run.

        The first pass is not measured, unless it takes more than half of `most` seconds.
        """
        forward, backward = ([t * count / rows for t in seconds] for seconds in earlier)
        given = self._given(chosen, count)
        if given is not None:
            batch = self.batch(count)
            began = time.perf_counter()
            passes = self._one_pass(batch, given, chosen)
            if time.perf_counter() - began <= most / 2:
                passes = self._one_pass(batch, given, chosen)
            for i in chosen:
                forward[i], backward[i] = self._scale[0] * passes[0][i], self._scale[1] * passes[1][i]
        return forward, backward

    def _given(self, chosen: set[int], count: int) -> dict[fx.Node, Any] | None:
        """Return what the chosen layers take from the others, at `count` rows; None if that cannot be made of a few
        rows."""
        nodes, layers = self.graph.calls.nodes, self.graph.layers
        skipped = {node for i, layer in enumerate(layers) if i not in chosen for node in nodes[layer.first : layer.end]}
        taken = {source for node in nodes if node not in skipped for source in node.all_input_nodes} & skipped
        values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            self._run_through(self.batch(FEW), values)
        given = {node: _stretched(node, values[node], count) for node in taken if node.op != "placeholder"}
        return None if any(value is None for value in given.values()) else given

    def _run_through(self, batch: Any, values: dict[fx.Node, Any]) -> None:
        inputs = _tensors(batch)
        for node in self.graph.calls.nodes:
            values[node] = next(inputs) if node.op == "placeholder" else self._evaluate(node, values)

    def _clock(self) -> float:
        return clock(self.device)

    def whole(self, batch: Any) -> tuple[float, float]:
        """Return the seconds of the whole network's forward and backward pass."""
        args, kwargs = batch
        self.model.zero_grad(set_to_none=True)
        began = self._clock()
        out = self.model(*args, **kwargs)
        between = self._clock()
        ends = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        return between - began, self._clock() - between

    def _one_pass(
        self, batch: Any, given: Mapping[fx.Node, Any] | None = None, chosen: Collection[int] | None = None
    ) -> Times:
        """Run the layers, or those that are chosen, on a batch and on what they take from the others."""
        values: dict[fx.Node, Any] = dict(given or {})
        inputs = _tensors(batch)
        forward, backward = list[float](), list[float]()
        for number, layer in enumerate(self.graph.layers):
            nodes = self.graph.calls.nodes[layer.first : layer.end]
            if chosen is not None and number not in chosen:
                values |= {node: next(inputs) for node in nodes if node.op == "placeholder"}
                forward.append(0.0)
                backward.append(0.0)
                continue
            entering = self._detach(values, nodes)
            began = self._clock()
            for node in nodes:
                values[node] = next(inputs) if node.op == "placeholder" else self._evaluate(node, values)
            forward.append(self._clock() - began)
            backward.append(self._backward(layer, nodes, values, entering))
        return forward, backward

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        return self.graph.calls.evaluate(node, values, self.model)

    def _detach(self, values: dict[fx.Node, Any], nodes: Sequence[fx.Node]) -> list[Tensor]:
        """Cut autograd before a layer, and return the tensors for which it computes gradients."""
        entering, inside = [], set(nodes)
        changed = {source for node in nodes for source in node.meta.get("changes", ())}
        for source in {source: None for node in nodes for source in node.all_input_nodes if source not in inside}:
            value = source.meta.get("value")
            if value is not None and value.has_gradient and source.op != "get_attr":
                leaf = values[source].detach().requires_grad_()
                values[source] = leaf.clone() if source in changed else leaf
                entering.append(leaf)
        return entering

    def _backward(
        self, layer: Layer, nodes: Sequence[fx.Node], values: dict[fx.Node, Any], entering: list[Tensor]
    ) -> float:
        inside = set(nodes)
        leaving = [
            values[node]
            for node in nodes
            if isinstance(values[node], Tensor)
            and values[node].requires_grad
            and node.op != "get_attr"
            and leaves(node, inside)
        ]
        trained = [p for p in (self.model.get_parameter(name) for name in layer.parameters) if p.requires_grad]
        inputs = [*entering, *trained]
        if not leaving or not inputs:
            return 0.0
        ones = [torch.ones_like(x) for x in leaving]
        began = self._clock()
        torch.autograd.grad(leaving, inputs, ones, allow_unused=True)
        return self._clock() - began


def _tensors(batch: Any) -> Iterator[Tensor]:
    return iter([leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)])


def _stretched(node: fx.Node, value: Any, count: int) -> Any:
    """Return a tensor of a few rows as it is at `count` rows, of repeated rows; None if only its layer can make it."""
    if node.op == "get_attr":
        return value
    about = node.meta.get("value")
    if about is None or not isinstance(value, Tensor):
        return None
    shape = tuple(extent.at(count) for extent in about.shape)
    if shape[1:] != tuple(value.shape[1:]):
        return None
    return value if shape == tuple(value.shape) else repeat_rows(value, shape[0])
