"""The version of this package, the environment in which a result was made, and the cores that there are."""

from __future__ import annotations

import os
import platform
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def version() -> str:
    """Return the installed version, or for a source tree that of its pyproject.toml, or "0"."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return _source_version(Path(__file__).parents[2] / "pyproject.toml")


def _source_version(file: Path) -> str:
    """Return the version in a pyproject.toml, or "0" if it is not Shoal's."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == "shoal" else "0"
    except (OSError, KeyError, ValueError):
        return "0"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and threads, which are what to compare when two results differ."""
    import numpy
    import torch

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


def usable_cores() -> int:
    """Return the number of cores on which this process may run; macOS and Windows do not report it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
