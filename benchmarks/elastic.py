"""Two hundred jobs of four kinds on one device, against one after another in plain PyTorch.

python benchmarks/elastic.py --device cpu --out benchmarks/results/elastic-cpu.json

MLPs, CNNs with batch norm, LSTMs and transformers on digits; three batch sizes, three optimizers, lengths
from 50 to 1,000 steps, all drawn from one seed. `--sample` runs that share of every plain loop's steps and scales its
time up. `--check N` trains N of the jobs by themselves too and compares every bit (on a CPU).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.evidence.bench.stamp import stamp


class MLP(nn.Module):
    def __init__(self, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)))
        for layer in self.more:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out


class CNN(nn.Module):
    def __init__(self, width: int = 8, depth: int = 1) -> None:
        super().__init__()
        sizes = [1, *[width] * depth]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        out: Tensor = self.head(F.dropout(F.max_pool2d(x, 2).flatten(1), 0.1, self.training))
        return out


class LSTM(nn.Module):
    def __init__(self, width: int = 24, depth: int = 1) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, width, depth, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Transformer(nn.Module):
    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


SIZES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "small": {"MLP": MLP, "CNN": CNN, "LSTM": LSTM, "Transformer": Transformer},
    "medium": {
        "MLP": partial(MLP, 256, 4),
        "CNN": partial(CNN, 32, 4),
        "LSTM": partial(LSTM, 96, 2),
        "Transformer": partial(Transformer, 64, 4),
    },
}
"""Thousands of weights each, or up to some hundred thousand in layers that one after another keep a GPU waiting."""


def jobs(count: int = 200, seed: int = 0, size: str = "small") -> list[shoal.Job]:
    """The list: the same on every machine."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    draw = random.Random(seed)
    optimizers = [(torch.optim.Adam, 1e-3), (torch.optim.SGD, 0.05), (torch.optim.RMSprop, 1e-3)]
    found = []
    for index in range(count):
        kind, build = list(SIZES[size].items())[index % 4]
        optimizer, rate = draw.choice(optimizers)
        found.append(
            shoal.Job(
                model=build, data=(x, y), loss=F.cross_entropy, optimizer=optimizer,
                hparams={"lr": rate * draw.choice((0.3, 1.0, 3.0))}, batch_size=draw.choice((16, 32, 64)), epochs=None,
                steps=draw.randrange(50, 1001), seed=index, name=f"{index} {kind}",
            )
        )  # fmt: skip
    return found


def plain(job: shoal.Job, device: torch.device, data: tuple[Tensor, Tensor], steps: int) -> None:
    """What one writes by hand."""
    torch.manual_seed(job.seed)
    factory: Any = job.model
    model = factory().to(device)
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    done = 0
    while done < steps:
        for rows in torch.randperm(len(data[0]), generator=order).to(device).split(job.batch_size):
            if done == steps:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data[0][rows]), data[1][rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1


def one_after_another(made: list[shoal.Job], device: torch.device, sample: float) -> float:
    """Seconds of all of them in plain PyTorch."""
    data: Any = made[0].data
    data = tuple(leaf.to(device) for leaf in data)
    for job in made[:4]:
        plain(job, device, data, 5)
    total = 0.0
    for job in made:
        steps = max(5, round((job.steps or 0) * sample))
        start = time.perf_counter()
        plain(job, device, data, steps)
        if device.type == "cuda":
            torch.cuda.synchronize()
        total += (time.perf_counter() - start) * (job.steps or 0) / steps
    return total


def differing(made: list[shoal.Job], results: shoal.Results, count: int) -> list[str]:
    """Of so many jobs, those that come out otherwise when they are trained by themselves."""
    found = []
    for index in random.Random(1).sample(range(len(made)), min(count, len(made))):
        alone = shoal.train([made[index]], device="cpu", threads=1)[0].model.state_dict()
        ours = results[index].model.state_dict()
        if not all(torch.equal(ours[name], value) for name, value in alone.items()):
            found.append(made[index].name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--compile", default="auto", choices=["auto", "no"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    made, device = jobs(args.jobs, size=args.size), torch.device(args.device)
    start = time.perf_counter()
    results = shoal.train(made, device=device, compile="auto" if args.compile == "auto" else False)
    packed = time.perf_counter() - start
    print(f"packed: {packed:.1f} s, {results.running:.1f} members at once on average, {results}", flush=True)
    alone = one_after_another(made, device, args.sample)
    print(f"one after another: {alone:.1f} s; gain {alone / packed:.2f}x", flush=True)
    wrong = differing(made, results, args.check)
    found = {
        "jobs": len(made), "size": args.size, "steps": sum(job.steps or 0 for job in made), "packed_seconds": packed,
        "plain_seconds": alone, "plain_share_run": args.sample, "gain": alone / packed, "running": results.running,
        "statuses": {status: sum(r.status == status for r in results) for status in {r.status for r in results}},
        "checked_alone": args.check, "differing": wrong, "environment": stamp(str(device), 1),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k != "environment"}))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
