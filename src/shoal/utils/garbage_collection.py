"""Python's garbage collector beside a GPU.

A full collection looks at every object there is, which takes a tenth of a second once torch and a few hundred members
are loaded, and the device waits meanwhile. What units are built of is there to stay: it stays out of the collector's
sight. Whoever froze things before us looks after the collector himself, and is left alone.
"""

from __future__ import annotations

import gc

FEW = 10_000
"""Objects that Python itself may have frozen as it started."""
_ours = False
"""Whether what is frozen was frozen here."""


def freeze() -> None:
    """Keep all objects there are from being looked at again, until `thaw`."""
    global _ours
    if _ours or gc.get_freeze_count() < FEW:
        gc.collect(1)  # what has just become garbage is not to stay
        gc.freeze()
        _ours = True


def thaw() -> None:
    """Let the collector see what was frozen here."""
    global _ours
    if _ours:
        gc.unfreeze()
        _ours = False


def collect() -> None:
    """A full collection, in which what was frozen here is looked at too."""
    frozen = _ours
    thaw()
    gc.collect()
    if frozen:
        freeze()
