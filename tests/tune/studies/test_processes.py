"""A study's trials in several processes: the same values and weights, whatever becomes of a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tune.studies import problems

import shoal
from shoal.engine.processes import sharing, temporary_workers, training_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two processes, also for little work and where bits are compared; how many members each loan had."""
    monkeypatch.setenv("SHOAL_WORKERS", "2")
    problems.share(monkeypatch.setattr)
    loans: list[int] = []
    begin = temporary_workers.TemporaryWorker.start

    def start(worker: temporary_workers.TemporaryWorker) -> bool:
        loans.append(len(worker.members))
        return begin(worker)

    monkeypatch.setattr(temporary_workers.TemporaryWorker, "start", start)
    return loans


def assert_same(a: shoal.tune.Study, b: shoal.tune.Study) -> None:
    assert [t.values for t in a.trials] == [t.values for t in b.trials]
    assert [(t.state, t.rung) for t in a.trials] == [(t.state, t.rung) for t in b.trials]
    assert a.epochs == b.epochs and a.best.number == b.best.number
    for x, y in zip(a.results, b.results, strict=True):
        assert (x.status, x.steps, x.tier) == (y.status, y.steps, y.tier)
        assert all(torch.equal(v, y.model.state_dict()[n]) for n, v in x.model.state_dict().items())


@pytest.mark.parametrize("kind", ["hyperband", "in-turn", "none"])
def test_the_same_bits(kind: str, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = problems.tune(kind)
    assert sum(started) > 0
    monkeypatch.setenv("SHOAL_WORKERS", "1")
    count = len(started)
    assert_same(shared, problems.tune(kind))
    assert len(started) == count


def test_asha_begins_trials_while_others_are_elsewhere(started: list[int]) -> None:
    study = problems.tune("asha")
    assert started and len(study.trials) == 14
    assert {t.state for t in study.trials} <= {"complete", "pruned"}
    assert all(sorted(t.values) == list(range(1, t.epochs + 1)) for t in study.trials)


def test_population_based_training_stays_in_one_process(started: list[int]) -> None:
    assert len(problems.tune("pbt").trials) == 8 and not started


def test_cores_that_become_free_are_used(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_WORKERS")
    answers = iter([1.0, 0.4, 1.8])
    monkeypatch.setattr(temporary_workers, "free_cores", lambda count: next(answers, 2.0))
    monkeypatch.setattr(temporary_workers, "LOOK_SECONDS", 0.0)  # also after a look that found none
    monkeypatch.setattr(sharing, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "usable_cores", lambda: 2)
    study = problems.tune("none")
    assert started and next(answers, None) is None and study.epochs == 16


def test_gradients_that_accumulate(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def make_job(params: dict[str, Any]) -> shoal.Job:
        return problems.make_job(params, accumulate=3)

    shared = problems.tune(make_job=make_job)
    monkeypatch.setenv("SHOAL_WORKERS", "1")
    assert_same(shared, problems.tune(make_job=make_job))


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_process_that_is_killed(deaths: int, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one has its members from where they were lent; those of one that dies twice fail, and no others."""
    left, worker_start = [deaths], temporary_workers.TemporaryWorker.start

    def start(worker: temporary_workers.TemporaryWorker) -> bool:
        begun = worker_start(worker)
        if left[0] and begun and worker._child is not None:
            left[0] -= 1
            os.kill(worker._child.pid, signal.SIGKILL)
        return begun

    monkeypatch.setattr(temporary_workers.TemporaryWorker, "start", start)
    shared = problems.tune()
    monkeypatch.setenv("SHOAL_WORKERS", "1")
    alone = problems.tune()
    if deaths == 1:
        assert_same(shared, alone)
        return
    failed = [t for t in shared.trials if t.state == "failed"]
    assert 0 < len(failed) < len(shared.trials)
    assert all("its worker process was killed by SIGKILL" in str(t.error) for t in failed)


def test_a_folder_holds_all_of_it(started: list[int], tmp_path: Path) -> None:
    study = problems.tune(out=tmp_path, checkpoint_every=0.02)
    again = problems.tune(out=tmp_path)
    assert_same(study, again)


def test_a_deterministic_study_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKERS", "2")
    monkeypatch.setattr(training_run, "run_with_temporary_workers", None)
    assert problems.tune("none").epochs == 16
