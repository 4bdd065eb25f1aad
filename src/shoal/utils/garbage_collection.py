"""Keep Python's garbage collector from slowing down training.

A full collection visits every object, which takes a tenth of a second once torch and a few hundred members are loaded,
and training waits meanwhile. Objects of units live long, so they are frozen, and the collector skips them. If the
program has frozen objects itself, nothing is done here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 10_000
"""The number of objects that Python itself may have frozen at its start."""
_ours = False
"""Whether the frozen objects were frozen here."""


def freeze(*, collect: bool = True) -> None:
    """Make the collector skip all objects that exist now, until `thaw`; with `collect`, after a quick collection."""
    global _ours
    if _ours or gc.get_freeze_count() < FEW:
        if collect:
            gc.collect(1)
        gc.freeze()
        _ours = True


def thaw() -> None:
    """Let the collector visit the objects that were frozen here."""
    global _ours
    if _ours:
        gc.unfreeze()
        _ours = False


@contextmanager
def frozen() -> Iterator[None]:
    """Make the collector skip older objects inside this context, for code that makes many objects in a short time."""
    were_frozen = _ours
    freeze(collect=False)
    try:
        yield
    finally:
        if not were_frozen:
            thaw()


@contextmanager
def paused() -> Iterator[None]:
    """Turn the collector off inside this context, for imports, which leave no garbage and are then a third faster."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect() -> None:
    """Run a full collection, including the frozen objects."""
    were_frozen = _ours
    thaw()
    gc.collect()
    if were_frozen:
        freeze()
