"""What a user waits: seconds from `shoal.train` to its results, on networks of several libraries, against a plain loop.

    python benchmarks/sweeps.py --data FOLDER --device cuda --out benchmarks/results/sweeps.json
    python benchmarks/sweeps.py gpt2 bert --data FOLDER --times 8

Each sweep runs three times, each time in a new process: a plain loop over the jobs (eager, data on the device,
autocast, fused AdamW; after its own warm-up; on a share of the jobs, scaled), Shoal with an empty cache, and Shoal
again with the cache of that first run. Imports are not counted, the loop's or Shoal's; the seconds of Shoal's are in
the results. `--times`: so many times the epochs. FOLDER holds mnist.npz, covertype.npz and tinyshakespeare.txt.
Networks whose library is not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.evidence.bench.stamp import stamp

RATES = torch.logspace(-4, -2.5, 16).tolist()


def mnist(folder: Path, rows: int = 20_000, flat: bool = False) -> tuple[Tensor, Tensor]:
    with np.load(folder / "mnist.npz") as stored:
        x, y = torch.as_tensor(stored["x_train"][:rows]), torch.as_tensor(stored["y_train"][:rows])
    x = x.float() / 255
    return (x.flatten(1) if flat else x.unsqueeze(1)), y.long()


def covertype(folder: Path) -> tuple[Tensor, Tensor]:
    with np.load(folder / "covertype.npz") as stored:
        picked = np.random.default_rng(0).permutation(len(stored["y"]))[:40_000]
        x, y = torch.as_tensor(stored["X"][picked]).float(), torch.as_tensor(stored["y"][picked]).long()
    return (x - x.mean(0)) / (x.std(0) + 1e-6), y - y.min()


def text(folder: Path, length: int, rows: int) -> tuple[Tensor, Tensor]:
    codes = torch.tensor(list((folder / "tinyshakespeare.txt").read_bytes()))
    first = torch.randperm(len(codes) - length - 1, generator=torch.Generator().manual_seed(0))[:rows]
    rows_BT = torch.stack([codes[i : i + length + 1] for i in first.tolist()])
    return rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous()


def images(rows: int, side: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, side, side, generator=drawn), torch.randint(10, (rows,), generator=drawn)


def mlp(*widths: int, rate: float, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), *([nn.BatchNorm1d(b)] if norm else []), nn.ReLU(), nn.Dropout(rate)]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip


class Unstackable(nn.Module):
    """Asks for a value in its forward pass, as people do for a check."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(784, 256, 128, 10, rate=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 1e6:
            raise ValueError("inputs are not scaled")
        logits: Tensor = self.layers(x)
        return logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
                   max_position_embeddings=64)
    )  # fmt: skip


def vit() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10)
    return model


def resnet18() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Jobs that differ in learning rate and seed."""

    model: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Tensor, Tensor]]
    jobs: int
    batch: tuple[int, ...]
    epochs: int = 3
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = class_loss
    needs: str = "torch"

    def make(self, folder: Path, times: int) -> list[shoal.Job]:
        data = self.data(folder)
        return [
            shoal.Job(
                model=self.model, data=data, step=self.step, optimizer=torch.optim.AdamW,
                hparams={"lr": RATES[i % len(RATES)]}, batch_size=self.batch[i % len(self.batch)],
                epochs=self.epochs * times, seed=i, precision="bf16", name=f"{i}",
            )
            for i in range(self.jobs)
        ]  # fmt: skip


SWEEPS = {
    "cnn": Sweep(model=cnn, data=mnist, jobs=32, batch=(128,)),
    "mlp": Sweep(
        model=lambda: mlp(784, 256, 128, 10, rate=0.1), data=lambda f: mnist(f, flat=True), jobs=32, batch=(128,)
    ),
    "covertype": Sweep(model=lambda: mlp(54, 256, 128, 7, rate=0.1, norm=True), data=covertype, jobs=64, batch=(256,)),
    "batch-sizes": Sweep(
        model=lambda: mlp(784, 256, 128, 10, rate=0.1),
        data=lambda f: mnist(f, flat=True),
        jobs=32,
        batch=(64, 128, 256, 512),
    ),
    "gpt2": Sweep(
        model=gpt2, data=lambda f: text(f, 128, 6_400), jobs=16, batch=(32,), step=language_loss, needs="transformers"
    ),
    "bert": Sweep(
        model=bert, data=lambda f: text(f, 64, 6_400), jobs=16, batch=(32,), step=language_loss, needs="transformers"
    ),
    "vit": Sweep(model=vit, data=lambda _: images(6_400, 64), jobs=16, batch=(64,), needs="timm"),
    "resnet18": Sweep(
        model=resnet18, data=lambda _: images(6_400, 64), jobs=16, batch=(128,), epochs=2, needs="torchvision"
    ),
    "unstackable": Sweep(model=Unstackable, data=lambda f: mnist(f, 12_800, flat=True), jobs=8, batch=(128,), epochs=1),
}


def run_loop(jobs: list[shoal.Job], device: torch.device, share: float) -> float:
    """Seconds of a plain loop over all jobs, from a share of them."""
    x, y = (tensor.to(device) for tensor in jobs[0].data)
    every = max(1, round(1 / share))
    timed = jobs[::every]
    _loop_over(jobs[0], x[: 20 * jobs[0].batch_size], y, device, epochs=1)
    start = time.perf_counter()
    for job in timed:
        _loop_over(job, x, y, device, epochs=job.epochs or 1)
    return (time.perf_counter() - start) * len(jobs) / len(timed)


def _loop_over(job: shoal.Job, x: Tensor, y: Tensor, device: torch.device, *, epochs: int) -> None:
    assert job.step is not None
    torch.manual_seed(job.seed)
    model = job.model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda", **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).to(device).split(job.batch_size):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = job.step(model, (x[rows], y[rows]))
            loss.backward()
            optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_shoal(jobs: list[shoal.Job], device: torch.device) -> dict[str, Any]:
    """Seconds from the call to the results, and what they were spent on."""
    start = time.perf_counter()
    results = shoal.train(jobs, device=str(device))
    seconds = time.perf_counter() - start
    set_up = {} if results.plan is None else dict(results.plan.set_up or {})
    assert all(result.status == "done" for result in results), [result.error for result in results if result.error]
    return {
        "seconds": seconds,
        "tiers": sorted({r.tier or "" for r in results}),
        "set_up": set_up,
    }


def one(args: argparse.Namespace) -> None:
    """One measurement, in this process; one JSON line."""
    device = torch.device(args.device)
    sweep = SWEEPS[args.sweeps[0]]
    sweep.model()  # imports the network's library, which is no part of either
    start = time.perf_counter()
    assert shoal.Job is not None  # imports what training needs; a loop's first optimizer imports most of that too
    imports = time.perf_counter() - start
    jobs = sweep.make(args.data, args.times)
    if args.way == "loop":
        print(json.dumps({"seconds": run_loop(jobs, device, args.share)}))
    else:
        print(json.dumps(run_shoal(jobs, device) | {"imports": imports}))


def in_a_new_process(name: str, way: str, cache: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, name, "--way", way, "--data", str(args.data), "--device", args.device,
               "--times", str(args.times), "--share", str(args.share)]  # fmt: skip
    folders = {"SHOAL_CACHE": "shoal", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    env = os.environ | {variable: os.path.join(cache, folder) for variable, folder in folders.items()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"seconds": float("nan"), "error": done.stderr.strip().splitlines()[-1][:300]}
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"of {', '.join(SWEEPS)}; none given: all")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=1, help="so many times the epochs")
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the jobs that the loop trains; its time is scaled"
    )
    parser.add_argument("--way", choices=["loop", "shoal"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.sweeps if name not in SWEEPS]
    if unknown:
        parser.error(f"there is no sweep {unknown[0]!r}; use {', '.join(SWEEPS)}")
    if args.way:
        one(args)
        return
    rows = []
    for name in args.sweeps or SWEEPS:
        if find_spec(SWEEPS[name].needs) is None:
            print(f"{name}: left out, {SWEEPS[name].needs} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as cache:
            loop = in_a_new_process(name, "loop", cache, args)
            first, second = (in_a_new_process(name, "shoal", cache, args) for _ in range(2))
        row = {"sweep": name, "jobs": SWEEPS[name].jobs, "times": args.times}
        rows.append({**row, "loop": loop, "first": first, "second": second})
        shown = [f"{run['seconds']:.1f} s = {loop['seconds'] / run['seconds']:.1f}x" for run in (first, second)]
        errors = [run["error"] for run in (loop, first, second) if "error" in run]
        print(f"{name}: loop {loop['seconds']:.1f} s, first run {shown[0]}, second run {shown[1]}", flush=True)
        print(f"    {first.get('tiers')}, set-up {first.get('set_up')} {errors or ''}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps({"stamp": stamp(args.device, 1), "sweeps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
