"""Record one training step of an ordinary module as a graph.

The step runs once on fake tensors (shapes without data), and every operator is recorded *before* autograd and autocast
decompose it: `aten.linear`, `aten.batch_norm`, `aten.dropout`, `aten.lstm`. The effects of Python code (attributes,
closures, hooks, globals, control flow on shapes) become constants in the graph, so two jobs can be compared by their
graphs. If a step does something that a graph cannot contain, `Untraceable` is raised and the job is not stacked.
"""

from __future__ import annotations

import copy
import itertools
import os
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.python_state.module_modes import change_by_eval
from shoal.engine.python_state.places import path_text
from shoal.engine.tracing._calls import Calls, same_arguments
from shoal.engine.tracing._constants import Constants
from shoal.engine.tracing._first_call import record_repeatable
from shoal.engine.tracing._model_checks import refuse_at_sight
from shoal.engine.tracing.params_with_grad import reached_by
from shoal.engine.tracing.patches import Untraceable, patched
from shoal.engine.tracing.rate_reads import noting_rate_reads
from shoal.errors import describe
from shoal.utils.random_state import Snapshot
from shoal.utils.torch_flags import quiet_fake_tensors

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

Call = Callable[[nn.Module, Any], Any]
"""The function that is traced: `(model, batch) -> outputs`."""


@dataclass(slots=True, eq=False)
class Trace:
    """A step as a graph, whose placeholders are the parameters, then the buffers, then the leaves of the batch."""

    module: GraphModule
    params: list[str]
    buffers: list[str]
    trainable: list[bool]
    """For every parameter, whether it requires a gradient."""
    batch_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    """The structure of the flat outputs: `(what the call returned, {buffer: its value after the step})`."""
    precision: str | None = None
    """The precision of autocast, whose casts are not in the graph, so that the graph must run under autocast too."""
    nodes: list[Node] = field(init=False)
    used: list[bool] = field(default_factory=list)
    """For every parameter of a training step, whether it gets a gradient from the loss, so that it is updated."""
    skeleton: Hashable | None = None
    """The cached result of `signature.skeleton`."""
    numbers: dict[Any, Any] | None = None
    """The cached result of `signature.numbers`."""
    kind: int = -1
    """A number that is equal for steps whose code differs only in floating-point numbers; see `TraceCache.graph`."""
    checked: bool = False
    """Whether the graph contains checks of torch.distributions. If one of them fails, the loss is not finite."""
    caches: bool = False
    """Whether a first call stores something in Python that later calls read, such as a mask that is made once."""
    left: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """Numbers, strings and tensors that a first call sets as attributes of modules, by module name and attribute."""
    rates_unread: bool = False
    """Whether only torch's dropout layers have read their rates, so that the step is the same for other rates."""
    number: int = field(default_factory=itertools.count().__next__)
    """A number that no other trace has or had. An `id()` may be reused after a trace is deleted."""

    def __post_init__(self) -> None:
        self.nodes = list(self.module.graph.nodes)

    @property
    def trained(self) -> list[int]:
        """The indices of the parameters that an optimizer step changes, since they require and get a gradient."""
        return [i for i, both in enumerate(zip(self.trainable, self.used, strict=True)) if all(both)]

    @property
    def log_names(self) -> list[str]:
        """The names that a training step logs, in the order of its outputs."""
        return list(self.out_spec.children()[0].children()[1].context)

    def with_nodes(self, nodes: list[Node]) -> Trace:
        """Return a trace of the same step with these nodes, which may have other numbers or dtypes."""
        made = Trace(
            self.module, self.params, self.buffers, self.trainable, self.batch_spec, self.out_spec, self.precision
        )
        made.nodes, made.used, made.checked, made.rates_unread = nodes, self.used, self.checked, self.rates_unread
        return made

    def like(self, other: Trace) -> bool:
        """Return whether both call the same operators in the same order and have the same trainable parameters."""
        mine, theirs = ([(node.op, node.target) for node in trace.nodes] for trace in (self, other))
        return mine == theirs and self.trainable == other.trainable

    def constant(self, node: Node) -> Tensor:
        """Return the tensor of a `get_attr` node, which the step reads and is neither parameter, buffer nor batch."""
        value = getattr(self.module, str(node.target))
        assert isinstance(value, Tensor)
        return value


def autocast(precision: str | None, device: torch.device) -> Any:
    """Return the autocast context in which a step runs; without a precision, a context that does nothing."""
    if precision is None:
        return nullcontext()
    # Cached casts of the weights would connect the graphs of consecutive steps.
    return torch.autocast(device.type, PRECISIONS[precision], cache_enabled=False)


def trace(
    model: nn.Module,
    call: Call,
    batch: Any,
    *,
    precision: str | None = None,
    evaluating: bool = False,
    reached: Any = None,
    twice: bool = True,
) -> Trace:
    """Record `call(model, batch)` as a graph.

    Args:
        precision: The precision of autocast, if any.
        evaluating: Put the copy of the model that is recorded into eval mode; otherwise it keeps its mode.
        reached: The functions and objects besides the model that the call may use, such as the user's step.
        twice: Run the step again and compare. This can be skipped if the same code was run twice on another batch size.

    Raises:
        Untraceable: If a graph cannot represent everything that the step does; the message is the reason.
    """
    aliases = refuse_at_sight(model)
    pair = record_repeatable(
        lambda: _copy(model, evaluating),
        reached,
        lambda model_copy: _record(model_copy, call, batch, precision, not evaluating),
        lambda model_copy: _run(model_copy, call, batch, precision, not evaluating),
        twice=twice,
    )
    first, again = pair.first, pair.again
    first.caches, first.left = pair.caches, pair.left
    _refuse_in_graph(first)
    _refuse_buffers(first)
    if not same_graph(first, again):
        raise Untraceable("two runs of the same step do different things (python state or randomness outside torch)")
    for name in aliases & _written_buffers(first):
        raise Untraceable(f"an attribute is another name of {name}, which its forward writes to")
    return first


def _copy(model: nn.Module, evaluating: bool) -> nn.Module:
    try:
        model_copy = copy.deepcopy(model)
    except Exception as error:
        raise Untraceable(f"the model cannot be copied ({describe(error)[:180]})") from error
    changed = change_by_eval(model_copy) if evaluating else None
    if changed is not None:
        raise Untraceable(f"its train() method changes more than modes of modules ({path_text(changed)})")
    return model_copy


def _run(model: nn.Module, call: Call, batch: Any, precision: str | None, grad: bool) -> None:
    """Run the call with real data, only for its effects on Python state."""
    device = next(model.parameters()).device
    with quiet_fake_tensors(), warnings.catch_warnings(), torch.set_grad_enabled(grad), autocast(precision, device):
        warnings.simplefilter("ignore")
        call(model, batch)


class _Recording(nn.Module):
    """Wraps the call as a module, so that `functional_call` can replace the model's tensors by traced ones."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        out = self.call(self.model, batch)
        return out, dict(self.model.named_buffers(remove_duplicate=False))


def _record(
    model: nn.Module, call: Call, batch: Any, precision: str | None, grad: bool
) -> tuple[Trace, Callable[[], bool]]:
    """Record the call. Also return a function that runs its Python code again to see if it makes the same calls."""
    recorder = _Recorder(model, call, batch, precision, grad)
    return recorder.record(), recorder.repeats


class _Recorder:
    """Records one call as a graph, and can repeat its Python code."""

    def __init__(self, model: nn.Module, call: Call, batch: Any, precision: str | None, grad: bool) -> None:
        self.params, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        leaves, self.batch_spec = pytree.tree_flatten(batch)
        self.inputs = [*self.params.values(), *self.buffers.values(), *leaves]
        self.precision, self.grad = precision, grad
        self.wrapper, self.calls = _Recording(model, call), Calls()
        self.checks: list[Tensor] | None = [] if grad else None
        """The checks of torch.distributions in the step."""
        self.traced: list[Tensor] = []
        """The traced parameters."""
        self.rate_reads: list[bool] = []
        """For each run, whether the step has read the rate of a dropout layer."""
        self.runs: list[tuple[list[Tensor], list[Any], pytree.TreeSpec]] = []
        """The inputs and outputs of each run, and the structure of its outputs."""

    def record(self) -> Trace:
        """Return the graph, or raise Untraceable."""
        fake: dict[str, Any] = {"pre_dispatch": True, "tracing_mode": "fake", "_allow_non_fake_inputs": True}
        before, torch_state = Snapshot(), torch.get_rng_state()
        try:
            with self._surroundings():
                module = make_fx(lambda values: self._run(values), **fake)(self.inputs)
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(_explain(error)) from error
        finally:
            seeded = not torch.equal(torch.get_rng_state(), torch_state)  # a draw on fake tensors changes nothing
            torch.set_rng_state(torch_state)
        if seeded:
            raise Untraceable("it seeds torch's random numbers inside the step")
        if before.moved():
            raise Untraceable("it draws from python's or numpy's random numbers inside the step")
        return self._as_trace(module)

    def _as_trace(self, module: GraphModule) -> Trace:
        """Return the recorded graph with what is known about the step."""
        trainable = [param.requires_grad for param in self.params.values()]
        values, outputs, out_spec = self.runs[0]
        names = list(self.params), list(self.buffers)
        recorded = Trace(module, *names, trainable, self.batch_spec, out_spec, self.precision)
        recorded.checked, recorded.rates_unread = bool(self.checks), not any(self.rate_reads)
        reached = reached_by(outputs[0]) if self.grad else set()
        recorded.used = [id(value) in reached for value in values[: len(self.params)]]
        return recorded

    def repeats(self) -> bool:
        """Run the call again on the same inputs, and return whether it does the same."""
        self.calls.repeat()
        if self.checks:
            self.checks.clear()
        before = Snapshot()
        try:
            with self._surroundings():
                self._run(self.runs[0][0])
        except Exception:
            return False
        (_, outputs, spec), (_, others, other_spec) = self.runs
        return self.calls.repeated and same_arguments(outputs, others) and spec == other_spec and not before.moved()

    def _run(self, values: list[Tensor]) -> list[Any]:
        """Run the call on these parameters, buffers and leaves of the batch, and return its outputs in a flat list."""
        names = [f"model.{name}" for name in (*self.params, *self.buffers)]
        self.traced[:] = values[: len(self.params)]
        state = dict(zip(names, values, strict=False))
        folded = pytree.tree_unflatten(values[len(names) :], self.batch_spec)
        # `calls` comes last, to see calls that `Constants` answers
        with noting_rate_reads() as reads, Constants(), self.calls:
            out = torch.func.functional_call(self.wrapper, state, (folded,), tie_weights=True)
            if self.checks:
                (loss, logs), after = out
                # divide the loss by 1, or by 0 if a check fails
                out = (loss / torch.stack([check.all() for check in self.checks]).all(), logs), after
        self.rate_reads.append(reads.seen)
        outputs, spec = pytree.tree_flatten(out)
        self.runs.append((values, outputs, spec))
        return [leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in outputs]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The patches and modes in which the call runs."""
        quiet, cast = quiet_fake_tensors(), autocast(self.precision, self.inputs[0].device)
        mode = torch.set_grad_enabled(self.grad)  # without gradients some layers use fused operators
        with patched(self.checks, self.traced), quiet, warnings.catch_warnings(), mode, cast:
            warnings.simplefilter("ignore")
            yield


def _refuse_buffers(recorded: Trace) -> None:
    """Raise Untraceable if a buffer changes shape or dtype or shares memory, since a stack updates buffers in place."""
    inputs = [node for node in recorded.nodes if node.op == "placeholder"]
    count = len(recorded.params)
    before = dict(zip(recorded.buffers, inputs[count:], strict=False))
    owned = {*inputs[: count + len(before)]}
    values = recorded.nodes[-1].args[0]
    _, after = pytree.tree_unflatten(values, recorded.out_spec)  # type: ignore[arg-type]
    taken: dict[Any, str] = {}
    for name, node in after.items():
        if name not in before or not isinstance(node, Node):
            if any(node is after.get(known) for known in before if known != name):
                continue  # the same buffer under a second name
            raise Untraceable(f"its forward makes or removes buffer {name}")
        was, now = before[name].meta["val"], node.meta["val"]
        if was.shape != now.shape or was.dtype != now.dtype:
            raise Untraceable(f"its forward changes the shape or dtype of buffer {name}")
        root = origin(node)
        if (root in owned and root is not before[name]) or taken.setdefault(root, name) != name:
            raise Untraceable(f"its forward makes buffer {name} another name of a tensor it keeps")
    if before.keys() - after.keys():
        raise Untraceable(f"its forward removes buffer {min(before.keys() - after.keys())}")


def _written_buffers(recorded: Trace) -> set[str]:
    """Return the names of the buffers that the graph writes to or replaces."""
    places = recorded.nodes[len(recorded.params) : len(recorded.params) + len(recorded.buffers)]
    before = dict(zip(places, recorded.buffers, strict=True))
    _, after = pytree.tree_unflatten(recorded.nodes[-1].args[0], recorded.out_spec)  # type: ignore[arg-type]
    mutable = [node for node in recorded.nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    roots = {origin(argument) for node in mutable for argument in node.all_input_nodes}
    return {name for node, name in before.items() if node in roots or after.get(name) is not node}


def origin(node: Node) -> Node:
    """Return the node of the tensor that a view was taken of, or the node itself if it is not a view."""
    while node.op == "call_function" and node.all_input_nodes and hasattr(node.target, "_schema"):
        if not any(result.alias_info is not None for result in node.target._schema.returns):
            break
        node = node.all_input_nodes[0]
    return node


def _refuse_in_graph(recorded: Trace) -> None:
    for node in recorded.nodes:
        if node.op == "get_attr":
            value = getattr(recorded.module, str(node.target), None)
            if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
                raise Untraceable("it reaches a tensor past autograd (.data, torch.func inside the step or the like)")
            if value.layout != torch.strided:
                raise Untraceable(f"it reads a tensor of layout {value.layout}")
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise Untraceable(f"it reads a number out of a tensor ({node.target})")
            if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
                raise Untraceable(f"the shape of a result depends on the data ({node.target})")
            if isinstance(value, Tensor) and value.layout != torch.strided:
                raise Untraceable(f"it uses a tensor of layout {value.layout} ({node.target})")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Untraceable(f"it uses a higher-order operator ({node.target})")


def same_graph(a: Trace, b: Trace) -> bool:
    """Return whether two graphs are the same, including their numbers and constants."""
    if len(a.nodes) != len(b.nodes) or not same_constants(a, b):
        return False
    return all(
        x.op == y.op and x.target == y.target and str(x.args) == str(y.args) and str(x.kwargs) == str(y.kwargs)
        for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def same_constants(a: Trace, b: Trace) -> bool:
    """Return whether the constant tensors of two graphs with the same number of nodes are equal."""
    constants = [
        (getattr(a.module, str(x.target), None), getattr(b.module, str(y.target), None))
        for x, y in zip(a.nodes, b.nodes, strict=True)
        if x.op == y.op == "get_attr"
    ]
    return all(_same_constant(x, y) for x, y in constants)


def _same_constant(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or not isinstance(a, Tensor) or type(a) not in (Tensor, nn.Parameter):
        return type(a) is type(b)
    if a.layout != torch.strided:
        return True  # `_refuse_in_graph` raises with a better reason
    try:
        return a is b or (a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()))
    except Exception as error:
        raise Untraceable("it uses torch.func inside the step") from error


def _explain(error: Exception) -> str:
    name, line = type(error).__name__, _line_of(error)
    if name in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"):
        return f"control flow or a shape depends on the data{line}"
    return f"it cannot be traced ({describe(error)[:180]}){line}"


def _line_of(error: Exception) -> str:
    """Format the last line of the traceback that is in neither torch nor Shoal, as ` (file:7: code)`."""
    ours = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, shoal))
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    if not lines:
        return ""
    code = f": {lines[-1].line[:80]}" if lines[-1].line else ""
    return f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno}{code})"
