"""The planner: pure, without a model. Nothing over budget, no room left unused, the same plan every time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.planning.planner import (
    Curve,
    Part,
    Plan,
    Request,
    pays_after,
    plan,
    predict,
    stack_bytes,
    stacks,
    total_bytes,
)
from shoal.engine.planning.policy import Fifo, Ticket
from shoal.engine.planning.queue import admit

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


def admitted(asked: list[Request], budget: float, together: bool, taken: float) -> list[Request]:
    """Those that run now: the admission that runs and explanations use, over these requests."""
    by_index = {request.index: request for request in asked}

    def fits(tickets: list[Ticket]) -> bool:
        return taken + total([by_index[ticket.index] for ticket in tickets], together) <= budget

    tickets = [Ticket(index=request.index, arrived=0.0, since=0.0, running=False) for request in asked]
    return [by_index[index] for index in admit(tickets, Fifo(), fits, 0.0).join]


def total(asked: list[Request], together: bool) -> float:
    return total_bytes([stack_bytes(stack) for stack in stacks(asked)], together=together)


@settings(max_examples=300, deadline=None)
@given(queues(), st.integers(0, 2000), st.booleans(), st.integers(0, 100))
def test_nothing_over_budget_and_all_placed_or_waiting(
    asked: list[Request], budget: int, together: bool, taken: int
) -> None:
    chosen = admitted(asked, budget, together, taken)
    parts = plan(chosen)
    state = sum(part.predicted["state_bytes"] for part in parts)
    working = [part.predicted["memory_bytes"] - part.predicted["state_bytes"] for part in parts]
    assert not parts or taken + state + (sum(working) if together else max(working)) <= budget + 1e-6
    placed = [i for part in parts for i in part.members]
    assert sorted(placed) == [request.index for request in chosen], "each once"
    kinds = {r.index: r for r in asked}
    for part in parts:
        assert {kinds[i].tier for i in part.members} == {part.tier}, "a tier is the job's own"
        assert len({kinds[i].key for i in part.members}) == 1 and (part.tier != "serial" or len(part.members) == 1)
        most = kinds[part.members[0]].most_rows
        assert most is None or len(part.members) <= most
    for request in asked:
        assert request in chosen or taken + total([*chosen, request], together) > budget, "it would have fitted"
    assert parts == plan(admitted(asked, budget, together, taken)), "the same plan every time"
    json.dumps(Plan("cpu", parts).to_json())


@given(queues())
def test_without_a_budget_all_run(asked: list[Request]) -> None:
    assert admitted(asked, float("inf"), False, 0.0) == asked


def test_a_smaller_job_passes_one_that_does_not_fit() -> None:
    def ask(i: int, each: float) -> Request:
        return Request(index=i, name=f"j{i}", key=f"{each}", tier="serial", state=Curve.line(0.0, each))

    chosen = admitted([ask(0, 60), ask(1, 60), ask(2, 300), ask(3, 30)], 100, False, 5)
    assert [part.members for part in plan(chosen)] == [[0], [3]]


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
    found = predict([request] * 10)
    assert found["step_seconds"] == pytest.approx(0.02) and found["alone_seconds"] == pytest.approx(0.1)
    assert found["gain"] == pytest.approx(5.0) and found["memory_bytes"] == 1510 and found["state_bytes"] == 1000
    assert found["compile_pays_after_steps"] == 900
    assert predict([request])["memory_bytes"] == 310, "a stack of one is padded to two"
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
