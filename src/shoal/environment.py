"""The environment in which a result was made."""

from __future__ import annotations

import platform
from typing import Any

import numpy
import torch

from shoal.version import version


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and threads, which are what to compare when two results differ."""
    stamp: dict[str, Any] = {
        "shoal": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        stamp |= {
            "device_name": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return stamp
