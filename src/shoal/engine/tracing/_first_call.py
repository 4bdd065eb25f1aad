"""Record a step after its caches are filled, and refuse steps that change Python state at every call.

A first call may store something that later calls only read: a mask that is made once, a flag that a warning was issued,
`config.problem_type` of a Hugging Face model, einops' table of backends by tensor class. A real call fills such caches
before the step is recorded. Cached values must depend on neither the batch nor the weights, which a comparison with the
recorded first call shows. State that every call changes (a counter, a hidden state) cannot be part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.engine.python_state.places import Attributes, Path, path_text
from shoal.engine.python_state.preserve import PythonState, preserved
from shoal.engine.tracing.patches import Untraceable
from shoal.errors import describe
from shoal.utils.random_state import restored

if TYPE_CHECKING:
    from shoal.engine.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Repeated:
    """Two recordings of the same step, which may be one object."""

    first: Trace
    again: Trace
    caches: bool = False
    """Whether a first call stores something in Python that later calls read."""
    left: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """Numbers, strings and tensors that a first call sets as attributes of modules, by module name and attribute."""


def record_repeatable(
    copy_model: Callable[[], nn.Module],
    reached: Any,
    record: Callable[[nn.Module], tuple[Trace, Callable[[], bool]]],
    run: Callable[[nn.Module], Any],
    *,
    twice: bool,
) -> Repeated:
    """Record the same step twice, in the Python state that its first call leaves.

    Args:
        copy_model: Returns a new copy of the model.
        reached: The functions and objects besides the model that the step may use. Their state is restored afterwards.
        record: Records the step on a copy. Also returns a function that checks whether a second run does the same.
        run: Runs the step on a copy with real data.
        twice: Whether to run the step a second time. If False, both recordings are the first one.

    Raises:
        Untraceable: If later calls change Python state too, or if the state cannot be watched or restored.
    """
    model = copy_model()
    with preserved({"step": reached, "model": model}, skip=model) as state:
        if state.unrestorable:
            raise Untraceable(f"it reads from an iterator that cannot be restored ({path_text(state.unrestorable[0])})")
        if not state.complete:
            raise Untraceable("its step reaches more Python objects than can be watched")
        try:
            first, repeats = record(model)
            changes = state.changes()
            if changes:
                cold, reason = first, _refusal(changes[0], state)
                state.restore()
                state.forget_cached_calls()
                model = copy_model()
                before = _plain_attributes(model)
                try:
                    _run(run, model)
                except Exception as error:
                    raise Untraceable(f"{reason}; its first call raises {describe(error)}") from error
                left = {k: v for k, v in _plain_attributes(model).items() if k not in before or _is_new(v, before[k])}
                first = _record_filled(model, reached, record, run)
                if _without_constants(first) != _without_constants(cold):
                    raise Untraceable(reason)
                return Repeated(first, first, caches=True, left=left)
            return Repeated(first, first if not twice or repeats() else record(model)[0])
        finally:
            state.forget_cached_calls()


def _record_filled(
    model: nn.Module,
    reached: Any,
    record: Callable[[nn.Module], tuple[Trace, Callable[[], bool]]],
    run: Callable[[nn.Module], Any],
) -> Trace:
    """Record a step whose caches a real call has filled; raise Untraceable if it still changes Python state.

    A recording uses its own tensor class, which adds an entry to a cache keyed by tensor class. So one recording may
    change state if a second real call does not change any, and the next recording does not either.
    """

    def state() -> PythonState:
        return PythonState({"step": reached, "model": model}, skip=model)

    filled = state()
    first, _ = record(model)
    changes = filled.changes()
    if not changes:
        return first
    reason = _refusal(changes[0], filled)
    filled.restore()
    filled = state()
    _run(run, model)
    if filled.changes():
        raise Untraceable(reason)
    record(model)
    filled = state()
    first, _ = record(model)
    if filled.changes():
        raise Untraceable(reason)
    return first


def _plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    plain = (bool, int, float, str, Tensor)
    modules = model.named_modules()
    return {(where, k): v for where, module in modules for k, v in vars(module).items() if isinstance(v, plain)}


def _is_new(value: Any, before: Any) -> bool:
    return value is not before if isinstance(value, Tensor) else bool(value != before)


def _refusal(path: Path, state: PythonState) -> str:
    """Return the reason why a step that changes the state at this path cannot be recorded."""
    place = state.place_at(path)
    if place.data:
        return f"it changes a tensor that is neither a parameter nor a buffer ({path_text(path)})"
    if isinstance(place, Attributes) and isinstance(place.owner, nn.Module):
        return f"its forward changes python attributes of the model ({path_text(path)})"
    return f"it changes python state (a counter, an iterator, random numbers of its own: {path_text(path)})"


def _without_constants(trace: Trace) -> list[Hashable]:
    """Return the graph's nodes without those that only compute constants, as a list that can be compared."""
    position: dict[Node, int] = {}
    rows: list[Hashable] = []
    for node in trace.nodes:
        constant = node.op in ("get_attr", "call_function") and not any(n in position for n in node.all_input_nodes)
        if constant and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        position[node] = len(rows)
        name = lambda x: f"node {position[x]}" if x in position else "a constant"  # noqa: E731
        arguments = pytree.tree_map_only(Node, name, (node.args, node.kwargs))
        rows.append((node.op, "" if node.op != "call_function" else node.target, str(arguments)))
    return rows


def _run(run: Callable[[nn.Module], Any], model: nn.Module) -> None:
    """Run the step with real data, and restore the random state of torch, Python and numpy."""
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with restored(), torch.random.fork_rng(devices):
        run(model)
