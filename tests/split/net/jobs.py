"""Jobs and runs that the tests of a distributed split have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import shoal
from shoal.split import IST, DataParallel, LocalSGD
from shoal.split.core.method import Method, TaskExecutor, Worker
from shoal.split.core.parts import Outcome, Task

METHODS: dict[str, Callable[[shoal.Job, int], Method]] = {
    "local_sgd": lambda job, workers: LocalSGD(job, workers, local_steps=5),
    "ist": lambda job, workers: IST(job, workers, local_steps=3, overlap=0.2, recovery=1),
    "data_parallel": lambda job, workers: DataParallel(job, workers),
}


def network(width: int = 24) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 3),
    )  # fmt: skip


def a_job(width: int = 24, steps: int = 20, rows: int = 215, **fields: Any) -> shoal.Job:
    """Three classes of points; rows that no number of workers divides."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=draw)
    y = (x @ torch.randn(8, 3, generator=draw)).argmax(1)
    given: dict[str, Any] = {
        "model": lambda: network(width), "data": (x, y), "val": (x, y), "loss": F.cross_entropy,
        "optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}, "batch_size": 8, "steps": steps, "seed": 1,
        "metrics": {"accuracy": accuracy},
    }  # fmt: skip
    return shoal.Job(**{**given, **fields})


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).float().mean().item()


class Between:
    """A crew that lets a test act right before a round."""

    tier = "distributed"

    def __init__(self, executor: TaskExecutor, act: Callable[[int], None]) -> None:
        self.executor, self.act = executor, act
        self.sizes: list[int] = []

    def workers_of_round(self, number: int) -> Sequence[Worker]:
        self.act(number)
        found = self.executor.workers_of_round(number)
        self.sizes.append(len(found))
        return found

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        return self.executor.run(tasks)


def same_weights(a: shoal.Result, b: shoal.Result) -> bool:
    """Weights, buffers and optimizer state, bit for bit."""
    ours, mine = pytree.tree_flatten((a.model.state_dict(), a.optimizer_state))
    theirs, other = pytree.tree_flatten((b.model.state_dict(), b.optimizer_state))
    assert mine == other and sum(isinstance(x, torch.Tensor) for x in ours) > len(a.model.state_dict())
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(ours, theirs, strict=True))
