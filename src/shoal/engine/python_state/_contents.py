"""Places that hold other state than Python values: tensors, arrays, random generators and positions of iterators."""

from __future__ import annotations

import array
import configparser
import ctypes
import io
import itertools
import os
import queue
import string
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.engine.python_state._compare import same_bits, version
from shoal.engine.python_state.places import Path, Place
from shoal.engine.python_state.user_code import is_library_module
from shoal.utils.random_state import get_state, same_state, set_state

MAX_ELEMENTS = 1_000_000
"""Larger tensors are compared only by their version, and larger arrays by a sample; neither is restored."""
_SAMPLED = 4096
_COPYABLE: tuple[type, ...] = (
    itertools.count, type(iter([])), type(iter(())), type(iter(range(0))), type(reversed([])), type(iter("")),
)  # fmt: skip
"""Iterators that `copy.copy` copies with their position, so that original and copy advance independently."""


class TensorContent(Place):
    """The values in a tensor that is neither a parameter nor a buffer of the model."""

    owner: Tensor
    data = True
    most = MAX_ELEMENTS
    """The values of tensors with more elements are not compared."""

    @property
    def whole(self) -> bool:
        """Whether its values can be copied and compared."""
        value = self.owner
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type != "meta"
        odd = value.is_quantized or value.is_nested
        return plain and not odd and value.numel() <= self.most

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return self.whole

    def get(self) -> Tensor:
        return self.owner.detach().clone()

    def put(self, value: Tensor) -> None:
        with torch.no_grad():
            self.owner.copy_(value)

    def note(self) -> tuple[int, Tensor | None, Tensor]:
        return version(self.owner), self.get() if self.whole else None, self.owner.detach()

    def changed(self, note: tuple[int, Tensor | None, Tensor]) -> bool:
        if version(self.owner) != note[0] or self.owner.device != note[2].device:
            return True
        return note[1] is not None and not same_bits(self.owner, note[1])

    def restore(self, note: tuple[int, Tensor | None, Tensor]) -> None:
        if self.owner.device != note[2].device:  # a recording has put a tensor without data in its `.data`
            self.owner.data = note[2]
        if note[1] is not None and not same_bits(self.owner, note[1]):
            self.put(note[1])


class ArrayContent(Place):
    """The values in a numpy array."""

    owner: np.ndarray[Any, Any]

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return self.owner.size <= MAX_ELEMENTS

    def get(self) -> np.ndarray[Any, Any]:
        if self.owner.size <= MAX_ELEMENTS:
            return self.owner.copy()
        return self.owner.reshape(-1)[:: max(1, self.owner.size // _SAMPLED)].copy()

    def put(self, value: np.ndarray[Any, Any]) -> None:
        if self.restorable and self.owner.flags.writeable and self.changed(value):
            self.owner[...] = value

    def changed(self, note: np.ndarray[Any, Any]) -> bool:
        now = self.get()
        if now.shape != note.shape or now.dtype != note.dtype:
            return True
        return list(now.flat) != list(note.flat) if now.dtype.hasobject else now.tobytes() != note.tobytes()


class BufferContent(Place):
    """The bytes of a buffer: a bytearray, an `array.array`, a ctypes value, shared memory of `multiprocessing`."""

    def get(self) -> bytes:
        return bytes(self._view())

    def put(self, value: bytes) -> None:
        if isinstance(self.owner, array.array | bytearray) and len(value) != len(self._view()):
            del self.owner[:]
            self.owner.extend(value) if isinstance(self.owner, bytearray) else self.owner.frombytes(value)
        elif self.changed(value):
            self._view()[:] = value

    def _view(self) -> memoryview:
        owner = self.owner.get_obj() if isinstance(self.owner, SynchronizedBase) else self.owner
        return memoryview(owner).cast("B")


BUFFERS = (array.array, bytearray, ctypes.Array, ctypes._SimpleCData, SynchronizedBase)


class FrameContent(Place):
    """The content of a DataFrame or a Series of pandas."""

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return bool(self.owner.size <= MAX_ELEMENTS)

    def get(self) -> Any:
        if self.restorable:
            return self.owner.copy()
        return self.owner.iloc[:: max(1, len(self.owner) // _SAMPLED)].copy()

    def put(self, value: Any) -> None:
        if self.restorable and self.changed(value):
            self.owner._update_inplace(value.copy())

    def changed(self, note: Any) -> bool:
        return not self.get().equals(note)


def is_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame or a Series of pandas, which is not imported for this."""
    pandas = sys.modules.get("pandas")  # without the classes while another thread imports it
    return isinstance(value, (getattr(pandas, "DataFrame", ()), getattr(pandas, "Series", ())))


class RandomNumbers(Place):
    """The state of a random generator of Python, numpy or torch."""

    def get(self) -> Any:
        return get_state(self.owner)

    def put(self, value: Any) -> None:
        if self.changed(value):
            set_state(self.owner, value)

    def changed(self, note: Any) -> bool:
        return not same_state(self.get(), note)


class Position(Place):
    """The position of an iterator. It is restored by replacing the iterator by a copy, which only few types allow."""

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return isinstance(self.owner, _COPYABLE)

    def get(self) -> Any:
        value = self.owner
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pickling itertools objects is deprecated
                return repr(value.__reduce__())
        except Exception:
            return None  # the iterator does not tell its position


class CachedCalls(Place):
    """The number of results that a `functools.cache` has computed. Restoring keeps them; `forget` removes them."""

    restorable = False

    def get(self) -> int:
        return int(self.owner.cache_info().misses)

    def forget(self) -> None:
        """Empty the cache, so that its results are computed again."""
        self.owner.cache_clear()


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator other than a file."""
    return isinstance(value, Iterator) and not hasattr(value, "fileno")


_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (os._Environ, dict),
    (configparser.RawConfigParser, lambda parser: {name: dict(section) for name, section in parser.items()}),
    (string.Template, lambda template: template.template),
    (threading.local, lambda local: dict(vars(local))),
    (threading.Event, threading.Event.is_set),
    (queue.SimpleQueue, queue.SimpleQueue.qsize),
    ((io.StringIO, io.BytesIO), lambda file: None if file.closed else file.getvalue()),
    ((type({}.keys()), type({}.values()), type({}.items())), list),
    (
        types.ModuleType,
        lambda module: {name: v for name, v in vars(module).items() if isinstance(v, int | float | str)},
    ),
)
"""Objects whose content cannot be found in attributes, and functions that return a copy of it."""


class ReadContent(Place):
    """The content of an object that is not searched, such as a buffer or a Python module that a closure refers to.

    It is only compared: never saved, and never restored.
    """

    restorable = False

    def get(self) -> Any:
        return next(read for kinds, read in _READERS if isinstance(self.owner, kinds))(self.owner)

    @staticmethod
    def among(values: Iterable[tuple[Path, Any]]) -> list[ReadContent]:
        """Return a place for each of the values, given with their paths, that is such an object."""
        return [
            ReadContent(path, value)
            for path, value in values
            if isinstance(value, _READABLE) and not _is_library(value)
        ]


_READABLE = tuple(kind for kinds, _ in _READERS for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def _is_library(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and is_library_module(value.__name__, getattr(value, "__file__", None))
