"""Read the items of a Dataset so that random ones depend on the job alone.

An item is read under its own seed, a function of (data seed, epoch, row): the global generators of torch, numpy and
Python, and those that the Dataset holds, are seeded for it and restored afterwards. So it does not matter how many
workers read, in which order, or which other jobs read the same Dataset.
"""

from __future__ import annotations

import enum
import gc
import hashlib
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.errors import ROW_NOTE
from shoal.utils.random_state import GENERATORS, NUMPY, PYTHON, Generator, Snapshot, get_state, restored

MOST_OBJECTS, MOST_ITEMS = 10_000, 200
"""How far a Dataset is searched for generators: the most objects, and the most references of each."""

_PLAIN = (
    Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None), type, types.ModuleType, enum.Enum,
)  # fmt: skip


class Items:
    """Reads the items of one Dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.generators = [(generator, _salt(generator)) for generator in generators_of(dataset)]
        """The Dataset's own generators, each with a salt that distinguishes those that were seeded differently."""

    def __call__(self, row: int, seed: int, epoch: int) -> Any:
        """Read an item with all generators seeded by (seed, epoch, row), and restore them afterwards."""
        return self.batch([row], seed, epoch)[0]

    def batch(self, rows: Iterable[int], seed: int, epoch: int) -> list[Any]:
        """Read items, each under its own seed, and restore the generators afterwards."""
        with self.generators_restored():
            return [self.read(row, seed, epoch) for row in rows]

    def generators_restored(self) -> AbstractContextManager[Snapshot]:
        """Restore all generators on exit. That takes as long as reading many cheap items."""
        return restored([torch.default_generator, NUMPY, PYTHON, *(generator for generator, _ in self.generators)])

    def read(self, row: int, seed: int, epoch: int) -> Any:
        """Read an item under its own seed, without restoring the generators."""
        item_seed = word(seed, epoch, row)
        torch.default_generator.manual_seed(item_seed)
        NUMPY.seed(item_seed & 0xFFFFFFFF)
        PYTHON.seed(item_seed)
        for generator, salt in self.generators:
            seed_generator(generator, word(seed, epoch, row, salt))
        try:
            return self.dataset[row]
        except Exception as error:
            error.add_note(f"{ROW_NOTE}{row} of its Dataset")
            raise

    def plain(self, rows: Iterable[int]) -> list[Any] | None:
        """Read items; None if one does not consist of tensors and numbers, or reading them drew random numbers."""
        with self.generators_restored() as before:
            items = [self.dataset[row] for row in rows]
            drew = before.moved()
        return items if not drew and all(map(_is_plain, items)) else None


def _is_plain(item: Any) -> bool:
    return isinstance(item, (tuple, list, dict, Tensor)) and all(
        isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float)) for leaf in pytree.tree_leaves(item)
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two items hold the same values, as far as they are tensors, arrays, numbers and strings."""
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return bool(spec_a == spec_b) and all(_same_leaf(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _same_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.layout != torch.strided or y.layout != torch.strided:
            x, y = x.to_dense(), y.to_dense()
        return x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(x.nan_to_num(), y.nan_to_num()))
    if isinstance(x, (np.ndarray, np.generic, int, float, complex, str, bytes)):
        a, b = np.asarray(x), np.asarray(y)
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    return type(x) is type(y)


def generators_of(*readers: Any) -> list[Generator]:
    """Return random generators that reading these (a Dataset, DataLoader or sampler) may use, besides the global ones.

    These are generators in attributes, lists, transforms and closures, and in globals of their functions.
    """
    return [value for value in reachable(*readers) if isinstance(value, GENERATORS)]


def reachable(*readers: Any) -> Iterator[Any]:
    """Yield the objects that reading these may use, as far as they are searched; plain values such as numbers and
    tensors too, but not classes, modules and the global generators."""
    visited = {id(torch.default_generator), id(PYTHON), id(NUMPY)}
    methods = ("__getitem__", "__getitems__", "__iter__")
    to_visit: deque[Any] = deque(readers)
    to_visit.extend(getattr(type(reader), name, None) for reader in readers for name in methods)
    searched = len(visited)
    while to_visit and searched < MOST_OBJECTS:
        value = to_visit.popleft()
        if id(value) in visited or isinstance(value, (type, types.ModuleType)):
            continue
        if isinstance(value, _PLAIN):
            yield value
            continue
        visited.add(id(value))
        searched += 1
        if isinstance(value, random.SystemRandom):
            continue  # it has no state
        yield value
        if not isinstance(value, GENERATORS):
            to_visit.extend(_references(value))


def _references(value: Any) -> Iterator[Any]:
    """Yield what an object references; of a function's globals, only generators."""
    if isinstance(value, types.FunctionType):
        used_globals = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (*(value.__closure__ or ()), *(value.__defaults__ or ()))
        yield from (value_used for value_used in used_globals if isinstance(value_used, GENERATORS))
        return
    getattr(value, "__dict__", None)  # makes the dict that else is only made when somebody asks for it
    yield from gc.get_referents(value)[:MOST_ITEMS]
    yield getattr(value, "__self__", None)  # the object of a built-in method
    for kind in type(value).__mro__:
        if "__call__" in vars(kind) and isinstance(vars(kind)["__call__"], types.FunctionType):
            yield vars(kind)["__call__"]


def word(*parts: object) -> int:
    """Return a 64-bit seed from these numbers and names."""
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
    """Return a hash of the generator's current state."""
    state = get_state(generator)
    data = state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
