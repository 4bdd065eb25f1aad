"""Python state that training changes besides weights and optimizer state: found once, then saved with each checkpoint.

A counter in a module, a list in a closure, a hidden state, a target network, a generator of random numbers: none of
them is in a `state_dict()`. The walk that also watches a step (`state_walk`) looks for the places where such state can
be, before the first step, and what they hold is noted. A checkpoint holds those that have changed since; another
process, which builds the same jobs and so finds the same places, puts them back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.source import as_bytes
from shoal.engine.python_state import places
from shoal.engine.python_state._compare import same_value, version
from shoal.engine.python_state._contents import ArrayContent, CachedCalls, Position, TensorContent
from shoal.engine.python_state._parts import NotSavable
from shoal.engine.python_state._state_codec import Decoder, Encoder, Plain
from shoal.engine.python_state.places import Path, Place, key_name, say
from shoal.engine.python_state.state_walk import Walk

Handle = tuple[int, str | None]
"""The id of an object, and of an object with named values one of the names."""
SHARED = "other jobs can change it too, since they have the same object"
SAME, LEFT, MISSING = ["same"], ["left"], ["missing"]
"""Instead of a value: what is there at the beginning; what could not be saved; nothing at all."""
_IN_STATE_DICT = frozenset({"state", "param_groups"})
_SEPARATOR = "\x1f"
_LARGE, _SAMPLE = 1 << 20, 1 << 16
"""Elements of a tensor from which a part of them is compared, and how many."""


class _KeptWalk(Walk):
    """A walk that leaves out what is in the state_dict() of an optimizer that is a root."""

    def _attributes(self, path: Path, value: Any, without: frozenset[str] = frozenset()) -> None:
        root = isinstance(value, Optimizer) and len(path) == 1
        super()._attributes(path, value, _IN_STATE_DICT if root else without)


class Keeper:
    """Saves what can be reached from some named functions and objects, and puts it back.

    It has to be made before any training changes them: what is saved is what differs from then.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, model: nn.Module | None = None, beside: Keeper | None = None
    ) -> None:
        """`model`: one whose parameters and buffers are saved elsewhere. `beside`: another keeper, whose places
        are not looked at here."""
        self.paths: dict[int, Path] = dict(beside.paths) if beside is not None else {}
        self._objects: dict[Path, Any] = {}
        walk = _KeptWalk(roots, skip=model, known=self.paths)
        tensors = (*model.named_parameters(), *model.named_buffers()) if model is not None else ()
        for path, value in (*((("model tensor", name), tensor) for name, tensor in tensors), *walk.reached):
            while path in self._objects:  # two classes of one name
                path = (*path, "'")
            self.paths.setdefault(id(value), path)
            self._objects[path] = value
        if beside is not None:
            self._objects = {**beside._objects, **self._objects}
        self.complete = walk.complete
        self._walk = walk  # holds the objects, so that their ids are theirs
        self._places: dict[str, Place] = {}
        for place in walk.places:
            if not isinstance(place, CachedCalls):
                self._places[_key(place, self._places)] = place
        self._notes = {key: _note(place) for key, place in self._places.items()}
        self._changed: set[str] = set()
        """Those that are known to have changed: they are not compared again."""
        self.shared: set[Handle] = set()
        """What other jobs can change too: it is not saved."""
        self.problems: dict[str, str] = {}
        """What cannot be saved, in words: where it is, and why."""
        self._left_out: set[str] = set()
        """Keys of places that could not be saved."""

    def know(self, objects: Mapping[Path, Any]) -> None:
        """Objects that took the place of others since, by the ways to them: references to them are saved as such."""
        objects = {path: value for path, value in objects.items() if value is not None}
        self.paths = {key: path for key, path in self.paths.items() if path not in objects}
        self.paths |= {id(value): path for path, value in objects.items()}
        self._objects |= objects

    def at(self, path: Path) -> Any:
        """The object at the end of a way; None where there is none."""
        return self._objects.get(path)

    def swap(self, objects: Mapping[int, Any]) -> None:
        """Take these objects, by the ids of those that they replace, for what was there at the beginning."""
        self._notes = {
            key: note if _is_content(place) else place.swap(note, objects)
            for (key, note), place in zip(self._notes.items(), self._places.values(), strict=True)
        }

    def handles(self) -> set[Handle]:
        """All that it looks at."""
        named = [(p, p.get()) for p in self._places.values() if isinstance(p, places.Names)]
        others = {(id(p.owner), None) for p in self._places.values() if not isinstance(p, places.Names)}
        return others | {(id(place.owner), name) for place, names in named for name in names}

    def changed_in(self, handles: set[Handle]) -> dict[str, str]:
        """Which of these hold something else than at the beginning, in words; and that others have them too."""
        changed: dict[str, str] = {}
        for key, place in self._places.items():
            if isinstance(place, Position) or not self._has_changed(key, place):
                continue
            if isinstance(place, places.Names):
                paths = list(place.differences(self._notes[key]))
                names = {(*place.path, place.element(name)): name for name in place.get()}
                changed |= {say(p): SHARED for p in paths if p in names and (id(place.owner), names[p]) in handles}
            elif (id(place.owner), None) in handles:
                changed[say(place.path)] = SHARED
        return changed

    # --- saving -----------------------------------------------------------------------------------------------------

    def _has_changed(self, key: str, place: Place) -> bool:
        if isinstance(place, Position):  # what is inside of it may move where it does not say so
            return True
        if key not in self._changed and _changed(place, self._notes[key]):
            if not isinstance(place, places.Names | places.Items | Position):
                self._changed.add(key)
            return True
        return key in self._changed

    def capture(self) -> dict[str, Plain] | None:
        """What has changed, as plain data and tensors; None where nothing has. See `problems` for what is left out."""
        encoder = Encoder(self.paths)
        saved: dict[str, Plain] = {}
        for key, place in self._places.items():
            if self._has_changed(key, place):
                value = self._saved(encoder, place, self._notes[key])
                if value is LEFT:
                    self._left_out.add(key)
                else:
                    saved[key] = value
        return {"places": saved, "nodes": encoder.nodes} if saved else None

    def _saved(self, encoder: Encoder, place: Place, note: Any) -> Plain:
        if (id(place.owner), None) in self.shared:
            self._problem(say(place.path), SHARED)
            return LEFT
        if isinstance(place, places.Names):
            now = place.get()
            items = {n: self._item(encoder, place, n, v, note.get(n, places.MISSING)) for n, v in now.items()}
            return [[name, value] for name, value in items.items()]
        if isinstance(place, places.Items):
            return self._saved_items(encoder, place, dict(note))
        if isinstance(place, TensorContent):
            grad = place.owner.grad
            return [place.owner.detach(), None if grad is None else grad.detach()]
        if isinstance(place, Position):
            return self._item(encoder, place, None, place.owner, anew=True)
        return self._item(encoder, place, None, place.get())

    def _saved_items(self, encoder: Encoder, place: places.Items, before: dict[Any, Any]) -> Plain:
        if not place.restorable:
            return LEFT
        saved = []
        for number, (key, value) in enumerate(place.get()):
            try:
                name = encoder.value(key)
            except NotSavable as error:
                self._problem(say((*place.path, key_name(key, number))), str(error))
                continue
            saved.append([name, self._item(encoder, place, key, value, before.get(key, places.MISSING))])
        return saved

    def _item(
        self, encoder: Encoder, place: Place, name: Any, value: Any, before: Any = places.MISSING, *, anew: bool = False
    ) -> Plain:
        """One value of a place; SAME where it is the one from the beginning, LEFT where it cannot be saved."""
        if value is places.MISSING:
            return MISSING
        if before is not places.MISSING and same_value(value, before):
            return SAME
        path = place.path if name is None else (*place.path, _element(place, name))
        if isinstance(place, places.Names) and (id(place.owner), name) in self.shared:
            self._problem(say(path), SHARED)
            return LEFT
        try:
            return encoder.value(value, anew=anew)
        except NotSavable as error:
            self._problem(say(path), str(error))
            return LEFT

    def _problem(self, where: str, why: str) -> None:
        self.problems.setdefault(where, why)

    # --- putting back -----------------------------------------------------------------------------------------------

    def restore(self, saved: Mapping[str, Plain] | None, device: torch.device, *, partly: bool = False) -> None:
        """Hold what was captured, here or in another process; what had not changed is as it was at the beginning.

        KeyError where this is not the job that it was captured from; `partly`: that is then left as it is.
        """
        saved = saved or {"places": {}, "nodes": []}
        decoder = Decoder(saved["nodes"], self._objects, device)
        targets: dict[str, Any] = {}
        for key, content in saved["places"].items():
            try:
                targets[key] = self._target(decoder, key, content)
            except KeyError:
                if not partly:
                    raise KeyError(say(tuple(key.split(_SEPARATOR)[1:]))) from None
        moved = {
            id(self._places[key].owner): value
            for key, value in targets.items()
            if isinstance(self._places[key], Position)
        }
        for key, place in self._places.items():
            left = key in self._left_out or (id(place.owner), None) in self.shared
            if isinstance(place, Position) or (left and key not in targets):
                continue
            if isinstance(place, TensorContent | ArrayContent):
                if key in targets:
                    _put_content(place, targets[key])
                continue
            target = targets[key] if key in targets else self._at_the_beginning(key, place)
            if key in targets or moved or place.changed(target):
                place.put(place.swap(target, moved) if moved else target)
        self._changed |= {key for key in targets if not isinstance(self._places[key], places.Names | places.Items)}

    def _at_the_beginning(self, key: str, place: Place) -> Any:
        note = self._notes[key]
        if not isinstance(place, places.Names):
            return note
        now = place.get()
        return note | {name: now[name] for name in now if (id(place.owner), name) in self.shared}

    def _target(self, decoder: Decoder, key: str, content: Plain) -> Any:
        """What a place shall hold, as its `put` takes it."""
        place, note = self._places[key], self._notes[key]
        if isinstance(place, places.Names | places.Items):
            before, now, target = dict(note), dict(place.get()), dict[Any, Any]()
            for element, value in content:
                name = decoder.value(element)
                if value not in (SAME, LEFT):
                    target[name] = decoder.value(value)
                elif name in (held := before if value == SAME else now):
                    target[name] = held[name]
            return target if isinstance(place, places.Names) else list(target.items())
        if isinstance(place, TensorContent):
            return content
        return places.MISSING if content == MISSING else decoder.value(content)


def _key(place: Place, taken: Mapping[str, Any]) -> str:
    """A name for a place: its path, with what it is, since a module has several places of one path."""
    number = 0
    while (key := _SEPARATOR.join((f"{type(place).__name__}{number or ''}", *place.path))) in taken:
        number += 1
    return key


def _element(place: Place, name: Any) -> str:
    return place.element(name) if isinstance(place, places.Names) else key_name(name, 0)


def _note(place: Place) -> Any:
    """What a place holds; of tensors and arrays a hash, since they may be large."""
    if isinstance(place, TensorContent):
        return version(place.owner), _tensor_hash(place.owner)
    return _array_hash(place.owner) if isinstance(place, ArrayContent) else place.note()


def _changed(place: Place, note: Any) -> bool:
    if isinstance(place, TensorContent):
        if place.owner.grad is not None or version(place.owner) != note[0]:
            return True
        return bool(_tensor_hash(place.owner) != note[1])  # what is written through `.data` leaves the version as it is
    return bool(_array_hash(place.owner) != note) if isinstance(place, ArrayContent) else place.changed(note)


def _tensor_hash(value: Tensor) -> bytes:
    """Of the content; of a large tensor's, of elements spread over it: writing to a part of it changes its version."""
    if value.layout != torch.strided or value.is_meta or type(value) not in (Tensor, nn.Parameter):
        return b""
    if value.numel() > _LARGE:
        value = value.detach().reshape(-1)[:: value.numel() // _SAMPLE]
    return hashlib.sha256(as_bytes(value)).digest()


def _array_hash(value: np.ndarray[Any, Any]) -> bytes:
    """Of the content, all of it: an array does not say that it was written to."""
    return hashlib.sha256(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()).digest()


def _is_content(place: Place) -> bool:
    return isinstance(place, TensorContent | ArrayContent)


def _put_content(place: Place, content: Any) -> None:
    if isinstance(place, TensorContent):
        value, grad = content
        with torch.no_grad():
            place.owner.copy_(value)
        place.owner.grad = None if grad is None else grad.to(place.owner.device)
    else:
        place.owner[...] = content
