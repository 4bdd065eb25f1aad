"""IST on networks that nobody changed for it: accuracy against ordinary training at no more compute, memory per worker.

    python benchmarks/ist_networks.py --seeds 5 --out benchmarks/results/ist-networks.json
    python benchmarks/ist_networks.py --data FOLDER --rows 6000 --defaults --choose --device cuda --seeds 5

Two convolutional networks with batch norm, a residual network and a small transformer, on MNIST from a folder or on
digits. Ordinary training is one worker with the whole network. IST has four workers; its steps are as many as fit into
the operations of the ordinary training, counted over all workers. In both the rate falls linearly to zero. Rates were
chosen on rows held out of the training rows of digits; `--choose` does it again on the data at hand, with another seed.
`--defaults`: IST with its default settings, in place of those that were chosen for each network. Memory is the most
that a worker's training holds; a recovery round, where there is one, is a line of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.evidence.bench.datasets import Data, load
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.ist import accuracy
from shoal.models import Residual
from shoal.results import Result
from shoal.split.core.method import Worker
from shoal.split.methods.ist import IST


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


class SmallConvNet(nn.Module):
    """Three convolutions with batch norm, each followed by pooling, and one linear layer."""

    def __init__(self, side: int, classes: int, width: int = 16) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 2 * width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(2 * width * (side // 8) ** 2, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x_BCHW).flatten(1))
        return logits


class ResNet(nn.Module):
    """A stem and two stages of two residual blocks each."""

    def __init__(self, side: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            Residual(width, width, 1), Residual(width, width, 1), Residual(width, 2 * width, 2),
            Residual(2 * width, 2 * width, 1),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(F.relu(self.norm(self.stem(x_BCHW)))).mean((2, 3)))
        return logits


class Transformer(nn.Module):
    """Reads an image as a sequence of its rows, and all of them for the class."""

    def __init__(self, side: int, classes: int, width: int = 128, layers: int = 2, heads: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(side, width), nn.Parameter(torch.randn(side, width) * 0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(side * width, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.embed(x_BCHW.squeeze(1)) + self.place
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD).flatten(1))
        return logits


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with what was found to suit it."""

    build: Callable[[int, int], nn.Module]
    optimizer: type[torch.optim.Optimizer]
    hparams: dict[str, float]
    """Besides the rate."""
    rate: float
    """Of ordinary training."""
    ist_rate: float
    rates: tuple[float, ...]
    """That `--choose` tries, for both."""
    steps: int
    """Of ordinary training."""
    local_steps: int = 20
    settings: dict[str, Any]
    """Of IST."""


DEFAULT_LOCAL_STEPS: int = inspect.signature(shoal.split.ist).parameters["local_steps"].default
SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "hparams": {"momentum": 0.9}, "rates": (0.02, 0.05, 0.1, 0.2)}
ADAM: dict[str, Any] = {"optimizer": torch.optim.Adam, "hparams": {}, "rates": (1e-3, 2e-3, 4e-3, 8e-3)}
CASES = {
    "cnn": Case(build=ConvNet, **SGD, rate=0.02, ist_rate=0.05, steps=600,
                settings={"recovery": 0, "scale": False, "moments": "fresh"}),
    "small-cnn": Case(build=SmallConvNet, **ADAM, rate=2e-3, ist_rate=2e-3, steps=470, settings={}),
    "resnet": Case(build=ResNet, **SGD, rate=0.1, ist_rate=0.05, steps=400, local_steps=10, settings={"recovery": 0}),
    "transformer": Case(build=Transformer, **ADAM, rate=1e-3, ist_rate=2e-3, steps=800, settings={"recovery": 0}),
}  # fmt: skip


def case_of(name: str, *, defaults: bool) -> Case:
    """A case as it was chosen, or with the default settings of IST."""
    return replace(CASES[name], settings={}, local_steps=DEFAULT_LOCAL_STEPS) if defaults else CASES[name]


def operations(network: nn.Module, x: Tensor, y: Tensor) -> int:
    """Of one step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


class Bench:
    """One network on one set of rows."""

    def __init__(self, name: str, data: Data, args: argparse.Namespace) -> None:
        self.name, self.case, self.data, self.args = name, case_of(name, defaults=args.defaults), data, args
        self.side = int(data.features**0.5)
        self.steps: int = args.steps or self.case.steps

    def job(self, rate: float, steps: int, seed: int) -> shoal.Job:
        data, case, side = self.data, self.case, self.side
        x, x_test = (rows.view(-1, 1, side, side) for rows in (data.x, data.x_test))
        return shoal.Job(
            model=lambda: case.build(side, data.classes), data=(x, data.y), val=(x_test, data.y_test),
            loss=F.cross_entropy, optimizer=case.optimizer, hparams={**case.hparams, "lr": rate},
            batch_size=self.args.batch, steps=steps, seed=seed, metrics={"accuracy": accuracy}, name=self.name,
            val_every=10**6, schedule=lambda step: 1 - step / steps,
        )  # fmt: skip

    def ordinary(self, rate: float, seed: int) -> Result:
        return shoal.split.local_sgd(
            self.job(rate, self.steps, seed), workers=1, local_steps=self.steps, device=self.args.device,
            moments="fresh",
        )  # fmt: skip

    def ist(self, rate: float, seed: int) -> tuple[Result, dict[str, int]]:
        """Trained, and the operations: in all of ordinary training, of IST without recovery, and of recovery."""
        case, workers, window = self.case, self.args.workers, self.case.local_steps
        first = IST(self.job(rate, self.steps, seed), workers, window, **case.settings)
        parts = first.parts(0, [Worker(number) for number in range(workers)])
        batch = first.data.take(0, self.args.batch)
        whole = operations(case.build(self.side, self.data.classes), *batch)
        each = sum(operations(first.network(part), *batch) for part in parts)
        last = first.recovery * window
        narrow = int((self.steps - workers * last) * whole / each) // window * window
        assert narrow > 0, "recovery alone takes more operations than ordinary training"
        job = self.job(rate, narrow + last, seed)
        result = shoal.split.ist(job, workers, window, device=self.args.device, **case.settings)
        counted = {"ordinary": self.steps * whole, "narrow": narrow * each, "recovery": last * workers * whole}
        return result, {"steps": narrow + last, **{f"operations_{name}": n for name, n in counted.items()}}

    def chosen(self, seed: int = 100) -> tuple[float, float]:
        """The best rates of ordinary training and of IST, on rows held out of the training rows."""
        inner = Bench(self.name, self.data.held_out(), self.args)
        ordinary = {rate: reached(inner.ordinary(rate, seed)) for rate in self.case.rates}
        ist = {rate: reached(inner.ist(rate, seed)[0]) for rate in self.case.rates}
        print(f"{self.name}, held out: ordinary {ordinary}, IST {ist}", flush=True)
        return max(ordinary, key=lambda rate: ordinary[rate]), max(ist, key=lambda rate: ist[rate])

    def compared(self, rates: tuple[float, float], seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        plain = self.ordinary(rates[0], seed)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        result, counted = self.ist(rates[1], seed)
        assert plain.split is not None and result.split is not None
        peaks = dict(result.split.peak_measured)
        return {
            "network": self.name,
            "seed": seed,
            "rate": rates[0],
            "ist_rate": rates[1],
            "ordinary": reached(plain),
            "ist": reached(result),
            "ordinary_steps": self.steps,
            **counted,
            "peak_recovery": peaks.pop("recovery", 0),
            "peak_part": max(peaks.values()),
            "peak_whole": max(plain.split.peak_measured.values()),
            "bytes": result.split.bytes_measured,
            "seconds": seconds,
            "ist_seconds": time.perf_counter() - start,
        }


def reached(result: Result) -> float:
    """The accuracy in the end; of a training that diverged none."""
    return (result.last("accuracy") or 0.0) if result.status == "done" else 0.0


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The seeds of one network as one line."""
    ordinary, ist = ([100 * row[key] for row in rows] for key in ("ordinary", "ist"))
    first = rows[0]
    done = first["operations_narrow"] + first["operations_recovery"]
    return {
        "network": name,
        "seeds": len(rows),
        "ordinary": round(mean(ordinary), 2),
        "ordinary_std": round(spread(ordinary), 2),
        "ist": round(mean(ist), 2),
        "ist_std": round(spread(ist), 2),
        "points": round(mean(ist) - mean(ordinary), 2),
        "operations_share": round(done / first["operations_ordinary"], 3),
        "memory_share": round(first["peak_part"] / first["peak_whole"], 3),
        "memory_share_in_recovery": round(first["peak_recovery"] / first["peak_whole"], 3),
    }


def summary_line(line: dict[str, Any]) -> str:
    """A summary in words."""
    last = line["memory_share_in_recovery"]
    return (
        f"{line['network']}: ordinary {line['ordinary']:.2f} +- {line['ordinary_std']:.2f}, "
        f"IST {line['ist']:.2f} +- {line['ist_std']:.2f} ({line['points']:+.2f} points), "
        f"operations {line['operations_share']:.0%}, memory of a worker {line['memory_share']:.0%} of the whole"
        + (f" ({last:.0%} in recovery rounds)" if last else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--data", type=Path, help="folder with mnist.npz; without it: digits")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, help="of ordinary training, in place of the case's own")
    parser.add_argument("--defaults", action="store_true", help="IST with its default settings")
    parser.add_argument("--choose", action="store_true", help="choose the rates on held-out rows first")
    parser.add_argument("--held-out", action="store_true", help="look at held-out rows in place of the test rows")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = load(args.data, args.rows)
    data = data.held_out() if args.held_out else data
    rows, lines = [], []
    for name in args.networks:
        bench = Bench(name, data, args)
        rates = bench.chosen() if args.choose else (bench.case.rate, bench.case.ist_rate)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            rows.append(bench.compared(rates, seed))
            print(json.dumps(rows[-1]), flush=True)
        lines.append(summary(name, [row for row in rows if row["network"] == name]))
        print(summary_line(lines[-1]), flush=True)
        if args.out is not None:
            cases = {name: case_of(name, defaults=args.defaults) for name in args.networks}
            settings = {name: {"local_steps": case.local_steps, **case.settings} for name, case in cases.items()}
            found = {"stamp": stamp(args.device, 1), "data": data.name, "training_rows": len(data.x),
                     "batch": args.batch, "workers": args.workers, "settings": settings, "summary": lines,
                     "results": rows}  # fmt: skip
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
