"""What a step gave, by name, and whether two ways to run it gave the same; for `prove`."""

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
"""Of a tensor's largest value, in float64."""
SHARE = 1e-3
"""A tensor that is smaller than this share of the largest of its sort is measured by that share: a gradient that should
be zero is rounding, and has no size of its own."""
ROUNDING = 10
"""Times what rounding the inputs changes, where that is more than the tolerance."""

_WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip


@dataclass(slots=True)
class Observed:
    """What one step of one member gave."""

    values: dict[str, dict[str, Tensor | None]]
    """By sort ("loss", "gradient", "buffer", ...) and name; None: there is none."""
    trainable: dict[str, bool] = field(default_factory=dict)
    """`requires_grad` of every parameter, after the step."""
    stream: Tensor | None = None
    """Where the member's random stream is after the step, on a CPU."""


def difference(expected: Observed, seen: Observed, trace: Trace, run_rounded: Callable[[], Observed]) -> str:
    """Say in a few words what the two differ in; empty: in nothing but rounding.

    `run_rounded`: runs the step from inputs that were rounded, which shows how much rounding can do. It is called where
    they differ and some of the step is in fewer digits than float64.
    """
    reason, eps = _difference(expected, seen), coarsest(trace)
    if reason and eps > torch.finfo(torch.float64).eps:
        return _difference(expected, seen, run_rounded(), eps)
    return reason


def _difference(expected: Observed, seen: Observed, rounded: Observed | None = None, eps: float = 0.0) -> str:
    """`eps`: the coarsest unit of rounding: a loss in float32 may come out the same from rounded inputs."""
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
    size = float(value.detach().abs().max())
    if math.isfinite(size):
        return size
    finite = torch.nan_to_num(value.detach().abs().double(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.max())


def _apart(a: Tensor, b: Tensor | None) -> float:
    """The largest difference; infinite where only one of them is finite, or not of the same sign."""
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
    """The same model with every parameter and buffer in float64 or complex128."""
    model._apply(_wide)  # type: ignore[no-untyped-call]
    return model


def widen_leaves(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64 or complex128."""
    return pytree.tree_map_only(Tensor, _wide, batch)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE[tensor.dtype]) if tensor.dtype in _WIDE else tensor


def widened(trace: Trace) -> Trace | None:
    """The same graph on tensors of float64; None where some value would not follow the dtype of the inputs."""
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
        copies[node].meta = {"val": pytree.tree_map_only(Tensor, wide_meta, node.meta.get("val"))}
    return trace.with_nodes(list(graph.nodes))


def _follows_inputs(node: Node) -> bool:
    """Whether a value has no dtype of its own: it is computed from others of floating point, and none is asked for."""
    if any(isinstance(leaf, torch.dtype) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
        return False
    narrow = [any(v.dtype in _WIDE for v in _tensors(n)) for n in (node, *node.all_input_nodes)]
    return not narrow[0] or any(narrow[1:])


def _tensors(node: Node) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, those outside the state_dict too."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def rounded(model: nn.Module, state: Mapping[str, Tensor], trace: Trace) -> nn.Module:
    """A copy of the model with this state, every number off by as much as the graph's coarsest dtype rounds."""
    twin, eps = copy.deepcopy(model), coarsest(trace)
    tensors = dict((*twin.named_parameters(), *twin.named_buffers()))
    with torch.no_grad():
        for name, value in state.items():
            if name in tensors:
                tensors[name].copy_(_nudged(value, eps))
    return twin


def rounded_leaves(batch: Any, trace: Trace) -> Any:
    """A batch whose numbers are off in the same way."""
    eps = coarsest(trace)
    return pytree.tree_map_only(Tensor, lambda leaf: _nudged(leaf, eps), batch)


def _nudged(tensor: Tensor, eps: float) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device) * 2 - 1
    return (tensor * (1 + eps * noise)).to(tensor.dtype)


def coarsest(trace: Trace) -> float:
    """The unit of rounding of the coarsest dtype that a step computes in."""
    values = (value for node in trace.nodes for value in _tensors(node))
    return max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point() or v.is_complex()), default=0.0)
