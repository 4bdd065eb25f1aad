"""A benchmark's result for people: a table, a picture, a file. Reads the plain data that `run.bench` returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.evidence.bench.titles import TITLES

if TYPE_CHECKING:
    from rich.console import Console


def size(value: float | None) -> str:
    """Bytes for people.

    >>> size(3 * 2**20), size(None)
    ('3.0 MiB', '')
    """
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{value:.2f} GiB"


def percent(value: float | None, missing: str = "") -> str:
    """A share as per cent."""
    return missing if value is None else f"{100 * value:.1f} %"


def milliseconds(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def peak(memory: dict[str, Any] | None) -> int | None:
    """The figure for the table: what the allocator held at most (GPU), how far the resident set grew (CPU)."""
    if memory is None:
        return None
    most: int | None = memory["reserved"] if memory["reserved"] is not None else memory["growth"]
    return most


def heading(result: dict[str, Any]) -> str:
    """What was measured on what, in one line."""
    at = result["stamp"]
    device = at["gpu"] or f"{at['processor']}, {at['cores']} cores, {at['threads']} threads"
    return f"{device}; torch {at['torch']}; code {at['commit'] or at['source']}; {at['date']}"


def _floor_line(result: dict[str, Any]) -> str:
    best = result["ceilings"]
    if best is None:
        return "The device's ceilings could not be measured: no floors."
    return (
        f"Floor: bytes and operations of the step over a measured {best['bandwidth'] / 1e9:.0f} GB/s copy and "
        f"{best['rate'] / 1e12:.3g} TFLOP/s matrix product; activations are estimated."
    )


def table(result: dict[str, Any], console: Console) -> None:
    """One table: milliseconds for a step of all members, against sequential eager; memory beside."""
    from rich.table import Table

    gpu = result["stamp"]["gpu"] is not None
    columns = ["network", "members", "way", "ms", "times eager", "floor ms", "predicted ms", "set-up s", "memory"]
    columns += ["driver" if gpu else "all processes", "note"]
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
            milliseconds(row["floor_ms"]) if first else "",
            milliseconds(row["predicted_ms"]),
            f"{row['setup_s']:.1f}" if row["setup_s"] is not None else "",
            size(peak(row["memory"])),
            size(memory.get("driver") if gpu else memory.get("resident")),
            " ".join(filter(None, [_plain(row["note"]), reason])),
        )
    console.print(shown)
    console.print(_floor_line(result), style="dim")
    for line in _memory_lines(result):
        console.print(line)
    console.print(heading(result), style="dim")


def _plain(text: str, longest: int = 110) -> str:
    """Text that the table will not take for markup, and that leaves room for the rest."""
    text = text if len(text) <= longest else text[: longest - 3] + "..."
    return text.replace("[", "(").replace("]", ")")


def _memory_lines(result: dict[str, Any]) -> list[str]:
    """Shoal's reserved peak beside the sum of the members' own."""
    lines = []
    for row in result["results"]:
        if row["way"] != "shoal" or row["error"]:
            continue
        solo = next((r["solo_reserved"] for r in result["results"] if _same(r, row) and r["way"] == "eager"), None)
        reserved = peak(row["memory"])
        if solo and reserved:
            lines.append(
                f"{row['network']}: {reserved / solo:.2f} of the sum of the members' peaks alone ({size(solo)})"
            )
    return lines


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["network"] == b["network"] and a["members"] == b["members"])


def text(result: dict[str, Any]) -> str:
    """The plain data as JSON."""
    return json.dumps(result, indent=2)


def write(result: dict[str, Any], path: Path) -> None:
    """The plain data as JSON, in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(result) + "\n")


def pyplot() -> Any:
    """matplotlib, drawing into files."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'shoal[plot]'") from None

    def figure(width: float, height: float) -> Any:
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawn)
        return drawn

    return figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars on a log scale: milliseconds for a step of all members, by network and way, the floor as a line."""
    networks = list(dict.fromkeys(row["network"] for row in result["results"]))
    ways = [way for way in TITLES if any(row["way"] == way for row in result["results"])]
    times = {(row["network"], row["way"]): row["ms"] for row in result["results"]}
    figure = pyplot()(max(6.0, 1.8 * len(networks) + 2), 4.5)
    axes = figure.subplots()
    width = 0.8 / len(ways)
    for w, way in enumerate(ways):
        places = [n + w * width for n, name in enumerate(networks) if times.get((name, way))]
        heights = [times[name, way] for name in networks if times.get((name, way))]
        bars = axes.bar(places, heights, width, label=TITLES[way], color=f"C{w}")
        axes.bar_label(bars, labels=[milliseconds(h) for h in heights], fontsize=6, rotation=90, padding=2)
    for n, name in enumerate(networks):
        floor = result["floors"].get(name, {}).get("ms")
        if floor:
            axes.hlines(floor, n - width / 2, n + 0.8 - width / 2, colors="black", linestyles="dotted")
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(networks))], networks)
    axes.set_ylabel("ms for a step of all members (dotted: floor)")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    axes.set_title(heading(result), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_bars(path: Path, bars: list[tuple[str, float | None, float]], *, ylabel: str, title: str) -> None:
    """Ours beside the published numbers: two bars for each label, shares as per cent; a missing one is left out."""
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
