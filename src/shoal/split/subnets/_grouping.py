"""Make groups of units from axes: each leaf of an axis that may be cut becomes a group, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.split.subnets._axes import Axis, find, fix, leaves, note, rows_of_units, twice
from shoal.split.subnets._coupling import Coupling
from shoal.split.subnets._record import Call, Op, Record
from shoal.split.subnets._rules import pointwise, unknown
from shoal.split.subnets._shapes import RULES
from shoal.split.subnets.units import Group, Reader, Sized, Span, Units, Use

STREAM = "a residual stream that layer norms read stays whole (streams=True cuts it)"


def units_of(record: Record, *, streams: bool = False) -> Units:
    """Return the groups of units of a recorded forward pass, not checked yet."""
    return _Builder(couple(record), streams).units()


class _Builder:
    def __init__(self, coupling: Coupling, streams: bool) -> None:
        self.coupling = coupling
        self.streams = streams
        self.names: dict[Axis, str] = {}
        self.rows: dict[tuple[Axis, Axis], Tensor] = {}
        self.summed = {(s.tensor, s.dim) for s in coupling.sums}

    def units(self) -> Units:
        state = self.coupling.record.state
        order = [(name, dim) for name in state for dim in range(state[name].dim())]
        for axes in [self.axes(name) for name in state]:
            for axis in axes:
                for leaf in twice(axis):
                    fix(leaf, "its units meet one another in one dimension")
        # Groups are named after the layers that make them, so dimensions that are summed over come last.
        for name, dim in sorted(order, key=lambda dimension: dimension in self.summed):
            for leaf in leaves(self.axes(name)[dim]):
                if leaf not in self.names and not self.reason(leaf):
                    self.names[leaf] = self.fresh_name(name)
        spans = {name: tuple(self.span(axis, name, dim) for dim, axis in enumerate(self.axes(name))) for name in state}
        calls = {id(call): place for place, call in enumerate(self.coupling.record.calls)}
        readers = tuple(
            Reader(s.tensor, s.dim, self.span(s.axis, s.tensor, s.dim), s.op.modules[-1],
                   calls.get(id(s.op.call)), s.normalised)
            for s in self.coupling.sums
        )  # fmt: skip
        groups = {name: self.group(leaf, name, spans) for leaf, name in self.names.items()}
        whole = {
            name: why
            for name in state
            if spans[name] and not any(s.uses for s in spans[name]) and (why := self.why(name))
        }
        sized = tuple(self.sized(call) for call in self.coupling.record.calls)
        return Units(groups=groups, whole=whole, spans=spans, readers=readers, calls=sized)

    def axes(self, name: str) -> list[Axis]:
        return self.coupling.of(self.coupling.record.state[name])

    def reason(self, leaf: Axis) -> str:
        """Return why a leaf is not cut."""
        if leaf.size < 2:
            return "it has one unit only"
        if leaf.fixed:
            return leaf.fixed
        return STREAM if {"normalised", "residual"} <= leaf.notes and not self.streams else ""

    def why(self, name: str) -> str:
        reasons = [self.reason(leaf) for axis in self.axes(name) for leaf in leaves(axis)]
        return next((r for r in reasons if r), "") or "nothing of it is used"

    def fresh_name(self, tensor: str) -> str:
        name = tensor.rpartition(".")[0] or tensor
        taken = set(self.names.values())
        return name if name not in taken else next(n for i in range(2, 99) if (n := f"{name}:{i}") not in taken)

    def span(self, axis: Axis, tensor: str = "", dim: int = 0) -> Span:
        axis = find(axis)
        uses = []
        for leaf in dict.fromkeys(leaves(axis)):
            if leaf in self.names:
                if (axis, leaf) not in self.rows:
                    self.rows[axis, leaf] = torch.from_numpy(rows_of_units(axis, leaf))
                uses.append(Use(self.names[leaf], tensor, dim, self.rows[axis, leaf]))
        return Span(axis.size, tuple(uses))

    def group(self, leaf: Axis, name: str, spans: dict[str, tuple[Span, ...]]) -> Group:
        uses = tuple(use for dims in spans.values() for span in dims for use in span.uses if use.group == name)
        kind = "head" if "batched" in leaf.notes else "channel" if "channel" in leaf.notes else "neuron"
        return Group(name, leaf.size, kind, uses, exact="normalised" not in leaf.notes, stream="residual" in leaf.notes)

    def sized(self, call: Call) -> Sized:
        outs = tuple(self.dims(out) for out in call.outs) if call.sized else ()
        return Sized(call.name, call.modules, call.runs, call.dim, outs)

    def dims(self, out: Tensor) -> tuple[Span | None, ...]:
        axes: Sequence[Axis] = self.coupling.axes.get(id(out), [Axis(n) for n in out.shape])
        spans: list[Span | None] = []
        for axis in axes:
            rows = any("input" in leaf.notes for leaf in leaves(axis))
            cut = any(leaf in self.names for leaf in leaves(axis))
            spans.append(replace(self.span(axis), rows=rows) if cut or not rows else None)
        return tuple(spans)


def couple(record: Record) -> Coupling:
    """Apply the rules of all operators, in order."""
    coupling = Coupling(record)
    for name, tensor in record.state.items():
        coupling.axes[id(tensor)] = [Axis(n) for n in tensor.shape]
        coupling.origin[id(tensor)] = (name, list(range(tensor.dim())))
    for tensor in record.inputs:
        coupling.axes[id(tensor)] = [Axis(n, "the inputs have its size") for n in tensor.shape]
        for axis in coupling.axes[id(tensor)]:
            note(axis, "input")
    live = record.live()
    for op in live:
        rule = RULES.get(op.name) or (pointwise if op.pointwise else unknown)
        rule = unknown if record.recurrent.intersection(op.modules) else rule
        rule(coupling, op)
    for tensor in record.outputs:
        for axis in coupling.of(tensor):
            fix(axis, "the outputs have its size")
    used = {id(tensor) for op in record.ops for tensor in op.tensors}
    for tensor in record.state.values():
        if id(tensor) not in used:
            for axis in coupling.of(tensor):
                fix(axis, "nothing of it is used")
    _mark_normalised(coupling, live)
    return coupling


def _mark_normalised(c: Coupling, live: Sequence[Op]) -> None:
    """Mark sums whose result is read by a normalisation only."""
    readers: dict[int, list[Op]] = {}
    for op in live:
        for tensor in op.tensors:
            readers.setdefault(id(tensor), []).append(op)
    for axis_sum in c.sums:
        axis_sum.normalised = _only_norms(axis_sum.op.outs[0], readers)


def _only_norms(tensor: Tensor, readers: dict[int, list[Op]]) -> bool:
    reading_ops = readers.get(id(tensor), [])
    return bool(reading_ops) and all(
        "norm" in op.name
        or (op.name in ("view", "_unsafe_view", "transpose", "permute") and _only_norms(op.outs[0], readers))
        for op in reading_ops
    )
