"""How many of torch's threads steps use is tried on the first of them: no step is lost, none is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.tiers import threads as tiers_threads
from shoal.engine.tiers import unit as tiers_unit
from shoal.engine.tiers.threads import Threads, busy


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the cores are busy: a test does not depend on what else the machine runs."""
    state = {"busy": False}
    monkeypatch.setattr(tiers_threads, "busy", lambda threads: state["busy"])
    return state


class Timed:
    """Stands for a unit whose batches take so many seconds with one thread and with two."""

    def __init__(self, patch: pytest.MonkeyPatch, one: float, two: float) -> None:
        self.seconds, self.now, self.used = {1: one, 2: two}, 0.0, list[int]()
        self.failing_batch = 0
        patch.setattr(tiers_threads, "perf_counter", lambda: self.now)

    def run(self, batches: int) -> None:
        if self.failing_batch:
            batches = min(batches, self.failing_batch - len(self.used))
        self.used += [torch.get_num_threads()] * batches
        self.now += batches * self.seconds[self.used[-1]]

    def failures(self) -> dict[int, Exception]:
        return {0: ValueError()} if 0 < self.failing_batch <= len(self.used) else {}


def used(unit: Timed, *turns: int) -> list[int]:
    torch.set_num_threads(1)
    threads = Threads(2)
    for batches in turns:
        threads.run(unit, batches)  # type: ignore[arg-type]
    assert torch.get_num_threads() == 1
    return unit.used


def test_several_threads_are_used_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert used(Timed(monkeypatch, 0.01, 0.006), 3, 9, 6) == [1] + [1, 2] * 4 + [2] * 9


@pytest.mark.parametrize(("two", "tried"), [(0.0095, 4), (0.012, 4), (0.3, 1)])
def test_one_thread_is_used_where_several_are_not(monkeypatch: pytest.MonkeyPatch, two: float, tried: int) -> None:
    assert used(Timed(monkeypatch, 0.01, two), 4, 16) == [1] + [1, 2] * tried + [1] * (19 - 2 * tried)


def test_small_steps_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert used(Timed(monkeypatch, 0.0005, 0.0001), 20, 20) == [1] * 40


def test_busy_cores_are_not_tried(monkeypatch: pytest.MonkeyPatch, cores: dict[str, bool]) -> None:
    """One batch with several threads could take as long as the whole training with one."""
    cores["busy"] = True
    unit = Timed(monkeypatch, 0.01, 0.4)
    assert used(unit, 20, 20) == [1] * 40


def test_cores_that_were_busy_are_tried_later(monkeypatch: pytest.MonkeyPatch, cores: dict[str, bool]) -> None:
    cores["busy"] = True
    unit = Timed(monkeypatch, 0.01, 0.006)
    torch.set_num_threads(1)
    threads = Threads(2)
    threads.run(unit, 4)  # type: ignore[arg-type]
    cores["busy"], unit.now = False, unit.now + 11
    threads.run(unit, 12)  # type: ignore[arg-type]
    assert unit.used == [1] * 4 + [1] + [1, 2] * 4 + [2] * 3


def test_a_try_that_cost_much_is_repeated_late(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Timed(monkeypatch, 0.1, 4.0)
    torch.set_num_threads(1)
    threads = Threads(2)
    threads.run(unit, 4)  # type: ignore[arg-type]
    assert unit.used == [1, 2, 1, 1], "one batch of a tenth of a second shows that steps are long enough"
    unit.now += 60
    threads.run(unit, 4)  # type: ignore[arg-type]
    assert unit.used[4:] == [1] * 4
    unit.now += 60
    threads.run(unit, 4)  # type: ignore[arg-type]
    assert unit.used[8:] == [1, 2, 1, 1]


@pytest.mark.parametrize(("seconds", "is_busy"), [(0.6, False), (1.5, False), (200.0, True)])
def test_cores_are_busy_if_a_small_operator_waits(
    seconds: float, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that each reading moves: `seconds` is how long the operator takes with two threads, in those of one."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-5 * (seconds if torch.get_num_threads() == 2 else 1.0)
        return now[0]

    monkeypatch.setattr(tiers_threads, "perf_counter", clock)
    torch.set_num_threads(1)
    assert busy(2) == is_busy
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("batch", [2, 3, 12])
def test_nothing_runs_after_a_failure(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one call of `Unit.run`, also where batches are tried one by one or several threads are used."""
    unit = Timed(monkeypatch, 0.01, 0.006)
    unit.failing_batch = batch
    assert len(used(unit, 20)) == batch


def test_several_are_given_up_when_others_come_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Timed(monkeypatch, 0.012, 0.006)
    assert used(unit, 20)[-11:] == [2] * 11
    torch.set_num_threads(1)
    threads = Threads(2)
    threads.run(unit, 20)  # type: ignore[arg-type]
    unit.seconds[2] = 0.03
    unit.used = []
    threads.run(unit, 8)  # type: ignore[arg-type]
    threads.run(unit, 3)  # type: ignore[arg-type]
    assert unit.used == [2] * 4 + [1] * 7  # a piece of the turn
    unit.seconds[2], unit.used, unit.now = 0.006, [], unit.now + 11
    threads.run(unit, 12)  # type: ignore[arg-type]
    assert unit.used == [1] + [1, 2] * 4 + [2] * 3


def train(**settings: Any) -> tuple[shoal.Results, set[int]]:
    seen: set[int] = set()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return F.mse_loss(model(batch[0]), batch[1])

    x = torch.randn(512, 256)
    job = shoal.Job(model=lambda: nn.Linear(256, 256), data=(x, x), step=step, batch_size=64, epochs=3)
    results = shoal.train([job], device="cpu", **settings)
    in_training = set(seen)
    alone = shoal.solo(job)
    torch.testing.assert_close(results[0].model.state_dict(), alone.model.state_dict())
    assert results[0].steps == alone.steps == 24
    return results, in_training


def test_a_run_tries_threads_and_puts_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PACK", "")
    monkeypatch.setattr(tiers_threads, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(tiers_threads, "WORSE", float("inf"))
    assert train()[1] >= {1, 2}
    assert torch.get_num_threads() == 2


def test_a_run_on_busy_cores_uses_one_thread(monkeypatch: pytest.MonkeyPatch, cores: dict[str, bool]) -> None:
    monkeypatch.setenv("SHOAL_PACK", "")
    monkeypatch.setattr(tiers_threads, "SMALL_SECONDS", 0.0)
    cores["busy"] = True
    assert train()[1] == {1}
    assert torch.get_num_threads() == 2


def test_threads_that_were_asked_for_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SHOAL_PACK", "")
    assert train(threads=2)[1] == {2}
    assert train(out=tmp_path / "run")[1] == {1}  # chosen before the run, and the same when it is resumed
    assert torch.get_num_threads() == 2


def test_of_units_that_are_alike_only_the_first_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Threads] = []

    class Counted(Threads):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            made.append(self)

    monkeypatch.setenv("SHOAL_PACK", "")
    monkeypatch.setattr(tiers_unit, "Threads", Counted)
    x = torch.randn(64, 6)
    widths = (6, 6, 6, 5)
    jobs = [
        shoal.Job(model=lambda n=n: nn.Linear(6, n), data=(x, x[:, :n]), loss=F.mse_loss, epochs=2, name=f"{i}")
        for i, n in enumerate(widths)
    ]
    results = shoal.train(jobs, device="cpu")
    assert {result.tier for result in results} == {"serial"}
    tried = [threads for threads in made if threads._one_seconds]
    assert len(tried) == len(set(widths))
