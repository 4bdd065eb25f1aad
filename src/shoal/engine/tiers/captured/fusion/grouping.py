"""Choose which elementwise operators of a recording are fused.

Every call has a level. An elementwise call has the level of the elementwise calls it reads from, and any other call is
one level above what it reads; so elementwise calls of one level can be fused, whatever else runs before and after. What
a later group reads of an earlier one is computed again there if that takes no more memory traffic than reading it; so
few of the many values that a backward pass needs are stored at all.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.engine.tiers.captured.fusion import kernel_source as source
from shoal.engine.tiers.captured.fusion.recording import Call, Recording, Value

MOST_CALLS = 80
"""The largest number of calls in one group, including those that it computes again."""


@dataclass(slots=True, eq=False)
class Group:
    """Elementwise calls that form one kernel."""

    numel: int
    calls: set[int]
    again: set[int] = field(default_factory=set)
    """Calls of other groups that it computes as well."""
    stored: set[int] = field(default_factory=set)
    """Values that are read outside of the group."""

    @property
    def all_calls(self) -> set[int]:
        return self.calls | self.again


class Grouping:
    """The groups of a recording."""

    def __init__(self, recording: Recording, device: torch.device) -> None:
        self.values, self.calls = recording.values, recording.calls
        self._written, self._device = recording.written, device
        self.arguments = {i: arguments for i, call in enumerate(self.calls) if (arguments := self._elementwise(call))}
        """The arguments of the elementwise calls, in the schema's order."""
        groups = self._group()
        self.group_of = {index: group for group in groups for index in group.calls}
        for group in groups:
            self._compute_again(group)

    def _elementwise(self, call: Call) -> list[Any] | None:
        """Return all arguments of a call in the schema's order if it can be part of a kernel, else None."""
        if len(call.gives) != 1 or call.gives[0] is None or call.written:
            return None
        out = self.values[call.gives[0]]
        inputs = [self.values[number] for number in call.reads]
        if not inputs or not 0 < out.numel < 2**31 or out.root != call.gives[0] or not _dense(out):
            return None
        if any(value.device != self._device for value in (out, *inputs)):
            return None
        if any(not _broadcasts(value.shape, out.shape) or _extent(value) >= 2**32 for value in inputs):
            return None
        args, kwargs = pytree.tree_unflatten(call.args, call.spec)
        arguments = [
            args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            for i, argument in enumerate(call.func._schema.arguments)
        ]
        fits = source.has_expression(call.func, [value.dtype for value in inputs], out.dtype, arguments)
        return arguments if fits else None

    def source(self, number: int, out: Value) -> int | None:
        """Return the elementwise call whose result this operand is, in the element order of `out`, else None."""
        value = self.values[number]
        call = self.values[value.root].call
        return call if call in self.arguments and same_order(value, out) else None

    def out(self, index: int) -> Value:
        number = self.calls[index].gives[0]
        assert number is not None
        return self.values[number]

    def _group(self) -> list[Group]:
        """Return groups of elementwise calls on the same level that share operands or results."""
        levels: list[int] = []
        joined: dict[int, int] = {}

        def first(index: int) -> int:
            while joined[index] != index:
                index = joined[index]
            return index

        readers: dict[tuple[int, int, int], int] = {}
        for index, call in enumerate(self.calls):
            below = [self.values[number].call for number in call.reads]
            after = [levels[i] + 1 for i in call.after]
            if index not in self.arguments:
                is_view = any(
                    self.values[n].storage == self.values[r].storage
                    for n in call.gives
                    for r in call.reads
                    if n is not None
                )
                above = 0 if is_view and not call.written else 1
                levels.append(max([0, *after, *(levels[i] + above for i in below if i >= 0)]))
                continue
            out = self.out(index)
            sources = [self.source(number, out) for number in call.reads]
            known = [
                levels[i] if i is not None else levels[b] + 1 if b >= 0 else 0
                for i, b in zip(sources, below, strict=True)
            ]
            levels.append(max([0, *after, *known]))
            joined[index] = index
            near = [i for i in sources if i is not None and levels[i] == levels[index]]
            for number in call.reads:
                value = self.values[number]
                if value.numel == out.numel:
                    key = value.root, levels[index], out.numel
                    near.append(readers.setdefault(key, index))
            for i in near:
                joined[first(i)] = first(index)
        groups: dict[int, Group] = {}
        for index in joined:
            groups.setdefault(first(index), Group(self.out(index).numel, set())).calls.add(index)
        return list(groups.values())

    def _compute_again(self, group: Group) -> None:
        """Decide what a group computes itself instead of reading it, beginning with the groups nearest to it."""
        refused: set[int] = set()
        while True:
            wanted: dict[int, set[int]] = {}
            _, loads = self.inside(group, {n for i in group.calls if (n := self.calls[i].gives[0]) is not None})
            for number, out in loads:
                call = self.source(number, out)
                if call is not None and id(self.group_of[call]) not in refused:
                    wanted.setdefault(id(self.group_of[call]), set()).add(number)
            if not wanted:
                return
            key, numbers = next(iter(wanted.items()))
            other = self.group_of[self.values[self.values[next(iter(numbers))].root].call]
            calls, needed = self.inside(other, {self.values[n].root for n in numbers})
            held = {self.values[n].root for n, _ in loads} - {self.values[n].root for n in numbers}
            reads = {self.values[n].root: n for n, _ in needed}
            more = sum(self.bytes_of(root) for root in reads if root not in held)
            less = sum(self.bytes_of(n) for n in numbers) * 2
            safe = all(self.values[n].storage not in self._written for n in reads.values())
            if more <= less and safe and len(group.all_calls | calls) <= MOST_CALLS:
                group.again |= calls
            else:
                refused.add(key)

    def inside(self, group: Group, numbers: set[int]) -> tuple[set[int], list[tuple[int, Value]]]:
        """Return the calls of a group that these values need, and what they load, each with the result that reads
        it."""
        calls: set[int] = set()
        loads: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, Value]] = {}
        waiting = [self.values[number].call for number in numbers]
        inside = group.all_calls
        while waiting:
            index = waiting.pop()
            if index in calls:
                continue
            calls.add(index)
            out = self.out(index)
            for number in self.calls[index].reads:
                call = self.source(number, out)
                if call is not None and call in inside:
                    waiting.append(call)
                else:
                    loads[number, out.shape, out.stride] = number, out
        return calls, list(loads.values())

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a value, without those that an expanded tensor repeats."""
        value = self.values[number]
        used = reduce(operator.mul, (n for n, s in zip(value.shape, value.stride, strict=True) if s), 1)
        return used * value.dtype.itemsize


def _dense(value: Value) -> bool:
    """Return whether the elements are adjacent in memory, in any order."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(value.shape, value.stride, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _extent(value: Value) -> int:
    """Return the offset of the last element from the first, since kernels count in 32 bits."""
    return sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))


def _broadcasts(shape: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    if len(shape) > len(wide):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(wide), strict=False))


def same_order(value: Value, out: Value) -> bool:
    """Return whether the n-th elements in memory of both correspond."""
    if value.shape != out.shape:
        return False
    return value.stride == out.stride or (value.contiguous and out.contiguous)


def offset(value: Value, out: Value) -> str:
    """Return the C expression of an operand's offset, from the index `i` of the result's element in memory."""
    missing = len(out.shape) - len(value.shape)
    strides = [0] * missing + [0 if n == 1 else s for n, s in zip(value.shape, value.stride, strict=True)]
    dims = sorted(
        ((s, n, mine) for n, s, mine in zip(out.shape, out.stride, strides, strict=True) if n > 1), reverse=True
    )
    merged: list[list[int]] = []  # outermost first: [stride of the index, size, operand's stride]
    for stride, size, mine in dims:
        if merged and merged[-1][2] == mine * size:
            merged[-1] = [stride, merged[-1][1] * size, mine]
        else:
            merged.append([stride, size, mine])
    terms = []
    for place, (stride, size, mine) in enumerate(merged):
        if not mine:
            continue
        term = "i" if stride == 1 else f"(i / {stride}u)"
        term = term if place == 0 else f"({term} % {size}u)"
        terms.append(term if mine == 1 else f"{term} * {mine}u")
    return " + ".join(terms) or "0"
