"""Show a benchmark's result as a table, a picture or a file, from the plain data that `run.bench` returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.evidence.bench.titles import TITLES
from shoal.utils import tables

if TYPE_CHECKING:
    from rich.console import Console


def size(value: float | None) -> str:
    """Format a number of bytes, or return "" if it is unknown."""
    return "" if value is None else tables.size(value)


def percent(value: float | None, missing: str = "") -> str:
    """Format a fraction as per cent."""
    return missing if value is None else f"{100 * value:.1f} %"


def milliseconds(value: float | None) -> str:
    """Format milliseconds with three digits."""
    if value is None:
        return ""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def peak(memory: dict[str, Any] | None) -> int | None:
    """Return the memory for the table: the allocator's peak on a GPU, the growth of the resident set on a CPU."""
    if memory is None:
        return None
    most: int | None = memory["reserved"] if memory["reserved"] is not None else memory["growth"]
    return most


def heading(result: dict[str, Any]) -> str:
    """Return in one line what was measured on what."""
    at = result["stamp"]
    device = at["gpu"] or f"{at['processor']}, {at['cores']} cores, {at['threads']} threads"
    return f"{device}; torch {at['torch']}; code {at['commit'] or at['source']}; {at['date']}"


def table(result: dict[str, Any], console: Console) -> None:
    """Print milliseconds for a step of all members, the ratio to sequential eager, and memory."""
    from rich.table import Table

    gpu = result["stamp"]["gpu"] is not None
    columns = ["network", "members", "way", "ms", "times eager", "predicted ms", "set-up s", "memory"]
    columns += ["driver" if gpu else "whole process", "note"]
    shown = Table(*columns)
    for column in shown.columns[3:-1]:
        column.justify = "right"
    last = None
    for row in result["results"]:
        if last not in (None, row["network"]):
            shown.add_section()
        first = row["network"] != last
        last = row["network"]
        memory = row["memory"] or {}
        reason = f"[red]{_plain(row['error'])}[/red]" if row["error"] else ""
        shown.add_row(
            row["network"] if first else "",
            str(row["members"]) if first else "",
            TITLES[row["way"]],
            milliseconds(row["ms"]),
            f"{row['ratio']:.2f}x" if row["ratio"] else "",
            milliseconds(row["predicted_ms"]),
            f"{row['setup_s']:.1f}" if row["setup_s"] is not None else "",
            size(peak(row["memory"])),
            size(memory.get("driver") if gpu else memory.get("resident")),
            " ".join(filter(None, [_plain(row["note"]), reason])),
        )
    console.print(shown)
    for line in _memory_lines(result):
        console.print(line)
    console.print(heading(result), style="dim")


def _plain(text: str, longest: int = 110) -> str:
    """Return text that the table does not interpret as markup, shortened to leave room for the rest."""
    text = text if len(text) <= longest else text[: longest - 3] + "..."
    return text.replace("[", "(").replace("]", ")")


def _memory_lines(result: dict[str, Any]) -> list[str]:
    """Return lines that compare Shoal's reserved peak with the sum of the members' own peaks."""
    solo = {row["network"]: row["solo_reserved"] for row in result["results"] if row["way"] == "eager"}
    lines = []
    for row in result["results"]:
        alone, reserved = solo.get(row["network"]), peak(row["memory"])
        if row["way"] == "shoal" and alone and reserved:
            lines.append(
                f"{row['network']}: {reserved / alone:.2f} of the sum of the members' peaks alone ({size(alone)})"
            )
    return lines


def text(result: dict[str, Any]) -> str:
    """Return the plain data as JSON."""
    return json.dumps(result, indent=2)


def write(result: dict[str, Any], path: Path) -> None:
    """Write the plain data to a file as JSON."""
    path.write_text(text(result) + "\n")


def new_figure(width: float, height: float = 4.5) -> Any:
    """Return a matplotlib figure that is drawn into a file."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw bars on a log scale: milliseconds for a step of all members, by network and way."""
    networks = list(dict.fromkeys(row["network"] for row in result["results"]))
    times = {(row["network"], row["way"]): row["ms"] for row in result["results"]}
    series: dict[str, Sequence[float | None]] = {
        title: [times.get((name, way)) for name in networks]
        for way, title in TITLES.items()
        if any(row["way"] == way for row in result["results"])
    }
    grouped_bars(path, networks, series, ylabel="ms for a step of all members", title=heading(result), log=True)


def draw_bars(path: Path, bars: list[tuple[str, float | None, float]], *, ylabel: str, title: str) -> None:
    """Draw our numbers beside the published ones: two bars for each label, fractions as per cent; missing ones are
    left out."""
    series: dict[str, Sequence[float | None]] = {
        "Shoal": [None if ours is None else 100 * ours for _, ours, _ in bars],
        "published": [100 * published for *_, published in bars],
    }
    grouped_bars(path, [label for label, *_ in bars], series, ylabel=f"{ylabel}, %", title=title)


def grouped_bars(
    path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], *, ylabel: str, title: str,
    log: bool = False,
) -> None:  # fmt: skip
    """Draw a group of bars for each label, with one bar for each series that has a number there."""
    figure = new_figure(max(6.0, (0.3 * len(series) + 0.4) * len(labels) + 2))
    axes = figure.subplots()
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        known = [(position + number * width, value) for position, value in enumerate(values) if value is not None]
        bars = axes.bar([position for position, _ in known], [value for _, value in known], width, label=name)
        axes.bar_label(bars, labels=[milliseconds(value) for _, value in known], fontsize=6, rotation=90, padding=2)
    axes.set_yscale("log" if log else "linear")
    axes.margins(y=0.15)
    axes.set_xticks([position + 0.4 - width / 2 for position in range(len(labels))], labels, rotation=30, ha="right")
    axes.set_ylabel(ylabel)
    axes.set_title(title, fontsize=7)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
