"""Records a step in a state that its calls do not change: caches are filled first, and other changes are refused.

A first call may leave something behind that the next ones only read: a mask that is made once, a flag that a warning
was given, `config.problem_type` of a Hugging Face model, einops' table of backends by the class of a tensor. Such
caches are filled by a real call before the step is recorded; they may depend on neither the batch nor the weights, as
the record of the first call shows. What every call changes (a counter, a hidden state) is state, and a graph cannot
carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.engine.python_state.places import Attributes, Path, say
from shoal.engine.python_state.preserve import PythonState, preserved
from shoal.engine.tracing.patches import Untraceable
from shoal.errors import describe
from shoal.utils.random_state import restored

if TYPE_CHECKING:
    from shoal.engine.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Repeated:
    """A step, recorded twice."""

    first: Trace
    again: Trace
    caches: bool = False
    """Whether a first call leaves something in Python behind that later ones read."""
    left: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """Plain attributes that it leaves in the model's modules, by module and name: a rate, a tensor made once."""


def record_repeatable(
    copy_model: Callable[[], nn.Module],
    reached: Any,
    record: Callable[[nn.Module], tuple[Trace, Callable[[], bool]]],
    run: Callable[[nn.Module], Any],
    *,
    twice: bool,
) -> Repeated:
    """Two records of the same step, in the state that its first call leaves.

    Args:
        copy_model: A fresh copy of the model.
        reached: What Python the step may reach besides the model; it is put back as it was.
        record: Records the step of a copy; the function that it gives too says whether it does the same once more.
        run: Runs the step of a copy for real.
        twice: Whether to run it a second time; otherwise the first record is given twice.

    Raises:
        Untraceable: when there is no such state, or it cannot be come by.
    """
    model = copy_model()
    with preserved({"step": reached, "model": model}, skip=model) as state:
        if state.unrestorable:
            raise Untraceable(f"it reads from an iterator that cannot be put back ({say(state.unrestorable[0])})")
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
    """A record of a step whose caches a real call has filled: neither it nor another real call may change anything.

    Tensors of a record are of a class of their own, so a cache by the classes of tensors gets one more entry. What a
    second real call leaves alone may therefore change in one record, if it does not in the next.
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
    """Why a step that changes this at every call has no graph."""
    place = state.place_at(path)
    if place.data:
        return f"it changes a tensor that is neither a parameter nor a buffer ({say(path)})"
    if isinstance(place, Attributes) and isinstance(place.owner, nn.Module):
        return f"its forward changes python attributes of the model ({say(path)})"
    return f"it changes python state (a counter, an iterator, random numbers of its own: {say(path)})"


def _without_constants(trace: Trace) -> list[Hashable]:
    """What a graph computes from its inputs and random numbers, wherever its constants come from."""
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
    """A real call that leaves torch's, Python's and numpy's random numbers as they were."""
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with restored(), torch.random.fork_rng(devices):
        run(model)
