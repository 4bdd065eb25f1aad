"""The settings that say how to train, which are arguments of `shoal.train`: their checks and conversions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shoal.engine.planning.policy import Fifo, Policy, policy_for
from shoal.utils.numpy_values import plain_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run the jobs. No setting changes what a job means."""

    device: torch.device
    memory: int | None = None
    """The number of bytes that may be used."""
    threads: int | None = None
    compile: bool | Literal["auto"] = "auto"
    checkpoint_every: float = 60.0
    """Seconds between two checkpoints."""
    deterministic: bool = False
    policy: Policy = field(default_factory=Fifo)


def make_settings(
    device: Any, memory: Any, threads: Any, compile: Any, checkpoint_every: Any, deterministic: Any, policy: Any
) -> Settings:
    """Check the arguments of `train` and convert them to settings."""
    threads = plain_int(threads)
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}; use a whole number, 1 or more")
    if not isinstance(compile, bool) and compile != "auto":
        raise ValueError(f"compile is {compile!r}; use True, False or 'auto'")
    if deterministic not in (True, False):
        raise ValueError(f"deterministic is {deterministic!r}; use True or False")
    chosen = pick_device(device)
    if compile is True and chosen.type == "cpu":
        raise ValueError("compile is True, but steps on a CPU are not compiled; use 'auto' or False")
    return Settings(
        device=chosen,
        memory=None if memory is None else parse_bytes(memory),
        threads=threads,
        compile=compile,
        checkpoint_every=parse_seconds(checkpoint_every),
        deterministic=bool(deterministic),
        policy=policy_for(policy),
    )


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device of this name if torch has it; "auto" is the GPU if there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; Shoal runs on 'cpu' and 'cuda'")
    if chosen.type == "cuda":
        if not torch.cuda.device_count():  # asks the driver without initializing CUDA, see `processes.guard`
            raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device; use 'cpu' or 'auto'")
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        index = current if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device is {str(device)!r}, but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return torch.device("cpu")


def parse_bytes(text: int | str) -> int:
    """Return a number of bytes given as a number or as a string such as "8GB" or "512 MiB"."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", str(text))
    try:
        size = int(float(match[1]) * units[match[2].lower()]) if match else 0
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise ValueError(f"memory is {text!r}; use a number of bytes, or a size such as '8GB'")
    return size


def parse_seconds(text: float | str) -> float:
    """Return a number of seconds given as a number or as a string such as "60s", "5m" or "1h"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(s|m|h|)\s*", str(text))
    try:
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"checkpoint_every is {text!r}; use seconds, or a time such as '60s' or '5m'")
    return seconds
