"""Axes: which dimensions of a network's tensors belong together.

Every dimension of every tensor is an axis. Operators say which axes are the same (`unify`), which are made of others (a
view that takes (heads, width) out of one dimension makes it a product, a concatenation makes a sum), and which must
stay whole (`fix`, with the reason). Leaves that were not fixed can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class Axis:
    """An axis: a leaf, a product of other axes (the first varies slowest), or a sum of other axes, one after
    another."""

    __slots__ = ("factors", "fixed", "into", "notes", "size", "terms")

    def __init__(self, size: int, fixed: str = "") -> None:
        self.size = size
        self.fixed = fixed
        """Why the axis stays whole; used for leaves only."""
        self.notes: set[str] = set()
        """What operators said about the axis: "head", "channel", "normalised", "residual", "input"."""
        self.into: Axis | None = None
        self.factors: list[Axis] = []
        self.terms: list[Axis] = []


def find(axis: Axis) -> Axis:
    """Return the axis that represents all axes that were unified with this one."""
    while axis.into is not None:
        axis = axis.into
    return axis


def leaves(axis: Axis) -> Iterator[Axis]:
    axis = find(axis)
    parts = axis.factors or axis.terms
    if not parts:
        yield axis
    for part in parts:
        yield from leaves(part)


def fix(axis: Axis, reason: str) -> None:
    """Keep an axis whole. The first reason is kept."""
    for leaf in leaves(axis):
        leaf.fixed = leaf.fixed or reason


def note(axis: Axis, label: str) -> None:
    for leaf in leaves(axis):
        leaf.notes.add(label)


def product(factors: Sequence[Axis]) -> Axis:
    factors = [find(f) for f in factors if find(f).size != 1]
    if len(factors) == 1:
        return factors[0]
    axis = Axis(prod(f.size for f in factors))
    axis.factors = list(factors)
    return axis


def total(terms: Sequence[Axis]) -> Axis:
    terms = [find(t) for t in terms if find(t).size]
    if len(terms) == 1:
        return terms[0]
    axis = Axis(sum(t.size for t in terms))
    axis.terms = list(terms)
    return axis


def unify(a: Axis, b: Axis) -> None:
    """Declare that two axes are the same."""
    a, b = find(a), find(b)
    if a is b:
        return
    if a.size != b.size:
        fix(a, f"sizes {a.size} and {b.size} meet")
        fix(b, f"sizes {a.size} and {b.size} meet")
        return
    if a.factors or a.terms:
        a, b = b, a  # a leaf becomes what the other is
    if not (a.factors or a.terms):
        if a.fixed:
            fix(b, a.fixed)
        for word in a.notes:
            note(b, word)
    elif a.factors and b.factors:
        _refine_factors(a, b)
    elif a.terms and b.terms:
        _refine_terms(a, b)
    else:
        _both_whole(a, b, "it is taken apart in two ways that do not fit")
        return
    a, b = find(a), find(b)
    if a is not b:
        a.into = b


def reshape(dims: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Return the axes of a view of the same elements in another shape."""
    waiting = [f for dim in reversed(dims) for f in reversed(_flat(dim)) if f.size != 1]
    axes: list[Axis] = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1 and waiting:
            first = find(waiting.pop())
            if missing % first.size == 0:
                taken.append(first)
                missing //= first.size
            elif first.size % missing == 0 and (pieces := _cut(first, [missing, first.size // missing])):
                taken.append(pieces[0])
                waiting.append(pieces[1])
                missing = 1
            else:
                for axis in dims:
                    fix(axis, "a view mixes it with other dimensions")
                return [Axis(n, "a view mixes it with other dimensions") for n in sizes]
        axes.append(product(taken) if taken else Axis(size))
    return axes


def pieces(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Return the axes of consecutive pieces of an axis."""
    axis = find(axis)
    sizes = list(sizes)
    if len([n for n in sizes if n]) <= 1:
        return [axis if n else Axis(0) for n in sizes]
    if axis.factors:
        inner = prod(find(f).size for f in axis.factors[1:])
        if all(n % inner == 0 for n in sizes):
            outer = pieces(axis.factors[0], [n // inner for n in sizes])
            return [product([piece, *axis.factors[1:]]) for piece in outer]
    if axis.terms and [find(t).size for t in axis.terms] == [n for n in sizes if n]:
        terms = iter(axis.terms)
        return [find(next(terms)) if n else Axis(0) for n in sizes]
    if axis.factors or axis.terms:
        fix(axis, "it is taken apart in two ways that do not fit")
        return [Axis(n, "a piece of something that stays whole") for n in sizes]
    children = [_child(axis, n) for n in sizes]
    axis.terms = [f for f in children if f.size]
    return children


def rows_of_units(axis: Axis, leaf: Axis) -> Rows:
    """Return the places of the axis that belong to each unit of the leaf, [units, rows of each]; empty if there are
    none."""
    owners = _owners(axis, leaf)
    places = np.argsort(owners, kind="stable")
    return places[np.count_nonzero(owners < 0) :].reshape(leaf.size, -1).astype(np.int64)


def twice(axis: Axis) -> list[Axis]:
    """List the leaves that are in more than one factor of a product, as in an outer product of an axis with itself."""
    axis = find(axis)
    inside = [set(leaves(f)) for f in axis.factors]
    met = [leaf for i, some in enumerate(inside) for leaf in some if any(leaf in other for other in inside[:i])]
    return met + [leaf for part in (*axis.factors, *axis.terms) for leaf in twice(part)]


def _owners(axis: Axis, leaf: Axis) -> Rows:
    """Return, for each place of the axis, the unit of the leaf that it belongs to, or -1."""
    axis = find(axis)
    if axis is leaf:
        return np.arange(axis.size, dtype=np.int64)
    if axis.terms:
        return np.concatenate([_owners(t, leaf) for t in axis.terms])
    owners = np.full(1, -1, dtype=np.int64)
    for factor in axis.factors:
        owners = np.maximum(owners[:, None], _owners(factor, leaf)[None, :]).reshape(-1)
    return owners if axis.factors else np.full(axis.size, -1, dtype=np.int64)


def _flat(axis: Axis) -> list[Axis]:
    axis = find(axis)
    return [inner for f in axis.factors for inner in _flat(f)] if axis.factors else [axis]


def _child(axis: Axis, size: int) -> Axis:
    child = Axis(size, axis.fixed)
    child.notes = set(axis.notes)
    return child


def _cut(axis: Axis, sizes: list[int]) -> list[Axis]:
    """Turn a leaf into a product of these sizes; returns nothing if it is a sum."""
    if axis.terms:
        return []
    axis.factors = [_child(axis, n) for n in sizes]
    return axis.factors


def _refine_factors(a: Axis, b: Axis) -> None:
    """Split the factors of two products until they match, and unify them."""
    left, right = _flat(a)[::-1], _flat(b)[::-1]
    while left and right:
        x, y = find(left.pop()), find(right.pop())
        if x.size == y.size:
            unify(x, y)
            continue
        large, small, remaining = (x, y, left) if x.size > y.size else (y, x, right)
        halves = _cut(large, [small.size, large.size // small.size]) if large.size % small.size == 0 else []
        if not halves:
            _both_whole(a, b, "it is taken apart in two ways that do not fit")
            return
        unify(halves[0], small)
        remaining.append(halves[1])


def _refine_terms(a: Axis, b: Axis) -> None:
    if [find(x).size for x in a.terms] != [find(y).size for y in b.terms]:
        _both_whole(a, b, "it is taken apart in two ways that do not fit")
        return
    for x, y in zip(a.terms, b.terms, strict=True):
        unify(x, y)


def _both_whole(a: Axis, b: Axis, reason: str) -> None:
    fix(a, reason)
    fix(b, reason)
