"""Ours and the published number, side by side."""

from __future__ import annotations

from pathlib import Path

from shoal.evidence.bench.report import pyplot


def draw(path: Path, bars: list[tuple[str, float | None, float]], *, ylabel: str, title: str) -> None:
    """Two bars for each label; shares are drawn as per cent, a missing one is left out."""
    figure = pyplot()(max(6.0, 0.8 * len(bars) + 2), 4.5)
    axes = figure.subplots()
    places = range(len(bars))
    axes.bar([p - 0.2 for p in places], [100 * (ours or 0) for _, ours, _ in bars], 0.4, label="Shoal", color="C0")
    axes.bar([p + 0.2 for p in places], [100 * there for *_, there in bars], 0.4, label="published", color="C7")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xticks(list(places), [label for label, *_ in bars], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(f"{ylabel}, %")
    axes.set_title(title, fontsize=7)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
