"""Workers that a launcher starts read what those read that the training process forks, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_loader import CPU, Noisy, assert_equal, jobs
from tests.data.test_loader_overlap import loader_of
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import shoal
from shoal.data import Pool, _launcher
from shoal.data._loader import Loader
from shoal.data._reading import Reading
from shoal.data.loader import LoaderSource
from shoal.errors import ReadError


class Careless(Noisy):
    """Draws from generators of its own, and shuffles a list of its own in place."""

    def __init__(self, rows: int = 44) -> None:
        super().__init__(rows)
        self.shifts = list(range(9))
        self.numbers, self.torchs = np.random.default_rng(5), torch.Generator().manual_seed(6)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(row)
        random.shuffle(self.shifts)
        noise = self.numbers.normal() + torch.randn((), generator=self.torchs).item() + np.random.rand()
        return x + 0.01 * (noise + self.shifts[0] + START[0]), y


START = [0]


def begin_at(worker: int) -> None:
    START[0] = worker


def collate(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + 0.01 * START[0], y


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that a launcher began."""
    epochs: list[int] = []
    begin = Loader.begin

    def noted(loader: Loader, epoch: int) -> Any:
        iterator = begin(loader, epoch)
        if isinstance(iterator._workers[0], _launcher.Worker):  # type: ignore[attr-defined]
            epochs.append(epoch)
        return iterator

    monkeypatch.setattr(Loader, "begin", noted)
    return epochs


def batches(loader: DataLoader[Any], epochs: int, launch: bool) -> list[Tensor]:
    source = Pool(CPU).open(loader).source
    assert isinstance(source, LoaderSource)
    source.overlaps = launch
    read = [batch[0] for epoch in range(epochs) for batch in source.read(3, epoch, goes_on=epoch + 1 < epochs)]
    source.close()
    assert not multiprocessing.active_children()
    return read


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("starters", [1, 2])
def test_workers_read_the_same(starters: int, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "num_starters", lambda workers, cores: starters)
    loader = loader_of(
        Careless(), batch_size=3, worker_init_fn=begin_at, collate_fn=collate,
        generator=torch.Generator().manual_seed(8),
    )  # fmt: skip
    plain = batches(loader, 3, launch=False)
    assert not launched
    assert_same(batches(loader, 3, launch=True), plain)
    assert launched == [0, 1, 2]


def test_a_dataset_that_draws_from_the_generator_of_its_loader(launched: list[int]) -> None:
    generator = torch.Generator().manual_seed(8)

    class Sharing(Noisy):
        def __getitem__(self, row: int) -> Any:
            return torch.rand(3, generator=generator), row

    loader = loader_of(Sharing(), batch_size=4, generator=generator)
    plain = batches(loader, 2, launch=False)
    assert_same(batches(loader, 2, launch=True), plain)
    assert launched == [0, 1]


def test_large_lists_of_indices_and_large_rows_pass_through_the_pipes(launched: list[int]) -> None:
    class Wide(Noisy):
        def __getitem__(self, row: int) -> Any:
            return torch.rand(3), "x" * 100

    loader = loader_of(Wide(60_000), batch_size=20_000, prefetch_factor=3)
    assert_same(batches(loader, 2, launch=True), batches(loader, 2, launch=False))
    assert launched == [0, 1]


def test_other_ways_to_start_processes_are_left_alone(launched: list[int]) -> None:
    loader = loader_of(Noisy(), num_workers=1, multiprocessing_context="spawn")
    loader_source = Pool(CPU).open(loader).source
    assert isinstance(loader_source, LoaderSource)
    loader_source.loader.launches = True
    assert loader_source.loader._launched(loader) is None


def test_training_reads_what_the_reference_reads(launched: list[int]) -> None:
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    results = shoal.train(jobs(loader_of(Careless(), batch_size=4), epochs=6))
    assert launched == [0, 1, 2, 3, 4, 5]
    assert not multiprocessing.active_children()
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files + 4
    assert_equal(results)


def test_an_epoch_is_read_by_other_workers_if_one_cannot_be_started(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, started = _launcher._fork, list[int]()

    def failing(launcher: Any, args: Any, handles: Any, pipe: Any) -> None:
        started.append(1)
        if len(started) == 4:  # of the second epoch's two workers the second
            for handle in handles:
                os.close(handle)
        else:
            fork(launcher, args, handles, pipe)

    loader = loader_of(Careless(), batch_size=3)
    plain = batches(loader, 4, launch=False)
    monkeypatch.setattr(_launcher, "_fork", failing)
    assert_same(batches(loader, 4, launch=True), plain)
    assert launched == [0, 1]


def test_without_processes_for_a_launcher_the_workers_start_as_usual(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(_launcher.Starter, "__init__", failing)
    assert_equal(shoal.train(jobs(loader_of(Noisy()), epochs=3)))
    assert not launched


def test_a_worker_that_is_killed_fails_the_jobs_that_read_it(launched: list[int]) -> None:
    class Killing(Noisy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            if torch.rand(()) > 0.996:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(row)

    results = shoal.train(jobs(loader_of(Killing(), batch_size=4), epochs=40))
    assert {result.status for result in results} == {"failed"}
    assert "exited unexpectedly" in str(results[0].error) and launched
    assert not multiprocessing.active_children()


def test_a_second_interrupt_leaves_no_process(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Pool(CPU).open(loader_of(Noisy(4000), batch_size=2)).source
    assert isinstance(source, LoaderSource)
    source.overlaps = True
    reader = source.read(0, 0, goes_on=True)
    next(reader)

    def interrupted(reading: Reading) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reading, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        source.close()
    assert launched and not multiprocessing.active_children()
    monkeypatch.undo()
    source.close()


def test_a_batch_that_cannot_be_sent_fails_its_readers(
    launched: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Unsent:
        def __reduce__(self) -> Any:
            raise OSError(24, "no more files")

    class Last(Noisy):
        def __getitem__(self, row: int) -> Any:
            return Unsent() if row == 40 else row

    monkeypatch.setattr(_launcher, "END_SECONDS", 1.0)
    loader = Loader(loader_of(Last(), shuffle=False, collate_fn=list), CPU, "it")
    loader.launches = True
    reading = Reading(loader, 0, 0)
    assert reading.get(4) == list(range(32, 40)) and launched == [0]
    with pytest.raises(ReadError, match="exited unexpectedly"):
        reading.get(5)
    loader.stop_launching()
    assert "no more files" in capfd.readouterr().err and not multiprocessing.active_children()


def test_a_reading_that_is_closed_early_leaves_no_process(launched: list[int]) -> None:
    source = Pool(CPU).open(loader_of(Noisy(4000), batch_size=2)).source
    assert isinstance(source, LoaderSource)
    source.overlaps = True
    reader = source.read(0, 0, goes_on=True)
    next(reader)
    source.close()
    assert launched[0] == 0 and not multiprocessing.active_children()


@pytest.mark.usefixtures("one_thread")
def test_batches_pass_through_the_thread_that_pins_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here the thread only copies."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    plain = loader_of(Noisy(), batch_size=4)
    loader = Loader(loader_of(Noisy(), batch_size=4, pin_memory=True), torch.device("cuda"), "it")
    monkeypatch.setattr(loader, "move", lambda batch: batch)
    loader.launches = True
    reading = Reading(loader, 0, 1)
    read = [reading.get(place)[0] for place in range(reading.count(0, 99))]
    loader.stop_launching()
    source = Pool(CPU).open(plain).source
    assert isinstance(source, LoaderSource)
    assert_same(read, [batch[0] for batch in source.read(0, 1)])
    assert not multiprocessing.active_children()


KILLED = """
import os, signal, sys
from tests.data.test_launcher import *

def begin(reading, begin=Reading.begin):
    begin(reading)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    Reading.begin = begin
    shoal.train(jobs(loader_of(Noisy()), epochs=5), device="cpu", progress=False)
"""


def test_no_process_outlives_a_killed_run(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    where = os.pathsep.join((str(Path(shoal.__file__).parents[1]), str(Path(__file__).parents[2])))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": where},
    )  # fmt: skip
    process.communicate(timeout=60)  # all of its processes have this pipe, so it ends with the last of them
    assert process.returncode == -signal.SIGKILL
