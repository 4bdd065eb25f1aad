"""A step as one compiled function: traced with its backward pass and its update, then compiled whole by Inductor."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.pack.captured.step import Inputs, Step, inputs_like, stack_tensors

Compiled = Callable[[list[Tensor]], None]
_LOCK = threading.Lock()


@dataclass(slots=True)
class Executable:
    """A step that can be run on any stack of its shape."""

    run: Compiled
    compiled: bool
    seconds: float
    """What compiling took."""


def executable(step: Step, inputs: Inputs, *, compiled: bool) -> Executable:
    """The step as a function of its tensors; with `compiled=False` it is run operator by operator."""
    if not compiled:
        return Executable(lambda tensors: step(tensors, inputs), False, 0.0)
    start = time.perf_counter()
    tensors = [*stack_tensors(step.stack), *inputs.tensors()]
    fakes = [t.detach() for t in tensors]

    def flat(values: list[Tensor]) -> list[Tensor]:
        step(values, inputs)
        return []

    with _LOCK, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(fakes)
    graph.graph.eliminate_dead_code()
    run = _inductor(graph, fakes)
    return Executable(run, True, time.perf_counter() - start)


def _inductor(graph: torch.fx.GraphModule, example: list[Tensor]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile_fx(_flat_signature(graph), example)

    def run(tensors: list[Tensor]) -> None:
        with torch.no_grad():
            compiled(*tensors)

    return run


def _flat_signature(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """make_fx keeps the list argument's pytree in the code; the compiler wants plain positional inputs."""
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()
    return graph


def warm_up(ready: Executable, step: Step, inputs: Inputs) -> None:
    """Run once on copies, so that nothing is built, loaded or tuned during capture."""
    own = [t.detach().clone() for t in stack_tensors(step.stack)]
    ready.run([*own, *inputs_like(inputs).tensors()])
