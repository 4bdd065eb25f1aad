"""Python values that steps read and something else can change: a callback, a schedule, the user's own loop.

A graph holds the values that its step read when it was recorded. What they were is noted here, once, for each member,
and compared when asked: at the end of an epoch, or before a step of the user's own loop. Asking is cheap, since
objects are compared by identity first, and what several members read is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import nn

from shoal.engine.python_state import _contents, places
from shoal.engine.python_state.places import Path, Place
from shoal.engine.python_state.state_walk import Walk

MOST_ELEMENTS = 65_536
"""Larger tensors are compared by their versions alone: writing to their `.data` goes unnoticed."""
_NOT_READ = (_contents.RandomNumbers, _contents.Position, _contents.CachedCalls)
"""What can only be read by moving it on, which a step that has a graph does not do."""


class RequiresGrad(Place):
    """Which of a model's parameters are trained."""

    owner: list[nn.Parameter]

    def get(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.owner]


@dataclass(slots=True, eq=False)
class _Check:
    """One place, what it held, and whose steps read it."""

    place: Place
    note: Any
    same: Callable[[], bool] | None
    """Whether it holds the very same objects; where that is not so it may still hold equal ones."""
    members: set[int] = field(default_factory=set)

    def changed(self) -> bool:
        if self.same is not None and self.same():
            return False
        if self.place.changed(self.note):
            return True
        self.same = _identity(self.place)
        return False


class Watch:
    """What members' steps read besides their weights and data."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._checks: list[_Check] = []
        self._by_place: dict[tuple[Any, ...], _Check] = {}

    def __len__(self) -> int:
        return len(self._checks)

    def add(self, member: int, code: Mapping[str, Any], model: nn.Module, *, private: bool = False) -> bool:
        """Note what a member's code and model can read now; whether all of it could be looked at.

        `private`: the model is a copy that is not shared.
        """
        roots = {"model": model}
        walk = Walk(code if private else {**code, **roots}, skip=model, private=roots if private else None)
        noted = [place for place in walk.places if not isinstance(place, _NOT_READ)]
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
        """Look no longer at what only these members' steps read."""
        self.keep(self._members - set(members))

    def keep(self, members: Collection[int]) -> None:
        """Look at what these members' steps read, and at nothing else."""
        wanted = self._members.intersection(members)
        if len(wanted) == len(self._members):
            return
        self._members = wanted
        for check in self._checks:
            check.members &= wanted
        self._checks = [check for check in self._checks if check.members]
        self._by_place = {key: check for key, check in self._by_place.items() if check.members}

    def shared_with(self, walk: Walk) -> bool:
        """Whether other code can reach what these members' steps read."""
        mine = {_key(check.place): check.place for check in self._checks}
        for place in walk.places:
            if isinstance(place, places.Globals):
                read = (p for p in mine.values() if isinstance(p, places.Globals) and p.owner is place.owner)
                if any(walk.written.intersection(other.names) for other in read):
                    return True
            elif _key(place) in mine:
                return True
        return False

    def changes(self) -> dict[int, Path]:
        """Members whose steps read something that has changed since they were added, and what."""
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
    """A quick test whether a place holds the very objects that it holds now; None: there is none."""
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
        except RuntimeError:  # another thread is writing to it
            return False

    return same


MOST_CHANGES, FEW_STEPS = 8, 8
"""After so many changes, with fewer steps from one to the next, recording each time costs more than it gains."""


class ChangeLog:
    """How often what members' steps read has changed."""

    def __init__(self) -> None:
        self._steps: dict[int, list[int]] = {}

    def note(self, member: int, step: int, changed: Path) -> str | None:
        """Note that this changed at a member's step; where that happens too often, the reason not to stack it."""
        steps = self._steps.setdefault(member, [])
        steps.append(step)
        if len(steps) < MOST_CHANGES or steps[-1] - steps[-MOST_CHANGES] >= FEW_STEPS * MOST_CHANGES:
            return None
        return f"what its step reads changes too often ({places.say(changed)})"
