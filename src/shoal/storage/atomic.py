"""Write files atomically: to a temporary file in the same folder, synced to the disk, then renamed.

A reader, and a run that resumes after a kill or a power cut, sees the old contents or the new ones, never a mixture.
The temporary file's name is fixed, so that the next process overwrites what a killed one left.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import DamagedError

THREADS = 16
"""How many files are written at the same time; the disk syncs several in nearly the time of one."""

Chunks = Sequence[bytes]
S = TypeVar("S")
T = TypeVar("T")


def write(path: Path, chunks: Chunks, *, durable: bool = True) -> None:
    """Replace one file. On an OSError the old file is unchanged."""
    (error,) = write_many([(path, chunks)], durable=durable)
    if error is not None:
        raise error


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace one file."""
    write(path, [text.encode()], durable=durable)


def write_many(files: Sequence[tuple[Path, Chunks]], *, durable: bool = True) -> list[OSError | None]:
    """Replace each of these files, and return for each the error that prevented it, or None.

    With `durable=False` the files are not synced: faster, and safe from a kill, but not from a power cut.
    """
    errors = _for_each(partial(_write_one, durable=durable), files, durable)
    if durable:
        _for_each(sync_folder, list({path.parent for path, _ in files}), durable)
    return errors


def _write_one(file: tuple[Path, Chunks], durable: bool) -> OSError | None:
    """Replace one file, and return the error that prevented it, or None."""
    path, chunks = file
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as opened:
            opened.writelines(chunks)
            opened.flush()
            if durable:
                os.fsync(opened.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return error
    return None


def _for_each(work: Callable[[T], S], inputs: Sequence[T], durable: bool) -> list[S]:
    """Call `work` for each input, in threads if it waits for the disk."""
    if len(inputs) > 1 and durable:
        with suppress(RuntimeError), ThreadPoolExecutor(min(THREADS, len(inputs))) as pool:
            return list(pool.map(work, inputs))
    return [work(one) for one in inputs]  # also at Python's exit, when threads cannot start


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_left_overs(folder: Path) -> None:
    """Remove temporary files that killed processes left."""
    for path in folder.rglob(".*.tmp"):
        with suppress(OSError):
            path.unlink()


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file, with a checksum that `read_sealed` checks."""
    content = json.loads(json.dumps(content))
    write_text(path, json.dumps({"sha256": _checksum(content), **content}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the contents of a file that `write_sealed` wrote, or raise a DamagedError if it has changed since."""
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("sha256")
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{str(path)!r} is damaged: it is not what was written there") from None
    if checksum != _checksum(content):
        raise DamagedError(f"{str(path)!r} is damaged: it does not match its checksum")
    checked: dict[str, Any] = content
    return checked


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
