"""How long each layer of a network takes on a device: measured layer by layer, or estimated from its operations.

To measure, the layers run one after another on the sample's rows, repeated to a few batch sizes. Autograd is cut
between layers, so that each layer's backward pass can be timed. The sum is then scaled to the time of the whole
network's forward and backward pass. On a CPU with one thread, the thread's own time is measured, so that other
processes do not count.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from shoal.engine.processes.child import Child
from shoal.engine.tiers.threads import threads_to_time
from shoal.errors import PlaceError, describe
from shoal.place._timing import LayerTimer, clock, time_layers
from shoal.place.graph import LayerGraph
from shoal.utils.torch_flags import torch_flags

FORMAT = 1
BUDGET = 6.0
"""Seconds for a profile. If one pass takes long, it is repeated less often, and slow layers run on fewer rows."""
UPDATE_REPEATS = 5
UPDATE_BYTES = 16_000_000
DEFAULT_SPEED = 1e12
"""Assumed operations per second of an unknown device."""
OPERATIONS_PER_BYTE = 100
"""If it was not measured, updating one byte of a parameter is assumed to take as long as so many operations."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, at each of the profile's batch sizes."""

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of one network's layers on one kind of device."""

    device: str
    measured: bool
    rows: tuple[int, ...]
    """The batch sizes of the times."""
    layers: tuple[LayerTimes, ...]
    update_seconds: float = OPERATIONS_PER_BYTE / DEFAULT_SPEED
    """Seconds of an optimizer's step for each byte of a parameter."""
    threads: int | None = None

    def forward(self, layer: int, rows: float) -> float:
        """Return the seconds of a layer's forward pass, interpolated linearly between the measured batch sizes and
        beyond."""
        return _line(self.rows, self.layers[layer].forward, rows)

    def backward(self, layer: int, rows: float) -> float:
        """Return the seconds of a layer's backward pass, as in `forward`."""
        return _line(self.rows, self.layers[layer].backward, rows)

    def check(self, graph: LayerGraph) -> None:
        """Raise a PlaceError if it is of another network."""
        names, profiled = [layer.name for layer in graph.layers], [layer.name for layer in self.layers]
        if names != profiled:
            other = next((a for a, b in zip(names, profiled, strict=False) if a != b), f"{len(names)} layers")
            raise PlaceError(f"the profile is of another network (here: {other!r}); profile this one")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        layers = [{"name": x.name, "forward": list(x.forward), "backward": list(x.backward)} for x in self.layers]
        return {"format": FORMAT, **asdict(self), "rows": list(self.rows), "layers": layers}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Profile:
        """Create a profile from what `to_dict` returned, also after JSON."""
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
            raise PlaceError(f"this is not a profile ({describe(error)}); write one with Profile.save") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a file that `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlaceError(f"{str(path)!r} cannot be read as a profile ({error})") from None
        return Profile.from_dict(data if isinstance(data, dict) else {})


def _line(rows: Sequence[int], seconds: Sequence[float], target: float) -> float:
    """Return the value on the line through the two nearest measurements; never negative."""
    if len(rows) == 1:
        return seconds[0] * target / rows[0]
    right = next((i for i in range(1, len(rows)) if target <= rows[i]), len(rows) - 1)
    a, b = rows[right - 1], rows[right]
    slope = (seconds[right] - seconds[right - 1]) / (b - a)
    return max(0.0, seconds[right - 1] + max(0.0, slope) * (target - a), min(seconds) * min(1.0, target / rows[0]))


def estimate_profile(graph: LayerGraph, *, operations_per_second: float = DEFAULT_SPEED) -> Profile:
    """Estimate times from operations, for a device of that speed. Nothing runs, and the network may be on meta."""
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
    busy_processes: int = 0,
) -> Profile:
    """Time every layer on a device at these batch sizes; the sample's rows are repeated. The network is not changed.

    Args:
        busy_processes: The number of processes that compute the same meanwhile, as on a machine whose cores are shared.
    """
    target_device = torch.device(device)
    if any(tensor.is_meta for tensor in (*graph.model.parameters(), *graph.tensors_of(sample))):
        raise PlaceError("the network is on the meta device, so its layers cannot be timed; use measure=False")
    model = copy.deepcopy(graph.model).to(target_device).train()
    threads = threads_to_time(target_device)
    flags = torch_flags(target_device, threads)
    fork_rng = torch.random.fork_rng(devices=[target_device] if target_device.type == "cuda" else [])
    timer = LayerTimer(graph, model, sample, target_device)
    with flags, fork_rng, torch.enable_grad():
        try:
            measured = time_layers(
                timer,
                sorted(set(rows)),
                budget,
                lambda batch: beside_busy_processes(partial(timer.whole, batch), busy_processes),
            )
        except Exception as error:
            raise PlaceError(f"the network does not run on {target_device} ({describe(error)})") from error
        update_seconds = _time_update(target_device)
    layers = tuple(
        LayerTimes(layer.name, tuple(t[0][i] for t in measured.times), tuple(t[1][i] for t in measured.times))
        for i, layer in enumerate(graph.layers)
    )
    return Profile(
        device=device_name(target_device),
        measured=True,
        rows=measured.rows,
        layers=layers,
        update_seconds=update_seconds,
        threads=threads,
    )


@contextmanager
def beside_busy_processes(compute: Callable[[], Any], busy_processes: int) -> Iterator[None]:
    """Run so many forked processes that compute the same, again and again, inside this context."""
    others = [Child(partial(_forever, compute)) for _ in range(busy_processes)]
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


def _time_update(device: torch.device) -> float:
    """Return the seconds of an optimizer's step (SGD with momentum) for each byte of a parameter."""
    parameter = nn.Parameter(torch.zeros(UPDATE_BYTES // 4, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9)
    return _best(optimizer.step, device) / UPDATE_BYTES


def _best(step: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(UPDATE_REPEATS):
        began = clock(device)
        step()
        seconds.append(clock(device) - began)
    return median(seconds[1:])
