"""Derive the graph of a step from graphs of steps that differ only in numbers, such as a dropout rate.

This is faster than recording the step. Two recorded steps show which number of the code is which number of the graph.
That may not hold for a third step, whose code may branch on a number. So this step and its derived graph run once on
the same batch from the same random state. If any result differs, the step is recorded after all. Only where nothing
but the rates of torch's dropout layers differs, and no other code read them, no step can differ, and none is run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from shoal.engine.python_state.preserve import preserved
from shoal.engine.tracing.rate_reads import LAYERS, RATE
from shoal.engine.tracing.signature import Path, arguments_of, numbers, skeleton
from shoal.engine.tracing.trace import Call, Trace, autocast, same_constants


@dataclass(slots=True)
class Known:
    """Steps that differ only in numbers, on batches of one shape."""

    steps: list[tuple[list[str], Trace]] = field(default_factory=list)
    """The numbers in their fingerprints, and their graphs."""
    rates: list[bool] | None = None
    """For each of these numbers, whether it is the rate of a dropout layer of torch."""


def derive(
    known: Known, floats: list[str], model: nn.Module, call: Call, batch: Any, *, reached: Any, evaluating: bool
) -> Trace | None:
    """Return a derived graph of `call(model, batch)`, or None if the step must be recorded.

    Args:
        known: Recorded steps to derive the graph from.
        floats: The numbers in the fingerprint of the step.
        reached: The functions and objects besides the model that the call may use.
    """
    values = _values(known, floats)
    if values is None:
        return None
    trace = _with_numbers(known.steps[0][1], values)
    try:
        same = _gives_the_same(trace, model, call, batch, reached, evaluating)
    except Exception:  # recording the step will report the reason
        return None
    return trace if same else None


def with_rates(known: Known, code: Hashable, floats: list[str]) -> Trace | None:
    """Return a derived graph of a step that differs from a known one only in rates of dropout layers which no other
    code reads; None if it may differ in more."""
    steps = known.steps
    if len(steps) < 2 or not all(trace.rates_unread and not trace.caches for _, trace in (steps[0], steps[-1])):
        return None
    if known.rates is None:
        known.rates = list(_rates(code))
    for before, now, is_rate in zip(steps[0][0], floats, known.rates, strict=True):
        if before != now and not (is_rate and 0.0 < float(before) < 1.0 and 0.0 < float(now) < 1.0):
            return None
    values = _values(known, floats)
    return None if values is None else _with_numbers(steps[0][1], values)


def _rates(print: Hashable) -> Iterator[bool]:
    """Yield for each floating-point number in a fingerprint whether it is the rate of a dropout layer of torch."""
    if not isinstance(print, tuple):
        return
    if len(print) == 2 and print[0] is float:
        yield False
    elif len(print) == 4 and isinstance(print[0], type) and print[0] in LAYERS:
        _, tensors, attributes, children = print
        yield from _rates(tensors)
        for name, value in attributes:
            yield from ([True] if name == RATE and value[0] is float else _rates(value))
        yield from _rates(children)
    else:
        for part in print:
            yield from _rates(part)


def _values(known: Known, third: list[str]) -> dict[Path, float] | None:
    """Return the numbers for the places where the known graphs differ; None if these floats do not determine them."""
    if len(known.steps) < 2:
        return None
    (first, a), (second, b) = known.steps[0], known.steps[-1]
    floats = list(zip(first, second, third, strict=True))
    if any(x != z and x == y for x, y, z in floats):
        return None  # this number is the same in both known steps, so its place in the graph is unknown
    ours, others = numbers(a), numbers(b)
    values: dict[Path, float] = {}
    for path, number in ours.items():
        if repr(number) == repr(others[path]):
            continue
        candidates = {z for x, y, z in floats if (x, y) == (repr(number), repr(others[path]))}
        if len(candidates) != 1:
            return None
        values[path] = float(candidates.pop())
    return values


def _with_numbers(trace: Trace, values: dict[Path, float]) -> Trace:
    """Return a copy of the trace with these numbers in its graph."""
    graph, copies, by_node = Graph(), dict[Node, Node](), dict[int, list[Path]]()
    for path in values:
        by_node.setdefault(path[0], []).append(path)
    for index, node in enumerate(trace.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for path in by_node.get(index, ()):
            _put(copies[node], path, values[path])
    made = trace.with_nodes(list(graph.nodes))
    made.skeleton, made.numbers = skeleton(trace), numbers(trace) | values
    return made


def _put(node: Node, path: Path, value: float) -> None:
    """Replace one number in an argument of a node."""
    for place, (slot, argument) in enumerate(arguments_of(node)):
        if slot.key != path[1]:
            continue
        leaves, spec = pytree.tree_flatten(argument)
        at = [tuple(way) for way, _ in pytree.tree_leaves_with_path(argument)].index(path[2])
        replaced = pytree.tree_unflatten([*leaves[:at], value, *leaves[at + 1 :]], spec)
        if place < len(node.args):
            node.update_arg(place, replaced)
        else:
            node.update_kwarg(str(slot.key), replaced)


def _gives_the_same(trace: Trace, model: nn.Module, call: Call, batch: Any, reached: Any, evaluating: bool) -> bool:
    """Return whether the step, run on a copy of the model, and the graph have the same outputs, gradients and draws."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    outcomes: list[tuple[list[Any], Tensor]] = []
    model_copy = copy.deepcopy(model)
    if evaluating:
        model_copy.eval()
    with warnings.catch_warnings(), preserved({"step": reached, "model": model_copy}, skip=model_copy) as state:
        warnings.simplefilter("ignore")
        if state.unrestorable or not state.complete:
            return False
        named = {**dict(model_copy.named_parameters()), **dict(model_copy.named_buffers())}
        tensors = [named[name].detach().clone() for name in (*trace.params, *trace.buffers)]
        params = [t.requires_grad_(on) for t, on in zip(tensors, trace.trainable, strict=False)]
        runs: tuple[Callable[[Any], Any], ...] = (
            partial(_run_step, call, model_copy),
            partial(_run_graph, trace, tensors),
        )
        for run in runs:
            rows = pytree.tree_map_only(Tensor, Tensor.clone, batch)
            mode = torch.set_grad_enabled(not evaluating)
            with torch.random.fork_rng(devices), mode, autocast(trace.precision, device):
                given = pytree.tree_leaves(run(rows))
                stream = torch.cuda.get_rng_state(device) if devices else torch.get_rng_state()
            wanted = [
                p for p in (params if outcomes else model_copy.parameters()) if p.requires_grad and not evaluating
            ]
            given += torch.autograd.grad(given[0], wanted, allow_unused=True) if wanted else ()
            outcomes.append((given, stream))
        if state.changes():
            return False
    (mine, stream), (other, other_stream) = outcomes
    return torch.equal(stream, other_stream) and len(mine) == len(other) and all(map(_same, mine, other))


def _run_step(call: Call, model: nn.Module, batch: Any) -> Any:
    return call(model, batch), dict(model.named_buffers(remove_duplicate=False))


def _run_graph(trace: Trace, tensors: list[Tensor], batch: Any) -> Any:
    inputs = iter([*tensors, *pytree.tree_leaves(batch)])
    values: dict[Node, Any] = {}
    for node in trace.nodes:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = trace.constant(node)
        elif node.op == "output":
            return pytree.tree_unflatten(args[0], trace.out_spec)
        else:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    raise AssertionError("a graph has an output")


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def remember(known: Known, floats: list[str], trace: Trace) -> None:
    """Add a recorded step to `known`, if it differs from the first one only in numbers and fills no caches."""
    first = known.steps[0][1] if known.steps else trace
    if not trace.caches and skeleton(first) == skeleton(trace) and same_constants(first, trace):
        known.steps.append((floats, trace))
