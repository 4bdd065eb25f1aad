"""A study in less room than it would like, and stacks that become too small: places change, decisions do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.tune.studies.problems import SPACE, tune

from shoal.engine.members.member import Member
from shoal.engine.planning import planner
from shoal.engine.runtime import commands
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.reporting.events import Event
from shoal.tune import Study


def outcome(study: Study) -> list[tuple[Any, ...]]:
    return [(t.params, t.state, t.rung, t.values) for t in study.trials]


@pytest.mark.parametrize("kind", ["hyperband", "pbt"])
def test_room_for_four(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials wait for places, and one that pauses gives its place to one that waits."""
    roomy = tune(kind)
    events: list[Event] = []
    running: list[int] = []

    def fits(self: PlanningContext, members: list[Member]) -> bool:
        return len(members) <= 4

    def follow(event: Event) -> None:
        events.append(event)
        if event.kind == "turn":
            running.append(event.data["members"])

    monkeypatch.setattr(PlanningContext, "fits", fits)
    tight = tune(kind, events=follow)
    assert outcome(tight) == outcome(roomy)
    assert max(running) <= 4
    assert any(event.kind == "preempt" and event.data["by"] == "pause" for event in events)
    if kind == "hyperband":
        assert tight.epochs == 69


def test_batch_sizes_that_arrive_at_different_times() -> None:
    from tests.tune.studies.problems import make_job

    def make(params: dict[str, Any]) -> Any:
        return make_job(params, batch_size=params["batch_size"])

    study = tune(make_job=make, space={**SPACE, "batch_size": [8, 32, 160]})
    assert study.epochs == 69 and Counter(t.state for t in study.trials) == {"complete": 5, "pruned": 12}


def test_stacks_that_became_small_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times may decide; with deterministic=True they may not."""
    monkeypatch.setenv("SHOAL_PACK", "always")
    real = planner.predict

    def slow(stack: Any) -> dict[str, float]:
        return real(stack) | {"gain": len(stack) / 8}

    monkeypatch.setattr(commands, "predict", slow)
    sizes: dict[str, set[int]] = {"stacked": set(), "serial": set()}

    def follow(event: Event) -> None:
        if event.kind == "turn":
            sizes[event.data["tier"]].add(event.data["members"])

    study = tune(deterministic=False, events=follow)
    assert study.epochs == 69
    assert sizes["stacked"] == {17, 11} and sizes["serial"] == {1}
    sizes["serial"].clear()
    tune(events=follow)
    assert not sizes["serial"] and 5 in sizes["stacked"]
