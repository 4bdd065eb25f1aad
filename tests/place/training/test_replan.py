"""Links that become slower while a job trains: it is placed again, and the result is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.place.training.jobs import job_of, largest_difference, placement_of, rows
from torch import nn

import shoal
from shoal.place.links import Link
from shoal.place.training.api import build, replan
from shoal.place.training.members import Workers


def wide() -> nn.Module:
    """Few parameters first, many last; the first layer's output is small."""
    return nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3))


def speeds(*megabits: float) -> Iterator[Link]:
    yield from (Link(1e6 * speed, 1e6 * speed, 0.0) for speed in megabits)
    while True:
        yield Link(1e6 * megabits[-1], 1e6 * megabits[-1], 0.0)


def test_a_slower_link_gives_another_placement_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = speeds(1000, 1000, 10, 10)
    monkeypatch.setattr(Workers, "probe", lambda self: next(measured))
    job = job_of(wide, rows(12), steps=30)
    everywhere = placement_of(job, 5, "allreduce", workers=2)
    notes: list[str] = []

    def listen(event: shoal.Event) -> None:
        if event.kind == "note":
            notes.append(event.data["text"])

    (result,) = shoal.train([job], placement=everywhere, checkpoint_every=0.001, events=listen)
    assert any("0.01 times as fast" in note and "placed again" in note for note in notes), notes
    assert result.split.notes == notes
    assert largest_difference(result, job) < 1e-9


def test_a_link_that_changes_little_or_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = speeds(1000, 900, 10, 1100, 800)
    monkeypatch.setattr(Workers, "probe", lambda self: next(measured))
    job = job_of(wide, rows(12))
    (result,) = shoal.train([job], placement=placement_of(job, 3, workers=2), checkpoint_every=0.001)
    assert result.split.notes == []


def test_the_same_link_gives_no_other_placement() -> None:
    job = job_of(wide, rows(12))
    built = build(job, placement_of(job, 5, "allreduce", workers=2), torch.device("cpu"))
    slow = replan(built, placement_of(job, 5, "allreduce", workers=2), 1e-4)
    assert slow is not None and slow.link.up == pytest.approx(1e5)
    assert slow.mode != "one machine"
    again = replan(build(job, slow, torch.device("cpu")), slow, 1.0)
    assert again is None or again.mode != "one machine"
