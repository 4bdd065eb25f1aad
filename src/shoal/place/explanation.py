"""Explain in a few sentences why a placement was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.place.cost import CostModel
from shoal.place.graph import Cut, LayerGraph
from shoal.place.placement import ONE_MACHINE, PLACED, Alternative
from shoal.utils.tables import duration, size

FASTER = tuple(2**power for power in range(1, 13))
"""How many times faster the links are assumed to be, to find out when distributing pays."""


def explain(costs: CostModel, chosen: Alternative, every: Sequence[Alternative]) -> str:
    """Explain in a few sentences why this alternative was chosen."""
    others = [other for other in every if other.mode not in (chosen.mode, PLACED) and not other.problem]
    compared = [f"{other.describe()} {duration(other.seconds)}" for other in others]
    beside = f" Others: {', '.join(compared)}." if compared else ""
    cluster, graph = costs.cluster, costs.graph
    setting = f"{cluster.size} worker{'s' * (cluster.size > 1)} with {costs.rows[0]} rows each, {cluster.link}"
    if chosen.mode == ONE_MACHINE:
        pays = _pays_from(costs, chosen, every)
        return f"One machine is faster than {setting}: {duration(chosen.seconds)} a step.{pays}{beside}{_fails(graph)}"
    lines = [f"{chosen.describe().capitalize()}, {setting}: {duration(chosen.seconds)} a step."]
    if chosen.mode == PLACED and chosen.cut < len(graph.layers):
        cut = graph.cuts[chosen.cut - 1]
        server_bytes = sum(layer.trained_bytes for layer in graph.layers[chosen.cut :])
        all_bytes = sum(layer.trained_bytes for layer in graph.layers)
        lines.append(
            f"{size(server_bytes)} of {size(all_bytes)} of parameters stay on the server, and "
            f"{size(cut.bytes_up(1) + cut.bytes_down(1))} are sent for each row instead: "
            f"{size(chosen.bytes_both)} a step at each worker, {_compare(2 * all_bytes, chosen.bytes_both)} "
            f"all parameters through a server ({size(2 * all_bytes)}). "
            f"In bytes it pays below batch {pays_below(graph, cut):,}."
        )
    return " ".join(lines) + beside + _fails(graph)


def _compare(parameter_bytes: int, placed_bytes: int) -> str:
    """Describe the bytes of a placement beside those of all parameters.

    >>> _compare(1000, 200), _compare(1000, 990), _compare(1000, 1500)
    ('5.0 times less than', 'about as much as', '1.5 times as much as')
    """
    ratio = parameter_bytes / max(1, placed_bytes)
    if ratio >= 1.05:
        return f"{ratio:.1f} times less than"
    return "about as much as" if ratio > 0.95 else f"{1 / ratio:.1f} times as much as"


def _pays_from(costs: CostModel, alone: Alternative, every: Sequence[Alternative]) -> str:
    """Describe how fast the links must be for distributing to pay."""
    inner_cuts = range(1, len(costs.graph.layers))
    cuts = [costs.graph.cuts[other.cut - 1] for other in every if other.mode == PLACED and other.cut in inner_cuts]
    for times in FASTER:
        model = costs.over_faster_links(times)
        other = model.fastest_of(cuts[:3])
        if other.seconds < alone.seconds:
            faster = f"{other.describe()}, {duration(other.seconds)}"
            return f" It would pay with links of about {model.cluster.link} or faster ({faster})."
    return " No faster link would change that."


def _fails(graph: LayerGraph) -> str:
    """Return why the network cannot be cut anywhere; empty if it can."""
    if len(graph.layers) > 1 and all(cut.problem for cut in graph.cuts):
        return f" It cannot be cut: {graph.cuts[0].problem}."
    return ""


def pays_below(graph: LayerGraph, cut: Cut) -> int:
    """Return the rows of a worker below which this cut moves fewer bytes than all parameters through the server."""
    param_bytes = 2 * sum(layer.trained_bytes for layer in graph.layers[cut.index :])
    return int(param_bytes / max(1, cut.bytes_up(1) + cut.bytes_down(1)))
