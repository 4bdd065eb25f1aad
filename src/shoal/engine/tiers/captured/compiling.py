"""Compile a step as one function: trace it with its backward pass and its update, then compile all of it with
Inductor."""

from __future__ import annotations

import copyreg
import importlib
import pkgutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engine.tiers.captured._step import Inputs, Step, bind_stack, inputs_like, stack_tensors

Compiled = Callable[[list[Tensor]], None]
_LOCK = threading.Lock()
_NOT_CACHED = "this graph is not in Inductor's cache"
FEW_NODES = 600
"""A graph with fewer nodes has many kernels of a few microseconds; independent ones are combined into one."""
LARGE = 500_000
"""The number of elements from which a kernel is not combined with others, which would make both slower."""


@dataclass(slots=True)
class Executable:
    """A step that can be run on any stack of its shape."""

    run: Compiled
    compiled: bool
    seconds: float
    """The seconds that compiling took."""


def executable(step: Step, inputs: Inputs, *, compiled: bool) -> Executable:
    """Return the step as a function of its tensors; with `compiled=False` it is run operator by operator."""
    if not compiled:
        return Executable(lambda tensors: step(tensors, inputs), False, 0.0)
    start = time.perf_counter()
    run = compile_graph(step_graph(step, inputs))
    return Executable(run, True, time.perf_counter() - start)


def step_graph(step: Step, inputs: Inputs) -> GraphModule:
    """Return the step as a graph of operators, whose inputs are the tensors of its stack and of `inputs`."""

    def flat(values: list[Tensor]) -> list[Tensor]:
        step(values, inputs)
        return []

    return _pure_graph(flat, [*stack_tensors(step.stack), *inputs.tensors()])


def _pure_graph(function: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> GraphModule:
    """Return a function of tensors as a graph whose only mutations are the copies into its inputs at its end."""
    with warnings.catch_warnings():  # torch warns of its own deprecated code
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.lowering")  # a decomposition uses it without importing it
        from torch._inductor.decomposition import select_decomp_table
    fakes = [t.detach() for t in tensors]
    with _LOCK, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(fakes)
    with _LOCK, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        pure = functionalize(graph, remove="mutations")
        decompositions = {**select_decomp_table(), torch.ops.aten.view.default: _view_or_copy()}
        graph = make_fx(pure, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)(fakes)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # plain positional inputs instead of make_fx's list
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _view_or_copy() -> Callable[..., Any]:
    """Return a decomposition of a view, for a graph in which nothing writes to views: it makes a copy if an operator's
    decomposition has given the tensor other strides than the operator, so that it cannot be viewed."""
    entered = False

    def view(tensor: Tensor, size: Sequence[int]) -> Any:
        nonlocal entered
        if entered:  # the view that `reshape` asks for
            return NotImplemented
        entered = True
        try:
            return tensor.reshape(size)
        finally:
            entered = False

    return view


def compile_graph(graph: GraphModule) -> Compiled:
    """Compile what `step_graph` returned, or load it if Inductor finds it in its cache.

    AOTAutograd is not used, because the backward pass is already in the graph, and no two inputs overlap.
    """
    with warnings.catch_warnings():  # torch warns of its own deprecated code
        warnings.simplefilter("ignore")
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = inputs[0].fake_mode
    mode.shape_env = ShapeEnv()  # no shape varies, but without one Inductor does not use its cache
    with torch.no_grad(), warnings.catch_warnings(), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        warnings.simplefilter("ignore")
        joint_graph_passes(graph)
        with (
            config.patch(combo_kernels=len(graph.graph.nodes) < FEW_NODES),
            _large_apart(),
            _same_keys(),
            _recursion_limit(),
        ):
            compiled = compile_fx_inner(graph, inputs)

    def run(tensors: list[Tensor]) -> None:
        with torch.no_grad():
            compiled(list(tensors))  # the call empties its list

    return run


@contextmanager
def _large_apart() -> Iterator[None]:
    """Combine only small kernels inside this context; Inductor's own limit is a hundred times ours."""
    from torch._inductor.codegen import triton_combo_kernel as combos

    before = getattr(combos, "LARGE_NUMELS", LARGE)  # versions without it have no limit
    combos.LARGE_NUMELS = min(before, LARGE)
    try:
        yield
    finally:
        combos.LARGE_NUMELS = before


@contextmanager
def _recursion_limit() -> Iterator[None]:
    """Restore the program's recursion limit after this context; Inductor raises it."""
    before = sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def no_compiling() -> Iterator[None]:
    """Load compiled graphs inside this context, in this thread; raise an error for those that are not in Inductor's
    cache."""
    with warnings.catch_warnings():  # torch warns of its own deprecated code
        warnings.simplefilter("ignore")
        from torch._inductor import compile_fx

    before, thread = compile_fx.fx_codegen_and_compile, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return before(*args, **kwargs)
        raise RuntimeError(_NOT_CACHED)

    compile_fx.fx_codegen_and_compile = refuse
    try:
        yield
    finally:
        compile_fx.fx_codegen_and_compile = before


def not_cached(error: BaseException) -> bool:
    """Return whether a graph was not in Inductor's cache, inside `no_compiling`."""
    return _NOT_CACHED in str(error)


@contextmanager
def _same_keys() -> Iterator[None]:
    """Give equal graphs equal keys in Inductor's cache inside this context, whatever this process has imported.

    A key is made from pickles, and pickle names a memory format after any module that has imported torch.
    """
    before = copyreg.dispatch_table.get(torch.memory_format)
    copyreg.pickle(torch.memory_format, _reduce_memory_format)
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[torch.memory_format]
        else:
            copyreg.dispatch_table[torch.memory_format] = before


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[Callable[[str], Any], tuple[str]]:
    return pkgutil.resolve_name, (str(memory_format).replace(".", ":"),)


def warm_up(ready: Executable, step: Step, inputs: Inputs, *, fuse: bool = True) -> None:
    """Run the step once on copies, so that nothing is built, loaded or tuned during capture.

    Args:
        fuse: Whether to make fused kernels of the elementwise operators, which may round differently.
    """
    copies = [
        tensor.detach() if place in step.stack.shared else _copy(tensor)  # no step writes to shared tensors
        for place, tensor in enumerate(stack_tensors(step.stack))
    ]
    if fuse and not ready.compiled:
        step.fuse(bind_stack(step.stack, copies), inputs_like(inputs))
    ready.run([*copies, *inputs_like(inputs).tensors()])


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which a compiled step relies on."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor.detach())
