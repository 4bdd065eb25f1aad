"""Predicted against measured, for placements of four networks at three batch sizes over links of three rates.

python benchmarks/placement.py --limit 330                  # as root; again until no case is left
python benchmarks/placement.py --report                     # predict again from the layers' saved times, and count

Measurements and the layers' times are kept in the result file, so that a run can be continued, and so that a change of
the cost model can be judged without measuring again. Each case compares the placement that `shoal.place` chooses with
others, in rounds: each way takes its turn in each round, and the median of its rounds counts. The layers are timed
just before a case is measured, as a user's would be: a virtual machine is not equally fast every day. A measurement
during which other processes used more than `BUSY` of the machine's cores is made again by the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without a name

from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.namespaces import Links, missing, shaped
from shoal.evidence.reproduce.placement import (
    DDP,
    PIXELS,
    Case,
    images,
    make_network,
    measure_ddp,
    measure_one,
    measure_way,
)
from shoal.evidence.reproduce.placement_networks import SHAPES
from shoal.place.api import place
from shoal.place.graph import LayerGraph, trace_layers
from shoal.place.placement import DATA_PARALLEL, ONE_MACHINE, PARAMETER_SERVER, PLACED, Placement

OUT = Path(__file__).parent / "results" / "placement.json"
RATES, ROWS, WORKERS, STEPS = ("50mbit", "100mbit", "500mbit"), (4, 16, 64), 4, 6
"""Six steps have five intervals between their ends."""
SLOW, VERY_SLOW = 1.0, 2.0
"""Seconds of a step from which a way is measured in one round, and at one batch size: the link, not the cores, takes
that long, whatever the rows."""
BUSY = 0.15
Key = tuple[str, str, int, str]
"""Of a way: its mode, cut, micro-batches, and how layers on the workers stay equal."""


def planned(network: str, graph: LayerGraph, rows: int, rate: str, profile: Any, **how: Any) -> Placement:
    """A placement by the layers' times in `profile`, or by new ones."""
    case, sample = Case(network, rows, rate, WORKERS), images(network, rows * WORKERS)[0]
    given: dict[str, Any] = {"cores": os.cpu_count(), "batch_norm": "own", "profile": profile, **how}
    return place(graph, sample, workers=WORKERS, link=case.link, batch_size=rows, **given)


def key_of(placement: Placement) -> Key:
    chosen = placement.predicted
    ways = sorted({layer.sync for layer in placement.layers if layer.sync})
    return (chosen.mode, chosen.cut_name, chosen.micro_batches, "+".join(ways))


def ways_of(network: str, graph: LayerGraph, rows: int, rate: str, times: Mapping[str, Any]) -> list[Placement]:
    """What a case compares: the choice, the best cut, the cut before the fully connected layers, the usual ways."""
    profile = load_times(times)
    shape = next(shape for shape in SHAPES if shape.name == network)
    asked: list[dict[str, Any]] = [
        {}, {"mode": PLACED}, {"cut": shape.cut}, {"cut": shape.cut, "sync": "server"},
        {"mode": PARAMETER_SERVER}, {"mode": DATA_PARALLEL}, {"mode": ONE_MACHINE},
    ]  # fmt: skip
    made = [planned(network, graph, rows, rate, profile, **how) for how in asked]
    different = {key_of(placement): placement for placement in made}
    return [p for i, p in enumerate(different.values()) if not i or p.seconds < VERY_SLOW or rows == ROWS[1]]


def load_times(times: Mapping[str, Any]) -> Placement:
    """Saved times of layers, as `shoal.place` takes them."""
    return Placement.from_dict(times)


def used_by_others() -> float:
    """Seconds of the cores that other processes have used since the machine started."""
    fields = [float(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    machine = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return machine - sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def watched(record: dict[str, Any]) -> Iterator[None]:
    """Inside, note which share of the machine's cores other processes use."""
    began, before = time.monotonic(), used_by_others()
    yield
    spent = (time.monotonic() - began) * (os.cpu_count() or 1)
    record["others"] = max(0.0, (used_by_others() - before) / spent)


def wait_for_quiet(until: float) -> bool:
    """Wait until other processes leave the machine alone; False where that does not happen in time."""
    while time.monotonic() < until:
        record: dict[str, Any] = {}
        with watched(record):
            time.sleep(0.5)
        if record["others"] <= BUSY:
            return True
    return False


def measure(case: Case, placement: Placement, links: Links) -> dict[str, Any]:
    """One round of one way."""
    record: dict[str, Any] = {}
    with watched(record):
        if placement.mode == ONE_MACHINE:
            done = measure_one(case, STEPS)
        else:
            done = measure_way(case, placement, links, STEPS)
    return {"seconds": done["seconds"], "bytes": done["bytes"], "error": done["error"], **record}


def good_rounds(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for one in rounds if one["seconds"] and one["others"] <= BUSY]


def lacks_rounds(rounds: Sequence[Mapping[str, Any]], predicted: float, wanted: int) -> bool:
    return len(good_rounds(rounds)) < (1 if predicted > SLOW else wanted)


def run_case(
    saved: dict[str, Any], network: str, graph: LayerGraph, rows: int, rate: str, until: float, wanted: int, ddp: bool
) -> None:
    """Measure what is missing of so many rounds of a case."""
    case = Case(network, rows, rate, WORKERS)
    placements = ways_of(network, graph, rows, rate, saved["times"][f"{network} {rows} {rate}"])
    ways: dict[str, Any] = saved["measured"].setdefault(f"{network} {rows} {rate}", {})
    by_name = {json.dumps(key_of(placement)): placement for placement in placements}
    pending = [n for n, p in by_name.items() if lacks_rounds(ways.get(n, []), p.seconds, wanted)]
    ddp = ddp and not good_rounds(ways.get(DDP, []))
    if not pending and not ddp:
        return
    with shaped(1 + WORKERS, rate) as links:
        for name in pending:
            if wait_for_quiet(until):
                one = measure(case, by_name[name], links)
                print(f"{network} {rows} {rate} {name}: {one['seconds']} ({by_name[name].seconds}), "
                      f"others {one['others']:.2f} {one['error'] or ''}", flush=True)  # fmt: skip
                ways.setdefault(name, []).append(one)
        if ddp and wait_for_quiet(until):
            record: dict[str, Any] = {}
            with watched(record):
                done = measure_ddp(case, links, STEPS)
            ways.setdefault(DDP, []).append({**done, **record})


def profile(saved: dict[str, Any], network: str, graph: LayerGraph, rows: int, rate: str) -> None:
    """Time the layers for a case, where that was not done yet."""
    name = f"{network} {rows} {rate}"
    if name in saved["times"] and saved["timed_beside"][name] <= BUSY:
        return
    record: dict[str, Any] = {}
    with watched(record):
        made = planned(network, graph, rows, rate, None)
    saved["times"][name] = {**made.to_dict(), "alternatives": []}
    saved["timed_beside"][name] = record["others"]
    print(f"{name}: layers timed, others {record['others']:.2f}", flush=True)


def report(saved: Mapping[str, Any], graphs: Mapping[str, LayerGraph]) -> dict[str, Any]:
    """What holds, by the cost model as it is now."""
    cases = []
    for network, graph in graphs.items():
        for rows in ROWS:
            for rate in RATES:
                measured = saved["measured"].get(f"{network} {rows} {rate}")
                if measured and f"{network} {rows} {rate}" in saved["times"]:
                    cases.append(_compared(saved, measured, network, graph, rows, rate))
    complete = [case for case in cases if case["chosen"]["seconds"]]
    ways = [way for case in complete for way in case["ways"]]
    return {
        "cases": len(complete),
        "bytes_within_2_percent": sum(abs(w["bytes_off"]) <= 0.02 for w in ways if w["bytes_off"] is not None),
        "ways_with_bytes": sum(w["bytes_off"] is not None for w in ways),
        "chosen_within_20_percent": sum(abs(case["chosen"]["seconds_off"]) <= 0.2 for case in complete),
        "best_cut_within_20_percent": sum(abs(case["cut"]["seconds_off"]) <= 0.2 for case in complete if case["cut"]),
        "ways_within_20_percent": sum(abs(way["seconds_off"]) <= 0.2 for way in ways),
        "ways": len(ways),
        "chosen_is_fastest_or_within_5_percent": sum(case["right"] for case in complete),
        "best_that_uses_workers_is_fastest_or_within_5_percent": sum(case["right_of_workers"] for case in complete),
        "missing": [case["name"] for case in cases if not case["chosen"]["seconds"]],
        "compared": cases,
    }


def _compared(
    saved: Mapping[str, Any], measured: Mapping[str, Any], network: str, graph: LayerGraph, rows: int, rate: str
) -> dict[str, Any]:
    ways = []
    for placement in ways_of(network, graph, rows, rate, saved["times"][f"{network} {rows} {rate}"]):
        rounds = good_rounds(measured.get(json.dumps(key_of(placement)), []))
        seconds = median(one["seconds"] for one in rounds) if rounds else None
        moved = median(one["bytes"] for one in rounds) if rounds else 0
        ways.append({
            "mode": placement.mode, "way": list(key_of(placement)), "seconds": seconds, "predicted": placement.seconds,
            "seconds_off": placement.seconds / seconds - 1 if seconds else None,
            "bytes": moved, "bytes_off": placement.predicted.socket_bytes / moved - 1 if moved else None,
        })  # fmt: skip
    chosen, there = ways[0], [way for way in ways if way["seconds"]]
    spread = [way for way in there if way["mode"] != ONE_MACHINE]
    best = min(spread, key=lambda way: way["predicted"], default=None)
    return {
        "name": f"{network} {rows} {rate}", "chosen": chosen,
        "cut": next((way for way in there if way["mode"] == PLACED), None), "ways": there,
        "ddp_seconds": next((one["seconds"] for one in good_rounds(measured.get(DDP, []))), None),
        "right": bool(chosen["seconds"]) and chosen["seconds"] <= 1.05 * min(way["seconds"] for way in there),
        "right_of_workers": best is not None and best["seconds"] <= 1.05 * min(way["seconds"] for way in spread),
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> None:
    for case in result["compared"]:
        print(case["name"], "" if case["right"] else "  the choice is not the fastest")
        for way in case["ways"]:
            mark = "*" if way is case["chosen"] or way["way"] == case["chosen"]["way"] else " "
            off = f"{100 * way['bytes_off']:+.1f} %" if way["bytes_off"] is not None else ""
            name, milliseconds = " ".join(str(x) for x in way["way"]), (1000 * way["seconds"], 1000 * way["predicted"])
            print(f"  {mark} {name:60} {milliseconds[0]:9.1f} ms, predicted {milliseconds[1]:9.1f} "
                  f"{100 * way['seconds_off']:+6.1f} %  bytes {off}")  # fmt: skip
        if case["ddp_seconds"]:
            print(f"    {DDP:60} {1000 * case['ddp_seconds']:9.1f} ms")
    for name, value in result.items():
        if name != "compared":
            print(f"{name.replace('_', ' ')}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=float, default=330.0, help="seconds after which no measurement begins")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way of a case")
    parser.add_argument("--networks", default=",".join(PIXELS), help="with commas")
    parser.add_argument("--rates", default=",".join(reversed(RATES)), help="to measure at, with commas")
    parser.add_argument("--ddp", action="store_true", help=f"also torch's {DDP}")
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    saved: dict[str, Any] = {"times": {}, "timed_beside": {}, "measured": {}}
    if options.out.exists():
        saved = json.loads(options.out.read_text())
    graphs = {name: trace_layers(make_network(name), images(name, 8)[0]) for name in options.networks.split(",")}
    if not options.report:
        reason = missing()
        if reason is not None:
            raise SystemExit(reason)
        _measure_all(saved, graphs, until, options)
    result = report(saved, graphs)
    show(result)
    options.out.write_text(json.dumps({**saved, "report": result}) + "\n")


def _measure_all(
    saved: dict[str, Any], graphs: Mapping[str, LayerGraph], until: float, options: argparse.Namespace
) -> None:
    saved |= stamp("cpu", 1)
    every = [(rate, network, rows) for rate in options.rates.split(",") for network in graphs for rows in ROWS]
    for wanted in range(1, options.rounds + 1):
        for rate, network, rows in every:
            if not wait_for_quiet(until):
                return
            profile(saved, network, graphs[network], rows, rate)
            run_case(saved, network, graphs[network], rows, rate, until, wanted, options.ddp)
            options.out.write_text(json.dumps(saved) + "\n")


if __name__ == "__main__":
    main()
