"""What a user is told about a split: losses that were not finite, and whether it pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.split.networks import make_job

import shoal
from shoal.net.link_speed import LinkSpeed
from shoal.split import DataParallel
from shoal.split.methods.sil_method import SILMethod
from shoal.split.net import _advice
from shoal.split.net._advice import advise


def test_losses_that_are_not_finite_come_with_advice() -> None:
    job = make_job(optimizer=torch.optim.SGD, hparams={"lr": 1e12}, epochs=2)
    scaled = shoal.split.ist(job, workers=2, local_steps=5).split
    assert scaled is not None and scaled.lost
    assert "use a learning rate 2 times smaller, or scale=False" in str(scaled)
    plain = shoal.split.ist(job, workers=2, local_steps=5, scale=False).split
    assert plain is not None and plain.lost and "advice" not in str(plain)


def test_data_parallel_is_not_told_to_take_more_local_steps() -> None:
    job = make_job()
    sentence = advise(job, DataParallel(job, 4), 4, LinkSpeed.parse("1Mbit 1ms")).sentence
    assert sentence.startswith("Splitting does not pay here") and "local steps" not in sentence


def test_parts_that_read_the_same_rows_are_not_counted_as_more_rows() -> None:
    job = make_job()
    fast = LinkSpeed.parse("1000Gbit")
    labels, heads = (SILMethod(job, None, **way) for way in ({"method": "labels"}, {"method": "heads"}))  # type: ignore[arg-type]
    first, more = (advise(job, way, 2, fast).forecasts[0] for way in (labels, heads))
    assert first.speedup <= 2.0  # two parts, each with half of the work at best
    assert more.round_bytes >= first.round_bytes + heads.crossing_bytes() // heads.windows  # activations there


def test_steps_are_timed_with_one_thread_on_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.tiers.threads.busy", lambda threads: True)
    seen = set[int]()
    task = _advice.train_task

    def train_task(*args: Any, **options: Any) -> Any:
        seen.add(torch.get_num_threads())
        return task(*args, **options)

    monkeypatch.setattr(_advice, "train_task", train_task)
    job, before = make_job(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        advise(job, DataParallel(job, 2), 2, LinkSpeed.parse("1Gbit"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
