"""Members' checkpoints in a run folder: two generations each, written while training continues.

    members/0003/a.ckpt, b.ckpt     in turn; each has a number, and the higher one is the newer

A state is copied when it is saved, which takes a fraction of a millisecond for a small network; the checksum, the
writing and the waiting for the disk happen in a thread beside the training.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DamagedError
from shoal.storage import _atomic, _store
from shoal.storage._store import Frozen

GENERATIONS = ("a.ckpt", "b.ckpt")


@dataclass(frozen=True, slots=True)
class Copy:
    """One member's state on its way to the disk."""

    index: int
    frozen: Frozen
    job: str
    """Which job it is of."""
    view: tuple[Path, list[bytes]] | None = None
    """A file for people that goes with it. Writing it does not wait for the disk, and may fail."""


class Checkpoints:
    """The checkpoints of all members of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: list[Exception] = []
        """What went wrong since it was last read."""
        self._damaged: set[Path] = set()
        """Found to be of no use, so that they are replaced first."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def of(self, index: int) -> Path:
        """Where a member's checkpoints are."""
        return self.folder / f"{index:04d}"

    def put(self, copies: list[Copy]) -> None:
        """Write these, in a thread of their own, after those before them."""
        self.wait()
        if not copies:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._write, args=(copies,), name="shoal-checkpoints")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the last ones are still on their way."""
        return self._thread is not None and self._pid == os.getpid() and self._thread.is_alive()

    def wait(self) -> None:
        """Until what was put is on the disk, or could not be written."""
        if self._thread is not None and self._pid == os.getpid():  # a forked process has not its parent's threads
            self._thread.join()
        self._thread = None

    def _write(self, copies: list[Copy]) -> None:
        try:
            self.errors += [error for error in self._write_all(copies) if error is not None]
        except Exception as error:  # it is reported later
            self.errors.append(error)

    def _write_all(self, copies: list[Copy]) -> list[OSError | None]:
        files, failed = [], list[OSError | None]()
        for copy in copies:
            folder = self.of(copy.index)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                failed.append(error)
                continue
            path, number = self._next(folder)
            files.append((path, copy.frozen.seal({"number": str(number), "job": copy.job})))
        failed += _atomic.write_many(files)
        _atomic.write_many([copy.view for copy in copies if copy.view is not None], durable=False)
        return failed

    def newest(self, index: int, job: str) -> tuple[Any, Path | None, list[str]]:
        """A member's newest good state and its file (None: there is none), and what is wrong with others."""
        best: tuple[int, Any, Path | None] = (-1, None, None)
        wrong: list[str] = []
        for name in GENERATIONS:
            path = self.of(index) / name
            if not path.exists():
                continue
            try:
                state, notes = _store.read(path)
            except DamagedError as error:
                wrong.append(str(error))
                self._damaged.add(path)
                continue
            if notes.get("job") != job:
                wrong.append(f"{str(path)!r} is of another job")
                self._damaged.add(path)
            elif (number := int(notes["number"])) > best[0]:
                best = (number, state, path)
        return best[1], best[2], wrong

    def _next(self, folder: Path) -> tuple[Path, int]:
        """Which of the two files to replace, and its number. By the files themselves: a member may have been saved by
        another process since this one last did."""
        paths = [folder / name for name in GENERATIONS]
        texts = [_store.peek(path, "number") or "" for path in paths]
        numbers = [int(text) if text.isdecimal() else -1 for text in texts]
        path = min(paths, key=lambda path: -1 if path in self._damaged else numbers[paths.index(path)])
        self._damaged.discard(path)
        return path, max(numbers) + 1
