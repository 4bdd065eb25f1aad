"""Killed at random moments, the same run resumes, and ends as if nothing had happened: shown on real processes.

python benchmarks/kill.py --kills 100 --out benchmarks/results/kill.json

A run of unlike jobs (dropout, batch norm, recurrent, schedules of several kinds, early stops, lengths in steps and
epochs, accumulation, a Dataset, an optimizer with a closure, one that diverges, one that fails) is trained once
without interruption. Then again and again in a new folder, by the same command, each time with SIGKILL at random
moments: of the process alone, or of it and its workers. Most moments are drawn from the time of training, some from all
of it, the planning included. After some kills a checkpoint is cut short, zeroed or changed in one bit. In the end
every weight, buffer, optimizer tensor, history row (but its seconds) and status must be bit for bit the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shoal

MOST_KILLS = 5
"""Of one run: then it may end."""
DAMAGE = 0.3
"""How often a checkpoint is damaged after a kill."""
TRAINING = 0.8
"""How often the moment is drawn from the time of training alone."""
LIMIT = 600.0
"""Seconds for one process."""


class Wide(nn.Module):
    """Dropout and batch norm."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(F.relu(self.norm(self.a(x))), self.p, self.training))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x.view(-1, 1, 4, 5)))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 4, 5))[0][:, -1])


class Own(nn.Module):
    """Python decides on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if float(h.detach().mean()) > 0 else h.tanh())


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def noisy(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A step with its own noise and logs."""
    x, y = batch
    out = model(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy(out, y), {"size": out.detach().square().mean()}


def touchy(out: Tensor, y: Tensor) -> Tensor:
    """Fails when it has become good enough."""
    loss = F.cross_entropy(out, y)
    if float(loss.detach()) < 0.4:
        raise ValueError("this loss does not like to be small")
    return loss


def accuracy(out: Tensor, y: Tensor) -> float:
    return float((out.argmax(1) == y).double().mean())


def jobs(length: int = 1) -> list[shoal.Job]:
    """Of all sorts; `length` times as long as the shortest."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(331, 20, generator=draw)
    y = (x @ torch.randn(20, 4, generator=draw)).argmax(1)
    common: dict[str, Any] = {
        "data": (x[:251], y[:251]), "val": (x[251:], y[251:]), "loss": F.cross_entropy, "batch_size": 16,
        "optimizer": torch.optim.Adam, "hparams": {"lr": 3e-3}, "epochs": 4 * length, "metrics": {"accuracy": accuracy},
    }  # fmt: skip

    def job(name: str, model: Any, **changes: Any) -> shoal.Job:
        return shoal.Job(name=name, model=model, **{**common, **changes})

    stop = shoal.EarlyStop("val_loss", patience=2)
    lr = torch.optim.lr_scheduler
    out = [
        job(f"wide {seed}", lambda: Wide(0.3), seed=seed, epochs=(3 + seed) * length, hparams={"lr": 1e-3 * (seed + 1)})
        for seed in range(5)
    ]
    out += [
        job(f"conv {seed}", Convolved, seed=seed, optimizer=torch.optim.SGD, hparams={"lr": 0.1, "momentum": 0.9},
            schedule=lambda step: 0.99**step, keep="best", epochs=(4 - seed) * length)
        for seed in range(3)
    ]  # fmt: skip
    out += [
        job("lstm", Recurrent, seed=7, clip_norm=0.5, epochs=2 * length),
        job("lstm 2", Recurrent, seed=8, clip_norm=0.5, epochs=3 * length, batch_size=24),
        job("own", Own, seed=9, schedule=lambda o: lr.StepLR(o, 2, 0.5), schedule_every="epoch", epochs=3 * length),
        job("stopped", lambda: Wide(0.0), seed=10, stop=stop, keep="best", hparams={"lr": 0.05}, epochs=40 * length),
        job("plateau", lambda: Wide(0.1), seed=11, schedule=lambda o: lr.ReduceLROnPlateau(o, patience=0),
            schedule_every="epoch"),
        job("steps", lambda: Wide(0.2), seed=12, epochs=None, steps=23 * length, accumulate=3, drop_last=True),
        job("noise", lambda: Wide(0.1), seed=13, loss=None, step=noisy, optimizer=torch.optim.AdamW,
            schedule=lambda o: lr.CosineAnnealingLR(o, 50 * length)),
        job("rows", lambda: Wide(0.1), seed=14, data=Rows(x[:120], y[:120]), epochs=2 * length),
        job("closure", Own, seed=15, optimizer=torch.optim.LBFGS, hparams={"lr": 0.05, "max_iter": 3}, epochs=length),
        job("diverges", Own, seed=16, optimizer=torch.optim.SGD, hparams={"lr": 1e4}, epochs=4 * length),
        job("fails", lambda: Wide(0.0), seed=17, loss=touchy, hparams={"lr": 0.02}, epochs=9 * length),
        job("amsgrad", lambda: Wide(0.4), seed=18, hparams={"lr": 1e-3, "amsgrad": True}, data_seed=3, val_every=2),
    ]  # fmt: skip
    return out


def child(folder: str | None, result: str, every: str, length: int) -> None:
    """One process: the command that is killed and given again."""
    torch.set_num_threads(1)
    work = jobs(length)
    print("go", flush=True)
    results = shoal.train(work, device="cpu", out=folder, checkpoint_every=every, deterministic=True)
    torch.save([plain(r) for r in results], result)


def plain(result: shoal.Result) -> dict[str, Any]:
    """All that must be the same."""
    history = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
    endings = {k: getattr(result, k) for k in ("name", "status", "tier", "error", "steps")}
    return {
        **endings,
        "weights": dict(result.model.state_dict()),
        "optimizer": result.optimizer_state,
        "history": history,
    }


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    """Where two runs differ in any bit."""
    out = []
    for one, other in zip(a, b, strict=True):
        for part in one:
            left, form = pytree.tree_flatten(one[part])
            right, other_form = pytree.tree_flatten(other[part])
            if form != other_form or not all(map(same, left, right)):
                out.append(f"{one['name']}: {part}")
    return out


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    return type(a) is type(b) and (a == b or (a != a and b != b))


class Command:
    """The run, as a process that can be killed."""

    def __init__(self, folder: Path, args: argparse.Namespace, workers: int) -> None:
        self.folder, self.args = folder, args
        self.result = folder.with_suffix(".pt")
        self.environment = {**os.environ, "SHOAL_WORKERS": str(workers), "OMP_NUM_THREADS": "1"}
        self.heard = ""

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--child", str(self.folder), str(self.result)]
        command += ["--every", self.args.every, "--length", str(self.args.length)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.time()
        process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True
        )
        assert process.stdout is not None
        if process.stdout.readline() != "go\n":
            self.end(process)
            raise SystemExit(f"the run does not start: {self.heard.strip()}")
        return process

    def trains(self, process: subprocess.Popen[str]) -> bool:
        """Wait for its first checkpoint; whether one came."""
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            if any(path.stat().st_mtime > self.began for path in self.folder.glob("members/*/*.ckpt")):
                return True
            time.sleep(0.01)
        return False

    def end(self, process: subprocess.Popen[str], seconds: float = LIMIT) -> bool:
        """Wait so long; whether the process came to its own end."""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self.errors.seek(0)
        self.heard = self.errors.read()
        return True


def reference(room: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], float, float]:
    """The run without interruption; its seconds, and those of its training alone."""
    command = Command(room / "reference", args, workers=1)
    process = command.start()
    start = time.monotonic()
    saves = command.trains(process)
    trained = time.monotonic()
    if not command.end(process) or process.returncode or not saves:
        raise SystemExit(
            f"the run without interruption {'failed' if saves else 'saved nothing'}: {command.heard.strip()}"
        )
    return torch.load(command.result, weights_only=False), time.monotonic() - start, time.monotonic() - trained


def damage(folder: Path, draw: random.Random) -> tuple[Path, str] | None:
    """Spoil one checkpoint."""
    held = sorted(folder.glob("members/*/*.ckpt"))
    if not held:
        return None
    path, how = draw.choice(held), draw.choice(["cut short", "zeroed", "one bit changed"])
    data = bytearray(path.read_bytes())
    if how == "cut short":
        data = data[: draw.randrange(len(data))]
    elif how == "zeroed":
        data = bytearray(len(data))
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return path, how


def trial(number: int, room: Path, args: argparse.Namespace, seconds: tuple[float, float], most: int) -> dict[str, Any]:
    """One run that is killed up to `most` times and then comes to its end."""
    draw = random.Random(args.seed * 100_003 + number)
    command = Command(room / f"run{number}", args, workers=draw.choice([1, 2]))
    kills, spoiled, unnoticed = list[dict[str, Any]](), list[str](), list[str]()
    expected: str | None = None
    while True:
        process = command.start()
        training = draw.random() < TRAINING and command.trains(process)
        moment = draw.uniform(0, seconds[training])
        ended = command.end(process, moment if len(kills) < most else LIMIT)
        if not ended:
            whole = draw.random() < 0.5
            (os.killpg if whole else os.kill)(process.pid, signal.SIGKILL)
            command.end(process)
            kills.append({"after": round(moment, 3), "training": training, "group": whole, **seen(command.folder)})
        if expected is not None and expected not in command.heard and (ended or training):
            unnoticed.append(expected)
        if ended:
            break
        expected = None
        if draw.random() < args.damage and (found := damage(command.folder, draw)):
            expected = str(found[0])
            spoiled.append(f"{found[0].relative_to(command.folder)}: {found[1]}")
    return {
        "kills": kills, "workers": int(command.environment["SHOAL_WORKERS"]), "damaged": spoiled,
        "unnoticed": unnoticed, "code": process.returncode, "result": str(command.result),
        "said": command.heard[-2000:] if process.returncode else "",
    }  # fmt: skip


def seen(folder: Path) -> dict[str, int]:
    """How far a run had come: members with a checkpoint, checkpoints written, files that were on their way."""
    held = list(folder.glob("members/*/*.ckpt"))
    newest = {path.parent: int(path.stem) for path in sorted(held)}
    return {
        "members": len(newest),
        "checkpoints": sum(newest.values()),
        "under way": len(list(folder.rglob(".*.tmp"))),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from shoal.evidence.bench.stamp import stamp

    with tempfile.TemporaryDirectory(prefix="shoal-kill-") as name:
        room = Path(name)
        expected, *seconds = reference(room, args)
        print(f"{len(expected)} jobs, {seconds[0]:.1f} s without interruption: " + ways(expected), flush=True)
        done, trials = 0, list[dict[str, Any]]()
        while done < args.kills:
            found = trial(len(trials), room, args, (seconds[0], seconds[1]), min(MOST_KILLS, args.kills - done))
            result = found.pop("result")
            bad = [f"exit code {found['code']}: {found['said']}"] if found["code"] else []
            bad = bad or differences(expected, torch.load(result, weights_only=False))
            bad += [f"a damaged file was not reported: {path}" for path in found["unnoticed"]]
            found["differences"] = bad
            done += len(found["kills"])
            trials.append(found)
            print(f"{done:4d} kills, {len(found['damaged'])} damaged: {'; '.join(bad) or 'the same'}", flush=True)
    return {
        "stamp": stamp("cpu", 1), "jobs": len(expected), "seconds": seconds, "kills": done,
        "damaged": sum(len(t["damaged"]) for t in trials), "different": sum(bool(t["differences"]) for t in trials),
        "trials": trials,
    }  # fmt: skip


def ways(results: list[dict[str, Any]]) -> str:
    """How the jobs ended, and in which tiers they ran."""
    endings = [(r["status"], r["tier"]) for r in results]
    return ", ".join(f"{endings.count(pair)} {pair[0]} ({pair[1]})" for pair in dict.fromkeys(endings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--every", default="0.05s", help="seconds between checkpoints")
    parser.add_argument("--length", type=int, default=8, help="how long the jobs are")
    parser.add_argument("--damage", type=float, default=DAMAGE, help="how often a checkpoint is damaged after a kill")
    parser.add_argument("--out", type=Path, help="write what was seen to this file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.child[1], args.every, args.length)
        return
    seen = measure(args)
    if args.out:
        args.out.write_text(json.dumps(seen, indent=1) + "\n")
    print(f"{seen['kills']} kills, {seen['damaged']} damaged files, {seen['different']} runs that ended differently")
    sys.exit(1 if seen["different"] else 0)


if __name__ == "__main__":
    main()
