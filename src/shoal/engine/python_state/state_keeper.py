"""Save the Python state that training changes besides weights and optimizer state, and restore it.

A counter in a module, a list in a closure, a hidden state, a target network or a random generator is in no
`state_dict()`. Before the first step, `state_walk` finds the places where such state can be, and their values are
recorded. A checkpoint contains the places that have changed since. Another process builds the same jobs, so it finds
the same places and can restore them.
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
from shoal.engine.python_state.places import Path, Place, key_name, path_text
from shoal.engine.python_state.state_walk import Walk

Handle = tuple[int, str | None]
"""An object's id and None, or for an object with attributes or globals, its id and one of the names."""
SHARED = "other jobs can change it too, since they have the same object"
SAME, LEFT, MISSING = ["same"], ["left"], ["missing"]
"""Markers in place of a value: it is the initial one; it could not be saved; there is none."""
_IN_STATE_DICT = frozenset({"state", "param_groups"})
_SEPARATOR = "\x1f"
_LARGE, _SAMPLE = 1 << 20, 1 << 16
"""Of tensors with more than `_LARGE` elements, only about `_SAMPLE` elements are compared."""


class _KeptWalk(Walk):
    """A walk that leaves out an optimizer's `state` and `param_groups`, which its `state_dict()` contains."""

    def _attributes(self, path: Path, value: Any, without: frozenset[str] = frozenset()) -> None:
        root = isinstance(value, Optimizer) and len(path) == 1
        super()._attributes(path, value, _IN_STATE_DICT if root else without)


class Keeper:
    """Saves and restores the state that can be reached from some functions and objects.

    Create it before training starts, since only state that has changed since then is saved.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, model: nn.Module | None = None, beside: Keeper | None = None
    ) -> None:
        """Find and record the state.

        Args:
            roots: The functions and objects to search, by name.
            model: A model whose parameters and buffers are saved elsewhere.
            beside: Another keeper, whose objects are left out here.
        """
        self.paths: dict[int, Path] = dict(beside.paths) if beside is not None else {}
        self._objects: dict[Path, Any] = {}
        walk = _KeptWalk(roots, skip=model, known=self.paths)
        tensors = (*model.named_parameters(), *model.named_buffers()) if model is not None else ()
        for path, value in (*((("model tensor", name), tensor) for name, tensor in tensors), *walk.reached):
            while path in self._objects:  # two classes may have the same name
                path = (*path, "'")
            self.paths.setdefault(id(value), path)
            self._objects[path] = value
        if beside is not None:
            self._objects = {**beside._objects, **self._objects}
        self.complete = walk.complete
        self._walk = walk  # keeps the objects alive, so that their ids stay valid
        self._places: dict[str, Place] = {}
        for place in walk.places:
            if not isinstance(place, CachedCalls):
                self._places[_key(place, self._places)] = place
        self._notes = {key: _note(place) for key, place in self._places.items()}
        self._changed: set[str] = set()
        """Keys of places that are known to have changed, and are not compared again."""
        self.shared: set[Handle] = set()
        """State that other jobs can change too, and that is therefore not saved."""
        self.problems: dict[str, str] = {}
        """State that cannot be saved: its location in words -> the reason."""
        self._left_out: set[str] = set()
        """Keys of places that could not be saved."""

    def know(self, objects: Mapping[Path, Any]) -> None:
        """Register objects that have replaced others at these paths, so that references to them are saved as paths."""
        objects = {path: value for path, value in objects.items() if value is not None}
        self.paths = {key: path for key, path in self.paths.items() if path not in objects}
        self.paths |= {id(value): path for path, value in objects.items()}
        self._objects |= objects

    def at(self, path: Path) -> Any:
        """Return the object at a path, or None."""
        return self._objects.get(path)

    def swap(self, objects: Mapping[int, Any]) -> None:
        """Replace objects in the recorded initial state: `objects` maps the id of an object to its replacement."""
        self._notes = {
            key: note if _is_content(place) else place.swap(note, objects)
            for (key, note), place in zip(self._notes.items(), self._places.values(), strict=True)
        }

    def handles(self) -> set[Handle]:
        """Return handles of all state that this keeper watches."""
        named = [(p, p.get()) for p in self._places.values() if isinstance(p, places.Names)]
        others = {(id(p.owner), None) for p in self._places.values() if not isinstance(p, places.Names)}
        return others | {(id(place.owner), name) for place, names in named for name in names}

    def changed_in(self, handles: set[Handle]) -> dict[str, str]:
        """Return which of these have changed since the beginning: the location in words -> `SHARED`, the reason."""
        changed: dict[str, str] = {}
        for key, place in self._places.items():
            if isinstance(place, Position) or not self._has_changed(key, place):
                continue
            if isinstance(place, places.Names):
                paths = list(place.differences(self._notes[key]))
                names = {(*place.path, place.element(name)): name for name in place.get()}
                changed |= {
                    path_text(p): SHARED for p in paths if p in names and (id(place.owner), names[p]) in handles
                }
            elif (id(place.owner), None) in handles:
                changed[path_text(place.path)] = SHARED
        return changed

    # --- saving -----------------------------------------------------------------------------------------------------

    def _has_changed(self, key: str, place: Place) -> bool:
        if isinstance(place, Position):  # an inner iterator may advance unnoticed
            return True
        if key not in self._changed and _changed(place, self._notes[key]):
            if not isinstance(place, places.Names | places.Items | Position):
                self._changed.add(key)
            return True
        return key in self._changed

    def capture(self) -> dict[str, Plain] | None:
        """Return the changed state as plain data and tensors; None if there is none. `problems` has what is missing."""
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
            self._problem(path_text(place.path), SHARED)
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
                self._problem(path_text((*place.path, key_name(key, number))), str(error))
                continue
            saved.append([name, self._item(encoder, place, key, value, before.get(key, places.MISSING))])
        return saved

    def _item(
        self, encoder: Encoder, place: Place, name: Any, value: Any, before: Any = places.MISSING, *, anew: bool = False
    ) -> Plain:
        """Encode one value of a place; return SAME if it is the initial value, LEFT if it cannot be saved."""
        if value is places.MISSING:
            return MISSING
        if before is not places.MISSING and same_value(value, before):
            return SAME
        path = place.path if name is None else (*place.path, _element(place, name))
        if isinstance(place, places.Names) and (id(place.owner), name) in self.shared:
            self._problem(path_text(path), SHARED)
            return LEFT
        try:
            return encoder.value(value, anew=anew)
        except NotSavable as error:
            self._problem(path_text(path), str(error))
            return LEFT

    def _problem(self, where: str, why: str) -> None:
        self.problems.setdefault(where, why)

    # --- restoring --------------------------------------------------------------------------------------------------

    def restore(self, saved: Mapping[str, Plain] | None, device: torch.device, *, partly: bool = False) -> None:
        """Restore a state that `capture()` returned, here or in another process.

        Other places get their initial values again, except for the values in tensors and arrays.

        Args:
            saved: The captured state; None if nothing had changed.
            device: The device for tensors that were on a GPU.
            partly: Skip places that this job does not have.

        Raises:
            KeyError: If this job does not have one of the places, unless `partly`.
        """
        saved = saved or {"places": {}, "nodes": []}
        decoder = Decoder(saved["nodes"], self._objects, device)
        targets: dict[str, Any] = {}
        for key, content in saved["places"].items():
            try:
                targets[key] = self._target(decoder, key, content)
            except KeyError:
                if not partly:
                    raise KeyError(path_text(tuple(key.split(_SEPARATOR)[1:]))) from None
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
        """Decode the value that a place is to be set to, in the form that its `put` takes."""
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
    """Return a unique name for a place: its class and its path. A module has several places with the same path."""
    number = 0
    while (key := _SEPARATOR.join((f"{type(place).__name__}{number or ''}", *place.path))) in taken:
        number += 1
    return key


def _element(place: Place, name: Any) -> str:
    return place.element(name) if isinstance(place, places.Names) else key_name(name, 0)


def _note(place: Place) -> Any:
    """Return a note of a place's value; for tensors and arrays a hash, since they may be large."""
    if isinstance(place, TensorContent):
        return version(place.owner), _tensor_hash(place.owner)
    return _array_hash(place.owner) if isinstance(place, ArrayContent) else place.note()


def _changed(place: Place, note: Any) -> bool:
    if isinstance(place, TensorContent):
        if place.owner.grad is not None or version(place.owner) != note[0]:
            return True
        return bool(_tensor_hash(place.owner) != note[1])  # writing through `.data` keeps the version
    return bool(_array_hash(place.owner) != note) if isinstance(place, ArrayContent) else place.changed(note)


def _tensor_hash(value: Tensor) -> bytes:
    """Hash a tensor's values; for a large tensor a sample, since most writes are already seen by its version."""
    if value.layout != torch.strided or value.is_meta or type(value) not in (Tensor, nn.Parameter):
        return b""
    if value.numel() > _LARGE:
        value = value.detach().reshape(-1)[:: value.numel() // _SAMPLE]
    return hashlib.sha256(as_bytes(value)).digest()


def _array_hash(value: np.ndarray[Any, Any]) -> bytes:
    """Hash all values of an array, since arrays have no version that would show writes."""
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
