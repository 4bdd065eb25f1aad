"""Subnets of one network as a pack on a GPU, against the same subnets one after another; and a layer too large for one.

    python benchmarks/subnets.py --out benchmarks/results/subnets.json

Both executors train the same tasks of independent subnet training: building the narrow networks, the local steps and
reading the weights back are all counted. Then a network whose training does not fit into a memory budget as a whole is
trained in parts that do.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.ist import Network
from shoal.split.core.state import State
from shoal.split.executors.local import Serial
from shoal.split.executors.packed import Packed
from shoal.split.methods.ist import IST

ROUNDS = 5


def convolutional() -> nn.Module:
    widths = [1, 64, 128, 128]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 9, 256), nn.ReLU(), nn.Linear(256, 10))


NETWORKS = {"784-2048-2048-10": lambda: Network(784, 2048, 10), "3 convolutions, 2 linear": convolutional}


def job(build: Any, image: bool, steps: int, dtype: torch.dtype = torch.float32) -> shoal.Job:
    x, y = torch.randn(8192, 784, dtype=dtype), torch.randint(10, (8192,))
    return shoal.Job(
        model=lambda: build().to(dtype), data=(x.view(-1, 1, 28, 28) if image else x, y), loss=F.cross_entropy,
        optimizer=torch.optim.SGD, hparams={"lr": 0.01, "momentum": 0.9}, batch_size=128, steps=steps,
    )  # fmt: skip


def rounds(made: shoal.Job, subnets: int, local_steps: int, number: int) -> dict[str, tuple[list[float], State]]:
    """So many rounds by each executor: the seconds of each round, and the outcomes."""
    method = IST(made, subnets, local_steps, moments="fresh", recovery=0)
    found = {}
    for executor in (Serial(made, method, subnets, "cuda"), Packed(made, method, subnets, "cuda")):
        state, took = State.of(method.model, {}, {}), []
        for place in range(number):
            parts = method.parts(place, executor.workers_of_round(place))
            tasks = [state.task(place, part, method.slices(part), moments=False, extras={}) for part in parts]
            torch.cuda.synchronize()
            start = time.perf_counter()
            done = executor.run(tasks)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
            state.commit(parts, [method.returns(part) for part in parts], done)
        found[executor.tier] = (took, state)
    return found


def speed(name: str, build: Any, subnets: int, local_steps: int) -> dict[str, Any]:
    image = "conv" in name
    timed = rounds(job(build, image, local_steps * (ROUNDS + 1)), subnets, local_steps, ROUNDS + 1)
    serial, packed = (median(timed[tier][0][1:]) for tier in ("serial", "packed"))
    exact = rounds(job(build, image, 20, torch.float64), subnets, 10, 2)
    one, pack = (exact[tier][1].tensors for tier in ("serial", "packed"))
    apart = [float((pack[n] - t).abs().max() / t.abs().max().clamp_min(1e-12)) for n, t in one.items()]
    return {
        "network": name, "subnets": subnets, "local_steps": local_steps, "serial_seconds": serial,
        "packed_seconds": packed, "times": serial / packed, "apart after 20 steps in float64": max(apart),
    }  # fmt: skip


def too_large(width: int, budget: float, subnets: int) -> dict[str, Any]:
    """Train a network in parts under a budget that the whole does not fit into."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + budget) / total)
    made = job(lambda: Network(784, width, 10), False, 20)
    found: dict[str, Any] = {"width": width, "budget_bytes": budget, "subnets": subnets}
    try:
        model = Network(784, width, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x, y = torch.randn(128, 784, device="cuda"), torch.zeros(128, dtype=torch.long, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found["whole"] = "fits"
    except torch.cuda.OutOfMemoryError:
        found["whole"] = "out of memory"
    model = optimizer = None  # type: ignore[assignment]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = shoal.split.ist(
        made, subnets, 10, device="cuda", tier="serial", moments="fresh", recovery=0, renormalise=False
    )
    found["parts"], found["peak_bytes"] = result.status, torch.cuda.max_memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subnets", type=int, default=8)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=16384, help="of the network that is too large")
    parser.add_argument("--budget", type=float, default=1.6e9, help="bytes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [speed(name, build, args.subnets, args.local_steps) for name, build in NETWORKS.items()]
    for row in rows:
        print(json.dumps(row), flush=True)
    large = too_large(args.width, args.budget, args.subnets)
    print(json.dumps(large), flush=True)
    if args.out is not None:
        result = {"stamp": stamp("cuda", None), "packs": rows, "too_large": large}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
