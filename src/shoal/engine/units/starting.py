"""Start the GPU in a thread while this one loads what planning needs.

The driver and a process's context on the GPU take a third of a second. Torch starts the driver while it holds Python's
lock, so that no other thread can do anything meanwhile; a call through ctypes does not hold it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from shoal.engine.tracing.trace import trace
from shoal.utils.caches import bytecode_kept

MODULES = ("shoal.engine.tiers.captured.executor", "shoal.engine.units.arrange")
"""Modules that only runs on a GPU need."""


def start_while_loading(device: torch.device) -> None:
    """Make this process's context on a GPU, and meanwhile load modules. Errors are left to torch's first call there."""
    starting = threading.Thread(target=_make_context, args=(device.index or 0,), daemon=True)
    starting.start()
    with suppress(Exception), bytecode_kept():
        load(starting.is_alive)
    starting.join()


def load(needed: Callable[[], bool] = lambda: True) -> None:
    """Import modules of runs on a GPU, and while `needed` also those that torch imports when it first traces a step.

    The step that is traced reads a number out of a tensor, which imports the most.
    """
    for name in MODULES:
        importlib.import_module(name)
    if needed():
        with suppress(Exception):  # this one cannot be traced
            trace(_Reading(), lambda model, batch: model(batch), torch.ones(1, 1, device="cpu"))


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() > 2.0:
            return x
        return x * self.weight


def _make_context(index: int) -> None:
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, before the driver reads it
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # another system's driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
