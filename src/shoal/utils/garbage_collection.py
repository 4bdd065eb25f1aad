"""Python's garbage collector beside a training.

A full collection looks at every object there is, which takes a tenth of a second once torch and a few hundred members
are loaded, and training waits meanwhile. What units are built of is there to stay: it stays out of the collector's
sight. Whoever froze things before us looks after the collector himself, and is left alone.
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
    """Keep all objects there are from being looked at again, until `thaw`; with `collect`, without recent garbage."""
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
    """Inside: what was there before is not looked at. For code that makes many objects in a short time."""
    before = _ours
    freeze(collect=False)
    try:
        yield
    finally:
        if not before:
            thaw()


@contextmanager
def paused() -> Iterator[None]:
    """Inside: nothing is collected. For imports, which leave no garbage and would be a third slower."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect() -> None:
    """A full collection, in which what was frozen here is looked at too."""
    frozen = _ours
    thaw()
    gc.collect()
    if frozen:
        freeze()
