"""What a user waits on a CPU: twenty ordinary lists, from the call of `shoal.train` to its results, against a loop.

    python benchmarks/cpu_lists.py --out benchmarks/results/cpu_lists.json
    python benchmarks/cpu_lists.py mlp_1 pinn_4 --pairs 3

Every measurement has a process of its own, forked from one that has imported torch, Shoal and what the first optimizer
of a process imports, and has computed nothing; Shoal's cache is empty. The loop is what its owner would write, with one
thread or with torch's default, whichever was faster in the first pair. `allowed` is 1.05 times the loop plus 0.1 s; of
wall time and, since other programs may use the machine, of processor time too (all processes together). `equal` is the
largest difference of a job's last training loss, of its size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, in a loop as in Shoal
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import train  # loads what the name stands for: Shoal's own modules, some 0.13 s
from shoal.evidence.bench.stamp import stamp

Jobs = list[shoal.Job]
LISTS: dict[str, Callable[[], Jobs]] = {}


def ordinary(make: Callable[[], Jobs]) -> Callable[[], Jobs]:
    """Register a list by its function's name."""
    LISTS[make.__name__] = make
    return make


def table(rows: int = 2000, columns: int = 20, classes: int = 3) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=drawn)
    return x, (x @ torch.randn(columns, classes, generator=drawn)).argmax(1)


def images(rows: int = 512, side: int = 16) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(rows, 1, side, side, generator=drawn), torch.randint(10, (rows,), generator=drawn)


def tokens(rows: int = 512, length: int = 24, words: int = 64) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(words, (rows, length), generator=drawn)
    return x, x[:, 0] % 4


def mlp(*widths: int, rate: float = 0.0, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), *([nn.BatchNorm1d(b)] if norm else []), nn.ReLU()]
        layers += [nn.Dropout(rate)] if rate else []
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, rate: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, rate, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(64, 16),
            nn.LSTM(16, width, batch_first=True),
            nn.Linear(width, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class Skipping(nn.Module):
    """Reads a number out of a tensor, and so cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(20, 64, 64, 3, rate=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if x.mean().item() > 0 else -x)


def cnn(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * width, 10),
    )  # fmt: skip


def residual(model: nn.Module, batch: Any) -> Tensor:
    """Of u'' + u = 0 with u(0) = 0, u'(0) = 1."""
    x = batch[0].detach().requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    start = torch.zeros(1, 1, requires_grad=True)
    u0 = model(start)
    slope = torch.autograd.grad(u0.sum(), start, create_graph=True)[0]
    return (second + u).square().mean() + u0.square().mean() + (slope - 1).square().mean()


def jobs(makes: list[Callable[[], nn.Module]], data: Any, *, rates: list[float] | None = None, **more: Any) -> Jobs:
    settings: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": torch.optim.Adam, "batch_size": 64, **more}
    rates = rates or [1e-3 * (1 + place % 7) for place in range(len(makes))]
    return [
        shoal.Job(model=make, data=data, hparams={"lr": rate}, seed=place, **settings)
        for place, (make, rate) in enumerate(zip(makes, rates, strict=True))
    ]


@ordinary
def mlps_64() -> Jobs:
    return jobs([lambda: mlp(20, 64, 64, 3)] * 64, table(), epochs=4)


@ordinary
def hidden_12() -> Jobs:
    return jobs([lambda w=w: mlp(20, w, w, 3) for w in range(16, 112, 8)], table(), epochs=6)


@ordinary
def mlp_1() -> Jobs:
    return jobs([lambda: mlp(20, 128, 128, 3)], table(), epochs=60)


@ordinary
def mlp_wide_1() -> Jobs:
    return jobs([lambda: mlp(20, 512, 512, 3)], table(), epochs=15)


@ordinary
def transformer_1() -> Jobs:
    return jobs([Transformer], tokens(), epochs=6)


@ordinary
def transformer_4() -> Jobs:
    return jobs([Transformer] * 4, tokens(), epochs=4)


@ordinary
def lstm_1() -> Jobs:
    return jobs([Recurrent], tokens(), epochs=20)


@ordinary
def lstm_4() -> Jobs:
    return jobs([Recurrent] * 4, tokens(), epochs=8)


@ordinary
def pinn_4() -> Jobs:
    make = lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))  # noqa: E731
    x = torch.linspace(0, 3, 256).unsqueeze(1)
    return jobs([make] * 4, (x,), loss=None, step=residual, steps=150)


@ordinary
def linear_1000() -> Jobs:
    return jobs([lambda: nn.Linear(20, 3)] * 1000, table(512), epochs=1, optimizer=torch.optim.SGD)


@ordinary
def tabular_5() -> Jobs:
    return jobs([lambda: mlp(20, 64, 64, 3, rate=0.1, norm=True)] * 5, table(), epochs=10, val=table(500))


@ordinary
def dropout_16() -> Jobs:
    return jobs([lambda r=r: mlp(20, 64, 64, 3, rate=0.02 + r / 50) for r in range(16)], table(), epochs=5)


@ordinary
def widths_18() -> Jobs:
    return jobs([lambda w=w: mlp(20, w, 3) for w in (16, 32, 64, 128, 256, 512)] * 3, table(), epochs=5)


@ordinary
def cnn_1() -> Jobs:
    return jobs([cnn], images(), epochs=10)


@ordinary
def cnn_8() -> Jobs:
    return jobs([cnn] * 8, images(), epochs=3)


@ordinary
def unstackable_8() -> Jobs:
    return jobs([Skipping] * 8, table(), epochs=4)


@ordinary
def half_second_1() -> Jobs:
    return jobs([lambda: mlp(20, 64, 64, 3, rate=0.1)], table(), epochs=15)


@ordinary
def half_second_8() -> Jobs:
    return jobs([lambda: mlp(20, 64, 64, 3)] * 8, table(), epochs=2)


@ordinary
def bert_2() -> Jobs:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=64, max_position_embeddings=32, num_labels=4, **size)
    return jobs([lambda: BertForSequenceClassification(config)] * 2, tokens(), loss=None, step=labelled, epochs=4)


@ordinary
def gpt2_1() -> Jobs:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    return jobs([lambda: GPT2LMHeadModel(config)], tokens()[:1], loss=None, step=written, epochs=6)


def labelled(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], labels=batch[1]).loss


def written(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], labels=batch[0]).loss


# --- both ways ------------------------------------------------------------------------------------------------------


def by_loop(some: Jobs) -> list[float]:
    """What their owner would write; each job's mean loss in its last epoch."""
    return [_train(job) for job in some]


def _train(job: shoal.Job) -> float:
    torch.manual_seed(job.seed)
    model: nn.Module = job.model()  # type: ignore[operator, assignment]
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    leaves: tuple[Tensor, ...] = job.data  # type: ignore[assignment]
    done, epoch, mean = 0, 0, 0.0
    while epoch < job.epochs if job.epochs is not None else done < (job.steps or 0):
        losses = []
        for rows in torch.randperm(len(leaves[0]), generator=order).split(job.batch_size):
            if job.steps is not None and done >= job.steps:
                break
            batch = tuple(leaf[rows] for leaf in leaves)
            optimizer.zero_grad()
            loss = job.step(model, batch) if job.step else job.loss(model(*batch[:-1]), batch[-1])  # type: ignore[misc]
            loss.backward()
            optimizer.step()
            losses.append((len(rows), loss.item()))
            done += 1
        mean = sum(n * value for n, value in losses) / sum(n for n, _ in losses)
        epoch += 1
        if job.val is not None:
            model.eval()
            with torch.random.fork_rng(), torch.no_grad():
                for x, y in zip(*(leaf.split(job.batch_size) for leaf in job.val), strict=True):  # type: ignore[union-attr]
                    job.loss(model(x), y).item()  # type: ignore[misc]
            model.train()
    return mean


def by_shoal(some: Jobs) -> list[float]:
    results = train(some, device="cpu")
    assert all(result.status == "done" for result in results), [result.error for result in results]
    return [result.history[-1]["loss"] for result in results]


def measured(name: str, how: str) -> dict[str, Any]:
    """Seconds of one list, one way, in a process of its own."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, how, theirs))
    process.start()
    theirs.close()
    try:
        result: dict[str, Any] = ours.recv()
    finally:
        process.join()
    return result


def _child(name: str, how: str, pipe: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = folder
        some = LISTS[name]()
        if how == "loop, 1 thread":
            torch.set_num_threads(1)
        before, start = _processor_seconds(), time.perf_counter()
        losses = (by_shoal if how == "shoal" else by_loop)(some)
        wall = time.perf_counter() - start
        pipe.send({"wall": wall, "processor": _processor_seconds() - before, "losses": losses})


def _processor_seconds() -> float:
    return sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


LOOPS = ("loop, 1 thread", "loop, default threads")[: torch.get_num_threads()]


def compare(name: str, pairs: int) -> dict[str, Any]:
    """Pairs of a list's loop and Shoal, in turns."""
    first = {how: measured(name, how) for how in LOOPS}
    how = min(LOOPS, key=lambda way: first[way]["wall"])
    loops, ours = [first[how]], [measured(name, "shoal")]
    for number in range(1, pairs):
        ways = [(loops, how), (ours, "shoal")]
        for results, way in ways if number % 2 else reversed(ways):
            results.append(measured(name, way))
    row: dict[str, Any] = {"list": name, "loop": how, "pairs": pairs}
    for clock in ("wall", "processor"):
        loop, shoal_ = (statistics.median(run[clock] for run in runs) for runs in (loops, ours))
        row[clock] = {"loop": loop, "shoal": shoal_, "allowed": 1.05 * loop + 0.1, "ratio": shoal_ / loop}
        row[clock]["within"] = shoal_ <= row[clock]["allowed"]
    row["equal"] = max(abs(a - b) / abs(a) for a, b in zip(loops[0]["losses"], ours[0]["losses"], strict=True))
    row["runs"] = {
        way: [{k: run[k] for k in ("wall", "processor")} for run in runs]
        for way, runs in zip(("loop", "shoal"), (loops, ours), strict=True)
    }
    return row


def show(row: dict[str, Any]) -> str:
    cells = [f"{row['list']:16} {row['loop'][6:]:16}"]
    for clock in ("wall", "processor"):
        x = row[clock]
        over = "" if x["within"] else "OVER"
        cells.append(f"{x['loop']:6.2f} {x['shoal']:6.2f} {x['allowed']:6.2f} {x['ratio']:5.2f} {over:4}")
    return "  ".join([*cells, f"{row['equal']:.0e}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lists", nargs="*", help=f"of {', '.join(LISTS)}; all without")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    wanted = settings.lists or [name for name in LISTS if find_spec("transformers") or name not in ("bert_2", "gpt2_1")]
    head = "loop  shoal allow  ratio     "
    print(f"{'':16} {'':16}    wall: {head}  processor: {head}  equal", flush=True)
    rows = []
    for name in wanted:
        rows.append(compare(name, settings.pairs))
        print(show(rows[-1]), flush=True)
        if settings.out is not None:
            settings.out.write_text(json.dumps({"stamp": stamp("cpu", None), "rows": rows}, indent=1) + "\n")
    for clock in ("wall", "processor"):
        print(f"{sum(row[clock]['within'] for row in rows)} of {len(rows)} within what is allowed, {clock} time")


if __name__ == "__main__":
    main()
