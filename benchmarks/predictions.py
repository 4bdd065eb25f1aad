"""Predicted beside measured: peak memory and step time of packs, each in a fresh process.

    python benchmarks/predictions.py --device cpu                       # resident growth, predicted cold
    python benchmarks/predictions.py --device cuda --networks mlp cnn gpt resnet --members 32

On a CPU a prediction is made in one process that trains nothing, and then a pack is trained in another: how far its
resident memory grew beyond a process that has only imported torch and Shoal. Step times are predicted and measured in
one process, a trial right before the steps that it speaks for: on a busy machine nothing else can be compared.

On a GPU one process asks `shoal.explain`, which builds, captures and times the pack for a moment, and another trains
it: its reserved peak, everything included, and the time of its steps. `--fit` also predicts the peak from packs of 4
and 8 members, as is done where a pack of that size has never been tried. With `--compile` steps are compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

CPU_PACKS = ("mlp:64", "cnn:16", "cnn:32", "gpt:8", "encoder:16", "lstm:32", "resnet:2")
MEMORY_BAR = {"cpu": 0.15, "cuda": 0.10}
TIME_BAR = 0.20
LEAST_BYTES = 200e6
SMALL, GPU_STEPS = (4, 8), 4000
TIME_ROUNDS = 5
RUNTIME_BYTES = 88_000_000
"""What a fresh process takes on a CPU before the first network: libraries as they are used, the tracer."""


def jobs(network: str, members: int, steps: int, batches: int, precision: str | None = None) -> list[Any]:
    from shoal.evidence.bench.workloads import Spec, workload

    made = workload(Spec(network=network, members=members, batches=batches, precision=precision))
    return [dataclasses.replace(job, epochs=None, steps=steps) for job in made]


def predict(network: str, members: int) -> dict[str, float]:
    """The growth of a process that trains this pack, from its traced step alone."""
    import shoal

    explanation = shoal.explain(jobs(network, members, 6, 8), device="cpu", measure=False)
    return {"bytes": explanation.memory_bytes + RUNTIME_BYTES}


def growth(network: str, members: int) -> dict[str, float]:
    """Train the pack here, and say how far this process grew."""
    import torch

    import shoal
    import shoal.training
    from shoal.evidence.bench.memory import peak_resident

    torch.set_num_threads(1)
    start = peak_resident() or 0
    shoal.train(jobs(network, members, 6, 8), device="cpu")
    return {"bytes": float((peak_resident() or 0) - start)}


def times(network: str, members: int) -> dict[str, float]:
    """A step of the pack: as the plan has it, and as it is; rounds of both, each with a trial of its own."""
    import torch

    torch.set_num_threads(1)
    rounds = [_timed(network, members) for _ in range(TIME_ROUNDS)]
    measured = statistics.median(seen for _, seen in rounds)
    return {"predicted": measured * statistics.median(said / seen for said, seen in rounds), "measured": measured}


def _timed(network: str, members: int) -> tuple[float, float]:
    import torch

    from shoal.engine.runtime.planning_context import PlanningContext
    from shoal.engine.units import trials
    from shoal.preparation.checks import prepare

    trials._trial_results.clear()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = cache
        built = prepare(jobs(network, members, 400, 64), torch.device("cpu"))
        units, parts = zip(*PlanningContext(built).units(built), strict=True)
    for unit in units:
        unit.begin_epoch(torch.stack([torch.randperm(m.num_rows, generator=m.orders) for m in unit.members]))
        unit.run(1)
    block = max(1, min(8, int(0.02 / _turn(units, 1))))  # short steps in a row, as in training
    seen = [_turn(units, block) for _ in range(5)]
    return sum(part.predicted["step_seconds"] for part in parts), statistics.median(seen)


def _turn(units: Sequence[Any], steps: int) -> float:
    start = perf_counter()
    for unit in units:
        unit.run(steps)
    return (perf_counter() - start) / steps


def explained(network: str, members: int, compile: bool) -> dict[str, Any]:
    """What `shoal.explain` says of a pack on a GPU."""
    import shoal

    said = shoal.explain(jobs(network, members, GPU_STEPS, 64, "bf16"), device="cuda", compile=compile)
    (part,) = said.plan.parts
    return {"bytes": said.memory_bytes, "seconds": part.predicted["step_seconds"], "tier": part.tier}


def fitted(network: str, members: int, compile: bool) -> dict[str, Any]:
    """What the peaks of smaller packs, tried before, say of a larger one."""
    import torch

    from shoal.engine.planning import memory, perf_cache
    from shoal.engine.recipes.recipe import TraceCache
    from shoal.preparation.checks import prepare

    built = prepare(jobs(network, 1, GPU_STEPS, 64, "bf16"), torch.device("cuda:0"))
    recipe = TraceCache().recipe(built[0])
    known = perf_cache.lookup(perf_cache.digest(recipe))
    curves = {tier: curve for tier in ("stacked", "streams") if (curve := known.curve("seconds", tier)) is not None}
    tier = min(curves, key=lambda name: curves[name].at(members))
    rest = memory.data_bytes(built) + memory.workspace_bytes(built[0].device)
    return {"bytes": sum(curve.at(members) for curve in memory.footprint(recipe, tier)) + rest, "tier": tier}


def trained(network: str, members: int, compile: bool) -> dict[str, Any]:
    """Train a pack on a GPU: the reserved peak of this process, and the seconds of a step."""
    import torch

    from shoal.evidence.bench.timed_pack import open_pack

    pack = open_pack(jobs(network, members, GPU_STEPS, 64, "bf16"), "cuda:0", compile)
    pack.step(4)
    times = []
    for _ in range(TIME_ROUNDS):
        start = perf_counter()
        pack.step(64)
        times.append((perf_counter() - start) / 64)
    peak = float(torch.cuda.max_memory_reserved())
    return {"bytes": peak, "seconds": statistics.median(times), "tier": pack.tier}


def child(*words: str) -> dict[str, Any]:
    """One measurement in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_WORKERS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cpu_rows(packs: list[str], what: list[str]) -> list[dict[str, Any]]:
    rows = []
    for pack in packs:
        network, _, members = pack.partition(":")
        if "memory" in what:
            said, seen = child("predict", network, members)["bytes"], child("growth", network, members)["bytes"]
            counts = seen >= LEAST_BYTES
            rows.append(row(pack, "memory", said, seen, MEMORY_BAR["cpu"], counts))
        if "time" in what:
            found = child("times", network, members)
            rows.append(row(pack, "step", found["predicted"], found["measured"], TIME_BAR))
    return rows


def gpu_rows(networks: list[str], members: int, compile: bool, fit: bool) -> list[dict[str, Any]]:
    rows = []
    for network in networks:
        how, pack = "compile" if compile else "", f"{network}:{members}"
        small = [child("explained", network, str(count), how)["bytes"] for count in SMALL] if fit else []
        fit_said = child("fitted", network, str(members), how) if fit else {}
        said = child("explained", network, str(members), how)
        seen = child("trained", network, str(members), how)
        rows.append(row(pack, "memory", said["bytes"], seen["bytes"], MEMORY_BAR["cuda"]))
        rows.append(row(pack, "step", said["seconds"], seen["seconds"], TIME_BAR))
        if fit:
            rows.append(row(pack, f"memory, from {SMALL}", fit_said["bytes"], seen["bytes"], MEMORY_BAR["cuda"]))
            told_small = ", ".join(f"{size / 1e6:.4g}" for size in small)
            print(f"{'':13} {pack:12} {fit_said['tier']} of {SMALL}: {told_small} MB; {said['tier']}, {seen['tier']}")
    return rows


def row(pack: str, what: str, said: float, seen: float, bar: float, counts: bool = True) -> dict[str, Any]:
    off = said / seen - 1
    holds = None if not counts else abs(off) <= bar
    line = {"pack": pack, "what": what, "predicted": said, "measured": seen, "off": off, "bar": bar, "holds": holds}
    unit, scale = ("MB", 1e-6) if what.startswith("memory") else ("ms", 1e3)
    outcome = "below 200 MB" if holds is None else "holds" if holds else "MISSED"
    print(
        f"{outcome:13} {pack:12} {what:18} {said * scale:9.4g} {unit}, was {seen * scale:9.4g}  {off:+.1%}", flush=True
    )
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--packs", nargs="+", default=list(CPU_PACKS), help="CPU: NETWORK:MEMBERS")
    parser.add_argument("--what", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--networks", nargs="+", default=["mlp", "cnn", "gpt", "resnet"], help="GPU")
    parser.add_argument("--members", type=int, default=32, help="GPU")
    parser.add_argument("--compile", action="store_true", help="GPU")
    parser.add_argument("--fit", action="store_true", help="GPU: from smaller packs")
    parser.add_argument("--out", help="write the numbers there as JSON")
    given = parser.parse_args()
    if given.child:
        name, network, members, *rest = given.child
        more = ("compile" in rest,) if name in ("explained", "fitted", "trained") else ()
        print(json.dumps(globals()[name](network, int(members), *more)))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = cache
        on_cpu = given.device == "cpu"
        gpu = given.networks, given.members, given.compile, given.fit
        rows = cpu_rows(given.packs, given.what) if on_cpu else gpu_rows(*gpu)
    if given.out:
        Path(given.out).write_text(json.dumps(rows, indent=1))
    return 1 if any(line["holds"] is False for line in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
