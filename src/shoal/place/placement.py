"""A placement: which layer is computed where, how its parameters stay equal, and what that should cost, as plain
data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.errors import PlaceError
from shoal.place.links import Link
from shoal.utils.tables import duration, render, size

Where = Literal["workers", "server"]
Sync = Literal["server", "allreduce", "sharded", "factors"]
Mode = Literal["placed", "parameter server", "data parallel", "one machine"]

FORMAT = 1
"""The version of the JSON file's format."""
WORKERS: Where = "workers"
SERVER: Where = "server"
ONE_MACHINE: Mode = "one machine"
DATA_PARALLEL: Mode = "data parallel"
PARAMETER_SERVER: Mode = "parameter server"
PLACED: Mode = "placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """One layer: where it is computed, and what it costs in a step."""

    name: str
    kind: str
    where: Where
    sync: Sync | None
    """How the gradients of a layer on the workers are summed: through the server, by an all-reduce among the workers,
    by an all-reduce in which each worker updates a part ("sharded"), or by exchanging the factors of the gradient of a
    fully connected layer. None: it has no parameters to train, or it is at the server."""
    parameters: tuple[str, ...]
    parameter_bytes: int
    output_bytes: int
    """Bytes for each row."""
    forward_seconds: float
    """Seconds in a step, on one worker or on the server."""
    backward_seconds: float
    bytes_up: int
    """Bytes that one worker sends in a step so that this layer's parameters stay equal."""
    bytes_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to place the network, and its predicted cost in a step."""

    mode: Mode
    cut: int
    """How many layers, from the first, are on the workers."""
    cut_name: str
    micro_batches: int
    seconds: float
    worker_seconds: float
    """Compute time of the slowest worker."""
    network_seconds: float
    """Seconds of the busiest link, in its busier direction."""
    server_seconds: float
    """Compute time of the server."""
    bytes_up: int
    """Bytes from one worker in a step."""
    bytes_down: int
    worker_memory: int
    server_memory: int
    message_bytes: int = 0
    """Bytes of headers, descriptions and row numbers in its messages, both ways, besides the tensors."""
    peer_sync: Sync = "allreduce"
    """How workers synchronise a layer among themselves, if that is cheaper for it than through the server."""
    problem: str = ""
    """Why it cannot be used: a device is too small. Empty if it can."""

    @property
    def bytes_both(self) -> int:
        """Bytes of tensors, both ways."""
        return self.bytes_up + self.bytes_down

    @property
    def socket_bytes(self) -> int:
        """All bytes at a worker's sockets in a step, both ways."""
        return self.bytes_both + self.message_bytes

    def describe(self) -> str:
        """Return its name for people: the mode, or where it is cut."""
        if self.mode != PLACED:
            return self.mode
        return f"cut after {self.cut_name}" if self.cut_name else "all layers on the workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision of `shoal.place`, as plain data: `to_dict` and `from_dict` are exact inverses."""

    mode: Mode
    """"placed": the first layers on the workers, the others at the server. "parameter server" and "data parallel": all
    layers on the workers, parameters through the server or by all-reduce. "one machine": distributing is slower."""
    cut: int
    """How many layers, from the first, are on the workers."""
    cut_name: str
    """The last layer on the workers; empty if all layers are on one side."""
    layers: tuple[PlacedLayer, ...]
    workers: int
    batch_size: int
    """Rows of one worker in a step; the joined batch is `sum(rows)`."""
    rows: tuple[int, ...]
    """Rows of each worker; they differ if workers have different speeds."""
    micro_batches: int
    """The number of parts of a worker's rows that are computed and sent one after another."""
    link: Link
    server_link: Link
    predicted: Alternative
    batch_norm: Literal["joined", "own"] = "joined"
    """Statistics of batch norm layers on the workers: over the joined batch, as in ordinary training, or over each
    worker's own rows, as in DistributedDataParallel."""
    staleness: int | None = None
    """None: synchronous. A number: asynchronous, and no worker is more than so many steps ahead of another."""
    alternatives: tuple[Alternative, ...] = ()
    """All alternatives that were compared, the fastest first."""
    explanation: str = ""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """The device of the seconds, whether they were measured, and the layers' times on a worker and on the server, so
    that the network can be placed again (`shoal.place(..., profile=placement)`)."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.predicted.seconds

    @property
    def bytes_up(self) -> int:
        """Predicted bytes from one worker in a step."""
        return self.predicted.bytes_up

    @property
    def bytes_down(self) -> int:
        """Predicted bytes to one worker in a step."""
        return self.predicted.bytes_down

    @property
    def server_parameters(self) -> tuple[str, ...]:
        """Names of the parameters of layers at the server."""
        return tuple(name for layer in self.layers if layer.where == SERVER for name in layer.parameters)

    def alternative(self, mode: Mode) -> Alternative | None:
        """Return the fastest alternative of a mode that was compared."""
        return next((other for other in self.alternatives if other.mode == mode and not other.problem), None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Placement:
        """Create a placement from what `to_dict` returned, also after JSON."""
        if data.get("format") != FORMAT:
            raise PlaceError(
                f"the placement has format {data.get('format')!r}; this version reads {FORMAT}: place again"
            )
        try:
            values = {name: value for name, value in data.items() if name != "format"}
            values["layers"] = tuple(
                PlacedLayer(**{**layer, "parameters": tuple(layer["parameters"])}) for layer in values["layers"]
            )
            values["alternatives"] = tuple(Alternative(**other) for other in values["alternatives"])
            values["predicted"] = Alternative(**values["predicted"])
            values["rows"] = tuple(values["rows"])
            values["link"], values["server_link"] = Link(**values["link"]), Link(**values["server_link"])
            return Placement(**values)
        except (KeyError, TypeError) as error:
            raise PlaceError(f"this is not a placement ({error}); write one with `shoal place --out`") from None

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, which `load` and `shoal place --placement` read."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Placement:
        """Read a file that `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlaceError(
                f"{str(path)!r} cannot be read as a placement ({error}); write one with `shoal place`"
            ) from None
        if not isinstance(data, dict):
            raise PlaceError(f"{str(path)!r} is not a placement; write one with `shoal place --out`")
        return Placement.from_dict(data)

    def table(self) -> str:
        """Format all layers: where they are, and what they compute and send in a step."""
        head = ["layer", "kind", "where", "sync", "parameters", "output/row", "forward", "backward", "up", "down"]
        rows = [
            [
                layer.name, layer.kind, layer.where, layer.sync or "-", _size(layer.parameter_bytes),
                size(layer.output_bytes), duration(layer.forward_seconds), duration(layer.backward_seconds),
                _size(layer.bytes_up), _size(layer.bytes_down),
            ]
            for layer in self.layers
        ]  # fmt: skip
        return render(head, rows, left=(0, 1, 2, 3))

    def comparison(self, most: int = 8) -> str:
        """Format the fastest alternatives, and the usual modes beside them."""
        head = [
            "",
            "micro-batches",
            "step",
            "worker",
            "network",
            "server",
            "bytes/worker",
            "worker mem",
            "server mem",
            "",
        ]
        shown = [other for i, other in enumerate(self.alternatives) if i < most or other.mode != PLACED]
        rows = [
            [
                other.describe(), str(other.micro_batches), duration(other.seconds), duration(other.worker_seconds),
                duration(other.network_seconds), duration(other.server_seconds), size(other.bytes_both),
                size(other.worker_memory), size(other.server_memory), other.problem,
            ]
            for other in shown
        ]  # fmt: skip
        return render(head, rows, left=(0, 9))

    def picture(self, path: str | Path) -> None:
        """Draw which device computes what, and what is sent, into a file (.svg, .png, .pdf)."""
        from shoal.place.picture import draw

        draw(self, Path(path))

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.comparison()}\n\n{self.explanation}"


def _size(count: int) -> str:
    return size(count) if count else "-"
