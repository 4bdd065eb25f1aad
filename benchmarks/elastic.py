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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.bench.stamp import stamp


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.relu(self.a(x.flatten(1))))
        return out


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x.unsqueeze(1)))), 2)
        out: Tensor = self.head(F.dropout(x.flatten(1), 0.1, self.training))
        return out


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x)).mean(1))
        return out


def jobs(count: int = 200, seed: int = 0) -> list[shoal.Job]:
    """The list: the same on every machine."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    draw = random.Random(seed)
    optimizers = [(torch.optim.Adam, 1e-3), (torch.optim.SGD, 0.05), (torch.optim.RMSprop, 1e-3)]
    found = []
    for index in range(count):
        kind = (MLP, CNN, LSTM, Transformer)[index % 4]
        optimizer, rate = draw.choice(optimizers)
        found.append(
            shoal.Job(
                model=kind, data=(x, y), loss=F.cross_entropy, optimizer=optimizer,
                hparams={"lr": rate * draw.choice((0.3, 1.0, 3.0))}, batch_size=draw.choice((16, 32, 64)), epochs=None,
                steps=draw.randrange(50, 1001), seed=index, name=f"{index} {kind.__name__}",
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
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--compile", default="auto", choices=["auto", "no"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    made, device = jobs(args.jobs), torch.device(args.device)
    start = time.perf_counter()
    results = shoal.train(made, device=device, compile="auto" if args.compile == "auto" else False)
    packed = time.perf_counter() - start
    print(f"packed: {packed:.1f} s, {results.riding:.1f} members riding on average, {results}", flush=True)
    alone = one_after_another(made, device, args.sample)
    print(f"one after another: {alone:.1f} s; gain {alone / packed:.2f}x", flush=True)
    wrong = differing(made, results, args.check)
    found = {
        "jobs": len(made), "steps": sum(job.steps or 0 for job in made), "packed_seconds": packed,
        "plain_seconds": alone, "plain_share_run": args.sample, "gain": alone / packed, "riding": results.riding,
        "statuses": {status: sum(r.status == status for r in results) for status in {r.status for r in results}},
        "checked_alone": args.check, "differing": wrong, "environment": stamp(str(device), 1),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k != "environment"}))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
