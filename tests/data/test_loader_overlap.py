"""The workers of an epoch start before the epoch before it ends, where nothing that they read can change until then."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_loader import CPU, Counted, Noisy, X, Y, assert_equal, jobs
from tests.engine.equality import assert_same_bits
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, Subset

import shoal
from shoal.data import Pool, _loader
from shoal.data._loader import Loader, _own_memory
from shoal.data._reading import Reading
from shoal.data.loader import LoaderSource


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs whose workers started early."""
    epochs: list[int] = []
    begin = Reading.begin

    def noted(reading: Reading) -> None:
        begin(reading)
        epochs.append(reading.epoch)

    monkeypatch.setattr(Reading, "begin", noted)
    return epochs


def loader_of(dataset: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 8, "shuffle": True, "num_workers": 2, **more})


@pytest.mark.parametrize("kind", ["numpy", "slice"])
def test_a_view_of_what_a_metric_changes_takes_effect_in_the_next_epoch(kind: str, early: list[int]) -> None:
    """Two objects that are one memory: a Dataset has a view of a tensor or array that code of the job changes."""

    def losses() -> list[float]:
        array = np.zeros(4)
        written: Any = torch.from_numpy(array) if kind == "numpy" else array[:1]
        dataset = Level(array if kind == "numpy" else array[:2])

        def metric(outputs: Tensor, targets: Tensor) -> float:
            written[0] += 1.0
            return 0.0

        more: dict[str, Any] = {"val": (X, Y), "metrics": {"m": metric}}
        (result,) = shoal.train(jobs(loader_of(dataset), count=1, epochs=3, **more))
        return [row["loss"] for row in result.history]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "may_overlap", False)
        expected = losses()
    assert losses() == expected and not early


class Watching:
    """A callback that only watches."""

    only_watches = True

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, view: shoal.MemberView) -> None:
        self.call(view)


@pytest.mark.parametrize("deterministic", [True, False])
def test_jobs_read_what_the_reference_reads(early: list[int], deterministic: bool) -> None:
    val = DataLoader(Noisy(20), batch_size=6, shuffle=True, num_workers=1)
    sampler = BatchSampler(RandomSampler(range(44), generator=torch.Generator().manual_seed(3)), 5, drop_last=True)
    loader = DataLoader(Noisy(), batch_sampler=sampler, num_workers=2)
    results = shoal.train(jobs(loader, val=val, epochs=4), deterministic=deterministic)
    assert early == [1, 2, 3] and {result.tier for result in results} == {"stacked"}
    assert_equal(results)


def test_the_workers_start_before_the_last_batches_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reading, "batches_while_starting", 0)
    source = Pool(CPU).open(loader_of(Noisy(80), batch_size=4)).source
    assert isinstance(source, LoaderSource)
    source.overlaps = True
    reader = source.read(0, 0, goes_on=True)
    for place in range(1, 21):
        next(reader)
        assert (reader.next is not None) == (place >= 16)  # two workers, each asked for two batches
    assert reader.next is not None
    alone = [batch[0] for batch in Pool(CPU).open(loader_of(Noisy(80), batch_size=4)).source.read(0, 1)]  # type: ignore[attr-defined]
    follower = source.read(0, 1)
    assert follower.reading is reader.next.reading
    assert all(torch.equal(a[0], b) for a, b in zip(follower, alone, strict=True))
    source.close()


def test_the_workers_start_as_early_as_it_takes_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Pool(CPU).open(loader_of(Noisy(80), batch_size=4)).source
    assert isinstance(source, LoaderSource)
    source.overlaps = True
    reader = source.read(0, 0, goes_on=True)
    begun = next(place for place in range(1, 21) if next(reader) and reader.reading.batches_while_starting)
    assert begun >= 2  # the speed of reading is known
    monkeypatch.setattr(Reading, "batches_while_starting", 20)
    next(reader)
    assert reader.next is not None
    source.close()
    assert not multiprocessing.active_children()


def test_jobs_of_other_lengths_and_data_seeds_share_a_loader(early: list[int]) -> None:
    loader = loader_of(Noisy())
    some = [
        *jobs(loader, count=2, epochs=2),
        *jobs(loader, count=2, epochs=4),
        *jobs(loader, count=2, data_seed=7, epochs=3),
        *jobs((X, Y), count=1),
    ]
    for number, job in enumerate(some):
        job.name = f"job {number}"
    results = shoal.train(some)
    assert_equal(results)
    assert {1, 2, 3} == set(early)
    assert not multiprocessing.active_children()


def test_serial_jobs_begin_early_together(early: list[int]) -> None:
    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x.add_(float(x.sum().item() > 0))  # no trace can follow it
        return torch.nn.functional.cross_entropy(model(x), y)

    results = shoal.train(jobs(loader_of(Noisy()), loss=None, step=step))
    assert {result.tier for result in results} == {"serial"} and set(early) == {1}
    assert_equal(results)


class Level(Noisy):
    """Rows with other labels after each change of a number."""

    def __init__(self, level: Any) -> None:
        super().__init__()
        self.level = level

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(row)
        return x, (y + int(self.level[0])) % 3


SCALE = [0.0]


class Scaled(Noisy):
    """Rows whose labels depend on a global."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(row)
        return x, (y + int(SCALE[0])) % 3


def _scale(outputs: Tensor, targets: Tensor) -> Tensor:
    SCALE[0] += 1.0
    return outputs.mean()


def test_what_a_callback_or_a_metric_changes_takes_effect_in_the_next_epoch(early: list[int]) -> None:
    """As in a plain loop, whose workers start at the epoch."""

    def losses(change: str) -> list[float]:
        level, more = [0.0], dict[str, Any]()
        dataset: Noisy = Scaled() if change == "global" else Level(level)

        def raised(*_: Any) -> Tensor:
            level[0] += 1.0
            return torch.zeros(())

        if change == "events":
            given: Any = {"events": lambda event: raised() if event.kind == "epoch" else None}
        else:
            given = {"callbacks": [lambda view: raised()]} if change == "callback" else {}
        if change in ("metric", "global"):
            more = {"val": (X, Y), "metrics": {"level": _scale if change == "global" else raised}}
        if change == "schedule":
            more = {"schedule": lambda epoch: float(raised() + 1), "schedule_every": "epoch"}
        (result,) = shoal.train(jobs(loader_of(dataset), count=1, epochs=3, **more), **given)
        return [row["loss"] for row in result.history]

    try:
        plain = losses("nothing")
        assert set(early) == {1, 2}
        early.clear()
        for change in ("callback", "events", "metric", "schedule", "global"):
            changed = losses(change)
            assert changed[1:] != plain[1:] and (change == "schedule" or changed[0] == plain[0])
            assert not early, change
    finally:
        SCALE[0] = 0.0


class Backwards(Sampler[int]):
    """A sampler that remembers how often it was used."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(list(range(44))[:: -1 if self.times % 2 else 1])

    def __len__(self) -> int:
        return 44


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class WithEpoch(Noisy):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Noisy(), batch_size=8, shuffle=True),
        loader_of(Noisy(), shuffle=False, sampler=Backwards()),
        DataLoader(Noisy(), batch_sampler=[[0, 1], [2, 3]], num_workers=1),
        loader_of(Counted(), shuffle=False, num_workers=1),
        loader_of(WithEpoch()),
        Own(Noisy(), num_workers=1, batch_size=8),
    ],
    ids=["no workers", "sampler", "list of batches", "stream", "set_epoch", "own __iter__"],
)
def test_other_loaders_begin_when_their_epoch_does(loader: DataLoader[Any]) -> None:
    assert not Loader(loader, CPU, "it").may_overlap
    assert Loader(loader_of(Noisy()), CPU, "it").may_overlap


def test_a_dataset_that_validation_reads_in_this_process_may_change(early: list[int]) -> None:
    dataset = Noisy()
    val = DataLoader(Subset(dataset, [0, 1, 2]), batch_size=3)
    assert_equal(shoal.train(jobs(loader_of(Subset(dataset, range(3, 44))), val=val)))
    assert not early
    val = DataLoader(Subset(dataset, [0, 1, 2]), batch_size=3, num_workers=1)
    assert_equal(shoal.train(jobs(loader_of(Subset(dataset, range(3, 44))), val=val)))
    assert set(early) == {1}


def test_workers_of_an_epoch_that_is_not_wanted_are_ended(early: list[int]) -> None:
    """The jobs that read the loader stop early, and another goes on."""
    stop = shoal.EarlyStop("val_loss", mode="max", patience=1)  # at a loss that falls it stops after two epochs
    some = [*jobs(loader_of(Noisy()), val=(X, Y), stop=stop, epochs=9), *jobs((X, Y), count=1, epochs=30)]
    for number, job in enumerate(some):
        job.name = f"job {number}"
    left: dict[int, int] = {}

    def look(view: shoal.MemberView) -> None:
        if view.name == "job 3":
            left[view.epoch] = len(multiprocessing.active_children())

    results = shoal.train(some, callbacks=[Watching(look)])
    assert {result.status for result in results[:3]} == {"stopped"} and len(results[0].history) < 9
    assert max(early) == max(len(result.history) for result in results[:3])  # it had begun
    assert left[30] == 0
    assert_equal(results)


def test_a_loader_that_cannot_begin_early_begins_when_its_epoch_does(
    early: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = Loader.begin, list[int]()

    def failing(loader: Loader, epoch: int) -> Any:
        calls.append(epoch)
        if calls.count(1) == 1 and epoch == 1:
            raise OSError("no more processes")
        return begin(loader, epoch)

    monkeypatch.setattr(Loader, "begin", failing)
    assert_equal(shoal.train(jobs(loader_of(Noisy()))))
    assert early == [1] and calls.count(1) == 2 + 3  # and those of the reference


def test_little_shared_memory_holds_one_epoch(early: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data._loader.shutil.disk_usage", lambda path: type("Usage", (), {"free": 2048}))
    assert_equal(shoal.train(jobs(loader_of(Noisy()))))
    assert not early


def test_little_memory_holds_the_workers_of_one_epoch(early: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[Any]()
    monkeypatch.setattr("shoal.engine.units.overlapping.free_bytes", lambda device: 4096)
    monkeypatch.setattr(_loader, "Launcher", lambda *more: launched.append(more))
    assert_equal(shoal.train(jobs(loader_of(Noisy()))))
    assert not early and not launched and _own_memory(os.getpid()) > 4096


def test_a_worker_that_raises_in_an_epoch_that_began_early(early: list[int]) -> None:
    class Seldom(Noisy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            if torch.rand(()) > 0.996:
                raise OSError("no such file")
            return super().__getitem__(row)

    results = shoal.train(jobs(loader_of(Seldom(), batch_size=4), epochs=20))
    assert {result.status for result in results} == {"failed"} and "of epoch 1 " not in str(results[0].error)
    assert early and not multiprocessing.active_children()
    assert_equal(results)


def _train(folder: Path, die_in: int | None = None) -> shoal.Results:
    def dying(reading: Reading) -> None:
        begin(reading)
        if reading.epoch == die_in:
            os.kill(os.getpid(), signal.SIGKILL)

    begin, Reading.begin = Reading.begin, dying  # type: ignore[method-assign]
    try:
        val = DataLoader(Noisy(10), batch_size=4, shuffle=True)
        some = jobs(loader_of(Noisy(), batch_size=4), val=val, epochs=4)
        return shoal.train(some, out=folder, deterministic=True, checkpoint_every=1e-4)
    finally:
        Reading.begin = begin  # type: ignore[method-assign]


def test_a_run_that_is_killed_when_two_epochs_have_workers_reads_on_from_its_place(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for epoch in (1, 3):
        child = fork.Process(target=_train, args=(tmp_path / "a", epoch))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    assert 0 < shoal.load(tmp_path / "a")[0].steps < 44
    resumed, whole = _train(tmp_path / "a"), _train(tmp_path / "b")
    for a, b in zip(resumed, whole, strict=True):
        assert_same_bits(a, b)
    assert_equal(whole)


INTERRUPTED = """
import sys, time
from tests.data.test_loader_overlap import *

def begin(reading, begin=Reading.begin):
    begin(reading)
    print("early", flush=True)
    time.sleep(0.3)

if __name__ == "__main__":
    Reading.begin = begin
    try:
        shoal.train(jobs(loader_of(Noisy()), epochs=10_000), out=sys.argv[1], progress=False)
    except KeyboardInterrupt:
        print(*(result.status for result in shoal.load(sys.argv[1])), flush=True)
"""


def test_ctrl_c_ends_the_workers_of_both_epochs(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    where = os.pathsep.join((str(Path(shoal.__file__).parents[1]), str(Path(__file__).parents[2])))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": where},
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "early\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    rest, _ = process.communicate(timeout=60)
    assert rest.splitlines()[-1] == "unfinished unfinished unfinished"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
