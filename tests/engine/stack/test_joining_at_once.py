"""Several members leave or join a captured unit together, on a CPU: each is where it was, and goes on from there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.runtime.test_elastic import job as small_job
from tests.engine.tiers.captured.test_captured import Net, X, Y, job, worst
from tests.engine.tiers.captured.test_captured_on_cpu import CPU, Seats, as_on_a_gpu  # noqa: F401
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal import reference
from shoal.engine.members.member import Member
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner, turn
from shoal.engine.stack import transfer
from shoal.engine.tiers.captured.chunk import Chunk
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Executor
from shoal.preparation.checks import prepare
from shoal.reporting.events import Event
from shoal.training import collect

FITS: list[dict[str, Any]] = [
    {"optimizer": torch.optim.Adam, "clip_norm": 0.3},
    {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.05, "momentum": 0.9}, "schedule": lambda t: 0.95**t},
    {"optimizer": torch.optim.Adagrad, "hparams": {"lr": 0.03, "initial_accumulator_value": 0.2}},
]
"""Those who are there first: whoever comes fits one of them."""
COMES: list[dict[str, Any]] = [
    {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.07}},
    {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.004}},
    {"optimizer": torch.optim.Adagrad, "hparams": {"lr": 0.01}},
    {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.02, "momentum": 0.5}, "schedule": lambda t: 0.9**t},
    {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.002, "betas": (0.8, 0.99)}, "clip_norm": 0.1},
]
"""In an order in which no stack keeps them."""


def members_of(changes: Sequence[dict[str, Any]]) -> list[Member]:
    jobs = [job(i, val=None, **{"model": Net, "epochs": 2, **own}) for i, own in enumerate(changes)]
    return prepare(jobs, CPU)


def unit_of(members: list[Member], trace_cache: TraceCache, chunk: int) -> CapturedUnit:
    recipes = [trace_cache.recipe(member) for member in members]
    return CapturedUnit(recipes, trace_cache, {}, chunk=min(chunk, len(recipes)), compiled=False)


def on(runners: list[UnitRunner], batches: int) -> None:
    turn(runners, [batches] * len(runners), Executor())


def seen(member: Member) -> list[Any]:
    """All that a member is, as `write_back` leaves it."""
    own = [dict(member.model.state_dict()), member.optimizer_state, member.schedule_state, member.scaler_state]
    return copy.deepcopy(pytree.tree_leaves([*own, member.batches, member.place]))


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)
        else:
            assert a == b


def assert_as_alone(members: Sequence[Member], tolerance: float = 1e-9) -> None:
    for ours in collect(list(members), {}):
        theirs = reference.solo(ours.job)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps), ours.name
        assert worst(ours, theirs) < tolerance, ours.name


@pytest.mark.parametrize("most", [transfer.MOST_BYTES, 3000, 0], ids=["together", "in portions", "one by one"])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_each_is_where_it_was(chunk: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members in the middle of their training, with state of three kinds of optimizers, take each other's seats."""
    monkeypatch.setattr(transfer, "MOST_BYTES", most)
    members, trace_cache = members_of([*FITS, *FITS, *COMES]), TraceCache()
    here, there = members[:6], members[6:]
    runners = [UnitRunner(unit_of(own, trace_cache, chunk), UnitListener()) for own in (here, there)]
    on(runners, 4)
    on(runners[1:], 1)
    stays = next(slot for slot, member in enumerate(runners[0].members) if member is here[5])
    gone = runners[0].eject([slot for slot in range(6) if slot != stays])
    came = runners[1].eject(list(range(5)))
    runners[0].unit.write_back()
    before = {member.name: seen(member) for member in (*here, *came)}
    recipes = [trace_cache.recipe(member) for member in there]
    assert all(runners[0].unit.accepts(recipe, recipes[:place]) for place, recipe in enumerate(recipes))
    runners[0].join(recipes)
    assert sorted(member.name for member in runners[0].members) == sorted([here[5].name, *(m.name for m in there)])
    for member in there:
        for value in pytree.tree_leaves([list(member.model.parameters()), member.optimizer_state]):
            if isinstance(value, Tensor):
                value.detach().zero_()
    runners[0].unit.write_back()
    for member in (here[5], *there):
        assert_same(seen(member), before[member.name])
    while runners[0].ready():
        on(runners[:1], runners[0].next_batches())
    assert_as_alone([here[5], *there])
    for member in gone:  # nothing of those who left has changed since
        assert_same(seen(member), before[member.name])


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("flat", [False, True])
def test_the_bits_of_one_after_the_other(chunk: int, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving and joining together gives everybody the bits of leaving and joining one by one."""
    if flat:
        monkeypatch.setattr(transfer, "is_away", lambda tensor, device: True)

    def trained(together: bool) -> list[Member]:
        members, trace_cache = members_of([*FITS, *FITS, *COMES]), TraceCache()
        here, there = members[:6], members[6:]
        runner = UnitRunner(unit_of(here, trace_cache, chunk), UnitListener())
        on([runner], 3)
        stays = runner.members.index(here[5])
        gone = [slot for slot in range(6) if slot != stays]
        recipes = [trace_cache.recipe(member) for member in there]
        if together:
            runner.eject(gone)
            runner.join(recipes)
        else:
            for slot in reversed(gone):
                runner.eject([slot])
            for recipe in recipes:
                runner.join([recipe])
        on([runner], 3)
        runner.unit.write_back()
        return members

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        assert_same(seen(ours), seen(theirs))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_loss_scales_go_with_their_members() -> None:
    half = {"precision": "fp16", "model": lambda: Net().float(), "data": (X.float(), Y)}
    members, trace_cache = members_of([half] * 4), TraceCache()
    runner = UnitRunner(unit_of(members, trace_cache, 8), UnitListener())
    on([runner], 3)
    gone = runner.eject([0, 1, 3])
    for place, member in enumerate(gone):
        assert member.scaler_state is not None and member.scaler_state["_growth_tracker"] == 3
        member.scaler_state |= {"scale": 2.0 ** (9 + place), "_growth_tracker": 5 * place}
    before = [seen(member) for member in gone]
    runner.join([trace_cache.recipe(member) for member in reversed(gone)])
    runner.unit.write_back()
    for member, own in zip(gone, before, strict=True):
        assert_same(seen(member), own)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_nothing_is_left_of_who_sat_there() -> None:
    """Seats of members that ended in numbers that are none, taken by others who have no momentum at all."""
    sgd: dict[str, Any] = {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.05, "momentum": 0.9}}
    plain = {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.03}}
    members, trace_cache = members_of([sgd, sgd, sgd, plain, plain]), TraceCache()
    runner = UnitRunner(unit_of(members[:3], trace_cache, 8), UnitListener())
    on([runner], 2)
    runner.eject([0, 2])
    assert isinstance(runner.unit, CapturedUnit)
    stack = runner.unit.chunks[0].stack
    for tensor in (*stack.params, *stack.optimizer.tensors()):
        tensor.detach()[[0, 2]] = float("nan") if tensor.is_floating_point() else 1
    stack.active[[0, 2]] = False
    runner.join([trace_cache.recipe(member) for member in members[3:]])
    while runner.ready():
        on([runner], runner.next_batches())
    assert_as_alone([members[1], *members[3:]])


@pytest.mark.parametrize("kinds", [False, True], ids=["one optimizer", "several"])
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_run_lets_them_in_together(chunk: int, kinds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five leave after an epoch, and five of those who wait take their seats at once."""
    changes: list[dict[str, Any]] = [*FITS, *FITS, *COMES, *COMES[::-1]] if kinds else [{}] * 16
    lengths = [1] * 5 + [4] + [1] * 5 + [2] * 5
    members = members_of([{**own, "epochs": length} for own, length in zip(changes, lengths, strict=True)])
    planning = Seats(members, timed=False)
    planning.budget, planning.chunk = 6, chunk
    events, joined, assigned, sizes = list[Event](), list[int](), list[int](), list[int]()
    join, assign = UnitRunner.join, Chunk.assign

    def joining(runner: UnitRunner, recipes: Sequence[Recipe]) -> None:
        joined.append(len(recipes))
        join(runner, recipes)
        sizes.append(len(runner.members))

    def assigning(chunk: Chunk, seats: Any) -> None:
        assigned.append(len(seats))
        assign(chunk, seats)

    monkeypatch.setattr(UnitRunner, "join", joining)
    monkeypatch.setattr(Chunk, "assign", assigning)
    Run(members, planning, notify=events.append).go()
    assert joined == [5, 5] and assigned == ([1] * 10 if chunk == 1 else [5, 5])
    joins = [event for event in events if event.kind == "join"]
    assert [event.member.index for event in joins if event.member is not None][6:] == list(range(6, 16))
    assert [event.data["size"] for event in joins] == [6] * 16 and sizes == [6, 6]
    assert len({event.data["unit"] for event in joins}) == 1
    (part,) = planning.plan.parts
    assert sorted(part.members) == list(range(16))
    assert_as_alone(members)


@pytest.mark.parametrize("chunk", [1, 8])
def test_nobody_gets_a_seat_that_is_promised(chunk: int) -> None:
    members, trace_cache = members_of([{}] * 4 + [{"optimizer": torch.optim.SGD}] * 2 + [{}] * 3), TraceCache()
    unit = unit_of(members[:5], trace_cache, chunk)  # four of AdamW, one of SGD
    waits = [trace_cache.recipe(member) for member in members[5:]]
    runner = UnitRunner(unit, UnitListener())
    runner.eject([1, 3, 4])
    sgd, a, b, c = waits
    assert all(unit.accepts(recipe) for recipe in waits)
    assert unit.accepts(b, [a]) and not unit.accepts(c, [a, b]) and not unit.accepts(c, [a, sgd, b])
    assert unit.accepts(sgd, [a, b]) and not unit.accepts(sgd, [sgd])
    planning = Seats(members, timed=False)
    planning.recipes |= {recipe.member.index: recipe for recipe in waits}
    found = planning.joinable_units([runner], members[5:])
    assert [recipe for _, recipe in found] == [sgd, a, b]
    runner.join([recipe for _, recipe in found])
    assert sorted(member.index for member in runner.members) == [0, 2, 5, 6, 7]
    for own in unit.chunks:
        assert [recipe.member for recipe in own.stack.recipes] == own.by_row
    assert not planning.joinable_units([runner], members[8:])


def test_as_many_rows_as_are_best_and_no_more() -> None:
    """Those who are about to join count, and so do their own limits."""
    members = prepare([small_job(i) for i in range(7)], CPU)
    planning = PlanningContext(members, timed=False)
    planning._requests = {i: replace(own, most_rows=4, tier="stacked") for i, own in planning._requests.items()}
    unit = StackedUnit([planning.recipes[i] for i in range(2)], planning.trace_cache)
    joining = planning.joinable_units([UnitRunner(unit, UnitListener())], members[2:])
    assert [recipe.member.index for _, recipe in joining] == [2, 3]
    planning._requests[3] = replace(planning._requests[3], most_rows=3)
    joining = planning.joinable_units([UnitRunner(unit, UnitListener())], members[2:])
    assert [recipe.member.index for _, recipe in joining] == [2, 4]
    other = UnitRunner(StackedUnit([planning.recipes[6]], planning.trace_cache), UnitListener())
    found = planning.joinable_units([UnitRunner(unit, UnitListener()), other], members[2:6])
    assert [(runner is other, recipe.member.index) for runner, recipe in found] == [
        (False, 2), (True, 3), (False, 4), (True, 5)
    ]  # fmt: skip


@pytest.mark.usefixtures("as_on_a_gpu")
def test_copies_do_not_depend_on_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy for each dtype, and one for all that is known of those who come with state of their own."""
    made: list[torch.dtype] = []
    real = transfer._copy_flat

    def copied(parts: list[Tensor], device: torch.device) -> Tensor:
        made.append(parts[0].dtype)
        return real(parts, device)

    monkeypatch.setattr(transfer, "_copy_flat", copied)

    def counted(count: int) -> tuple[list[str], list[str]]:
        members, trace_cache = members_of([{}] * 4), TraceCache()
        runner = UnitRunner(unit_of(members, trace_cache, 8), UnitListener())
        on([runner], 2)
        made.clear()
        gone = runner.eject(list(range(count)))
        out = sorted(map(str, made))
        made.clear()
        runner.join([trace_cache.recipe(member) for member in gone])
        return out, sorted(map(str, made))

    assert (
        counted(1)
        == counted(3)
        == (
            ["torch.float64", "torch.int64"],
            ["torch.float64", "torch.float64", "torch.int64"],  # weights and buffers, and then the optimizers' state
        )
    )
