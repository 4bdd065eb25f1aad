"""States of random generators: torch's, numpy's and Python's, with those behind `random` and `numpy.random`."""

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
"""What the functions of the module `random` draw from."""
NUMPY: np.random.RandomState = np.random.mtrand._rand
"""What the functions of the module `numpy.random` draw from."""


class Snapshot:
    """The states of some generators at one moment."""

    def __init__(self, generators: Iterable[Generator] = (PYTHON, NUMPY)) -> None:
        self._states = [(generator, get_state(generator)) for generator in generators]

    def moved(self) -> bool:
        """Whether one of them is in another state now."""
        return not all(same_state(get_state(generator), state) for generator, state in self._states)

    def restore(self) -> None:
        """Put all of them back."""
        for generator, state in self._states:
            set_state(generator, state)


@contextmanager
def restored(generators: Iterable[Generator] = (PYTHON, NUMPY)) -> Iterator[Snapshot]:
    """Inside, generators may draw; after, they are in the states they were in."""
    before = Snapshot(generators)
    try:
        yield before
    finally:
        before.restore()


def get_state(generator: Generator) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Put a generator into a state that `get_state` gave."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of a generator are the same."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`; where there is a CPU alone, without the note of the stack that it makes for each device."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_modules(seed: int) -> None:
    """`random.seed` and `numpy.random.seed`, which takes 32 bits."""
    PYTHON.seed(seed)
    NUMPY.seed(seed & 0xFFFFFFFF)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
