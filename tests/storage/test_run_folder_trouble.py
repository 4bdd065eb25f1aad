"""Run folders where two runs meet, processes are killed, and disks are full."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.storage.run_folders import SavedMember, built, opened, restored, restored_from, results, warnings_of

from shoal.errors import OutError
from shoal.storage.lock import Lock, alive

# --- who is at work in it -------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from contextlib import nullcontext
from shoal.storage.lock import Lock
from shoal.utils.locks import locks_kept
lock, child = Lock(Path(sys.argv[1])), 0
lock.acquire()
if len(sys.argv) > 2:
    with locks_kept() if sys.argv[3] == "worker" else nullcontext():
        child = os.fork()
    if child == 0:
        time.sleep(float(sys.argv[2]))
        os._exit(0)
print("held", child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    held: list[subprocess.Popen[str]] = []
    children: list[int] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        held.append(process)
        assert process.stdout is not None
        said, child = process.stdout.readline().split()
        assert said == "held"
        children.extend([int(child)] * bool(more))
        return process

    yield start
    for process in held:
        process.kill()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for process in held:
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
    process = hold("0.5", "worker")
    process.kill()
    process.wait()
    assert not alive(process.pid) and alive(os.getpid())
    start = time.monotonic()
    lock = Lock(tmp_path)
    lock.acquire()
    assert 0.1 < time.monotonic() - start < 5
    lock.release()


def test_other_forked_processes_of_a_killed_run_are_not_waited_for(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    """Such as the workers of a DataLoader, which torch may leave behind for ever."""
    process = hold("60", "other")
    process.kill()
    process.wait()
    lock = Lock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_run_that_was_killed_just_now_is_waited_for(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    process = hold()
    threading.Timer(0.2, process.kill).start()
    lock = Lock(tmp_path)
    lock.acquire()
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
        folder.save_many([SavedMember(0, size=1 << 20).train()])
        pid = os.fork()
        if pid == 0:
            folder.save_many([SavedMember(1).train(7)])
            os._exit(0 if folder.flush() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        folder.save_many([SavedMember(1).train(8)])
    assert restored(tmp_path, 1, 2).step == 8 and restored(tmp_path, 0, 2).step == 1


# --- kills ----------------------------------------------------------------------------------------------------------


def save_for_ever(path: Path, count: int, ready: int) -> NoReturn:
    """A process that does nothing but go on and save, in several threads, until it is killed."""
    members = [SavedMember(i, size=2000) for i in range(count)]
    with opened(path, count) as folder:
        for member in members:
            folder.restore(member)
        os.write(ready, b"x")
        while True:
            folder.save_many([member.train() for member in members])
            folder.save(members[0].train())


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
        members = [SavedMember(i) for i in range(count)]
        with opened(tmp_path, count) as folder:
            for member in members:
                folder.restore(member)  # a warning is an error here
                assert member.step == len(member.history) == member.weight.min() == member.weight.max()
        after = [member.step for member in members]
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    assert min(before) > 1
    assert not list(tmp_path.rglob(".*")), "what a kill left is cleared away"


@pytest.mark.slow
def test_a_killed_training_ends_like_one_that_was_not(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "kill.py"
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
    member = SavedMember(size=10_000)
    with opened(out) as folder:
        assert folder.save(member.train())
        filler = fill(small_disk)
        (line,) = warnings_of(lambda: folder.save(member.train()))
        assert "No space left on device" in line and "tried again" in line
        assert not warnings_of(lambda: folder.save_many([member.train()])) and not folder.flush()
        assert restored_from(folder).step == 1
        filler.unlink()
        assert folder.save(member.train())
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
    member = SavedMember()
    with opened(tmp_path) as folder:
        folder.save(member.train())

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, call, fail)
        assert len(warnings_of(lambda: folder.save(member.train()))) == 1
        monkeypatch.undo()
        assert restored_from(folder).step == 1
        assert not list(tmp_path.rglob(".*"))
        assert folder.save(member.train()) and restored_from(folder).step == 3


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    member = SavedMember(size=100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as folder:
        folder.save(SavedMember().train())
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            (line,) = warnings_of(lambda: folder.save(member.train(2)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in line and restored_from(folder).step == 1


def test_a_folder_that_may_not_be_written_is_an_error_before_the_first_step(small_disk: Path) -> None:
    with opened(small_disk / "run") as folder:
        folder.save(SavedMember().train())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out in ("run", "new"):
        with pytest.raises(OutError, match=r"cannot be written .*Read-only file system"):
            opened(small_disk / out)
