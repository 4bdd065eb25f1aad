"""One DataLoader with workers and augmentation feeds many networks: batches a second of the loader alone, against those
of the training.

    python benchmarks/dataloader.py                                   # 32 MLPs, 2 workers, on a CPU
    python benchmarks/dataloader.py --wait 0.5                        # workers that wait: the cores are free
    python benchmarks/dataloader.py --device cuda --workers 8 --image 32 --batch-size 128
    python benchmarks/dataloader.py --out benchmarks/results/dataloader-cpu.json

The loader's own speed is that of iterating it epoch after epoch and doing nothing with its batches, before and after
the training. Its first epoch, and that of the training with its set-up, are not counted; those of the training are from
the end of the epoch before to their own, so that the start of the loader's workers is in all numbers. Neither is the
training's last epoch, during which no other one starts. `begin` is how long the process that reads or trains waits
until `iter(loader)` returns; where Shoal may start workers early, another process forks them meanwhile. `--loop` adds a
plain loop over the same loader that trains all networks one after the other on each batch. Medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import shoal
from shoal.environment import environment


class Augmented(Dataset[Any]):
    """Images that are flipped and shifted at random; `work`: how often noise is added, to make it cost more; `wait`:
    seconds that reading one waits, as for a disk."""

    def __init__(self, rows: int, side: int, work: int, wait: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(rows, 3, side, side, generator=generator)
        self.y = torch.randint(10, (rows,), generator=generator)
        self.work, self.wait = work, wait

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x = self.x[row]
        if self.wait:
            time.sleep(self.wait)
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        x = x.roll(int(torch.randint(-2, 3, ())), -1)
        for _ in range(self.work):
            x = x + 0.01 * torch.randn_like(x)
        return x, self.y[row]


class Ends:
    """Notes when each epoch ends. A listener would not do: with one, no epoch may begin early, since it might change
    the Dataset."""

    only_watches = True

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, view: shoal.MemberView) -> None:
        if view.epoch > len(self.seconds):
            self.seconds.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=100, help="in an epoch")
    parser.add_argument("--image", type=int, default=8, help="pixels on a side")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--work", type=int, default=1, help="additions of noise to each image")
    parser.add_argument("--wait", type=float, default=0.0, help="milliseconds for each image, with the core free")
    parser.add_argument(
        "--rounds", type=int, default=5, help="epochs of the training that count; of the loader alone twice as many"
    )
    parser.add_argument("--loop", action="store_true", help="time the plain loop too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pixels = 3 * given.image**2
    dataset = Augmented(given.batches * given.batch_size, given.image, given.work, given.wait / 1e3)
    pin = given.device.startswith("cuda")
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=given.batch_size, shuffle=True, num_workers=given.workers, pin_memory=pin
    )

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, given.hidden), nn.ReLU(), nn.Linear(given.hidden, 10))

    alone: list[float] = []
    looped: list[float] = []
    jobs = [
        shoal.Job(
            model=network, data=loader, loss=F.cross_entropy, hparams={"lr": 1e-3 * (1 + i % 4)}, seed=i,
            epochs=given.rounds + 2,
        )
        for i in range(given.members)
    ]  # fmt: skip
    begins = _note_begins()
    _time(loader)

    def time_alone() -> list[float]:
        begins.clear()
        alone.extend(given.batches / _time(loader) for _ in range(given.rounds))
        return [*begins]

    begins_alone = time_alone()
    begins.clear()
    ends = Ends()
    results = shoal.train(jobs, device=given.device, callbacks=[ends], progress=False)
    packed = [given.batches / (b - a) for a, b in pairwise(ends.seconds[:-1])]
    begins_packed = [*begins]
    begins_alone += time_alone()
    if given.loop:
        looped = [given.batches / _loop(loader, network, given.members, given.device) for _ in range(given.rounds)]
    rows: dict[str, Any] = {
        "loader alone, batches/s": round(statistics.median(alone), 1),
        "shoal, batches/s": round(statistics.median(packed), 1),
        "begin of each epoch of shoal, ms": [round(1e3 * begin) for begin in begins_packed],
        "begin of each epoch of the loader alone, ms": [round(1e3 * begin) for begin in begins_alone],
        "each epoch of shoal, batches/s": [round(x) for x in packed],
        "each epoch of the loader alone, batches/s": [round(x) for x in alone],
        "tiers": sorted({result.tier for result in results}),
        "settings": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "environment": environment(torch.device(given.device)),
    }
    rows["shoal / loader"] = round(rows["shoal, batches/s"] / rows["loader alone, batches/s"], 3)
    if looped:
        rows["loop, batches/s"] = round(statistics.median(looped), 1)
    print(json.dumps({key: value for key, value in rows.items() if key != "environment"}, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


def _time(loader: DataLoader[Any]) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def _note_begins() -> list[float]:
    """Return a list that gets the seconds of each beginning of an epoch with workers in this process."""
    begins: list[float] = []
    begin = _MultiProcessingDataLoaderIter.__init__

    def noted(self: Any, loader: DataLoader[Any]) -> None:
        start = time.perf_counter()
        begin(self, loader)
        begins.append(time.perf_counter() - start)

    _MultiProcessingDataLoaderIter.__init__ = noted  # type: ignore[method-assign]
    return begins


def _loop(loader: DataLoader[Any], network: Any, members: int, device: str) -> float:
    models = [network().to(device) for _ in range(members)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    start = time.perf_counter()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
