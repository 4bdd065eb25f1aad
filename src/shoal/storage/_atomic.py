"""Files that are replaced whole: written beside their place, brought to the disk, moved there.

A reader, and a run that goes on after a kill or a power cut, finds the old contents or the new, never half of either.
The name of the file beside is always the same, so that what a killed process left is overwritten by the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from shoal.errors import DamagedError

AT_ONCE = 64
"""Files that are written together."""
WAITING = 16
"""Of them, those that wait for the disk together: it serves several in nearly the time of one."""

Chunks = Sequence[bytes]
T = TypeVar("T")


def write(path: Path, chunks: Chunks, *, durable: bool = True) -> None:
    """Replace one file; OSError where that cannot be, and the old one then stands."""
    (error,) = write_many([(path, chunks)], durable=durable)
    if error is not None:
        raise error


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace one file."""
    write(path, [text.encode()], durable=durable)


def write_many(files: Sequence[tuple[Path, Chunks]], *, durable: bool = True) -> list[OSError | None]:
    """Replace each of these files; for each, what kept it from being replaced.

    Not durable: safe from a kill, not from a power cut, and without waiting for the disk.
    """
    out: list[OSError | None] = []
    for first in range(0, len(files), AT_ONCE):
        out += _write_some(files[first : first + AT_ONCE], durable)
    return out


def _write_some(files: Sequence[tuple[Path, Chunks]], durable: bool) -> list[OSError | None]:
    errors: list[OSError | None] = [None] * len(files)
    staged: dict[int, IO[bytes]] = {}
    try:
        for place, (path, chunks) in enumerate(files):
            try:
                staged[place] = _stage(path, chunks)
            except OSError as error:
                errors[place] = error
        synced = _each(_sync, list(staged.values())) if durable else [None] * len(staged)
        for place, failed in zip(staged, synced, strict=True):
            errors[place] = failed
    finally:
        for file in staged.values():
            with suppress(OSError):
                file.close()
    for place, (path, _) in enumerate(files):
        if errors[place] is None:
            errors[place] = _move(path)
        if errors[place] is not None:
            with suppress(OSError):
                _beside(path).unlink(missing_ok=True)
    if durable:
        _each(sync_folder, list({path.parent for place, (path, _) in enumerate(files) if errors[place] is None}))
    return errors


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _stage(path: Path, chunks: Chunks) -> IO[bytes]:
    file = _beside(path).open("wb")
    try:
        file.writelines(chunks)
        file.flush()
    except BaseException:
        with suppress(OSError):
            file.close()  # tries once more to write what is in its buffer
        with suppress(OSError):
            _beside(path).unlink(missing_ok=True)
        raise
    return file


def _each(sync: Callable[[T], OSError | None], what: list[T]) -> list[OSError | None]:
    if len(what) < 2:
        return [sync(one) for one in what]
    try:
        with ThreadPoolExecutor(min(WAITING, len(what))) as pool:
            return list(pool.map(sync, what))
    except RuntimeError:  # Python is on its way out, and starts no more threads
        return [sync(one) for one in what]


def _sync(file: IO[bytes]) -> OSError | None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _move(path: Path) -> OSError | None:
    try:
        os.replace(_beside(path), path)
    except OSError as error:
        return error
    return None


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system knows how to."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_left_overs(folder: Path) -> None:
    """What processes that were killed had not moved to its place yet."""
    for path in folder.rglob(".*.tmp"):
        with suppress(OSError):
            path.unlink()


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file that says whether it was changed: its checksum is in it."""
    content = json.loads(json.dumps(content))
    write_text(path, json.dumps({"sha256": _seal(content), **content}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote; DamagedError where it is not that any more."""
    try:
        content = json.loads(path.read_bytes())
        seal = content.pop("sha256")
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{str(path)!r} is damaged: it is not what was written there") from None
    if seal != _seal(content):
        raise DamagedError(f"{str(path)!r} is damaged: it does not match its checksum")
    found: dict[str, Any] = content
    return found


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
