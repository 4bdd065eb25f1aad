"""A loader's workers are started and stopped with the run, and a killed run reads on from its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.test_loader import CPU, Counted, Noisy, assert_equal, jobs
from tests.engine.equality import assert_same_bits
from torch.utils.data import DataLoader

import shoal
from shoal.data import Pool
from shoal.data.loader import LoaderSource
from shoal.errors import OutError


def _die_at(turn: int) -> Any:
    seen: list[Any] = []

    def listen(event: shoal.Event) -> None:
        if event.kind == "turn":
            seen.append(event)
        if len(seen) == turn:
            os.kill(os.getpid(), signal.SIGKILL)

    return listen


def _train(folder: Path, die_at: int = 0, workers: int = 0, **more: Any) -> shoal.Results:
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    events = _die_at(die_at) if die_at else None
    settings = {"val": DataLoader(Noisy(10), batch_size=4, shuffle=True), "accumulate": 3, **more}
    return shoal.train(jobs(loader, **settings), out=folder, deterministic=True, checkpoint_every=1e-4, events=events)


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_run_reads_on_from_its_place(tmp_path: Path, workers: int) -> None:
    fork = multiprocessing.get_context("fork")
    for turn in (3, 2):
        child = fork.Process(target=_train, args=(tmp_path / "a", turn, workers))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    resumed, whole = _train(tmp_path / "a", workers=workers), _train(tmp_path / "b", workers=workers)
    for a, b in zip(resumed, whole, strict=True):
        assert_same_bits(a, b)
    assert_equal(whole)


def test_another_loader_is_refused(tmp_path: Path) -> None:
    shoal.train(jobs(DataLoader(Noisy(), batch_size=4)), out=tmp_path)
    with pytest.raises(OutError, match="data"):
        shoal.train(jobs(DataLoader(Noisy(), batch_size=4, shuffle=True)), out=tmp_path)


def test_no_worker_is_left_behind() -> None:
    class Broken(Noisy):
        def __getitem__(self, row: int) -> Any:
            if row == 30:
                raise OSError("no such file")
            return super().__getitem__(row)

    def left() -> list[Any]:
        return multiprocessing.active_children()

    shoal.train(jobs(DataLoader(Noisy(), batch_size=4, num_workers=2), val=DataLoader(Noisy(8), num_workers=1)))
    assert not left()
    shoal.train(jobs(DataLoader(Noisy(400), batch_size=4, num_workers=2), steps=3))  # ends within an epoch
    assert not left()
    shoal.train(jobs(DataLoader(Broken(), batch_size=4, num_workers=2)))
    assert not left()
    with pytest.warns(shoal.ShoalWarning, match="persistent_workers"):
        shoal.train(jobs(DataLoader(Noisy(), batch_size=4, num_workers=1, persistent_workers=True), count=1))
    assert not left()


def _in_child(loader: DataLoader[Any], reader: Any, pipe: Any) -> None:
    results = shoal.train(jobs(loader, count=2))
    pipe.send([result.history[-1]["loss"] for result in results])
    pipe.send([batch[1].tolist() for batch in reader])


@pytest.mark.usefixtures("one_thread")  # the threads of OpenMP do not survive a fork
def test_a_forked_child_starts_workers_of_its_own() -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)
    source = Pool(CPU).open(loader).source
    assert isinstance(source, LoaderSource)
    reader, whole = source.read(0, 0), [batch[1].tolist() for batch in source.read(0, 0)]
    next(reader)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(loader, reader, theirs))
    child.start()
    theirs.close()  # a child that dies is an error here, not a wait without an end
    losses, rest = ours.recv(), ours.recv()
    child.join()
    assert rest == whole[1:] == [batch[1].tolist() for batch in reader]
    assert losses == [result.history[-1]["loss"] for result in shoal.train(jobs(loader, count=2))]


INTERRUPTED = """
import os, sys
from tests.data.test_loader import *

def listen(event):
    if event.kind == "turn":
        print("turn", flush=True)

if __name__ == "__main__":
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)
    try:
        shoal.train(jobs(loader, epochs=10_000), out=sys.argv[1], events=listen, progress=False)
    except KeyboardInterrupt:
        print(*(result.status for result in shoal.load(sys.argv[1])), flush=True)
"""


def test_ctrl_c_ends_the_run_and_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    root = Path(__file__).parents[2]
    where = os.pathsep.join((str(Path(shoal.__file__).parents[1]), str(root)))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": where},
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "turn\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    rest, _ = process.communicate(timeout=60)
    assert rest.splitlines()[-1] == "unfinished unfinished unfinished"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_reader_that_falls_behind_reads_by_itself() -> None:
    source = Pool(CPU).open(DataLoader(Counted(200), batch_size=2)).source
    assert isinstance(source, LoaderSource)
    slow, fast = source.read(0, 0), source.read(0, 0)
    assert slow.reading is fast.reading
    first = [next(fast) for _ in range(60)]
    late = [next(slow) for _ in range(60)]
    assert slow.reading is not fast.reading
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, late, strict=True))
    assert [len(batch[0]) for batch in slow] == [2] * 40
