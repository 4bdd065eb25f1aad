"""Run folders: what is saved is restored, whatever happens in between."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checks import prepare
from shoal.durable import atomic, store
from shoal.durable.lock import Lock, alive
from shoal.environment import environment
from shoal.errors import DamagedError, OutError, ShoalWarning
from shoal.pack.members import Member
from shoal.results import Result, Results
from shoal.runfolder import RunFolder

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def job(**changes: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "data": (X, Y),
        "loss": nn.functional.cross_entropy,
        "hparams": {"lr": 0.1},
        "batch_size": 8,
        "epochs": 2,
    }
    return shoal.Job(**{**given, **changes})


def built(count: int = 2, **changes: Any) -> list[Member]:
    return prepare([job(name=f"m{i}", seed=i, **changes) for i in range(count)], torch.device("cpu"))


class Rider:
    """A member of its own making, that can be anywhere in its training."""

    def __init__(self, index: int = 0, size: int = 100) -> None:
        self.index, self.name, self.step = index, f"m{index}", 0
        self.weight = torch.zeros(size)
        self.history: list[dict[str, float]] = []
        self.odd: Any = None

    def train(self, steps: int = 1) -> Rider:
        for _ in range(steps):
            self.step += 1
            self.weight = torch.full_like(self.weight, self.step)
            self.history.append({"epoch": self.step, "loss": 1 / self.step, "lr": math.inf})
        return self

    def state(self) -> dict[str, Any]:
        rows = [dict(row) for row in self.history]
        return {"step": self.step, "weight": self.weight, "history": rows, "odd": self.odd}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.weight, self.history = state["step"], state["weight"], state["history"]


def opened(path: Path, count: int = 1) -> RunFolder:
    folder = RunFolder(path)
    folder.claim(built(count))
    return folder


def restored(path: Path, index: int = 0, count: int = 1) -> Rider:
    """The member as a new process finds it."""
    rider = Rider(index)
    with opened(path, count) as folder:
        assert folder.restore(rider)
    return rider


def told(work: Callable[[], Any]) -> list[str]:
    """What a user is warned of, each in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert all(issubclass(w.category, ShoalWarning) and "\n" not in str(w.message) for w in caught)
    return [str(w.message) for w in caught]


def results(members: list[Member]) -> Results:
    stamp = environment(torch.device("cpu"))
    return Results(
        [
            Result(
                name=m.name, job=m.job, model=m.model, history=[{"epoch": 1, "loss": 0.5}], status="done",
                tier="serial", environment=stamp,
            )
            for m in members
        ]
    )  # fmt: skip


def test_a_member_is_restored_where_it_was_saved(tmp_path: Path) -> None:
    rider = Rider()
    for _ in range(5):
        with opened(tmp_path) as folder:
            assert folder.restore(rider) == (rider.step > 0)
            assert folder.save(rider.train(3))
    back = restored(tmp_path)
    assert back.step == 15 and torch.equal(back.weight, rider.weight) and back.history == rider.history
    assert sorted(p.name for p in (tmp_path / "members" / "0000").iterdir()) == ["a.safetensors", "b.safetensors"]
    assert [store.load(p)["step"] for p in sorted((tmp_path / "members" / "0000").iterdir())] == [15, 12]
    lines = (tmp_path / "history" / "0000.jsonl").read_text().splitlines()
    assert len(lines) == 15 and json.loads(lines[4]) == {"epoch": 5, "loss": 0.2, "lr": "inf"}
    assert not list(tmp_path.rglob(".*")), "a temporary file was left"


def test_history_comes_back_exactly_however_it_grew(tmp_path: Path) -> None:
    rider = Rider()
    with opened(tmp_path) as folder:
        assert folder.save(rider), "without a row"
        rider.history.append({"epoch": 1, "loss": math.nan, "big": 10**20, "low": -math.inf, "tiny": 5e-324})
        rider.step = 1
        assert folder.save(rider)
        rider.history.append({"epoch": 2})
        rider.history[0]["loss"] = 3.0
        assert folder.save(rider)
        assert restored_from(folder).history == rider.history
        rider.history = [{"epoch": 1, "low": 2.0}]
        assert folder.save(rider)
        assert restored_from(folder).history == rider.history
        rider.history = [{"epoch": 1, "words": [1, "nan", None]}]  # type: ignore[dict-item]
        assert folder.save(rider)
        assert restored_from(folder).history == rider.history
        rider.history = [{"epoch": 1, "loss": math.nan}]
        assert folder.save(rider)
        row = restored_from(folder).history[0]
        assert math.isnan(row["loss"]) and type(row["epoch"]) is int


def restored_from(folder: RunFolder) -> Rider:
    rider = Rider()
    assert folder.restore(rider)
    return rider


def test_what_is_saved_is_of_that_moment(tmp_path: Path) -> None:
    rider = Rider().train()
    with opened(tmp_path) as folder:
        folder.save_many([rider])
        rider.weight.fill_(99)
    assert torch.equal(restored(tmp_path).weight, torch.ones(100))


def test_many_at_once(tmp_path: Path) -> None:
    riders = [Rider(i).train(i + 1) for i in range(40)]
    with opened(tmp_path, 40) as folder:
        folder.save_many(riders)
        assert folder.flush() and not folder.busy
        folder.save_many([rider.train() for rider in riders[:3]] + riders[:1])
    assert [restored(tmp_path, i, 40).step for i in (0, 2, 3, 39)] == [2, 4, 4, 40]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "zeroed":
        data = bytearray(len(data))
    elif how == "flipped":
        data[-5] ^= 4
    elif how == "empty":
        data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "zeroed", "flipped", "empty"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    rider = Rider()
    with opened(tmp_path) as folder:
        for _ in range(3):
            folder.save(rider.train())
    newest = tmp_path / "members" / "0000" / "a.safetensors"
    damage(newest, how)
    back = Rider()
    with opened(tmp_path) as folder:
        (line,) = told(lambda: folder.restore(back))
        assert str(newest) in line and "job 'm0'" in line and "going on from b.safetensors" in line
        assert back.step == 2 and len(back.history) == 2
        folder.save(back.train())
    assert restored(tmp_path).step == 3, "the damaged one is replaced first"
    for name in "ab":
        damage(newest.with_name(f"{name}.safetensors"), how)
    with opened(tmp_path) as folder:
        (line,) = told(lambda: folder.restore(back))
    assert "starts again from its beginning" in line


def test_a_checkpoint_of_another_job_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as folder:
        folder.save_many([Rider(0).train(), Rider(1).train(5)])
    (tmp_path / "members" / "0000" / "a.safetensors").write_bytes(
        (tmp_path / "members" / "0001" / "a.safetensors").read_bytes()
    )
    back = Rider()
    with opened(tmp_path, 2) as folder:
        (line,) = told(lambda: folder.restore(back))
    assert "is of another job" in line and back.step == 0


def test_a_state_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as folder:
        folder.save(Rider().train())
        rider = Rider()
        monkeypatch.setattr(rider, "load_state", lambda state: state["weights"])
        with pytest.raises(OutError, match=r"does not fit job 'm0' \(KeyError: 'weights'\)"):
            folder.restore(rider)


def test_a_member_that_cannot_be_stored_is_told_once(tmp_path: Path) -> None:
    riders = [Rider(i).train() for i in range(3)]
    with opened(tmp_path, 3) as folder:
        folder.save_many(riders)
        for rider in riders[:2]:
            rider.odd = lambda: 1
        (line,) = told(lambda: folder.save_many([rider.train() for rider in riders]))
        assert "'m0' and 1 more is not checkpointed: odd is a function" in line
        assert not told(lambda: folder.save_many([rider.train() for rider in riders]))
        assert not folder.save(riders[0])
        assert folder.save(riders[2])
    assert [restored(tmp_path, i, 3).step for i in range(3)] == [1, 1, 3]


def test_claim_tells_new_from_known_and_other_jobs_apart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder(out) as folder:
        assert folder.claim(built()) is False
    with RunFolder(out) as folder:
        assert folder.claim(built()) is True
    with RunFolder(out) as folder, pytest.raises(OutError, match=r"job 'm0' has epochs 2 there and 9 here"):
        folder.claim(built(epochs=9))
    with RunFolder(out) as folder:
        assert folder.claim(built()) is True, "a refused claim holds no lock"


def test_a_folder_killed_before_it_was_claimed_is_new(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / ".jobs.json.tmp").write_text('{"sha')
    with RunFolder(tmp_path) as folder:
        assert folder.claim(built()) is False
    assert not (tmp_path / ".jobs.json.tmp").exists()


def test_an_address_in_a_setting_is_not_another_job(tmp_path: Path) -> None:
    class Thing:
        pass

    for known in (False, True):
        with RunFolder(tmp_path) as folder:
            assert folder.claim(built(schedule=lambda step: 1.0, hparams={"lr": 0.1, "foreach": Thing()})) is known


@pytest.mark.parametrize("name", ["jobs.json", "plan.json"])
def test_a_damaged_table_is_noticed_with_the_fix(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as folder:
        folder.keep_plan({"tiers": {"m0": "serial"}, "sizes": [1, 2]})
        folder.save(Rider().train())
    data = (tmp_path / name).read_bytes()

    def read() -> Any:
        with opened(tmp_path) as folder:
            return folder.plan()

    assert read() == {"tiers": {"m0": "serial"}, "sizes": [1, 2]}
    for bad in (data[:-20], bytes(len(data)), b"", b"[]", data.replace(b"m0", b"m1"), data.replace(b": 1", b": 3")):
        (tmp_path / name).write_bytes(bad)
        if bad == data:
            continue
        with pytest.raises(DamagedError) as caught:
            read()
        assert name in str(caught.value) and "damaged" in str(caught.value) and "remove this file" in str(caught.value)
    (tmp_path / name).unlink()
    assert read() == (None if name == "plan.json" else {"tiers": {"m0": "serial"}, "sizes": [1, 2]})
    assert restored(tmp_path).step == 1, "checkpoints stand"


def test_another_version_of_the_folder_is_named(tmp_path: Path) -> None:
    with opened(tmp_path):
        atomic.write_sealed(tmp_path / "jobs.json", {"version": 1, "jobs": []})
    with pytest.raises(OutError, match="another version of Shoal"):
        opened(tmp_path)


def test_results_are_written_and_the_lock_is_freed(tmp_path: Path) -> None:
    members = built()
    folder = RunFolder(tmp_path)
    folder.claim(members)
    folder.write(results(members))
    table = json.loads((tmp_path / "results.json").read_text())
    assert [row["status"] for row in table["results"]] == ["done", "done"]
    assert json.loads((tmp_path / "history" / "0001.jsonl").read_text()) == {"epoch": 1, "loss": 0.5}
    with opened(tmp_path, 2) as again:
        assert again.plan() is None


# --- who is at work in it -------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from shoal.durable.lock import Lock
lock = Lock(Path(sys.argv[1]))
lock.acquire()
if len(sys.argv) > 2 and os.fork() == 0:
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    held: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        held.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in held:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_until_the_first_is_gone(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    process = hold()
    start = time.monotonic()
    with pytest.raises(OutError, match=rf"is in use by another run \(process {process.pid}\); wait for its end"):
        opened(tmp_path)
    assert time.monotonic() - start < 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    with opened(tmp_path), pytest.raises(OutError, match=f"process {os.getpid()}"):
        opened(tmp_path)
    opened(tmp_path).close()


def test_the_workers_of_a_killed_run_are_waited_for(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    process = hold("0.5")
    process.kill()
    process.wait()
    assert not alive(process.pid) and alive(os.getpid())
    start = time.monotonic()
    lock = Lock(tmp_path)
    lock.acquire()
    assert 0.1 < time.monotonic() - start < 5
    lock.release()


def test_a_forked_process_does_not_free_the_lock(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        pid = os.fork()
        if pid == 0:
            folder.close()
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(OutError, match="in use"):
            opened(tmp_path)


def test_a_forked_process_saves_while_its_parent_writes(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as folder:
        folder.save_many([Rider(0, size=1 << 20).train()])
        pid = os.fork()
        if pid == 0:
            folder.save_many([Rider(1).train(7)])
            os._exit(0 if folder.flush() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        folder.save_many([Rider(1).train(8)])
    assert restored(tmp_path, 1, 2).step == 8 and restored(tmp_path, 0, 2).step == 1


# --- kills ----------------------------------------------------------------------------------------------------------


def save_for_ever(path: Path, count: int, ready: int) -> NoReturn:
    """A process that does nothing but go on and save, in several threads, until it is killed."""
    riders = [Rider(i, size=2000) for i in range(count)]
    with opened(path, count) as folder:
        for rider in riders:
            folder.restore(rider)
        os.write(ready, b"x")
        while True:
            folder.save_many([rider.train() for rider in riders])
            folder.save(riders[0].train())


def test_a_kill_while_saving_loses_no_checkpoint(tmp_path: Path) -> None:
    """Killed at random moments: what is there is whole, of one moment, and never older than before."""
    draw, count = random.Random(0), 5
    before = [0] * count
    for turn in range(25):
        read, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.closerange(1, 3)
            save_for_ever(tmp_path, count, ready)
        if turn % 5:
            os.read(read, 1)
        time.sleep(draw.uniform(0, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(ready)
        riders = [Rider(i) for i in range(count)]
        with opened(tmp_path, count) as folder:
            for rider in riders:
                folder.restore(rider)  # a warning is an error here
                assert rider.step == len(rider.history) == rider.weight.min() == rider.weight.max()
        after = [rider.step for rider in riders]
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    assert min(before) > 1
    assert not list(tmp_path.rglob(".*")), "what a kill left is cleared away"


@pytest.mark.slow
def test_a_killed_training_ends_like_one_that_was_not(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "kill.py"
    command = [sys.executable, str(script), "--kills", "5", "--length", "4", "--out", str(tmp_path / "seen.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["kills"] == 5 and seen["different"] == 0
    assert any(kill["checkpoints"] for trial in seen["trials"] for kill in trial["kills"])


# --- disks that are full, or may not be written ---------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take all the room there is."""
    path = place / "full"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


def test_a_full_disk_keeps_the_checkpoint_before_and_is_told_once(small_disk: Path) -> None:
    out = small_disk / "run"
    rider = Rider(size=10_000)
    with opened(out) as folder:
        assert folder.save(rider.train())
        filler = fill(small_disk)
        (line,) = told(lambda: folder.save(rider.train()))
        assert "No space left on device" in line and "tried again" in line
        assert not told(lambda: folder.save_many([rider.train()])) and not folder.flush()
        assert restored_from(folder).step == 1
        filler.unlink()
        assert folder.save(rider.train())
        assert restored_from(folder).step == 4
        fill(small_disk)
        with pytest.raises(OutError, match=r"results cannot be written \(No space left on device\)"):
            folder.finish(results(built(400)))
        assert restored_from(folder).step == 4
    assert not list(out.rglob(".*")), "a temporary file takes the room"


def test_a_full_disk_is_an_error_before_the_first_step(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(OutError, match="cannot be written"):
        opened(small_disk / "run")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_late_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rider = Rider()
    with opened(tmp_path) as folder:
        folder.save(rider.train())

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, call, fail)
        assert len(told(lambda: folder.save(rider.train()))) == 1
        monkeypatch.undo()
        assert restored_from(folder).step == 1
        assert not list(tmp_path.rglob(".*"))
        assert folder.save(rider.train()) and restored_from(folder).step == 3


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    rider = Rider(size=100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as folder:
        folder.save(Rider().train())
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            (line,) = told(lambda: folder.save(rider.train(2)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in line and restored_from(folder).step == 1


def test_a_folder_that_may_not_be_written_is_an_error_before_the_first_step(small_disk: Path) -> None:
    with opened(small_disk / "run") as folder:
        folder.save(Rider().train())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out in ("run", "new"):
        with pytest.raises(OutError, match=r"cannot be written .*Read-only file system"):
            opened(small_disk / out)


# --- members as they are --------------------------------------------------------------------------------------------


def test_a_real_member_is_saved_and_restored(tmp_path: Path) -> None:
    if not hasattr(Member, "state"):
        pytest.skip("members have no state yet")
    changes: dict[str, Any] = {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}}
    (member,) = built(1, **changes)
    with torch.no_grad():
        for parameter in member.model.parameters():
            parameter.add_(1.0)
    member.rng.manual_seed(5)
    member.history.append({"epoch": 1, "loss": 0.5})
    optimizer = torch.optim.Adam(member.model.parameters())
    member.model(X).sum().backward()
    optimizer.step()
    member.optimizer_state = optimizer.state_dict()
    member.step, member.epoch = 3, 1
    with RunFolder(tmp_path) as folder:
        folder.claim(built(1, **changes))
        assert folder.save(member)
    (other,) = built(1, **changes)
    with RunFolder(tmp_path) as folder:
        assert folder.claim([other]) and folder.restore(other)
    assert (other.step, other.epoch, other.history) == (3, 1, member.history)
    assert torch.equal(other.rng.get_state(), member.rng.get_state())
    for a, b in zip(tensors(member), tensors(other), strict=True):
        assert torch.equal(a, b)


def tensors(member: Member) -> list[Tensor]:
    held = torch.utils._pytree.tree_leaves([dict(member.model.state_dict()), member.optimizer_state])
    return [leaf for leaf in held if isinstance(leaf, Tensor)]
