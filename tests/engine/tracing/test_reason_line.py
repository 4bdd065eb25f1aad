"""The reason why a step is not stacked names the line of the user's code; odd containers do not end the search."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.python_state._compare import same_value

X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            return h
        return -h


class Sizes(tuple[int, ...]):
    """A tuple whose length is not defined, as the irreducible representations of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes((6, 3))
        self.a = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def make_jobs(model: Callable[[], nn.Module]) -> list[shoal.Job]:
    return [shoal.Job(model=model, data=(X, Y), loss=F.cross_entropy, epochs=1, seed=i) for i in range(2)]


def test_the_reason_names_the_line() -> None:
    (part, *_) = shoal.explain(make_jobs(Branch), device="cpu", measure=False).plan.parts
    assert "depends on the data (test_reason_line.py:" in part.reason and "if h.sum() > 0:" in part.reason


def test_a_tuple_without_a_length_can_be_an_attribute() -> None:
    (part,) = shoal.explain(make_jobs(Sized), device="cpu", measure=False).plan.parts
    assert part.tier == "stacked"
    assert same_value(Sizes((6, 3)), Sizes((6, 3))) and not same_value(Sizes((6, 3)), Sizes((6,)))
