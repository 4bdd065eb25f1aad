"""States of random generators: those of torch, numpy and Python, and the global ones of `random` and `numpy.random`."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PYTHON: random.Random = random._inst
"""The generator behind the functions of the module `random`."""
NUMPY: np.random.RandomState = np.random.mtrand._rand
"""The generator behind the functions of the module `numpy.random`."""


class Snapshot:
    """The states of some generators at one moment."""

    def __init__(self, generators: Iterable[Generator] = (PYTHON, NUMPY)) -> None:
        self._states = [(generator, get_state(generator)) for generator in generators]

    def moved(self) -> bool:
        """Return whether one of the generators is in another state now."""
        return not all(same_state(get_state(generator), state) for generator, state in self._states)

    def restore(self) -> None:
        """Restore the states of all generators."""
        for generator, state in self._states:
            set_state(generator, state)


@contextmanager
def restored(generators: Iterable[Generator] = (PYTHON, NUMPY)) -> Iterator[Snapshot]:
    """Restore the states of the generators on exit of this context."""
    snapshot = Snapshot(generators)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def get_state(generator: Generator) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if generator is NUMPY:
        return _numpy.get()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Set a generator to a state that `get_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif generator is NUMPY:
        _numpy.set(state)
    else:
        generator.set_state(state)


class _NumpyState:
    """The state of numpy's global generator, read and set as bytes: numpy copies its 624 words one by one, which takes
    longer than a small batch.

    The bytes do not have the second number of a pair of normal ones, which numpy keeps for the next draw. Without such
    a number a draw changes the bytes; with one, numpy's own functions are used.
    """

    def __init__(self) -> None:
        self._bits: Any = None
        self._bytes: Any = None
        """The memory of `_bits`; None if its layout is not the expected one."""
        self._known: tuple[bytes, dict[str, Any]] | None = None
        """The bytes and the state that were last read or set, if no normal number was kept."""

    def get(self) -> dict[str, Any]:
        """Return what `get_state(legacy=False)` returns. Nothing may write to it."""
        if self._is_known():
            assert self._known is not None
            return self._known[1]
        state: dict[str, Any] = NUMPY.get_state(legacy=False)
        self._note(state)
        return state

    def set(self, state: Any) -> None:
        """Do what `set_state` does."""
        if self._is_known() and isinstance(state, dict) and not state.get("has_gauss"):
            content = _bytes_of(state)
            if content is not None:
                with self._bits.lock:
                    self._bytes.raw = content
                self._known = content, state
                return
        NUMPY.set_state(state)
        self._note(NUMPY.get_state(legacy=False) if not isinstance(state, dict) else state)

    def _is_known(self) -> bool:
        if self._bits is not NUMPY._bit_generator or self._known is None:
            return False
        with self._bits.lock:
            return bool(self._bytes.raw == self._known[0])

    def _note(self, state: dict[str, Any]) -> None:
        """Remember the current state, if the bytes say all of it."""
        self._known = None
        if self._bits is not NUMPY._bit_generator:
            self._bits = NUMPY._bit_generator
            self._bytes = _memory_of(self._bits)
        if self._bytes is not None and not state.get("has_gauss"):
            with self._bits.lock:
                self._known = self._bytes.raw, state


_WORDS = 624
_numpy = _NumpyState()


def _bytes_of(state: Mapping[str, Any]) -> bytes | None:
    """Return a state as it is in the memory of a Mersenne twister: its words and its position among them."""
    words = state["state"].get("key")
    if state["bit_generator"] != "MT19937" or not isinstance(words, np.ndarray) or words.shape != (_WORDS,):
        return None
    return words.astype(np.uint32).tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder, signed=True)


def _memory_of(bits: Any) -> Any:
    """Return the memory of a Mersenne twister's state; None if it is another generator, or laid out otherwise."""
    if not isinstance(bits, np.random.MT19937):
        return None
    with bits.lock:
        memory = (ctypes.c_char * (4 * _WORDS + 4)).from_address(bits.ctypes.state_address)
    return memory if memory.raw == _bytes_of(bits.state) else None


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def seed_torch(seed: int) -> None:
    """Call `torch.manual_seed`, or a faster equivalent if there is only a CPU."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_modules(seed: int) -> None:
    """Call `random.seed` and `numpy.random.seed`, which takes 32 bits."""
    PYTHON.seed(seed)
    NUMPY.seed(seed & 0xFFFFFFFF)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
