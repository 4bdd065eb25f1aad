"""Batches that are not all of one shape: padded to their longest row, of one row each, or with rows left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import shoal

TEXTS = torch.randint(1, 50, (40, 12), generator=torch.Generator().manual_seed(0))


class Texts(Dataset[Any]):
    """Rows of different length: by `length`, of the row's number."""

    def __init__(self, length: Callable[[int], int], rows: int = 40) -> None:
        self.length, self.rows = length, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return TEXTS[row, : self.length(row)], row % 2


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def without_thirds(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Leaves rows out."""
    some = [item for i, item in enumerate(items) if i % 3 or len(items) < 5]
    return padded(some[: max(1, int(some[0][0][0]) % len(some))])


class Reader(nn.Module):
    """Divides by the length of the batch, a number that a graph would hold fast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 6, padding_idx=0), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(self.embed(x).sum(1) / x.shape[1])
        assert isinstance(out, Tensor)
        return out


def job(seed: int, data: Any, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: Reader().double(), "data": data, "collate": padded, "loss": F.cross_entropy, "batch_size": 8,
        "epochs": 3, "hparams": {"lr": 0.01},
    }  # fmt: skip
    return shoal.Job(seed=seed, name=f"{seed}", **(settings | changes))


KINDS: dict[str, tuple[Texts, dict[str, Any]]] = {
    "all along": (Texts(lambda row: 1 + row % 11), {}),
    "in the middle": (Texts(lambda row: 3 if 16 <= row < 24 else 7), {"shuffle": False}),
    "seldom": (Texts(lambda row: 9 if row == 20 else 4), {}),
    "never": (Texts(lambda row: 5), {}),
    "one row each": (Texts(lambda row: 1 + row % 5, rows=9), {"batch_size": 1, "collate": None}),
    "rows left out": (Texts(lambda row: 5), {"collate": without_thirds}),
}


@pytest.mark.parametrize("same_rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_many_shapes(kind: str, same_rows: bool) -> None:
    data, changes = KINDS[kind]
    seeds = {"data_seed": 5} if same_rows else {}
    results = assert_as_alone([job(i, data, **changes, **seeds) for i in range(3)], tier=None)
    tiers = {result.tier for result in results}
    assert tiers == {"stacked" if kind == "never" else "serial"}, tiers


def test_one_member_alone_and_with_accumulated_batches() -> None:
    data = Texts(lambda row: 3 if 16 <= row < 24 else 7)
    assert_as_alone([job(0, data, shuffle=False, accumulate=3)], tier="serial")
    assert_as_alone([job(i, data, shuffle=False, accumulate=2) for i in range(2)], tier="serial")


def test_only_those_leave_the_stack_whose_batches_vary() -> None:
    even, odd = Texts(lambda row: 5), Texts(lambda row: 5 if row != 20 else 9)
    results = assert_as_alone([job(i, odd if i == 1 else even) for i in range(3)], tier=None)
    assert [result.tier for result in results] == ["stacked", "serial", "stacked"]


def test_validation_of_many_shapes() -> None:
    x, y = numbers(1, 24, 6), torch.arange(24) % 2
    texts = Texts(lambda row: 1 + row % 11)
    jobs = [job(i, texts, val=texts, metrics={"shown": lambda out, target: out.shape[0]}) for i in range(2)]
    for result in assert_as_alone(jobs, tier=None):
        assert result.history[-1]["shown"] == 40
    plain = {"model": lambda: nn.Linear(6, 2).double(), "collate": None}
    assert_as_alone([job(i, (x, y), val=(x[:9], y[:9]), **plain) for i in range(2)])


def test_explain_says_that_they_vary() -> None:
    told = shoal.explain([job(0, KINDS["all along"][0])], device="cpu", measure=False)
    assert "its batches have different shapes ([8, 8], [8], [8, 11], [8])" in str(told)
