"""Python state around a step: what closures, globals and objects hold, noticed and put back.

A step is tried before any training (on a copy of the model, on tensors without data). Whatever it reaches besides the
model (a counter in a closure, a generator of random numbers, a loss with a buffer) is not copied with the model; it is
noted here before, compared after, and put back as it was, so that the training itself finds what its solo loop finds.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.engine.python_state._contents import CachedCalls, Position
from shoal.engine.python_state.places import Elements, Items, Path, Place, SetMembers
from shoal.engine.python_state.state_walk import Walk
from shoal.engine.python_state.user_code import in_library_tables
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import restored

_ONE_HOLDER = 3
"""References to a container that one object holds: that one, the place's and the call's own."""


class PythonState:
    """The state that can be reached from some named functions and objects, as it was when this was made."""

    def __init__(self, roots: Mapping[str, Any], *, skip: nn.Module | None = None) -> None:
        """`skip`: a model whose parameters and buffers are not looked at."""
        walk = Walk(roots, skip=skip)
        self.places: list[Place] = walk.places
        self.complete = walk.complete
        self._walk = walk
        """Whether all of it was looked at; there may be too much."""
        self._notes = [place.note() for place in self.places]
        self._unmoved = {
            id(p.owner): copy.copy(p.owner) for p in self.places if isinstance(p, Position) and p.restorable
        }

    def changes(self) -> list[Path]:
        """Paths of what is another thing than it was, contents of tensors included."""
        return [path for place, note in self._pairs() if place.changed(note) for path in place.differences(note)]

    def place_at(self, path: Path) -> Place:
        """The place that a path of `changes` belongs to; of an attribute that holds another tensor, its owner."""
        places = [
            place for place, note in self._pairs() if place.path == path[: len(place.path)] and place.changed(note)
        ]
        return max(places, key=lambda place: len(place.path))

    @property
    def changed(self) -> bool:
        """Whether anything but the content of a tensor is another thing than it was."""
        return any(not place.data and place.changed(note) for place, note in self._pairs())

    @property
    def written(self) -> bool:
        """Whether a tensor was written to."""
        return any(place.data and place.changed(note) for place, note in self._pairs())

    @property
    def may_draw(self) -> bool:
        """Whether code may draw from the modules `random` and `numpy.random`; a library's is not looked into."""
        return self._walk.may_draw

    @property
    def unrestorable(self) -> list[Path]:
        """Paths of iterators that cannot be put back once they have moved on, such as a generator."""
        return [place.path for place in self.places if isinstance(place, Position) and not place.restorable]

    def forget_cached_calls(self) -> None:
        """Empty caches of functions that were filled since, with tensors that have no data, it may be."""
        for place, note in self._pairs():
            if isinstance(place, CachedCalls) and place.changed(note):
                place.forget()

    def restore(self) -> None:
        """Put back everything that can be, except in tables that a library holds as well."""
        moved = [id(p.owner) for p, note in self._pairs() if id(p.owner) in self._unmoved and p.changed(note)]
        fresh = {key: copy.copy(self._unmoved[key]) for key in moved}
        wanted = [place.swap(note, fresh) if fresh else note for place, note in self._pairs()]
        containers = [
            place
            for place, note in zip(self.places, wanted, strict=True)
            if isinstance(place, Items | Elements | SetMembers) and place.changed(note)
        ]
        shared = in_library_tables(p.owner for p in containers if sys.getrefcount(p.owner) > _ONE_HOLDER)
        for place, note in zip(self.places, wanted, strict=True):
            if id(place.owner) not in shared:
                place.restore(note)

    def _pairs(self) -> Iterator[tuple[Place, Any]]:
        return zip(self.places, self._notes, strict=True)


@contextmanager
def preserved(roots: Mapping[str, Any], *, skip: nn.Module | None = None) -> Iterator[PythonState]:
    """Inside: Python may change what these hold. After: they hold what they held, and so do `random` and numpy.

    `skip`: a model whose parameters and buffers are not looked at. One thread at a time: two that put back the same
    object would otherwise put back what the other has changed.
    """
    with one_at_a_time, restored():
        state = PythonState(roots, skip=skip)
        try:
            yield state
        finally:
            state.restore()
