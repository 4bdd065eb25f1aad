"""Records a step in a state that its calls do not change: caches are filled first, and state that goes on is refused.

A first call may leave something behind that the next ones only read: a mask that is made once, a flag that a warning
was given, `config.problem_type` of a Hugging Face model. Such caches are filled by a real call before the step is
recorded. What every call changes (a counter, a hidden state) is state, and a graph cannot carry it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import describe
from shoal.pack.compare import same_bits
from shoal.pack.fingerprint import fingerprint
from shoal.pack.places import Attributes, Path, say
from shoal.pack.python_state import PythonState, preserved

T = TypeVar("T")


def record_repeatable(
    copy_model: Callable[[], nn.Module],
    reached: Any,
    record: Callable[[nn.Module], T],
    run: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    twice: bool,
) -> tuple[T, T] | str:
    """Two records of the same step, in the state that its first call leaves; or why there are none.

    Args:
        copy_model: A fresh copy of the model.
        reached: What Python the step may reach besides the model; it is put back as it was.
        record: Records the step of a copy.
        run: Runs the step of a copy on a batch for real.
        batch: A batch with data.
        twice: Whether to record it a second time; otherwise the first record is given twice.
    """
    model = copy_model()
    with preserved({"step": reached, "model": model}, skip=model) as state:
        if state.unrestorable:
            return f"it reads from an iterator that cannot be put back ({say(state.unrestorable[0])})"
        if not state.complete:
            return "its step reaches more Python objects than can be watched"
        first = record(model)
        if state.changes():
            state.restore()
            model = copy_model()
            reason = _fill_caches(model, copy_model, reached, run, batch)
            if reason:
                return reason
            filled = PythonState({"step": reached, "model": model}, skip=model)
            first = record(model)
            changes = filled.changes()
            if changes:
                return _refusal(changes[0], filled)
        return first, record(model) if twice else first


def _refusal(path: Path, state: PythonState) -> str:
    """Why a step that changes this at every call has no graph."""
    place = state.place_at(path)
    if place.data:
        return f"it changes a tensor that is neither a parameter nor a buffer ({say(path)})"
    if isinstance(place, Attributes) and isinstance(place.owner, nn.Module):
        return f"its forward changes python attributes of the model ({say(path)})"
    return f"it changes python state (a counter, an iterator, random numbers of its own: {say(path)})"


def _fill_caches(
    model: nn.Module,
    copy_model: Callable[[], nn.Module],
    reached: Any,
    run: Callable[[nn.Module, Any], Any],
    batch: Any,
) -> str:
    """Let a first call fill the model's caches and those that the step reaches; why that must not be, if so.

    A cache must not depend on the batch or on the weights: those differ between steps and members. So it is filled
    twice, the other time from another batch and other weights, and has to hold the same.
    """
    contents: list[dict[Path, Hashable]] = []
    for other in (True, False):
        one = copy_model() if other else model
        with preserved({"step": reached} if other else {}), torch.no_grad():
            if other:
                for tensor in (*one.parameters(), *one.buffers()):
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.mul_(0.5)
            weights = [p.detach().clone() for p in one.parameters()]
            state = PythonState({"step": reached, "model": one}, skip=one)
            try:
                _run(run, one, _other(batch) if other else batch)
            except Exception as error:
                return f"its first call changes python state, and could not be tried by itself ({describe(error)})"
            contents.append({path: fingerprint(value) for path, value in state.changed_values().items()})
            if not all(map(same_bits, one.parameters(), weights)):
                return "its first call changes parameters"
    if contents[0] != contents[1]:
        path = next(path for path in {**contents[0], **contents[1]} if contents[0].get(path) != contents[1].get(path))
        return _refusal(path, state)
    return ""


def _run(run: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> None:
    """A real call that leaves torch's, Python's and numpy's random numbers as they were."""
    device = next((leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), torch.device("cpu"))
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            run(model, batch)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _other(batch: Any) -> Any:
    """A batch of the same shapes and of other, valid numbers."""

    def change(leaf: Tensor) -> Tensor:
        rows = leaf[:1].expand_as(leaf).clone() if leaf.dim() else leaf.clone()
        return rows * 0.5 if rows.is_floating_point() else rows

    return pytree.tree_map_only(Tensor, change, batch)
