"""Items of a Dataset, read so that what a random one gives depends on the job alone.

An item is read under a seed of its own, a function of (data seed, epoch, row): torch's, numpy's and python's global
generators, and those that the Dataset keeps itself, are seeded for it and put back afterwards. So it does not matter
how many workers read, in which order, or which other jobs read the same Dataset.
"""

from __future__ import annotations

import gc
import hashlib
import random
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.errors import ROW_NOTE
from shoal.utils.random_state import GENERATORS, NUMPY, PYTHON, Generator, get_state, restored

MOST_OBJECTS, MOST_ITEMS = 10_000, 200
"""How far a Dataset is searched for generators: so many objects, so many things that each of them holds."""

_PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None), type, types.ModuleType)


class Items:
    """Reads the items of one Dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.generators = [(generator, _salt(generator)) for generator in generators_of(dataset)]
        """The Dataset's own, each with what tells two that were seeded differently apart."""

    @property
    def _all(self) -> list[Generator]:
        return [torch.default_generator, NUMPY, PYTHON, *(generator for generator, _ in self.generators)]

    def __call__(self, row: int, seed: int, epoch: int) -> Any:
        """Read an item, with all generators seeded by (seed, epoch, row), and put them back after."""
        with restored(self._all):
            torch.default_generator.manual_seed(word(seed, epoch, row))
            NUMPY.seed(word(seed, epoch, row) & 0xFFFFFFFF)
            PYTHON.seed(word(seed, epoch, row))
            for generator, salt in self.generators:
                seed_generator(generator, word(seed, epoch, row, salt))
            try:
                return self.dataset[row]
            except Exception as error:
                error.add_note(f"{ROW_NOTE}{row} of its Dataset")
                raise

    def plain(self, row: int) -> Any | None:
        """Read an item; None where it is not made of tensors and numbers, or where reading it drew at random."""
        with restored(self._all) as before:
            item = self.dataset[row]
            drew = before.moved()
        plain = isinstance(item, (tuple, list, dict, Tensor)) and all(
            isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float)) for leaf in pytree.tree_leaves(item)
        )
        return item if plain and not drew else None


def same(a: Any, b: Any) -> bool:
    """Whether two items hold the same numbers, as far as they are tensors, arrays, numbers and strings."""
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return bool(spec_a == spec_b) and all(_alike(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.layout != torch.strided or y.layout != torch.strided:
            x, y = x.to_dense(), y.to_dense()
        return x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(x.nan_to_num(), y.nan_to_num()))
    if isinstance(x, (np.ndarray, np.generic, int, float, complex, str, bytes)):
        a, b = np.asarray(x), np.asarray(y)
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    return type(x) is type(y)


def generators_of(*readers: Any) -> list[Generator]:
    """Random generators that reading these (a Dataset, a DataLoader, a sampler) may draw from, besides the global ones:
    those they keep in attributes, lists, transforms and closures, and those that their functions know as globals."""
    generators: list[Generator] = []
    seen = {id(torch.default_generator), id(PYTHON), id(NUMPY)}
    methods = ("__getitem__", "__getitems__", "__iter__")
    waiting: deque[Any] = deque(readers)
    waiting.extend(getattr(type(reader), name, None) for reader in readers for name in methods)
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if isinstance(value, random.SystemRandom):
            continue  # it has no state
        if isinstance(value, GENERATORS):
            generators.append(value)
        else:
            waiting.extend(_inside(value))
    return generators


def _inside(value: Any) -> Iterator[Any]:
    """What an object holds; of a function's globals, generators alone."""
    if isinstance(value, types.FunctionType):
        known = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (*(value.__closure__ or ()), *(value.__defaults__ or ()))
        yield from (one for one in known if isinstance(one, GENERATORS))
        return
    yield from gc.get_referents(value)[:MOST_ITEMS]
    yield getattr(value, "__self__", None)  # a method that is not Python's
    for kind in type(value).__mro__:
        if "__call__" in vars(kind) and isinstance(vars(kind)["__call__"], types.FunctionType):
            yield vars(kind)["__call__"]


def word(*parts: object) -> int:
    """A seed of 64 bits from these numbers and names."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generator(generator: Generator, seed: int) -> None:
    """Seed a generator of any of the three libraries."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _salt(generator: Generator) -> str:
    state = get_state(generator)
    data = state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
