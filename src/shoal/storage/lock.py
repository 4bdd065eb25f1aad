"""The lock of a run folder, which lets only one run at a time use the folder."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.errors import OutError, warn
from shoal.utils.locks import close_in_children

PATIENCE = 10.0
"""Seconds to wait for the workers of a killed run to end."""
BRIEFLY = 1.0
"""Seconds to wait if the process that took the lock is alive, since it may just have been killed."""
_EXITING = 0x4
"""PF_EXITING, the Linux flag of a process that is ending."""


class Lock:
    """A file lock in the folder, which the kernel releases when the process ends.

    Shoal's workers hold it too, so that no other run can use the folder while one of them is alive. Other forked
    processes do not hold it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None
        self._pid = 0

    def acquire(self) -> None:
        """Take the lock, or raise an OutError that names the process if another run has it."""
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
        """Return whether another run has the lock now."""
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
        """Wait until the file is locked, or raise an OutError if another run keeps it."""
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl
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
                warn(text)
                break
            time.sleep(0.02)
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()

    def _holder(self, file: IO[str]) -> tuple[str, bool]:
        """Return the process that took the lock, as text, and whether it is alive; of a killed run only workers may
        be left."""
        file.seek(0)
        pid, _, host = file.read().strip().partition(" ")
        if not pid.isdigit() or not host:
            return "", False  # it has just taken the lock and not written its name yet
        if host != socket.gethostname():
            return f" (process {pid} on {host})", True
        return f" (process {pid})", alive(int(pid))

    def release(self) -> None:
        """Release the lock. In a forked process, only close its copy, so that the parent keeps the lock."""
        if self._file is None:
            return
        if self._pid == os.getpid():
            with suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None


def alive(pid: int) -> bool:
    """Return whether a process of this machine is running; a process that is ending does not count."""
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
