"""Global state of the process that the program may have set: torch's flags and modes, its threads, the standard
streams. A run changes only what it was asked to change, and restores it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch


@contextmanager
def training_mode() -> Iterator[None]:
    """Record operations for a backward pass inside this context, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@cache
def start_autograd() -> None:
    """Run a first backward pass where torch is built for CUDA and there is no GPU.

    Fake tensors let torch see a GPU there. Its autograd engine, which looks once, would then start threads, and no
    forked process could run a backward pass.
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def backward_prevents_forking() -> bool:
    """Return whether torch starts threads with the first backward pass of this process, on whatever device: it does
    where it sees a GPU. No process that is forked after that can run one."""
    return torch.cuda.device_count() > 0  # asks the driver without initializing CUDA


_replaced: list[Callable[[], bool]] = []
"""One for each thread that is inside `driver_not_started`; the first is torch's own function."""
_replacing = threading.Lock()


@contextmanager
def driver_not_started() -> Iterator[None]:
    """Keep networks' code from starting CUDA's driver by asking whether a graph is being captured, as transformers and
    torch's optimizers do: no process that is forked after that could use a GPU."""
    with _replacing:
        _replaced.append(torch.cuda.is_current_stream_capturing)
        torch.cuda.is_current_stream_capturing = _is_capturing
    try:
        yield
    finally:
        with _replacing:
            own = _replaced[0]
            _replaced.pop()
            torch.cuda.is_current_stream_capturing = _is_capturing if _replaced else own


def _is_capturing() -> bool:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and _replaced[0]()


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors, since the exception says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def torch_flags(device: torch.device, threads: int | None = None, deterministic: bool = False) -> Iterator[None]:
    """Use this number of threads and torch's deterministic algorithms inside this context, if they are asked for."""
    if threads is None and deterministic and device.type == "cpu":
        threads = 1  # as in a worker process: the bits must not depend on the number of processes
    threads_before = torch.get_num_threads()
    deterministic_before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = deterministic and device.type == "cuda" and bool(torch.backends.cudnn.benchmark)
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic:
            if device.type == "cuda":
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if benchmark:
            _set_benchmark(False)
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(threads_before)
        if deterministic:
            torch.use_deterministic_algorithms(deterministic_before[0], warn_only=deterministic_before[1])
        if benchmark:
            _set_benchmark(True)


def _set_benchmark(value: bool) -> None:
    """Set cuDNN's flag even if flags are frozen; `torch.backends.cudnn.flags` would reset its other flags too."""
    allow_mutation: Any = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    allowed: AbstractContextManager[Any] = allow_mutation()
    with allowed:
        torch.backends.cudnn.benchmark = value


def flush_output() -> None:
    """Flush stdout and stderr. A program without a terminal may have no streams, or closed ones."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
