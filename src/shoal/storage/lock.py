"""The lock of a run folder: only one run at a time may use it."""

from __future__ import annotations

import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.errors import OutError, ShoalWarning
from shoal.utils.locks import close_in_children

PATIENCE = 10.0
"""Seconds to wait for the workers of a killed run to end."""
BRIEFLY = 1.0
"""Seconds to wait where the other run's process is there: it may have been killed just now."""
_EXITING = 0x4
"""The kernel's flag of a process that is ending, PF_EXITING."""


class Lock:
    """A file lock in the folder, which the kernel releases when the process ends.

    Shoal's own workers hold it too, so no other run can use the folder while one of them is alive. Other forked
    processes do not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None
        self._pid = 0

    def acquire(self) -> None:
        """Take the lock; OutError, naming the process, where another run has it."""
        if self._file is not None:
            return
        file = (self.folder / "lock").open("a+")
        try:
            self._wait(file)
        except BaseException:
            file.close()
            raise
        self._file, self._pid = file, os.getpid()
        close_in_children(file)

    def in_use(self) -> bool:
        """Whether another run has the lock now."""
        try:
            import fcntl

            with (self.folder / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (ImportError, OSError):
            return False
        return False

    def _wait(self, file: IO[str]) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system
            return
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder, lives = self._holder(file)
                if time.monotonic() - start > (BRIEFLY if lives else PATIENCE):
                    raise OutError(
                        f"out={str(self.folder)!r} is in use by another run{holder}; wait for its end, "
                        "or use another folder"
                    ) from None
            except OSError as error:
                text = (
                    f"out={str(self.folder)!r} cannot be locked ({error.strerror}): let only one run at a time use it"
                )
                warnings.warn(text, ShoalWarning, stacklevel=2)
                break
            time.sleep(0.02)
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()

    def _holder(self, file: IO[str]) -> tuple[str, bool]:
        """Which process took the lock, as text, and whether it is alive. Of a killed run only workers may be left."""
        file.seek(0)
        pid, _, host = file.read().strip().partition(" ")
        if not pid.isdigit() or not host:
            return "", False  # it has only just taken the lock
        if host != socket.gethostname():
            return f" (process {pid} on {host})", True
        return f" (process {pid})", alive(int(pid))

    def release(self) -> None:
        """Release the lock. A forked process only closes its copy: the parent keeps the lock."""
        if self._file is None:
            return
        if self._pid == os.getpid():
            with suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None


def alive(pid: int) -> bool:
    """Whether a process of this machine is running; one that is ending is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state not in ("Z", "X") and not int(numbers[5]) & _EXITING
    except (OSError, ValueError, IndexError):
        return True
