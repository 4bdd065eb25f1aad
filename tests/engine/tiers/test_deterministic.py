"""With `deterministic=True` the tier and the form of a step follow from the job alone: no clock, nothing remembered, no
number of threads or processes has a say in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_same_bits, numbers
from torch import nn

import shoal
from shoal.engine.rules import _per_member, _registry
from shoal.engine.units import trials
from shoal.engine.units.trials import TrialResult


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def job(seed: int, width: int = 5, **changes: Any) -> shoal.Job:
    x, y = numbers(1, 26, width, dtype=torch.float32), numbers(2, 26, 1, dtype=torch.float32)
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(width, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 1)),
        "data": (x, y), "loss": F.mse_loss, "batch_size": 13, "epochs": 3, "seed": seed, "name": f"{seed}",
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


def test_no_trial_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long job, that would be tried, and a result that says that stacking loses."""
    lost = TrialResult(stacked=1.0, solo=0.1, ratio=0.1)
    monkeypatch.setattr(trials, "trial_result", lambda *_: lost)
    pack = [job(seed, epochs=150) for seed in range(2)]
    assert {result.tier for result in shoal.train(pack, device="cpu")} == {"serial"}
    results = shoal.train(pack, device="cpu", deterministic=True)
    assert {result.tier for result in results} == {"stacked"}


def test_the_number_of_processes_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = [job(seed) for seed in range(5)]
    runs = []
    for count in ("1", "2", "3"):
        monkeypatch.setenv("SHOAL_WORKERS", count)
        runs.append(shoal.train(pack, device="cpu", deterministic=True))
    for one, two, three in zip(*runs, strict=True):
        assert one.tier == two.tier == three.tier == "stacked"
        assert_same_bits(two, one)
        assert_same_bits(three, one)


@pytest.mark.parametrize("tier", ["stacked", "serial"])
def test_the_number_of_threads_changes_no_bit(tier: str) -> None:
    """Threads split long sums; by default there is one."""
    rows = numbers(3, 600, 300, dtype=torch.float32)
    changes: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 1)),
        "data": (rows, rows[:, :1]), "batch_size": 600, "epochs": 3,
    }  # fmt: skip
    if tier == "serial":
        changes["optimizer"], changes["hparams"] = torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (result,) = shoal.train([job(0, **changes)], device="cpu", deterministic=True)
        assert torch.get_num_threads() == threads and result.tier == tier
        results.append(result)
    assert_same_bits(results[1], results[0])


def test_given_threads_are_used() -> None:
    seen: list[int] = []

    def step(model: nn.Module, batch: Any) -> Any:
        seen.append(torch.get_num_threads())
        return F.mse_loss(model(batch[0]), batch[1])

    shoal.train([job(0, loss=None, step=step)], device="cpu", deterministic=True, threads=2)
    assert set(seen) == {2}


def test_every_rule_says_whether_it_is_steady() -> None:
    """Those that compute by the shape of the whole stack must not be (`test_bits_operators.py`)."""
    assert _registry._STEADY.keys() == _registry._RULES.keys()


def test_a_members_part_starts_an_allocation_of_its_own() -> None:
    x = torch.randn(3, 5, 7, requires_grad=True)
    layout = _per_member.layout_of(torch.empty(5, 7).t().contiguous().t())
    parts = _per_member.rows(x, layout)
    assert all(part.data_ptr() % 64 == 0 and part.stride() == (1, 5) for part in parts)
    assert all(torch.equal(part, own) for part, own in zip(parts, x, strict=True))
    _per_member.together([part * (place + 1) for place, part in enumerate(parts)]).sum().backward()
    assert x.grad is not None and x.grad[:, 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert _per_member.layout_of(torch.empty(5, 1).expand(5, 7)) is None
    assert _per_member.layout_of(torch.empty(9, 7)[::2]) is None


def test_gradients_of_what_was_spread_are_summed_alike() -> None:
    """However the gradient lies in memory: as one number for all, or written out."""
    for dtype in (torch.float32, torch.float64):
        for members in (2, 7, 33):
            x = torch.ones(members, 1, 3, dtype=dtype, requires_grad=True)
            wide = _per_member.spread(x, (13, 3))
            (as_one,) = torch.autograd.grad(wide, x, torch.full((), 1 / 13, dtype=dtype).expand(members, 13, 3))
            (written,) = torch.autograd.grad(
                _per_member.spread(x, (13, 3)), x, torch.full((members, 13, 3), 1 / 13, dtype=dtype)
            )
            assert torch.equal(as_one, written) and as_one.unique().numel() == 1
