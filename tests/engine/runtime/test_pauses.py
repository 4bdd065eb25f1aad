"""A supervisor lets members pause, continue and end, and nobody's bits change by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.data import Pool
from shoal.engine.members.member import Member
from shoal.engine.runtime.clones import clone_of
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.results import Results
from shoal.settings import make_settings
from shoal.training import carry_out

G = torch.Generator().manual_seed(5)
X, Y = torch.randn(60, 6, generator=G), torch.randint(3, (60,), generator=G)


def job(name: str, **changes: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)),
        "data": (X[:40], Y[:40]), "val": (X[40:], Y[40:]), "loss": F.cross_entropy, "hparams": {"lr": 0.01},
        "batch_size": 8, "epochs": 6,
    }  # fmt: skip
    return shoal.Job(name=name, **{**given, **changes})


class Script:
    """A supervisor that does what it was given at each look; `pauses`: where members pause first."""

    def __init__(self, jobs: list[shoal.Job], pauses: dict[str, int], act: Callable[[Script, Run], None]) -> None:
        self.changed: set[str] = set()
        self.jobs, self.pauses, self.act = jobs, pauses, act
        self.seen: list[dict[str, int]] = []
        self.members: dict[str, Member] = {}

    def prepare(self, device: torch.device) -> list[Member]:
        self.pool = Pool(device)
        members = prepare(self.jobs, device, self.pool)
        for member in members:
            member.pause_at = self.pauses.get(member.name)
        self.members = {member.name: member for member in members}
        return members

    def update(self, run: Run) -> None:
        self.members |= {member.name: member for member in run.all_members}
        self.seen.append({name: member.epoch for name, member in self.members.items()})
        self.act(self, run)

    def pausing(self, *names: str) -> bool:
        return all(self.members[name].pausing for name in names)


def run(script: Script, **settings: Any) -> dict[str, shoal.Result]:
    made = make_settings("cpu", None, None, "auto", "60s", settings.pop("deterministic", True), "fifo")
    return {result.name: result for result in carry_out([], made, search=script, **settings)}


def alone(*jobs: shoal.Job) -> Results:
    return shoal.train(list(jobs), device="cpu", deterministic=True)


def same(a: shoal.Result, b: shoal.Result) -> bool:
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]  # noqa: E731
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs) and drop(a.history) == drop(b.history)


def test_a_pause_changes_no_bits() -> None:
    """One pauses while the other trains to its end, and then continues from its state."""

    def act(script: Script, run: Run) -> None:
        if script.pausing("a") and script.members["b"].status == "done":
            assert set(run.paused) == {0}
            script.members["a"].pause_at = None
            run.unpause(0)

    jobs = [job("a"), job("b", seed=1)]
    script = Script(jobs, {"a": 2}, act)
    results = run(script)
    assert [r.status for r in results.values()] == ["done", "done"]
    assert {"a": 2, "b": 5} in script.seen  # b went on while a waited
    assert all(same(results[r.name], r) for r in alone(*jobs))


def test_a_decision_in_the_same_round_keeps_the_place() -> None:
    def act(script: Script, run: Run) -> None:
        if script.pausing("a", "b", "c"):
            assert not run.paused and len(run.runners) == 1
            run.end({1}, "stopped")
            script.members["a"].pause_at = script.members["c"].pause_at = None

    jobs = [job("a"), job("b", seed=1), job("c", seed=2)]
    events: list[str] = []
    results = run(Script(jobs, {"a": 3, "b": 3, "c": 3}, act), events=lambda event: events.append(event.kind))
    assert [r.status for r in results.values()] == ["done", "stopped", "done"] and "preempt" not in events
    assert [len(r.history) for r in results.values()] == [6, 3, 6]
    first, _, third = alone(*jobs)
    assert same(results["a"], first) and same(results["c"], third)


def test_paused_members_can_be_ended_with_their_best_weights() -> None:
    def act(script: Script, run: Run) -> None:
        if script.members["b"].status == "done" and run.paused:
            run.end(set(run.paused), "stopped")

    rising = {"keep": "best", "stop": shoal.EarlyStop("val_loss", mode="max", patience=9)}
    jobs = [job("a", **rising), job("b", seed=1)]
    results = run(Script(jobs, {"a": 3}, act))
    assert results["a"].status == "stopped" and len(results["a"].history) == 3
    best = max(range(3), key=lambda i: results["a"].history[i]["val_loss"])
    (expected,) = alone(job("a", epochs=best + 1))
    for x, y in zip(results["a"].model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_pause_is_validated_whatever_val_every_says() -> None:
    def act(script: Script, run: Run) -> None:
        if script.pausing("a"):
            script.members["a"].pause_at = None

    results = run(Script([job("a", val_every=4)], {"a": 1}, act))
    assert [("val_loss" in row) for row in results["a"].history] == [True, False, False, True, False, True]


def test_jobs_that_come_later_join_the_stack() -> None:
    def act(script: Script, run: Run) -> None:
        if script.pausing("a", "b"):
            script.members["a"].pause_at = None
            run.end({1}, "stopped")
            (new,) = prepare([job("late", seed=7)], torch.device("cpu"), script.pool)
            new.index = 2
            run.add(new)

    units: list[Any] = []
    jobs = [job("a"), job("b", seed=1)]
    results = run(
        Script(jobs, {"a": 2, "b": 2}, act),
        events=lambda event: units.append(event.data["unit"]) if event.kind == "join" else None,
    )
    assert units == [1, 1, 1]  # one unit for all
    assert same(results["late"], alone(job("late", seed=7))[0])


def test_a_copy_takes_the_place_of_another_member() -> None:
    """Exploit and explore: the source and a bystander keep their bits, the copy continues with the source's state."""

    def act(script: Script, run: Run) -> None:
        if script.pausing("a", "b", "c"):
            a, b = script.members["a"], script.members["b"]
            copy = clone_of(run, a, "b", {"hparams": {"lr": 0.02}}, instead=b)
            run.replace(copy)
            for name in ("a", "c"):
                script.members[name].pause_at = None

    jobs = [job("a"), job("b", seed=1), job("c", seed=2)]
    results = run(Script(jobs, {"a": 3, "b": 3, "c": 3}, act))
    first, _, third = alone(*jobs)
    assert same(results["a"], first) and same(results["c"], third)
    copied = results["b"].history
    assert [row["loss"] for row in copied[:3]] == [row["loss"] for row in first.history[:3]]
    assert [row["lr"] for row in copied] == [0.01] * 3 + [0.02] * 3
    assert copied[3]["loss"] != first.history[3]["loss"]


def test_nobody_waits_for_ever() -> None:
    with pytest.raises(AssertionError, match="no supervisor decides"):
        run(Script([job("a")], {"a": 2}, lambda script, run: None))
