"""From a recorded forward pass to the axes of its tensors: every operator's rule, once, in order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.split.subnets._axes import Axis, fix, note
from shoal.split.subnets._coupling import Coupling
from shoal.split.subnets._record import Op, Record
from shoal.split.subnets._rules import pointwise, unknown
from shoal.split.subnets._shapes import RULES


def couple(record: Record) -> Coupling:
    """Go through the operators once and say what their axes have in common."""
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
    """Sums of which nothing but a normalisation reads the outcome."""
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
