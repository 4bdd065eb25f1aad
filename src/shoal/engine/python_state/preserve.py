"""Restore the Python state of closures, globals and objects after a trial of a step.

A step is tried before any training, on a copy of the model and on tensors without data. Other objects that it uses (a
counter in a closure, a random generator, a loss with a buffer) are not copied with the model. Their state is recorded
before the trial, compared afterwards and restored, so that training starts from the same state as a solo loop.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.engine.python_state._contents import CachedCalls, Position
from shoal.engine.python_state.places import Cell, Elements, Items, Names, Path, Place, SetMembers
from shoal.engine.python_state.state_walk import Walk
from shoal.engine.python_state.user_code import in_library_tables
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import restored


class PythonState:
    """A record of the state that can be reached from some functions and objects, taken when this object is created."""

    def __init__(self, roots: Mapping[str, Any], *, skip: nn.Module | None = None) -> None:
        """Record the state of `roots`, without the parameters and buffers of the model `skip`."""
        walk = Walk(roots, skip=skip)
        self.places: list[Place] = walk.places
        self.complete = walk.complete
        """Whether all of the state was recorded; the number of objects is limited."""
        self._walk = walk
        self._notes = [place.note() for place in self.places]
        self._unmoved = {
            id(p.owner): copy.copy(p.owner) for p in self.places if isinstance(p, Position) and p.restorable
        }

    def changes(self) -> list[Path]:
        """Return the paths of everything that has changed since, including values in tensors."""
        return [path for place, note in self._pairs() if place.changed(note) for path in place.differences(note)]

    def place_at(self, path: Path) -> Place:
        """Return the changed place to which a path of `changes` belongs."""
        places = [
            place for place, note in self._pairs() if place.path == path[: len(place.path)] and place.changed(note)
        ]
        return max(places, key=lambda place: len(place.path))

    @property
    def changed(self) -> bool:
        """Whether anything other than values in tensors has changed."""
        return any(not place.data and place.changed(note) for place, note in self._pairs())

    @property
    def written(self) -> bool:
        """Whether values in a tensor have changed."""
        return any(place.data and place.changed(note) for place, note in self._pairs())

    @property
    def may_draw(self) -> bool:
        """Whether the user's code may draw from `random` or `numpy.random`. Code of libraries is not searched."""
        return self._walk.may_draw

    @property
    def unrestorable(self) -> list[Path]:
        """The paths of iterators whose position cannot be restored, such as generators."""
        return [place.path for place in self.places if isinstance(place, Position) and not place.restorable]

    def forget_cached_calls(self) -> None:
        """Empty the caches of functions that were filled since, as they may contain tensors without data."""
        for place, note in self._pairs():
            if isinstance(place, CachedCalls) and place.changed(note):
                place.forget()

    def restore(self) -> None:
        """Restore everything that can be restored, except containers that a library refers to as well."""
        moved = [id(p.owner) for p, note in self._pairs() if id(p.owner) in self._unmoved and p.changed(note)]
        fresh = {key: copy.copy(self._unmoved[key]) for key in moved}
        wanted = [place.swap(note, fresh) if fresh else note for place, note in self._pairs()]
        containers = [
            place
            for place, note in zip(self.places, wanted, strict=True)
            if isinstance(place, Items | Elements | SetMembers) and place.changed(note)
        ]
        shared = in_library_tables(self._with_several_holders(containers, wanted))
        for place, note in zip(self.places, wanted, strict=True):
            if id(place.owner) not in shared:
                place.restore(note)

    def _with_several_holders(self, containers: Sequence[Place], wanted: Sequence[Any]) -> list[Any]:
        """Return those containers that more than one object refers to, not counting this record and `wanted`."""
        if not containers:
            return []
        of_record = Counter([id(place.owner) for place in self.places])
        of_record.update(id(value) for _, value in self._walk.reached)
        for notes in (self._notes, wanted):
            of_record.update(id(n) for p, n in zip(self.places, notes, strict=True) if isinstance(p, Cell))
        for place, note in self._pairs():
            if isinstance(place, Names):
                of_record.update(map(id, note.values()))
            elif isinstance(place, Elements):
                of_record.update(map(id, note))
            elif isinstance(place, Items):
                of_record.update(id(value) for _, value in note)
        # one more reference is the argument of getrefcount
        return [p.owner for p in containers if sys.getrefcount(p.owner) - of_record[id(p.owner)] - 1 > 1]

    def _pairs(self) -> Iterator[tuple[Place, Any]]:
        return zip(self.places, self._notes, strict=True)


@contextmanager
def preserved(roots: Mapping[str, Any], *, skip: nn.Module | None = None) -> Iterator[PythonState]:
    """Restore the state of these functions and objects, and of `random` and `numpy.random`, after this context.

    Only one thread at a time can be inside, since two threads that restore the same object would disturb each other.

    Args:
        roots: The functions and objects, by name.
        skip: A model whose parameters and buffers are not restored.
    """
    with one_at_a_time, restored():
        state = PythonState(roots, skip=skip)
        try:
            yield state
        finally:
            state.restore()
