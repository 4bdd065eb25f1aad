"""Run IST's comparison from beginning to end, and show it as a table, a picture and a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import describe
from shoal.evidence.bench.report import heading, new_figure
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce import ist, namespaces
from shoal.evidence.reproduce.ist import DATA_PARALLEL, IST, LOCAL_SGD, PUBLISHED, Scene, Setting
from shoal.evidence.reproduce.ist_links import over_links, seconds_a_step, timed_steps
from shoal.utils.tables import Log, duration, size

if TYPE_CHECKING:
    from rich.console import Console

TIMED_STEPS = 8
"""How many steps of data parallel are timed over the links; all of them would only take longer."""


def compare(
    scene: Scene,
    *,
    seeds: Sequence[int],
    windows: Sequence[int],
    link: str | None = "100mbit",
    device: str = "cpu",
    before: tuple[list[Setting], list[dict[str, Any]]] | None = None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Choose settings, train with every seed, then time the best of each method over links.

    Args:
        before: Settings and trainings of an earlier run, which are then not repeated.
        link: The rate of the links; None measures no seconds.
    """
    chosen, rows = before if before is not None else ([], [])
    if before is None:
        chosen = ist.choose(scene, windows=windows, device=device, seed=max(seeds) + 1000, log=log)
        for setting in chosen:
            for seed in seeds:
                log(f"training: {setting.method}, {setting.window} steps a round, seed {seed}")
                rows.append(ist.trained(scene, setting, seed, device=device))
    result: dict[str, Any] = {
        "stamp": stamp(device, None),
        "scene": {name: getattr(scene, name) for name in ("width", "workers", "batch", "steps")}
        | {"data": scene.data.name, "rows": len(scene.data.x), "test_rows": len(scene.data.x_test)},
        "settings": [asdict(setting) for setting in chosen],
        "rows": list(rows),
        "summary": ist.summary(rows),
        "links": None,
    }
    if link is not None:
        why = namespaces.missing()
        result["links"] = {"none": why} if why else _timed(scene, chosen, rows, seeds, link, log)
    return result


def earlier(path: Path) -> tuple[list[Setting], list[dict[str, Any]]]:
    """Return settings and trainings from the file of an earlier run."""
    try:
        result = json.loads(path.read_text())
        return [Setting(**setting) for setting in result["settings"]], list(result["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no earlier run ({describe(error)}); name a file that --out wrote") from None


def _timed(
    scene: Scene, chosen: Sequence[Setting], rows: Sequence[dict[str, Any]], seeds: Sequence[int], link: str, log: Log
) -> dict[str, Any]:
    """Time the best settings over links of this rate."""
    target = ist.target_of(rows)
    timed: list[dict[str, Any]] = []
    with namespaces.shaped(scene.workers, link) as links:
        log("timing data parallel: torch's own")
        reduced = seconds_a_step(scene, links, TIMED_STEPS)
        log("timing data parallel: through the coordinator")
        plain = next(setting for setting in chosen if setting.method == DATA_PARALLEL)
        short = Setting(method=DATA_PARALLEL, window=1, rate=plain.rate, steps=TIMED_STEPS)
        served = over_links(scene, short, seeds[0], links, look_every=TIMED_STEPS)
        step = min(reduced, served["seconds"] / TIMED_STEPS)
        timed += [timed_steps(row, step) for row in rows if row["method"] == DATA_PARALLEL]
        for method in (LOCAL_SGD, IST):
            for setting in _promising(chosen, rows, method, target):
                for seed in seeds:
                    log(f"timing {method}, {setting.window} steps a round, seed {seed}")
                    timed.append(over_links(scene, setting, seed, links))
    return {
        "rate": link,
        "data_parallel_step": {"torch": reduced, "coordinator": served["seconds"] / TIMED_STEPS},
        "data_parallel_bytes": {"measured": served["bytes"], "predicted": served["bytes_predicted"]},
        "rows": timed,
        "summary": ist.summary(timed),
    }


def _promising(chosen: Sequence[Setting], rows: Sequence[dict[str, Any]], method: str, target: float) -> list[Setting]:
    """Return the settings of the two windows that reach the target first, by steps and by bytes, cut well after it."""
    lines = [line for line in ist.summary(rows) if line["method"] == method and line["steps_to_target"] is not None]
    best = [min(lines, key=lambda line: line[key])["window"] for key in ("steps_to_target", "bytes_to_target") if lines]
    far = {line["window"]: line["steps_to_target"] for line in lines}
    return [
        Setting(
            method=method, window=s.window, rate=s.rate, steps=min(s.steps, int(1.25 * far[s.window]) + 2 * s.window)
        )
        for s in chosen
        if s.method == method and s.window in dict.fromkeys(best)
    ]


# --- for people -----------------------------------------------------------------------------------------------------


def table(result: dict[str, Any], console: Console) -> None:
    """Print every setting with its result, and below the seconds over the links."""
    from rich.table import Table

    scene = result["scene"]
    console.print(heading(result))
    console.print(
        f"{scene['data']}, {scene['rows']} rows, {scene['test_rows']} test rows; width {scene['width']}, "
        f"{scene['workers']} workers, batches of {scene['batch']} each"
    )
    shown = Table("method", "window", "rate", "accuracy", "±", "bytes", "steps to target", "bytes to target")
    for line in result["summary"]:
        shown.add_row(
            line["method"], str(line["window"]), f"{line['rate']:g}", f"{100 * line['accuracy']:.2f}",
            f"{50 * line['spread']:.2f}", size(line["bytes"]), _or_never(line["steps_to_target"], lambda v: f"{v:.0f}"),
            _or_never(line["bytes_to_target"], size),
        )  # fmt: skip
    console.print(shown)
    if result["summary"]:
        console.print(f"Target: {100 * result['summary'][0]['target']:.2f}, what data parallel reaches in its run.")
    timed = result["links"]
    if timed is None:
        return
    if "none" in timed:
        console.print(f"No seconds: {timed['none']}.")
        return
    shown = Table("method", "window", f"seconds to target at {timed['rate']}", "IST is faster by", "published")
    first = fastest(timed["summary"])
    for method in ist.METHODS:
        line, ratio = first.get(method), faster(timed["summary"], method)
        shown.add_row(
            method, "" if line is None else str(line["window"]),
            "never" if line is None else duration(line["seconds_to_target"]),
            "" if method == IST or ratio is None else f"{ratio:.1f}x",
            f"{PUBLISHED[method]:.1f}x" if method in PUBLISHED else "",
        )  # fmt: skip
    console.print(shown)
    console.print(
        "Data parallel: its steps were counted, and some of them timed over the links "
        f"(torch's own {timed['data_parallel_step']['torch']:.2f} s a step, through the coordinator "
        f"{timed['data_parallel_step']['coordinator']:.2f} s)."
    )


def _or_never(value: float | None, text: Any) -> str:
    return "never" if value is None else str(text(value))


def fastest(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each method the setting that reached the target first."""
    best: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["seconds_to_target"] is None:
            continue
        best_so_far = best.get(line["method"])
        if best_so_far is None or line["seconds_to_target"] < best_so_far["seconds_to_target"]:
            best[line["method"]] = line
    return best


def faster(lines: Sequence[dict[str, Any]], method: str) -> float | None:
    """Return how many times faster IST reaches the target than this method."""
    best = fastest(lines)
    if IST not in best or method not in best:
        return None
    return float(best[method]["seconds_to_target"] / best[IST]["seconds_to_target"])


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw accuracy against traffic for every window of both methods, and against seconds if they were measured."""
    timed = result["links"] if result["links"] and "rows" in result["links"] else None
    figure = new_figure(11 if timed else 6)
    axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _curves(axes[0], result["rows"], "bytes", "bytes, all workers, both ways")
    lowest = min(line["accuracy"] for line in result["summary"])
    axes[0].set_ylim(100 * min(ist.target_of(result["rows"]) - 0.04, lowest - 0.01), None)
    if timed is not None:
        _curves(axes[1], timed["rows"], "seconds", f"seconds, links of {timed['rate']}")
    figure.suptitle(heading(result), fontsize=7)
    figure.savefig(path, dpi=150)


def _curves(axes: Any, rows: Sequence[dict[str, Any]], column: str, label: str) -> None:
    colors = {DATA_PARALLEL: "C7", LOCAL_SGD: "C1", IST: "C0"}
    seen: set[str] = set()
    for (method, window, _), trainings in ist.grouped(rows).items():
        curve = ist.averaged(trainings)
        axes.plot(
            [point[column] for point in curve], [100 * point["accuracy"] for point in curve], color=colors[method],
            alpha=0.7, linewidth=1, marker=".", markersize=3, label=None if method in seen else method,
        )  # fmt: skip
        seen.add(method)
        if method != DATA_PARALLEL:
            axes.annotate(str(window), (curve[-1][column], 100 * curve[-1]["accuracy"]), fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy on the test rows, %")
    axes.legend(fontsize=8)
