"""Stand-ins for members of a run folder, and ways to look at what it holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.environment import environment
from shoal.errors import ShoalWarning
from shoal.preparation.checks import prepare
from shoal.results import Result, Results
from shoal.storage.run_folder import RunFolder

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def job(**changes: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "data": (X, Y),
        "loss": nn.functional.cross_entropy,
        "hparams": {"lr": 0.1},
        "batch_size": 8,
        "epochs": 2,
    }
    return shoal.Job(**{**given, **changes})


def built(count: int = 2, **changes: Any) -> list[Member]:
    return prepare([job(name=f"m{i}", seed=i, **changes) for i in range(count)], torch.device("cpu"))


class SavedMember:
    """A member of its own making, that can be anywhere in its training."""

    def __init__(self, index: int = 0, size: int = 100) -> None:
        self.index, self.name, self.step = index, f"m{index}", 0
        self.weight = torch.zeros(size)
        self.history: list[dict[str, float]] = []
        self.odd: Any = None

    def train(self, steps: int = 1) -> SavedMember:
        for _ in range(steps):
            self.step += 1
            self.weight = torch.full_like(self.weight, self.step)
            self.history.append({"epoch": self.step, "loss": 1 / self.step, "lr": math.inf})
        return self

    def state(self) -> dict[str, Any]:
        rows = [dict(row) for row in self.history]
        return {"step": self.step, "weight": self.weight, "history": rows, "odd": self.odd}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.weight, self.history = state["step"], state["weight"], state["history"]


def opened(path: Path, count: int = 1) -> RunFolder:
    folder = RunFolder(path)
    folder.claim(built(count))
    return folder


def restored(path: Path, index: int = 0, count: int = 1) -> SavedMember:
    """The member as a new process finds it."""
    member = SavedMember(index)
    with opened(path, count) as folder:
        assert folder.restore(member)
    return member


def warnings_of(work: Callable[[], Any]) -> list[str]:
    """What a user is warned of, each in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert all(issubclass(w.category, ShoalWarning) and "\n" not in str(w.message) for w in caught)
    return [str(w.message) for w in caught]


def results(members: list[Member]) -> Results:
    stamp = environment(torch.device("cpu"))
    return Results(
        [
            Result(
                name=m.name, job=m.job, model=m.model, history=[{"epoch": 1, "loss": 0.5}], status="done",
                tier="serial", environment=stamp,
            )
            for m in members
        ]
    )  # fmt: skip


def restored_from(folder: RunFolder) -> SavedMember:
    member = SavedMember()
    assert folder.restore(member)
    return member
