"""What a GPU captures, run operator by operator on a CPU: chunks, counted draws and the rules a GPU takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.pack.test_captured import CASES, KINDS, job, worst

import shoal
from shoal import reference
from shoal.checks import prepare
from shoal.events import Event
from shoal.pack.board import Board
from shoal.pack.captured.unit import CapturedUnit
from shoal.pack.group import group
from shoal.pack.members import Member, counted
from shoal.pack.planner import Part
from shoal.pack.policy import Fifo, Policy, RoundRobin
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.ride import Ride
from shoal.pack.run import Run, run
from shoal.pack.stacked import site
from shoal.pack.unit import Executor, Outcome, Unit
from shoal.randomness import counter_bits
from shoal.training import collect

CPU = torch.device("cpu")


class Ahead(Executor):
    """Looks ahead, as an executor does that waits for a device."""

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        outcomes = super().run(work)
        if meanwhile is not None:
            meanwhile()
        return outcomes


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference loop draws as it does on a GPU, and large kernels take the members all at once."""

    @contextmanager
    def drawing(state: Any) -> Iterator[None]:
        with counted(state.job.seed, state.device) as mode:
            mode.begin(len(state.losses))
            yield

    monkeypatch.setattr(reference, "_drawing", drawing)
    monkeypatch.setattr(site, "one_by_one", lambda _: False)


def train(jobs: list[shoal.Job], chunk: int) -> shoal.Results:
    members, kitchen = prepare(jobs, CPU), Kitchen()
    units: list[Unit] = [
        CapturedUnit(found.recipes, kitchen, {}, chunk=min(chunk, len(found.recipes)), compiled=False)
        for found in group(members, kitchen)
    ]
    run(units, Ahead())
    return collect(members, {})


class Seats(Board):
    """Captured units on a CPU, and a seat for every member."""

    chunk = 8

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members))

    def units(self, members: Sequence[Member]) -> list[tuple[Unit, Part]]:
        found = group(list(members), self.kitchen)
        parts = [Part("stacked", [m.index for m in g.members], [m.name for m in g.members], "") for g in found]
        made: list[Unit] = [CapturedUnit(g.recipes, self.kitchen, {}, chunk=self.chunk, compiled=False) for g in found]
        return list(zip(made, parts, strict=True))

    def seat(self, ride: Ride, member: Member) -> Recipe | None:
        recipe = self.recipes[member.index]
        return recipe if ride.unit.accepts(recipe) else None


LENGTHS: list[dict[str, Any]] = [{"epochs": 1 + i % 3} if i % 2 else {"epochs": None, "steps": 3 + i} for i in range(9)]


@pytest.mark.parametrize("policy", [Fifo(), RoundRobin(slice_seconds=1e-3)])
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("kinds", [False, True], ids=["one optimizer", "several"])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_seats_that_are_taken_again(chunk: int, policy: Policy, kinds: bool) -> None:
    """Members in one stack, each at another place of its epoch, some of them at their short last batch."""
    jobs = [job(i, val=None, **((LENGTHS[i] | KINDS[i % len(KINDS)]) if kinds else LENGTHS[i])) for i in range(9)]
    if kinds:
        jobs += [job(9 + i, val=None, **changes) for i, changes in enumerate(KINDS)]
    members = prepare(jobs, CPU)
    board = Seats(members, timed=False)
    board.budget, board.chunk = 4, chunk
    told: list[Event] = []
    run = Run(members, board, policy=policy, tell=told.append)
    run._turn_seconds = 1e-4
    run.go()
    joins = [event.data["unit"] for event in told if event.kind == "join"]
    assert len(set(joins)) < len(joins)
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        theirs = reference.solo(own)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps), own.name
        assert worst(ours, theirs) < 1e-9, own.name


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulate"])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_captured_steps_equal_the_reference_loop(case: str, chunk: int) -> None:
    jobs = CASES[case] if chunk == 8 else CASES[case][:3]
    if chunk == 1 and case == "one diverges":
        jobs = CASES[case]
    for ours, own in zip(train(jobs, chunk), jobs, strict=True):
        theirs = reference.solo(own)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps)
        assert worst(ours, theirs) < 1e-9


def test_draws_are_even_and_unrelated_between_seeds_steps_calls_and_elements() -> None:
    zeros, numbers = torch.zeros(16, dtype=torch.int64), torch.arange(16)
    for keys in ((numbers, zeros, zeros), (zeros, numbers, zeros), (zeros, zeros, numbers)):
        unit = counter_bits(*keys, 50_000).double() / 2**32
        assert (unit.mean(1) - 0.5).abs().max() < 0.006
        assert (unit.var(1) - 1 / 12).abs().max() < 0.002
        assert torch.corrcoef(unit).fill_diagonal_(0).abs().max() < 0.025
        assert torch.corrcoef(torch.stack([unit[0, 1:], unit[0, :-1]]))[0, 1].abs() < 0.02
    again = counter_bits(numbers[3:4], zeros[:1], zeros[:1], 100)
    assert torch.equal(again[0], counter_bits(numbers, zeros, zeros, 100)[3]), "a draw depends on the pack"
