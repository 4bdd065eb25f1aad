"""Members' checkpoints in a run folder: the last two of each, written while training continues.

    members/0003/000007.ckpt, 000008.ckpt     the higher number is the newer

Saving copies a state, which takes a fraction of a millisecond for a small network. A thread then computes the checksum
and writes the file while training continues.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DamagedError
from shoal.storage import _store, atomic
from shoal.storage._store import Frozen


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of one member's state, to be written."""

    index: int
    frozen: Frozen
    job: str
    """The key of its job in the job table."""
    view: tuple[Path, list[bytes]] | None = None
    """A history file to write as well. It is not synced to the disk, and writing it may fail."""


class Checkpoints:
    """The checkpoints of all members of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: list[Exception] = []
        """Errors since the caller last took them."""
        self._useless: set[Path] = set()
        """Damaged files and files of other jobs, which are removed once a newer checkpoint is written."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def of(self, index: int) -> list[Path]:
        """Return a member's checkpoint files, newest last. The folder is listed each time, since another process may
        save too."""
        paths = (self.folder / f"{index:04d}").glob("*.ckpt")
        return sorted((path for path in paths if path.stem.isdecimal()), key=lambda path: int(path.stem))

    def put(self, copies: list[Copy]) -> None:
        """Write these copies in a thread, once the previous ones are written."""
        self.wait()
        if not copies:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._write, args=(copies,), name="shoal-checkpoints")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the thread is still writing."""
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until everything is on the disk, or could not be written."""
        if self._thread is not None and self._pid == os.getpid():  # a forked process does not have its parent's threads
            self._thread.join()
        self._thread = None

    def _write(self, copies: list[Copy]) -> None:
        try:
            self.errors += [error for error in self._write_all(copies) if error is not None]
        except Exception as error:  # the caller reports it later
            self.errors.append(error)

    def _write_all(self, copies: list[Copy]) -> list[OSError | None]:
        """Write checkpoints and histories, remove old files, and return the errors."""
        files, failed = [], list[OSError | None]()
        for copy in copies:
            folder = self.folder / f"{copy.index:04d}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                failed.append(error)
                continue
            number = max((int(path.stem) for path in self.of(copy.index)), default=0) + 1
            files.append((folder / f"{number:06d}.ckpt", copy.frozen.seal({"job": copy.job})))
        failed += atomic.write_many(files)
        atomic.write_many([copy.view for copy in copies if copy.view is not None], durable=False)
        for paths in [self.of(copy.index) for copy in copies]:
            useful = [path for path in paths if path not in self._useless]
            for path in set(paths) - set(useful[-2:]):
                path.unlink(missing_ok=True)
        return failed

    def newest(self, index: int, job: str) -> tuple[Any, Path | None, list[str]]:
        """Return a member's newest undamaged state and its file, or None for both, and what is wrong with the other
        files."""
        best: tuple[Any, Path | None] = (None, None)
        problems: dict[Path, str] = {}
        for path in self.of(index):
            try:
                state, notes = _store.read(path)
            except DamagedError as error:
                problems[path] = str(error)
                continue
            if notes.get("job") == job:
                best = (state, path)
            else:
                problems[path] = f"{str(path)!r} is of another job"
        self._useless |= problems.keys()
        return *best, list(problems.values())
