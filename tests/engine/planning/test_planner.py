"""The planner: pure, without a model. Nothing over budget, everybody placed or told why, the same plan every time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.planning.planner import (
    Curve,
    Device,
    Part,
    Plan,
    Request,
    cost,
    pays_after,
    plan,
    predictions,
    rows_within,
)

TIERS = st.sampled_from(["stacked", "serial", "streams"])
COSTS = st.builds(Curve.line, st.integers(0, 50).map(float), st.integers(0, 50).map(float))


@st.composite
def queues(draw: st.DrawFn) -> list[Request]:
    """Jobs of a few kinds; jobs of one kind agree in what they cost."""
    kinds = draw(
        st.lists(st.tuples(TIERS, COSTS, COSTS, st.one_of(st.none(), st.integers(1, 5))), min_size=1, max_size=4)
    )
    chosen = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=25))
    return [
        Request(
            index=i,
            name=f"job {i}",
            key=f"kind {kind}",
            tier=kinds[kind][0],
            state=kinds[kind][1],
            working=kinds[kind][2],
            most_rows=kinds[kind][3],
            steps=10,
        )
        for i, kind in enumerate(chosen)
    ]


def total(made: Plan, device: Device) -> float:
    """The plan's bytes by what its parts say of themselves."""
    state = sum(part.predicted["state_bytes"] for part in made.parts)
    working = [part.predicted["memory_bytes"] - part.predicted["state_bytes"] for part in made.parts]
    return device.taken + state + (sum(working) if device.together else max(working, default=0.0))


@settings(max_examples=300, deadline=None)
@given(queues(), st.integers(0, 2000), st.booleans(), st.integers(0, 100))
def test_nothing_over_budget_and_everybody_placed_or_told(
    asked: list[Request], budget: int, together: bool, taken: int
) -> None:
    device = Device("cpu", budget, together, taken)
    made = plan(asked, (), device)
    if made.parts:
        assert total(made, device) <= budget + 1e-6
    placed = [i for part in made.parts for i in part.members]
    out = [w.index for w in made.waiting]
    assert sorted(placed + out) == [r.index for r in asked], "each once"
    assert all(w.reason for w in made.waiting)
    kinds = {r.index: r for r in asked}
    for part in made.parts:
        assert {kinds[i].tier for i in part.members} == {part.tier}, "a tier is the job's own"
        assert len({kinds[i].key for i in part.members}) == 1 and (part.tier != "serial" or len(part.members) == 1)
        most = kinds[part.members[0]].most_rows
        assert most is None or len(part.members) <= most
    for waiting in made.waiting:
        assert waiting.never == (taken + sum(cost(kinds[waiting.index], 1)) > budget)
    assert made == plan(asked, (), device), "the same plan every time"
    json.dumps(made.to_json())


@settings(max_examples=200, deadline=None)
@given(queues(), st.integers(50, 2000), st.booleans())
def test_who_rides_keeps_the_place_and_newcomers_join_it(asked: list[Request], budget: int, together: bool) -> None:
    device = Device("cpu", budget, together)
    first, rest = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    before = plan(first, (), device)
    after = plan(rest, before.parts, device)
    for old, new in zip(before.parts, after.parts, strict=False):
        assert new.members[: len(old.members)] == old.members and new.tier == old.tier
    assert total(after, device) <= budget + 1e-6 or not after.parts
    assert [p.members for p in before.parts] == [p.members for p in plan(first, (), device).parts], "left as it was"


@given(queues())
def test_without_a_budget_nobody_waits(asked: list[Request]) -> None:
    assert not plan(asked, (), Device("cpu")).waiting


@given(st.integers(1, 50), st.integers(0, 20), st.integers(1, 20), st.integers(0, 3000))
def test_as_many_rows_as_fit_and_not_one_more(fixed: int, state: int, working: int, budget: int) -> None:
    request = Request(index=0, name="a", state=Curve.line(fixed, state), working=Curve.line(0.0, working))
    rows = rows_within(request, budget)
    assert rows == 0 or sum(cost(request, rows)) <= budget
    assert sum(cost(request, rows + 1)) > budget
    assert rows_within(Request(index=0, name="a", most_rows=3), 10**9) == 3


def test_a_job_that_does_not_fit_is_told_from_one_that_waits() -> None:
    def ask(i: int, each: float) -> Request:
        return Request(index=i, name=f"j{i}", key=f"{each}", tier="serial", state=Curve.line(0.0, each))

    made = plan([ask(0, 60), ask(1, 60), ask(2, 300), ask(3, 30)], (), Device("cpu", 100, taken=5))
    assert [part.members for part in made.parts] == [[0], [3]], "a smaller one goes past"
    one, three = made.waiting
    assert (one.index, one.never) == (1, False) and one.reason == "waits for 25 B of memory"
    assert three.never and three.reason == "needs 300 B beside 5 B of data, and the budget is 100 B"


def test_what_a_part_should_cost() -> None:
    request = Request(
        index=0,
        name="a",
        key="k",
        alone=0.01,
        seconds=Curve.line(0.01, 0.001),
        state=Curve.line(0.0, 100.0),
        working=Curve.line(10.0, 50.0),
        compile_seconds=9.0,
        compiled=Curve.line(0.005, 0.0005),
    )
    found = predictions(request, 10)
    assert found["step_seconds"] == pytest.approx(0.02) and found["alone_seconds"] == pytest.approx(0.1)
    assert found["gain"] == pytest.approx(5.0) and found["memory_bytes"] == 1510 and found["state_bytes"] == 1000
    assert found["compile_pays_after_steps"] == 900
    assert predictions(request, 1)["memory_bytes"] == 310, "a stack of one is padded to two"
    assert pays_after(1.0, 0.1, 0.2) is None


def test_curves() -> None:
    assert Curve(((4, 8.0),)).at(2) == 4.0 and Curve.of([]) is None
    bent = Curve(((2, 1.0), (8, 4.0), (64, 4.0)))
    assert [bent.at(n) for n in (1, 2, 5, 8, 30, 64, 100)] == [0.5, 1.0, 2.5, 4.0, 4.0, 4.0, 4.0]
    assert Curve(((2, 5.0), (8, 3.0))).at(20) == 5.0, "more rows never cost less"


def test_a_part_takes_in_what_it_did_cost() -> None:
    part = Part("stacked", [0], ["a"], "")
    part.note(1.0, 10, 500)
    part.note(2.0, 20, 400)
    assert part.measured == {"seconds": 3.0, "steps": 30.0, "step_seconds": 0.1, "memory_bytes": 500.0}
    made = Plan("cpu", [part])
    assert made.part_of(0) is part and made.part_of(1) is None and made.tiers() == {0: "stacked"}
