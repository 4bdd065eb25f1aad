"""Detect changes of Python values that steps read, made by a callback, a schedule or the user's own loop.

A graph contains the values that its step read when it was recorded. These values are noted here for each member, and
compared at the end of an epoch or before a step of the user's own loop. Comparing is cheap, since objects are first
compared by identity, and values that several members read are compared only once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import nn

from shoal.engine.python_state import _contents, places
from shoal.engine.python_state.places import Path, Place
from shoal.engine.python_state.state_walk import Walk

MOST_ELEMENTS = 65_536
"""Larger tensors are compared only by their versions, so that writing to their `.data` goes unnoticed."""
_NOT_READ = (_contents.RandomNumbers, _contents.Position, _contents.CachedCalls)
"""Places that code can only read by changing them, which a step that has a graph does not do."""


class RequiresGrad(Place):
    """The `requires_grad` of a model's parameters."""

    owner: list[nn.Parameter]

    def get(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.owner]


@dataclass(slots=True, eq=False)
class _Check:
    """A place, a note of its value, and the members whose steps read it."""

    place: Place
    note: Any
    same: Callable[[], bool] | None
    """A quick test whether the place holds the same objects. If not, they may still be equal."""
    members: set[int] = field(default_factory=set)

    def changed(self) -> bool:
        if self.same is not None and self.same():
            return False
        if self.place.changed(self.note):
            return True
        self.same = _identity(self.place)
        return False


class Watch:
    """Watches the Python values that members' steps read, for changes."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._checks: list[_Check] = []
        self._by_place: dict[tuple[Any, ...], _Check] = {}

    def __len__(self) -> int:
        return len(self._checks)

    def add(self, member: int, code: Mapping[str, Any], model: nn.Module, *, private: bool = False) -> bool:
        """Note the values that a member's code and model can read, and return whether all of them could be noted.

        Args:
            private: The model is a copy that no other code refers to, so its own attributes are not watched.
        """
        roots = {"model": model}
        walk = Walk(code if private else {**code, **roots}, skip=model, private=roots if private else None)
        noted = [place for place in walk.places if not isinstance(place, _NOT_READ)]
        noted += _contents.ReadContent.among(walk.reached)
        if walk.reads_environment:
            noted.append(_contents.ReadContent(("os", ".environ"), os.environ))
        if not private:
            noted.append(RequiresGrad(("model", ".requires_grad"), list(model.parameters())))
        self._members.add(member)
        for place in noted:
            self._note(member, place)
        return walk.complete

    def _note(self, member: int, place: Place) -> None:
        key = _key(place)
        check = self._by_place.get(key)
        if check is None or check.changed():
            if isinstance(place, _contents.TensorContent):
                place.most = MOST_ELEMENTS
            check = self._by_place[key] = _Check(place, place.note(), _identity(place))
            self._checks.append(check)
        check.members.add(member)

    def drop(self, members: Iterable[int]) -> None:
        """Stop watching values that only these members' steps read."""
        self.keep(self._members - set(members))

    def keep(self, members: Collection[int]) -> None:
        """Watch only the values that these members' steps read."""
        wanted = self._members.intersection(members)
        if len(wanted) == len(self._members):
            return
        self._members = wanted
        for check in self._checks:
            check.members &= wanted
        self._checks = [check for check in self._checks if check.members]
        self._by_place = {key: check for key, check in self._by_place.items() if check.members}

    def shared_with(self, walk: Walk) -> bool:
        """Return whether the code that `walk` searched can reach objects or writes globals that the steps read."""
        watched = {_key(check.place): check.place for check in self._checks}
        for place in walk.places:
            if isinstance(place, places.Globals):
                read = (p for p in watched.values() if isinstance(p, places.Globals) and p.owner is place.owner)
                if any(walk.written.intersection(other.names) for other in read):
                    return True
            elif _key(place) in watched:
                return True
        return False

    def changes(self) -> dict[int, Path]:
        """Return the members whose steps read a value that has changed since they were added, with its path."""
        changed = [check for check in self._checks if check.changed()]
        changes: dict[int, Path] = {}
        for check in changed:
            path = next(iter(check.place.differences(check.note)))
            for member in check.members:
                changes.setdefault(member, path)
        return changes


def _key(place: Place) -> tuple[Any, ...]:
    return type(place), id(place.owner), getattr(place, "names", None)


def _identity(place: Place) -> Callable[[], bool] | None:
    """Return a quick test whether a place still holds the same objects as now; None if there is no such test."""
    owner = place.owner
    if isinstance(place, places.ClassAttributes) or (isinstance(place, places.Attributes) and not place.slots):
        return _same_values(vars(owner))
    if isinstance(place, places.Items) and isinstance(owner, dict):
        return _same_values(owner)
    if isinstance(place, places.Empties):
        return lambda: not any(owner)
    if isinstance(place, places.Elements):
        items = tuple(owner)
        return lambda: len(owner) == len(items) and all(map(is_, owner, items))
    if isinstance(place, places.Globals):
        names, held = place.names, [owner.get(name) for name in place.names]
        return lambda: all(map(is_, map(owner.get, names), held))
    if isinstance(place, places.Cell):
        value = place.get()
        return lambda: place.get() is value
    return None


def _same_values(space: Mapping[Any, Any]) -> Callable[[], bool]:
    keys, values = tuple(space), tuple(space.values())

    def same() -> bool:
        try:
            return len(space) == len(keys) and all(map(is_, space, keys)) and all(map(is_, space.values(), values))
        except RuntimeError:  # another thread changed it during the comparison
            return False

    return same


MOST_CHANGES, FEW_STEPS = 8, 8
"""After `MOST_CHANGES` changes with on average fewer than `FEW_STEPS` steps between them, a member is not stacked:
recording its step again each time costs more than stacking gains."""


class ChangeLog:
    """Counts how often values that members' steps read have changed."""

    def __init__(self) -> None:
        self._steps: dict[int, list[int]] = {}

    def note(self, member: int, step: int, changed: Path) -> str | None:
        """Note a change at a member's step; if it changes too often, return the reason not to stack the member."""
        steps = self._steps.setdefault(member, [])
        steps.append(step)
        if len(steps) < MOST_CHANGES or steps[-1] - steps[-MOST_CHANGES] >= FEW_STEPS * MOST_CHANGES:
            return None
        return f"what its step reads changes too often ({places.path_text(changed)})"
