"""Workers and servers that are killed, stop or stay away: noticed in bounded time, and the result is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.place.training.jobs import job_of, largest_difference, mlp, placement_of, rows

import shoal
from shoal.net.links import Link
from shoal.place.training import members
from shoal.place.training import run as run_module
from shoal.place.training.api import train_placed
from shoal.place.training.joining import Joining
from shoal.settings import make_settings

SETTINGS = make_settings("cpu", None, None, "auto", "60s", False, "fifo")
OFTEN = make_settings("cpu", None, None, "auto", 0.001, True, "fifo")


class Acting:
    """Is given a run's events, and acts once on the workers when a number of batches is done."""

    def __init__(self, folder: Path, after: int, act: Callable[[list[int]], None]) -> None:
        self.folder, self.after, self.act = folder, after, act
        self.batches, self.acted = 0, False
        self.notes: list[str] = []

    def enter(self, number: int) -> None:
        """In a worker: leave its process id."""
        (self.folder / f"{number}.pid").write_text(str(os.getpid()))

    def __call__(self, event: shoal.Event) -> None:
        if event.kind == "note":
            self.notes.append(event.data["text"])
        if event.kind == "turn":
            self.batches += event.data["batches"]
            if self.batches >= self.after and not self.acted:
                self.acted = True
                self.act([int(path.read_text()) for path in sorted(self.folder.glob("*.pid"))])


def kill(pids: list[int], which: int = 1, number: int = signal.SIGKILL) -> None:
    os.kill(pids[which], number)


def run(job: shoal.Job, placement: Any, acting: Acting, **how: Any) -> shoal.Result:
    (result,) = train_placed(job, placement, SETTINGS, events=acting, enter=acting.enter, **how)
    return result


@pytest.mark.parametrize("sync", ["server", "allreduce", "sharded"])
def test_a_killed_worker_changes_nothing_in_the_result(tmp_path: Path, sync: str) -> None:
    job = job_of(mlp, rows(12))
    acting = Acting(tmp_path, 4, kill)
    result = run(job, placement_of(job, 4, sync), acting)
    assert result.split.lost[0]["waited"] < 10
    assert any("lost worker" in note for note in acting.notes)
    if sync == "sharded":
        assert any("continues from step" in note for note in acting.notes)
    assert largest_difference(result, job) < 1e-9


def test_all_but_one_worker_killed_one_after_another(tmp_path: Path) -> None:
    job = job_of(mlp, rows(12))
    acting = Acting(tmp_path, 4, lambda pids: [kill(pids, which) for which in (0, 2)] and None)
    result = run(job, placement_of(job, 4, "allreduce"), acting)
    assert len(result.split.lost) == 2
    assert largest_difference(result, job) < 1e-9


@pytest.mark.slow
def test_a_worker_that_stops_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(members, "PING_SECONDS", 0.5)
    job = job_of(mlp, rows(12))
    acting = Acting(tmp_path, 4, partial(kill, number=signal.SIGSTOP))
    began = time.monotonic()
    result = run(job, placement_of(job, 4, "allreduce"), acting)
    assert time.monotonic() - began < 60
    assert "did not answer" in result.split.lost[0]["why"]
    assert largest_difference(result, job) < 1e-9


def crawl_while(path: Path) -> None:
    """In a worker: its link carries little while this file is there."""
    write = Link._write

    def slowly(self: Link, rest: memoryview, until: float) -> None:
        while path.exists() and rest:
            time.sleep(0.1)
            write(self, rest[:16], until)
            rest = rest[16:]
        write(self, rest, until)

    Link._write = slowly  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["server", "allreduce"])
def test_a_worker_whose_link_crawls_is_left_out_until_it_is_fast_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    monkeypatch.setattr(members, "PING_SECONDS", 0.5)
    monkeypatch.setattr(run_module, "LOOK_TIMES", 0)
    job = job_of(mlp, rows(12), steps=60)
    slow, notes, turns = tmp_path / "slow", list[str](), [0]

    def listen(event: shoal.Event) -> None:
        turns[0] += event.kind == "turn"
        if event.kind == "turn" and turns[0] == 3:
            slow.touch()
        if event.kind == "note":
            notes.append(event.data["text"])
            slow.unlink(missing_ok=True)

    (result,) = train_placed(
        job, placement_of(job, 4, sync), OFTEN, events=listen, deadline=1.0,
        enter=lambda number: crawl_while(slow) if number == 1 else None,
    )  # fmt: skip
    assert "its link is too slow" in result.split.lost[0]["why"] and len(result.split.lost) == 1
    assert any("takes part again" in note for note in notes), notes
    assert largest_difference(result, job) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["server", "allreduce"])
def test_a_worker_that_was_away_joins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    monkeypatch.setattr(members, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(members, "PING_SECONDS", 0.5)
    job = job_of(mlp, rows(12), steps=200)
    acting = Acting(tmp_path, 4, partial(kill, number=signal.SIGSTOP))
    sizes: list[int] = []
    admit = Joining.admit

    def note(self: Joining) -> None:
        admit(self)
        sizes.append(len(self.workers.live))

    def listen(event: shoal.Event) -> None:
        acting(event)
        if event.kind == "note" and "lost worker" in event.data["text"]:
            kill([int((tmp_path / "1.pid").read_text())], 0, signal.SIGCONT)

    monkeypatch.setattr(Joining, "admit", note)
    (result,) = train_placed(job, placement_of(job, 4, sync), SETTINGS, events=listen, enter=acting.enter)
    assert min(sizes) == 2 and sizes[-1] == 3
    assert largest_difference(result, job) < 1e-9


def test_no_worker_left(tmp_path: Path) -> None:
    job = job_of(mlp, rows(12))
    acting = Acting(tmp_path, 4, lambda pids: [kill(pids, which) for which in range(2)] and None)
    with pytest.raises(shoal.ShoalError, match=r"no worker came to 127\.0\.0\.1:\d+ in 1 s"):
        run(job, placement_of(job, 4, workers=2), acting, patience=1.0, out=tmp_path / "run")
    (result,) = shoal.train([job], placement=placement_of(job, 4, workers=2), out=tmp_path / "run")
    assert largest_difference(result, job) < 1e-9  # what was trained before was in the folder


SERVER = """
import sys, os, signal
import shoal
from tests.place.training.jobs import *
job = job_of(mlp, rows(12), steps=40)
placement = placement_of(job, 4, sys.argv[2], micro_batches=2)
done = [0]
def kill(event):
    done[0] += event.kind == "checkpoint"
    if done[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
shoal.train([job], placement=placement, out=sys.argv[1], checkpoint_every=0.001, events=kill, deterministic=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["server", "allreduce"])
def test_a_killed_server_resumes_from_its_checkpoint(tmp_path: Path, sync: str) -> None:
    paths = os.pathsep.join([str(Path(shoal.__file__).parents[1]), str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path / "run"), sync],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    job = job_of(mlp, rows(12), steps=40)
    rows_before = len(list((tmp_path / "run" / "members").rglob("*.ckpt")))
    assert rows_before
    first: list[int] = []

    def note(event: shoal.Event) -> None:
        if event.kind == "epoch":
            first.append(int(event.data["step"]))

    placement = placement_of(job, 4, sync, micro_batches=2)
    (result,) = shoal.train([job], placement=placement, out=tmp_path / "run", events=note, deterministic=True)
    assert largest_difference(result, job) < 1e-9
    assert first and first[0] > 4
    (undisturbed,) = shoal.train([job], placement=placement, deterministic=True)
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], value), name


def test_an_error_of_the_jobs_own_code_on_a_worker_fails_the_job() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_meta and os.getpid() != home:
                raise ValueError("no such thing")
            return x

    home = os.getpid()
    job = job_of(lambda: torch.nn.Sequential(torch.nn.Linear(12, 4), Odd(), torch.nn.Linear(4, 3)), rows(12))
    (result,) = shoal.train([job], placement=placement_of(job, 2, workers=2))
    assert result.status == "failed"
    assert result.error is not None and "ValueError: no such thing" in result.error
