"""The results of a step by name, and whether two ways to run it gave the same results; for `prove`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from shoal.engine.tracing.trace import Trace

TOLERANCE = 1e-9
"""The allowed difference in float64, relative to a tensor's largest value."""
SHARE = 1e-3
"""Tensors smaller than this share of the largest of their sort are measured by that share, since a gradient that should
be zero consists of rounding errors."""
ROUNDING = 10
"""The allowed difference is this many times what rounding the inputs changes, if that is more than the tolerance."""

_WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip


@dataclass(slots=True)
class Observed:
    """The results of one step of one member."""

    values: dict[str, dict[str, Tensor | None]]
    """Results by sort ("loss", "gradient of", "buffer", ...) and name; None if there is none."""
    trainable: dict[str, bool] = field(default_factory=dict)
    """`requires_grad` of every parameter, after the step."""
    stream: Tensor | None = None
    """The state of the member's random stream after the step, on a CPU."""


def difference(expected: Observed, seen: Observed, trace: Trace, run_rounded: Callable[[], Observed]) -> str:
    """Describe in a few words how the two differ; empty if only by rounding.

    Args:
        run_rounded: Runs the step from rounded inputs, which shows how much rounding can change. It is called if they
            differ by more than the rounding of each value, and part of the step has lower precision than float64.
    """
    eps = coarsest(trace)
    narrow = eps > torch.finfo(torch.float64).eps
    reason = _difference(expected, seen, None, eps if narrow else 0.0)
    return _difference(expected, seen, run_rounded(), eps) if reason and narrow else reason


def _difference(expected: Observed, seen: Observed, rounded: Observed | None = None, eps: float = 0.0) -> str:
    """Describe the first difference. `eps` is the coarsest unit of rounding, since a loss in float32 may be the same
    from rounded inputs."""
    for name, flag in expected.trainable.items():
        if flag != seen.trainable[name]:
            return f"it switches requires_grad of {name}"
    for sort, values in expected.values.items():
        sizes = {name: _size(value) for name, value in values.items() if value is not None}
        largest = max(sizes.values(), default=0.0)
        for name, value in values.items():
            what = f"{sort} {name}".strip()
            if name not in seen.values.get(sort, {}):
                return f"its graph has no {what}"
            other = seen.values[sort][name]
            if value is None or other is None:
                if value is not other:
                    one, other_one = ("no", "one") if value is None else ("a", "none")
                    return f"there is {one} {what}, and its graph has {other_one}"
                continue
            if value.shape != other.shape:
                return f"the {what} has shape {list(value.shape)}, and {list(other.shape)} by its graph"
            slack = 0.0 if rounded is None else ROUNDING * _apart(value, rounded.values[sort].get(name))
            slack = max(slack, ROUNDING * eps * sizes[name])
            allowed = max(TOLERANCE * max(sizes[name], SHARE * largest), slack)
            gap = _apart(value, other)
            if not gap <= allowed:
                return f"the {what} differs by {gap:.1e}, of {sizes[name]:.1e}"
    if expected.stream is not None and seen.stream is not None and not torch.equal(expected.stream, seen.stream):
        return "it draws other random numbers than its graph"
    return ""


def _size(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    numbers = value.detach() if value.is_complex() else value.detach().double()  # there is no abs() of bool
    size = float(numbers.abs().max())
    if math.isfinite(size):
        return size
    return float(torch.nan_to_num(numbers.abs(), nan=0.0, posinf=0.0, neginf=0.0).max())


def _apart(a: Tensor, b: Tensor | None) -> float:
    """Return the largest difference; infinite if only one value is finite, or their infinities differ."""
    if b is None or a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.detach().to(kind), b.detach().to(kind).to(a.device)
    largest = float((x - y).abs().max())
    if math.isfinite(largest):
        return largest
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    gap = torch.where(same, torch.zeros((), dtype=torch.float64, device=x.device), (x - y).abs())
    return float(torch.nan_to_num(gap, nan=float("inf"), posinf=float("inf")).max())


# --- dtypes and rounding --------------------------------------------------------------------------------------------


def widen(model: nn.Module) -> nn.Module:
    """Convert every parameter and buffer of the model to float64 or complex128, in place."""
    model._apply(_wide)  # type: ignore[no-untyped-call]
    return model


def widen_leaves(batch: Any) -> Any:
    """Return a batch with its floating-point tensors in float64 or complex128."""
    return pytree.tree_map_only(Tensor, _wide, batch)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE[tensor.dtype]) if tensor.dtype in _WIDE else tensor


def widened(trace: Trace) -> Trace | None:
    """Return the same graph on float64 tensors; None if the dtype of some value does not follow that of the inputs."""
    graph, copies, metas = Graph(), dict[Node, Node](), dict[Any, Tensor]()

    def wide_meta(value: Tensor) -> Tensor:
        if value.dtype not in _WIDE:
            return value
        key = (value.shape, value.stride(), value.dtype)
        if key not in metas:
            with value.fake_mode:  # type: ignore[attr-defined]
                metas[key] = torch.empty_strided(*key[:2], dtype=_WIDE[value.dtype], device=value.device)
        return metas[key]

    for node in trace.nodes:
        if node.op not in ("placeholder", "output") and not _follows_inputs(node):
            return None
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if _keeps_dtype(node):
            dtype: Any = node.kwargs["dtype"]
            copies[node].kwargs = node.kwargs | {"dtype": _WIDE.get(dtype, dtype)}
        copies[node].meta = {"val": pytree.tree_map_only(Tensor, wide_meta, node.meta.get("val"))}
    return trace.with_nodes(list(graph.nodes))


def _follows_inputs(node: Node) -> bool:
    """Return whether the dtype of a node's value follows from floating-point inputs, and no argument names one."""
    if (
        node.op == "get_attr"
    ):  # a constant: the user's own step on float64 inputs has it with the dtype that it has here
        return True
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    if any(isinstance(leaf, torch.dtype) and leaf in _WIDE for leaf in leaves) and not _keeps_dtype(node):
        return False
    narrow = [any(v.dtype in _WIDE for v in _tensors(n)) for n in (node, *node.all_input_nodes)]
    return not narrow[0] or any(narrow[1:])


def _keeps_dtype(node: Node) -> bool:
    """Return whether a node is `x.to(device)`, which is recorded with the dtype of `x`."""
    if node.target is not torch.ops.aten.to.dtype_layout:
        return False
    return {value.dtype for value in _tensors(node.all_input_nodes[0])} == {node.kwargs.get("dtype")}


def _tensors(node: Node) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter and buffer, including those that are not in the `state_dict()`."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def rounded(model: nn.Module, state: Mapping[str, Tensor], trace: Trace) -> nn.Module:
    """Return a copy of the model with this state, every number changed by as much as the graph's coarsest dtype
    rounds."""
    model_copy, eps = copy.deepcopy(model), coarsest(trace)
    tensors = dict((*model_copy.named_parameters(), *model_copy.named_buffers()))
    with torch.no_grad():
        for name, value in state.items():
            if name in tensors:
                tensors[name].copy_(_nudged(value, eps))
    return model_copy


def rounded_leaves(batch: Any, trace: Trace) -> Any:
    """Return a batch whose numbers are changed in the same way."""
    eps = coarsest(trace)
    return pytree.tree_map_only(Tensor, lambda leaf: _nudged(leaf, eps), batch)


def _nudged(tensor: Tensor, eps: float) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device) * 2 - 1
    return (tensor * (1 + eps * noise)).to(tensor.dtype)


def coarsest(trace: Trace) -> float:
    """Return the unit of rounding of the coarsest dtype in which a step computes."""
    values = (value for node in trace.nodes for value in _tensors(node))
    return max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point() or v.is_complex()), default=0.0)
