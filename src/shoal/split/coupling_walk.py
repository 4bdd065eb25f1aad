"""From a recorded forward pass to the axes of its tensors: every operator's rule, once, in order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.split.coupling import Coupling
from shoal.split.coupling_axes import Axis, fix, note
from shoal.split.coupling_rules import pointwise, unknown
from shoal.split.coupling_shapes import RULES
from shoal.split.coupling_trace import Op, Record


def couple(record: Record) -> Coupling:
    """Go through the operators once and say what their axes have in common."""
    found = Coupling(record)
    for name, tensor in record.state.items():
        found.axes[id(tensor)] = [Axis(n) for n in tensor.shape]
        found.origin[id(tensor)] = (name, list(range(tensor.dim())))
    for tensor in record.inputs:
        found.axes[id(tensor)] = [Axis(n, "it is an input's") for n in tensor.shape]
        for axis in found.axes[id(tensor)]:
            note(axis, "input")
    live = record.live()
    for op in live:
        found.where = op.modules
        rule = RULES.get(op.name) or (pointwise if op.pointwise else unknown)
        rule(found, op)
    for tensor in record.outputs:
        for axis in found.of(tensor):
            fix(axis, "it is an output's")
    _mark_normalised(found, live)
    return found


def _mark_normalised(c: Coupling, live: Sequence[Op]) -> None:
    """Sums of which nothing but a normalisation reads the outcome."""
    readers: dict[int, list[Op]] = {}
    for op in live:
        for tensor in op.tensors:
            readers.setdefault(id(tensor), []).append(op)
    by_place = {(s.tensor, s.modules): s for s in c.sums}
    for op in live:
        if op.name not in ("mm", "addmm", "convolution") or not op.outs:
            continue
        weight = next((c.origin[id(t)][0] for t in op.tensors if id(t) in c.origin and t.dim() > 1), "")
        if (found := by_place.get((weight, op.modules))) is not None:
            found.normalised = _only_norms(op.outs[0], readers)


def _only_norms(tensor: Tensor, readers: dict[int, list[Op]]) -> bool:
    found = readers.get(id(tensor), [])
    return bool(found) and all(
        "norm" in op.name
        or (op.name in ("view", "_unsafe_view", "transpose", "permute") and _only_norms(op.outs[0], readers))
        for op in found
    )
