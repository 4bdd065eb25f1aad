"""Compute the bytes that parameter-server training sends, and what placing fully connected layers at the server saves.

The published numbers are for full-size networks; here `shoal.place` computes them from the shapes, without a cluster.
"""

from __future__ import annotations

from typing import Any

import shoal
from shoal.evidence.reproduce.placement_networks import SHAPES, Shape, shape_of
from shoal.place.explanation import pays_below
from shoal.place.graph import trace_layers
from shoal.utils.tables import render

PUBLISHED = {
    "AlexNet": {"parameters": 61.1, "share": 96, "plain": 488.8, "placed": 29.2, "ratio": 16.7, "below": 6362},
    "VGG-16": {"parameters": 138.4, "share": 89, "plain": 1106.9, "placed": 124.1, "ratio": 8.9, "below": 4928},
    "ResNet-50": {"parameters": 25.6, "share": 8, "plain": 204.5, "placed": 189.1, "ratio": 1.08, "below": 1000},
    "Inception-v3": {"parameters": 23.8, "share": 9, "plain": 190.7, "placed": 175.3, "ratio": 1.09, "below": 1000},
}
"""Millions of parameters, per cent of them in fully connected layers, MB per step and worker both ways (all
parameters through the server; fully connected layers at the server), their ratio, and the batch below which that
pays."""


def arithmetic(link: str = "1Gbit") -> list[dict[str, Any]]:
    """Return a row for each network, with the published numbers beside ours."""
    return [_row(shape, link) for shape in SHAPES]


def _row(shape: Shape, link: str) -> dict[str, Any]:
    """Return the row of one network."""
    model, sample = shape_of(shape.name)
    graph = trace_layers(model, sample)
    options: dict[str, Any] = {"link": link, "sync": "server", "batch_norm": "own"}
    placed = shoal.place(graph, sample, cut=shape.cut, **options)
    plain = placed.alternative("parameter server")
    assert plain is not None
    linear = sum(layer.parameter_bytes for layer in graph.layers if layer.kind == "Linear")
    whole = sum(layer.parameter_bytes for layer in graph.layers)
    return {
        "network": shape.name,
        "batch": shape.batch,
        "parameters": whole / 4e6,
        "share": 100 * linear / whole,
        "plain": plain.bytes_both / 1e6,
        "placed": placed.predicted.bytes_both / 1e6,
        "ratio": plain.bytes_both / placed.predicted.bytes_both,
        "below": pays_below(graph, graph.cut_named(shape.cut)),
        "published": PUBLISHED[shape.name],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return our numbers as a table, with the published ones in brackets."""
    head = ["network", "batch", "M parameters", "% in FC", "plain PS MB", "FC at the server MB", "ratio", "pays below"]
    forms = {"parameters": ".1f", "share": ".0f", "plain": ",.1f", "placed": ",.1f", "ratio": ".2f", "below": ",.0f"}
    lines = [
        [
            row["network"],
            str(row["batch"]),
            *(f"{row[name]:{form}} ({row['published'][name]:{form}})" for name, form in forms.items()),
        ]
        for row in rows
    ]
    return render(head, lines, left=(0,))
