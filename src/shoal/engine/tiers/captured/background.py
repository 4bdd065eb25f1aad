"""Compile the step of a unit in another process while the unit trains, then replace the step if that is faster.

The other process fills Inductor's cache on disk, from which this one loads what was compiled. It has a CUDA context of
its own, and ends with this process, however that ends. If anything fails, the unit trains as before.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from shoal.engine.tiers.captured._compile import Executable, compile_graph
from shoal.engine.tiers.captured.graphs import Recorder, clear
from shoal.engine.tiers.unit import context_lost, out_of_memory

if TYPE_CHECKING:
    from shoal.engine.tiers.captured.unit import CapturedUnit

NICE = 10
"""How much the process gives way to the training where cores are scarce."""
_PROGRAM = "import sys; from shoal.engine.tiers.captured.background import compile_from; compile_from(*sys.argv[1:])"
Measured = Callable[[float, float], object]
"""Called with the seconds of a compiled step, and the seconds that loading it took."""


class BackgroundCompile:
    """The compilation of the step on a unit's full batches in another process."""

    def __init__(self, unit: CapturedUnit, measured: Measured) -> None:
        """Prepare it; `begin` starts it.

        Args:
            measured: Called once the compiled step has been timed.
        """
        self._unit, self._measured = unit, measured
        self._graph: GraphModule | None = None
        self._process: CompileProcess | None = None
        self._failed = False
        self._trace_seconds = 0.0

    def begin(self) -> None:
        """Trace the step and start the process, unless that has been done."""
        if self._graph is not None or self._failed:
            return
        start = time.perf_counter()
        try:
            self._graph = self._unit.chunks[0].graph(self._unit.full)
            self._process = CompileProcess(self._graph)
        except Exception as error:
            if context_lost(error):
                raise
            self._failed = True
        self._trace_seconds = time.perf_counter() - start

    def ended(self) -> bool:
        """Return whether the process has ended, or could not be started."""
        return self._failed or (self._process is not None and self._process.ended())

    def take_over(self, recorder: Recorder) -> None:
        """Load what the process has compiled, time it, and let the unit use it if it is faster."""
        if self._process is None or not self._process.succeeded():
            return
        assert self._graph is not None
        start = time.perf_counter()
        try:
            run = compile_graph(self._graph, only_load=True)
            load_seconds = self._trace_seconds + time.perf_counter() - start
            step_seconds = _replace_step(self._unit, Executable(run, True, load_seconds), recorder)
        except Exception as error:
            if context_lost(error):
                raise
            if out_of_memory(error):
                clear()
            return
        if self._unit.compiled:  # another shape would have to be compiled here, before it could train
            self._unit.set_up_seconds += self._process.seconds
        self._measured(step_seconds, load_seconds)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


def _replace_step(unit: CapturedUnit, compiled: Executable, recorder: Recorder) -> float:
    """Use a compiled step if it is faster than the present one, and return the seconds of a step with it."""
    rows = unit.full
    steps, graph, seconds = [chunk.ready(rows) for chunk in unit.chunks], unit.graphs.pop(rows, None), math.inf
    try:
        unit.chunks[0].warm_up(rows, compiled)
        for chunk in unit.chunks:
            chunk.use(rows, compiled)
        compiled_graph = unit.graph(recorder)
        with unit.trying():
            seconds = recorder.time(compiled_graph, unit.rewind)
    finally:
        unit.compiled = seconds < unit.step_seconds
        if unit.compiled:
            unit.step_seconds = seconds
        else:
            unit.graphs.pop(rows, None)
            if graph is not None:
                unit.graphs[rows] = graph
            for chunk, step in zip(unit.chunks, steps, strict=True):
                chunk.use(rows, step)
    return seconds


class CompileProcess:
    """A process that compiles a graph, for Inductor's cache."""

    def __init__(self, graph: GraphModule) -> None:
        self._start = time.monotonic()
        self.seconds = 0.0
        """How long it took, once it has ended."""
        read_end, write_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:
                file.write(_serialized(graph))
                file.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, str(read_end), json.dumps(_settings())],
                    stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[read_end],
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _end, self._process, write_end, os.getpid())
        """End it now, with the processes that it has started, which also happens when this object is deleted."""

    def ended(self) -> bool:
        """Return whether it has ended, and note how long it took."""
        if self._process.poll() is None:
            return False
        self.seconds = self.seconds or time.monotonic() - self._start
        return True

    def succeeded(self) -> bool:
        return self._process.returncode == 0


def _end(process: subprocess.Popen[bytes], write_end: int, owner: int) -> None:
    """End a process and those that it has started; in a forked copy of the owner nothing happens."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(write_end)


def _settings() -> dict[str, Any]:
    """Return the settings of torch that change what is compiled."""
    return {
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
    }


def _apply(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.set_num_threads(settings["num_threads"])
    if torch.backends.cuda.matmul.fp32_precision != settings["fp32_precision"]:
        torch.backends.cuda.matmul.fp32_precision = settings["fp32_precision"]


def _environment() -> dict[str, str]:
    """Return the environment of the process, in which it finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _serialized(graph: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graph, Options(ops_filter=None))


def compile_from(lifeline: str, settings: str) -> None:
    """Compile the graph on standard input, in a process of its own.

    Args:
        lifeline: The number of a pipe's end, which is closed at the other end when the parent ends.
        settings: What `_settings` returned there, as JSON.
    """
    os.nice(NICE)
    threading.Thread(target=_end_with_parent, args=[int(lifeline)], daemon=True).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import async_compile
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx._graph_pickler import GraphPickler

        import shoal.engine.optim.compile_fence  # noqa: F401  # its operators are in the graph

        _apply(json.loads(settings))
        graph = GraphPickler.loads(sys.stdin.buffer.read(), FakeTensorMode(allow_non_fake_inputs=True))
        assert isinstance(graph, GraphModule)
        device = next(node.meta["val"].device for node in graph.graph.nodes if node.op == "placeholder")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        compile_graph(graph)
        with suppress(Exception):
            async_compile.shutdown_compile_workers()
    os._exit(0)  # without waiting for threads of the compiler


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent has ended, then end this process and those that it has started."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)
