"""What a process has only one of, and a host program may have set or frozen: torch's flags and modes, its threads, the
standard streams. A run changes what it was asked to change, and puts back what it has changed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch


@contextmanager
def training_mode() -> Iterator[None]:
    """Inside: operations are recorded for a backward pass, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silence what torch logs of an operator that fails on tensors without data: the exception says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def torch_flags(device: torch.device, threads: int | None = None, deterministic: bool = False) -> Iterator[None]:
    """Inside: so many threads, and torch's deterministic algorithms, where they are asked for."""
    if threads is None and deterministic and device.type == "cpu":
        threads = 1  # as in a process of its own: bits must not depend on how many there are
    threads_before = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
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
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if benchmark:
            _set_benchmark(True)


def _set_benchmark(value: bool) -> None:
    """Set cuDNN's flag, frozen or not: `torch.backends.cudnn.flags` would reset its other flags too."""
    unfrozen: Any = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    allowed: AbstractContextManager[Any] = unfrozen()
    with allowed:
        torch.backends.cudnn.benchmark = value


def flush_output() -> None:
    """Write out what was printed. A program without a terminal may have no streams, or closed ones."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
