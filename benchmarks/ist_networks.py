"""IST on networks that nobody changed for it: accuracy against ordinary training at no more compute, memory per worker.

    python benchmarks/ist_networks.py --data FOLDER --seeds 5 --out benchmarks/results/ist-networks.json

A convolutional network with batch norm, a residual network and a small transformer, on MNIST from a folder or on
digits. Ordinary training is one worker with the whole network. IST has four workers; its steps are as many as fit into
the operations of the ordinary training, counted over all workers. Memory is the most that a worker's training holds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.bench.stamp import stamp
from shoal.models import ResNet18
from shoal.reproduce.datasets import Data, load
from shoal.reproduce.ist import accuracy
from shoal.split.ist import IST
from shoal.split.method import Worker


class ConvNet(nn.Module):
    """Three convolutions with batch norm and a hidden layer."""

    def __init__(self, side: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)
        self.conv3, self.norm3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)
        self.hidden, self.norm4 = nn.Linear(2 * width * (side // 4) ** 2, 4 * width), nn.BatchNorm1d(4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.max_pool2d(F.relu(self.norm1(self.conv1(x_BCHW))), 2)
        x_BCHW = F.relu(self.norm2(self.conv2(x_BCHW)))
        x_BCHW = F.max_pool2d(F.relu(self.norm3(self.conv3(x_BCHW))), 2)
        logits: Tensor = self.head(F.relu(self.norm4(self.hidden(x_BCHW.flatten(1)))))
        return logits


class Transformer(nn.Module):
    """Reads an image as a sequence of its rows."""

    def __init__(self, side: int, classes: int, width: int = 128, layers: int = 2, heads: int = 8) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(side, width), nn.Parameter(torch.randn(side, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.embed(x_BCHW.squeeze(1)) + self.place
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD).mean(1))
        return logits


@dataclass(frozen=True)
class Case:
    build: Callable[[int, int], nn.Module]
    optimizer: type[torch.optim.Optimizer]
    hparams: dict[str, float]
    """Of ordinary training."""
    rate: float
    """IST's own."""
    local_steps: int = 50
    settings: tuple[tuple[str, Any], ...] = ()


CASES = {
    "cnn": Case(ConvNet, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, 0.1),
    "resnet": Case(
        lambda side, classes: ResNet18(classes, 32, channels=1), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, 0.1
    ),
    "transformer": Case(Transformer, torch.optim.Adam, {"lr": 1e-3}, 2e-3),
}


def operations(network: nn.Module, x: Tensor, y: Tensor) -> int:
    """Of one step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def compared(name: str, case: Case, data: Data, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    side = int(data.features**0.5)
    shaped = [t.view(-1, 1, side, side) for t in (data.x, data.x_test)]
    job = shoal.Job(
        model=lambda: case.build(side, data.classes), data=(shaped[0], data.y), val=(shaped[1], data.y_test),
        loss=F.cross_entropy, optimizer=case.optimizer, hparams=case.hparams, batch_size=args.batch, steps=args.steps,
        seed=seed, metrics={"accuracy": accuracy}, name=name, val_every=10**6,
    )  # fmt: skip
    start = time.perf_counter()
    plain = shoal.split.local_sgd(job, workers=1, local_steps=args.steps, device=args.device, moments="fresh")
    seconds = time.perf_counter() - start
    narrow_job = replace(job, hparams={**case.hparams, "lr": args.rate or case.rate})
    split = IST(narrow_job, args.workers, case.local_steps, **dict(case.settings))
    parts = split.parts(0, [Worker(n) for n in range(args.workers)])
    x, y = shaped[0][: args.batch], data.y[: args.batch]
    whole = operations(case.build(side, data.classes), x, y)
    each = [operations(split.network(part), x, y) for part in parts]
    last = case.local_steps * args.workers * whole if split.settings.get("recovery") else 0
    steps = int((args.steps * whole - last) / sum(each)) // case.local_steps * case.local_steps
    steps += case.local_steps if last else 0
    start = time.perf_counter()
    result = shoal.split.ist(
        replace(narrow_job, steps=steps), args.workers, case.local_steps, device=args.device, **dict(case.settings)
    )
    report = result.split
    return {
        "network": name,
        "seed": seed,
        "ordinary": plain.last("accuracy"),
        "ist": result.last("accuracy"),
        "steps": args.steps,
        "ist_steps": steps,
        "operations": args.steps * whole,
        "ist_operations": (steps - (case.local_steps if last else 0)) * sum(each) + last,
        "peak_whole": report.peak_predicted.get("whole", 0),
        "peak_part": max(report.peak_measured.values(), default=0),
        "bytes": report.bytes_measured,
        "seconds": seconds,
        "ist_seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000, help="of ordinary training")
    parser.add_argument("--rate", type=float, help="IST's, in place of the case's own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = load(args.data, args.rows)
    rows = []
    for name in args.networks:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            rows.append(compared(name, CASES[name], data, args, seed))
            print(json.dumps(rows[-1]), flush=True)
        own = [row for row in rows if row["network"] == name]
        ordinary, ist = (100 * mean(row[key] for row in own) for key in ("ordinary", "ist"))
        print(
            f"{name}: ordinary {ordinary:.2f}, IST {ist:.2f} ({ist - ordinary:+.2f} points), "
            f"operations {own[0]['ist_operations'] / own[0]['operations']:.0%}, "
            f"memory of a worker {own[0]['peak_part'] / max(1, own[0]['peak_whole']):.0%} of the whole",
            flush=True,
        )
    if args.out is not None:
        args.out.write_text(
            json.dumps({"stamp": stamp(args.device, 1), "data": data.name, "results": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
