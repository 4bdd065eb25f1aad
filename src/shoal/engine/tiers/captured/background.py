"""Compile the step of a unit in another process while the unit trains, then replace the step if that is faster.

The other process fills Inductor's cache on disk, from which this one loads what was compiled. It has a CUDA context of
its own, and ends with this process, however that ends. One such process runs at a time. If anything fails, the unit
trains as before.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import pickle
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
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.fx import GraphModule

from shoal.engine.tiers.captured.compiling import Executable, compile_graph, no_compiling
from shoal.engine.tiers.captured.graphs import Recorder, clear, scarce
from shoal.engine.tiers.unit import context_lost, out_of_memory

if TYPE_CHECKING:
    from shoal.engine.tiers.captured.unit import CapturedUnit

NICE = 10
"""How much the process gives way to the training where cores are scarce."""
END_SECONDS = 5.0
"""How long to wait for the end of a process that was killed; a driver may hold it."""
_PROGRAM = (
    "import json, sys; sys.path += json.loads(sys.argv[2]); "
    "from shoal.engine.tiers.captured.background import compile_from; compile_from(sys.argv[1])"
)
OPERATORS = (
    "shoal.engine.optim.compile_fence", "shoal.engine.kernels.attention", "shoal.engine.kernels.channel_sums",
    "shoal.engine.kernels.layer_norm", "shoal.engine.kernels.patches", "shoal.engine.kernels.pooling",
    "shoal.engine.kernels.row_sums", "shoal.utils.mask_kernel",
)  # fmt: skip
"""Modules that register operators of ours, without which a graph that has them cannot be read."""
_PRECISIONS = {"ieee": "highest", "tf32": "high"}
"""The names of `torch.set_float32_matmul_precision` for those of `fp32_precision`."""
_FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
NoteTimes = Callable[[float | None, float], object]
"""Called with the seconds of a compiled step, or None if compiling or loading it failed, and of loading it."""

_log = logging.getLogger("shoal")


class BackgroundCompile:
    """The compilation of the step on a unit's full batches in another process."""

    _running: ClassVar[weakref.WeakSet[CompileProcess]] = weakref.WeakSet()

    def __init__(self, note_times: NoteTimes) -> None:
        """Prepare it; `begin` starts it."""
        self._note_times = note_times
        self._graph: GraphModule | None = None
        self._process: CompileProcess | None = None
        self._failed = False
        self._trace_seconds = 0.0

    def begin(self, unit: CapturedUnit) -> None:
        """Trace the step and start the process, unless that has been done, another one runs, or memory is short."""
        if self._graph is not None or self._failed or any(not process.ended() for process in self._running):
            return
        if unit.members[0].device.type == "cuda" and scarce():
            return
        start = time.perf_counter()
        try:
            self._graph = unit.chunks[0].graph(unit.full)
            self._process = CompileProcess(self._graph)
            self._running.add(self._process)
        except Exception as error:
            if context_lost(error):
                raise
            _log.debug("a step is not compiled in another process: %r", error)
            self._failed = True
        self._trace_seconds = time.perf_counter() - start

    def ended(self) -> bool:
        """Return whether the process has ended, or could not be started."""
        return self._failed or (self._process is not None and self._process.ended())

    def take_over(self, unit: CapturedUnit, recorder: Recorder) -> bool:
        """Load what the process has compiled, time it, and let the unit use it if it is faster; return whether it
        does."""
        if self._process is None or not self._process.succeeded():
            self._note_times(None, 0.0)
            return False
        if unit.seconds_left() < 2 * self._trace_seconds:  # loading takes about as long as tracing
            return False
        assert self._graph is not None
        start = time.perf_counter()
        try:
            with no_compiling():
                run = compile_graph(self._graph)
            step_seconds = _replace_step(unit, Executable(run, True, time.perf_counter() - start), recorder)
        except Exception as error:
            if context_lost(error):
                raise
            _log.debug("a step that another process compiled is not used: %r", error)
            if out_of_memory(error):
                clear()
            else:
                self._note_times(None, 0.0)
            return False
        self._note_times(step_seconds, self._trace_seconds + time.perf_counter() - start)
        if unit.compiled:
            unit.set_up_seconds += self._process.seconds  # what another shape would take
        return unit.compiled

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
            if graph is not None:
                unit.step_seconds = recorder.time(graph, unit.rewind)
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
        """Start it.

        Raises:
            RuntimeError: If there is no Python to start, or Inductor's cache is switched off.
        """
        from torch._inductor import config

        if getattr(sys, "frozen", False) or not sys.executable:
            raise RuntimeError("this program has no Python that could be started")
        if not config.fx_graph_cache or config.force_disable_caches:
            raise RuntimeError("Inductor's cache is switched off")
        self._start = time.monotonic()
        self.seconds = 0.0
        """How long it took, once it has ended."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # it is closed by `close`
        read_end, write_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:
                pickle.dump((_settings(), _serialized(graph)), file)
                file.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, str(read_end), json.dumps([*sys.path, os.getcwd()])],
                    stdin=file, stdout=subprocess.DEVNULL, stderr=self._errors, pass_fds=[read_end],
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(write_end)
            self._errors.close()
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _end, self._process, self._errors, write_end, os.getpid())
        """End it now, with the processes that it has started, which also happens when this object is deleted."""

    def ended(self) -> bool:
        """Return whether it has ended, and note how long it took."""
        if self._process.poll() is None:
            return False
        self.seconds = self.seconds or time.monotonic() - self._start
        return True

    def succeeded(self) -> bool:
        """Return whether it has compiled the graph; if not, log why."""
        if self._process.returncode:
            _log.debug("compiling a step in another process failed: %s", _last_line(self._errors))
        return self._process.returncode == 0


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return (file.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], write_end: int, owner: int) -> None:
    """End a process and those that it has started; in a forked copy of the owner nothing happens."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    errors.close()
    os.close(write_end)


def _settings() -> dict[str, Any]:
    """Return the settings of torch that change what is compiled, which are in the keys of Inductor's cache."""
    from torch._inductor import config

    matmul, deterministic = torch.backends.cuda.matmul, cast(Any, torch.utils.deterministic)
    return {
        "inductor": config.save_config(),
        "default_dtype": torch.get_default_dtype(),
        "num_threads": torch.get_num_threads(),
        "fp32_precision": matmul.fp32_precision,
        "matmul": {name: getattr(matmul, name) for name in _FLAGS},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
    }


def _apply(settings: dict[str, Any]) -> None:
    from torch._inductor import config

    config.load_config(settings["inductor"])
    torch.set_default_dtype(settings["default_dtype"])
    torch.set_num_threads(settings["num_threads"])
    if torch.backends.cuda.matmul.fp32_precision != settings["fp32_precision"]:
        torch.set_float32_matmul_precision(_PRECISIONS[settings["fp32_precision"]])
    for name, value in settings["matmul"].items():
        setattr(torch.backends.cuda.matmul, name, value)
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = settings["fill_uninitialized_memory"]


def _serialized(graph: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graph, Options(ops_filter=None))


def compile_from(lifeline: str) -> None:
    """Compile the graph on standard input with the settings there, in a process of its own.

    Args:
        lifeline: The number of a pipe's end, which is closed at the other end when the parent ends.
    """
    os.nice(NICE)
    threading.Thread(target=_end_with_parent, args=[int(lifeline)], daemon=True).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import async_compile
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx._graph_pickler import GraphPickler

        for module in OPERATORS:
            importlib.import_module(module)
        settings, data = pickle.load(sys.stdin.buffer)
        _apply(settings)
        graph = GraphPickler.loads(data, FakeTensorMode(allow_non_fake_inputs=True))
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
