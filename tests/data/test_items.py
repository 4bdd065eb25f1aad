"""Datasets that draw at random: what an item is depends on the job alone, wherever its randomness comes from."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, numbers
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from shoal.data._items import Items, generators_of
from shoal.reference import solo

X, Y = numbers(1, 20, 4), numbers(2, 20, 1)
_global = np.random.default_rng(5)


class Noisy(Dataset[Any]):
    """Adds a number that `draw` gives."""

    def __init__(self, draw: Any, **more: Any) -> None:
        self.draw = draw
        self.__dict__ |= more

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return X[row] + self.draw(), Y[row]


class Transform:
    """A transform as libraries have them: an object that is called."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __call__(self) -> float:
        return float(self.rng.normal())


def attribute() -> Noisy:
    rng = np.random.default_rng(3)
    return Noisy(rng.normal, rng=rng)


def closure() -> Noisy:
    generator = torch.Generator().manual_seed(4)
    return Noisy(lambda: torch.rand((), generator=generator))


def of_torch(generator: torch.Generator) -> Tensor:
    return torch.rand((), generator=generator)


KINDS: dict[str, Callable[[], Noisy]] = {
    "an attribute": attribute,
    "a closure": closure,
    "a transform in a list": lambda: Noisy(Transform(np.random.default_rng(1)), parts=[{"all": ()}]),
    "a partial": lambda: Noisy(partial(of_torch, torch.Generator().manual_seed(2))),
    "python's": lambda: Noisy(random.Random(7).random),
    "numpy's old one": lambda: Noisy(np.random.RandomState(7).rand),
    "a global": lambda: Noisy(lambda: _global.normal()),
}


def job(data: Dataset[Any], seed: int = 0) -> shoal.Job:
    return shoal.Job(
        model=lambda: nn.Linear(4, 1).double(), data=data, loss=F.mse_loss, epochs=3, batch_size=8, seed=seed,
        name=f"{seed}",
    )  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_generators_of_its_own(kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.dataset.SLOW_BATCH", float("inf"))
    one = KINDS[kind]()
    jobs = [job(one if shared else KINDS[kind](), i) for i in range(3)]
    before = [repr(g) if isinstance(g, torch.Generator) else str(_state(g)) for g in generators_of(one)]
    results = shoal.train(jobs, device="cpu")
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))
    after = [repr(g) if isinstance(g, torch.Generator) else str(_state(g)) for g in generators_of(one)]
    assert before == after and before, "the user's own generator has moved"


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def test_two_generators_that_were_seeded_differently_draw_differently() -> None:
    first, same, other = (Items(Noisy(np.random.default_rng(seed).normal)) for seed in (1, 1, 2))
    assert torch.equal(first(3, 0, 0)[0], same(3, 0, 0)[0]) and not torch.equal(first(3, 0, 0)[0], other(3, 0, 0)[0])
    drawn = [first(row, seed, epoch)[0] - X[row] for row, seed, epoch in ((3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1))]
    assert len({float(x[0]) for x in drawn}) == 4


def test_what_cannot_be_seeded_is_a_warning() -> None:
    count = iter(range(10**6))
    counted = Noisy(lambda: next(count))
    with pytest.warns(shoal.ShoalWarning, match=r"job '0': data gives another item when a row is read again"):
        shoal.train([job(counted)], device="cpu")


def test_plain_data_and_large_lists_are_not_searched_through() -> None:
    paths = [f"{i}.png" for i in range(10**5)]
    assert generators_of(Noisy(lambda: 0.0, paths=paths, table={i: i for i in range(1000)})) == []
    assert generators_of(Noisy(random.SystemRandom().random)) == []
    assert generators_of(Noisy(random.random, rng=torch.default_generator)) == []
