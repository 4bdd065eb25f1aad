"""Draw a placement: what the workers and the server compute, and what is sent between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.utils.tables import duration, size

if TYPE_CHECKING:
    from shoal.place.placement import PlacedLayer, Placement

MOST_LAYERS = 14
"""The most layers that are drawn one by one in a column; if there are more, those in the middle are drawn as one."""
COLORS = {"server": "#f3d9b1", "allreduce": "#cfe3f5", "sharded": "#d6ecd2", "factors": "#e7d5ef", None: "#eeeeee"}


def draw(placement: Placement, path: Path) -> None:
    """Write the picture to a file, whose suffix determines the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'shoal[plot]'") from None
    columns = [
        (f"each of {placement.workers} workers", [x for x in placement.layers if x.where == "workers"]),
        ("server", [x for x in placement.layers if x.where == "server"]),
    ]
    if placement.mode == "one machine":
        columns = [("one machine", list(placement.layers))]
    columns_shown = [(title, _folded(layers)) for title, layers in columns]
    height = 2.2 + 0.42 * max(len(boxes) for _, boxes in columns_shown)
    figure = Figure(figsize=(10, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, height)
    axes.axis("off")
    axes.text(5, height - 0.3, _title(placement), ha="center", va="center", fontsize=11, weight="bold")
    for i, (title, boxes) in enumerate(columns_shown):
        _column(axes, 0.3 + 5.9 * i, height - 0.8, title, boxes)
    if len(columns_shown) > 1:
        _arrows(axes, placement, height)
    figure.savefig(path, dpi=150)


def _title(placement: Placement) -> str:
    return (
        f"{placement.predicted.describe()}: {duration(placement.seconds)} a step, "
        f"{size(placement.bytes_up + placement.bytes_down)} at each worker, {placement.batch_size} rows each"
    )


def _folded(layers: list[PlacedLayer]) -> list[tuple[str, str | None]]:
    """Return lines of text with their colour's key; the middle of a long column becomes one line."""
    lines: list[tuple[str, str | None]] = [(_line(layer), layer.sync) for layer in layers]
    if len(lines) <= MOST_LAYERS + 1:
        return lines
    half = MOST_LAYERS // 2
    middle = layers[half:-half]
    param_bytes, seconds = (
        sum(x.parameter_bytes for x in middle),
        sum(x.forward_seconds + x.backward_seconds for x in middle),
    )
    text = f"... {len(middle)} layers, {size(param_bytes)}, {duration(seconds)}"
    return [*lines[:half], (text, None), *lines[-half:]]


def _line(layer: PlacedLayer) -> str:
    name = layer.name if len(layer.name) <= 26 else f"...{layer.name[-24:]}"
    weights = f", {size(layer.parameter_bytes)}" if layer.parameter_bytes else ""
    way = f", {layer.sync}" if layer.sync else ""
    return f"{name} ({layer.kind}{weights}{way}), {duration(layer.forward_seconds + layer.backward_seconds)}"


def _column(axes: Any, left: float, top: float, title: str, boxes: list[tuple[str, str | None]]) -> None:
    from matplotlib.patches import Rectangle

    axes.text(left + 1.8, top, title, ha="center", va="center", fontsize=10, weight="bold")
    for row, (text, way) in enumerate(boxes):
        y = top - 0.35 - 0.42 * (row + 1)
        axes.add_patch(Rectangle((left, y), 3.6, 0.36, facecolor=COLORS[way], edgecolor="#888888", linewidth=0.6))
        axes.text(left + 0.08, y + 0.18, text, ha="left", va="center", fontsize=6.5)


def _arrows(axes: Any, placement: Placement, height: float) -> None:
    """Draw what is sent between the columns: the tensors at the cut, and gradients and parameters of replicated
    layers."""
    replicated = [x for x in placement.layers if x.where == "workers"]
    server_bytes = sum(x.bytes_up for x in replicated if x.sync == "server")
    peer_bytes = sum(x.bytes_up for x in replicated if x.sync not in (None, "server"))
    at_cut = placement.bytes_up - server_bytes - peer_bytes
    lines = []
    if placement.cut < len(placement.layers):
        down = placement.bytes_down - server_bytes - peer_bytes
        lines += [(f"at the cut: {size(at_cut)}", True), (f"its gradients: {size(down)}", False)]
    if server_bytes:
        lines += [(f"gradients: {size(server_bytes)}", True), (f"parameters: {size(server_bytes)}", False)]
    y = height - 1.6
    for text, to_server in lines:
        ends = ((3.95, y), (6.15, y)) if to_server else ((6.15, y), (3.95, y))
        axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops={"arrowstyle": "->", "color": "#444444"})
        axes.text(5.05, y + 0.12, text, ha="center", va="bottom", fontsize=7.5)
        y -= 0.55
    if peer_bytes:
        axes.text(5.05, y, f"among workers:\n{size(peer_bytes)} each way", ha="center", va="top", fontsize=7.5)
