"""How long each layer of a network takes on a device: measured layer by layer, or estimated from its operations.

Measured: the layers run one after another on the sample's rows, repeated to a few batch sizes; autograd is cut between
layers, so that each one's backward pass has a time of its own. The sum is then scaled to the time of the whole
network's forward and backward pass. On a CPU with one thread, its own seconds count, so that other processes of the
machine do not.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.engine.runtime.processes import Child
from shoal.errors import PlaceError, describe
from shoal.graphs.calls import as_arguments
from shoal.place.graph import Layer, LayerGraph, leaves

FORMAT = 1
REPEATS = 5
BUDGET = 20.0
"""Seconds for a profile; where one pass takes long, it is repeated less often."""
UPDATE_BYTES = 16_000_000
DEFAULT_SPEED = 1e12
"""Operations a second of a device that nothing is known about."""
OPERATIONS_PER_BYTE = 100
"""That a device computes in the time of an update of one byte of a parameter, where that was not measured."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, at each of the profile's numbers of rows."""

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The layers of one network on one kind of device."""

    device: str
    measured: bool
    rows: tuple[int, ...]
    """Batch sizes that the times are for."""
    layers: tuple[LayerTimes, ...]
    update_seconds: float = OPERATIONS_PER_BYTE / DEFAULT_SPEED
    """Of an optimizer's step, for each byte of a parameter."""
    threads: int | None = None

    def forward(self, layer: int, rows: float) -> float:
        """Seconds of a layer's forward pass; between and beyond the measured numbers of rows on a line."""
        return _line(self.rows, self.layers[layer].forward, rows)

    def backward(self, layer: int, rows: float) -> float:
        """Seconds of a layer's backward pass, as `forward`."""
        return _line(self.rows, self.layers[layer].backward, rows)

    def check(self, graph: LayerGraph) -> None:
        """PlaceError where it is of another network."""
        names, known = [layer.name for layer in graph.layers], [layer.name for layer in self.layers]
        if names != known:
            other = next((a for a, b in zip(names, known, strict=False) if a != b), f"{len(names)} layers")
            raise PlaceError(f"the profile is of another network (here: {other!r}); profile this one")

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        layers = [{"name": x.name, "forward": list(x.forward), "backward": list(x.backward)} for x in self.layers]
        return {"format": FORMAT, **asdict(self), "rows": list(self.rows), "layers": layers}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Profile:
        """From `to_dict`, also after a way through JSON."""
        try:
            if data["format"] != FORMAT:
                raise PlaceError(
                    f"the profile has format {data['format']!r}; this version reads {FORMAT}: profile again"
                )
            values = {name: value for name, value in data.items() if name != "format"}
            values["rows"] = tuple(values["rows"])
            values["layers"] = tuple(
                LayerTimes(layer["name"], tuple(layer["forward"]), tuple(layer["backward"]))
                for layer in values["layers"]
            )
            return Profile(**values)
        except (KeyError, TypeError) as error:
            raise PlaceError(f"this is no profile ({describe(error)}); write one with Profile.save") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlaceError(f"{str(path)!r} cannot be read as a profile ({error})") from None
        return Profile.from_dict(data if isinstance(data, dict) else {})


def _line(rows: Sequence[int], seconds: Sequence[float], wanted: float) -> float:
    """The value on the line through the two nearest measurements; never less than nothing."""
    if len(rows) == 1:
        return seconds[0] * wanted / rows[0]
    right = next((i for i in range(1, len(rows)) if wanted <= rows[i]), len(rows) - 1)
    a, b = rows[right - 1], rows[right]
    slope = (seconds[right] - seconds[right - 1]) / (b - a)
    return max(0.0, seconds[right - 1] + max(0.0, slope) * (wanted - a), min(seconds) * min(1.0, wanted / rows[0]))


def estimate_profile(graph: LayerGraph, *, operations_per_second: float = DEFAULT_SPEED) -> Profile:
    """Times from operations alone, for a device of that speed: nothing runs, and the network may be on meta."""
    layers = tuple(
        LayerTimes(
            layer.name,
            (layer.operations.at(1) / operations_per_second,),
            (2 * layer.operations.at(1) / operations_per_second,),
        )
        for layer in graph.layers
    )
    return Profile(
        device=f"{operations_per_second:.3g} operations/s",
        measured=False,
        rows=(1,),
        layers=layers,
        update_seconds=OPERATIONS_PER_BYTE / operations_per_second,
    )


def measure_profile(
    graph: LayerGraph,
    sample: Any,
    *,
    rows: Sequence[int],
    device: torch.device | str = "cpu",
    budget: float = BUDGET,
    companions: int = 0,
) -> Profile:
    """Time every layer on a device at these batch sizes; the sample's rows are repeated. The network stays as it is.

    `companions`: processes that compute the same meanwhile, as on a machine whose cores are shared.
    """
    place = torch.device(device)
    if any(tensor.is_meta for tensor in (*graph.model.parameters(), *graph.tensors_of(sample))):
        raise PlaceError("the network is on the meta device, so its layers cannot be timed; use measure=False")
    model = copy.deepcopy(graph.model).to(place).train()
    sizes = tuple(sorted(set(rows)))
    times: list[tuple[list[float], list[float]]] = []
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.enable_grad():
        try:
            for count in sizes:
                batch = pytree.tree_map_only(Tensor, partial(_repeated, count, place), as_arguments(sample))
                timing = _Timing(graph, model, place)
                with accompanied(partial(timing.whole, batch), companions):
                    times.append(timing.run(batch, budget / len(sizes)))
        except Exception as error:
            raise PlaceError(f"the network does not run on {place} ({describe(error)})") from error
    layers = tuple(
        LayerTimes(layer.name, tuple(t[0][i] for t in times), tuple(t[1][i] for t in times))
        for i, layer in enumerate(graph.layers)
    )
    return Profile(
        device=device_name(place),
        measured=True,
        rows=sizes,
        layers=layers,
        update_seconds=_time_update(place),
        threads=torch.get_num_threads() if place.type == "cpu" else None,
    )


@contextmanager
def accompanied(compute: Callable[[], Any], companions: int) -> Iterator[None]:
    """Inside, so many forked processes compute the same, again and again."""
    others = [Child(partial(_forever, compute)) for _ in range(companions)]
    try:
        yield
    finally:
        for other in others:
            other.end()
            other.close()


def _forever(compute: Callable[[], Any], pipe: Connection) -> None:
    while True:
        compute()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _repeated(count: int, device: torch.device, tensor: Tensor) -> Tensor:
    return repeat_rows(tensor, count).to(device)


def repeat_rows(tensor: Tensor, count: int) -> Tensor:
    """So many rows, those of the tensor again and again."""
    if not tensor.dim():
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % len(tensor)]


def clock(device: torch.device) -> float:
    """Seconds, when all that was begun on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


class _Timing:
    """Times a network layer by layer."""

    def __init__(self, graph: LayerGraph, model: nn.Module, device: torch.device) -> None:
        self.graph, self.model, self.device = graph, model, device

    def run(self, batch: Any, budget: float) -> tuple[list[float], list[float]]:
        """Median seconds of each layer's forward and backward pass, scaled to those of the whole network."""
        until = time.perf_counter() + budget
        passes: list[tuple[list[float], list[float]]] = []
        wholes: list[tuple[float, float]] = []
        self._one_pass(batch)  # kernels are chosen, memory is allocated
        while len(passes) < REPEATS and (not passes or time.perf_counter() < until):
            passes.append(self._one_pass(batch))
            wholes.append(self.whole(batch))
        forward = [median(one[0][i] for one in passes) for i in range(len(self.graph.layers))]
        backward = [median(one[1][i] for one in passes) for i in range(len(self.graph.layers))]
        scale_forward = median(whole[0] for whole in wholes) / max(sum(forward), 1e-9)
        scale_backward = median(whole[1] for whole in wholes) / max(sum(backward), 1e-9)
        return [scale_forward * t for t in forward], [scale_backward * t for t in backward]

    def _clock(self) -> float:
        return clock(self.device)

    def whole(self, batch: Any) -> tuple[float, float]:
        args, kwargs = batch
        self.model.zero_grad(set_to_none=True)
        began = self._clock()
        out = self.model(*args, **kwargs)
        between = self._clock()
        ends = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        return between - began, self._clock() - between

    def _one_pass(self, batch: Any) -> tuple[list[float], list[float]]:
        values: dict[fx.Node, Any] = {}
        inputs = iter(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
        forward, backward = [], []
        for layer in self.graph.layers:
            nodes = self.graph.calls.nodes[layer.first : layer.end]
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
        """Cut autograd before a layer; the tensors whose gradients it gives."""
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
        wanted = [*entering, *trained]
        if not leaving or not wanted:
            return 0.0
        ones = [torch.ones_like(x) for x in leaving]
        began = self._clock()
        torch.autograd.grad(leaving, wanted, ones, allow_unused=True)
        return self._clock() - began


def _time_update(device: torch.device) -> float:
    """Seconds of an optimizer's step (SGD with momentum) for each byte of a parameter."""
    parameter = nn.Parameter(torch.zeros(UPDATE_BYTES // 4, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9)
    return _best(optimizer.step, device) / UPDATE_BYTES


def _best(step: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = clock(device)
        step()
        seconds.append(clock(device) - began)
    return median(seconds[1:])
