"""States of random generators: those of torch, numpy and Python, and the global ones of `random` and `numpy.random`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
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
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Set a generator to a state that `get_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


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
