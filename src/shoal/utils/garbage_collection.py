"""Python's garbage collector beside a training.

A full collection looks at every object, which takes a tenth of a second once torch and a few hundred members are
loaded, and training waits meanwhile. Objects of units live long, so they are frozen: the collector skips them. If the
program has frozen objects itself, nothing is done here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 10_000
"""Objects that Python itself may have frozen as it started."""
_ours = False
"""Whether what is frozen was frozen here."""


def freeze(*, collect: bool = True) -> None:
    """Have the collector skip all objects that exist now, until `thaw`; with `collect`, after a quick collection."""
    global _ours
    if _ours or gc.get_freeze_count() < FEW:
        if collect:
            gc.collect(1)
        gc.freeze()
        _ours = True


def thaw() -> None:
    """Let the collector see what was frozen here."""
    global _ours
    if _ours:
        gc.unfreeze()
        _ours = False


@contextmanager
def frozen() -> Iterator[None]:
    """Inside, the collector skips older objects. For code that makes many objects in a short time."""
    before = _ours
    freeze(collect=False)
    try:
        yield
    finally:
        if not before:
            thaw()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, the collector is off. For imports, which leave no garbage and are a third faster so."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect() -> None:
    """A full collection, including the frozen objects."""
    frozen = _ours
    thaw()
    gc.collect()
    if frozen:
        freeze()
