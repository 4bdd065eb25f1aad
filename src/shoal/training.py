"""`shoal.train`: jobs in, results out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.checks import prepare
from shoal.environment import environment
from shoal.job import Job
from shoal.pack import plan, workers
from shoal.pack.members import Member
from shoal.pack.unit import Executor, Unit
from shoal.progress import progress_for
from shoal.results import Result, Results
from shoal.runfolder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run, as opposed to what: nothing here changes what a job means."""

    device: torch.device
    memory: int | None = None
    """Bytes that may be used."""
    threads: int | None = None
    compile: bool | Literal["auto"] = "auto"
    checkpoint_every: float = 60.0
    """Seconds."""
    deterministic: bool = False


def arrange(members: list[Member], settings: Settings) -> tuple[list[Unit], Executor, int]:
    """The one place where the plan enters: which members run together, how units share the device, in how many
    processes."""
    made, units, executor = plan.arrange(members, timed=not settings.deterministic, compile=settings.compile)
    seconds = workers.predicted_seconds(made, members)
    return units, executor, workers.workers_for(settings.threads, settings.device, seconds)


def train(
    jobs: Sequence[Job],
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    memory: int | str | None = None,
    threads: int | None = None,
    compile: bool | Literal["auto"] = "auto",
    checkpoint_every: float | str = "60s",
    deterministic: bool = False,
) -> Results:
    """Train all jobs on one device, each exactly as if it were alone, and give their results in the same order.

    Args:
        jobs: What to train. Mistakes that can be seen before the first step raise one JobError (a ValueError) for all.
        device: "auto" takes the GPU where there is one; or "cpu", "cuda", "cuda:1".
        out: A folder for the results: jobs.json, results.json, history/*.jsonl, weights/*.safetensors. A folder that
            holds other jobs is an error that says what differs; the same jobs are trained again and replaced.
        progress: Show a bar in terminals and notebooks, plain lines elsewhere.
        memory: Not yet: anything but None is refused. `shoal.explain` says what memory to expect.
        threads: Torch's intra-op threads during the run, in this process alone; None: as they are, and on a CPU long
            runs are shared among one process per free core (SHOAL_WORKERS sets their number).
        compile: Whether steps on a GPU may be compiled; "auto": where it pays. On a CPU they are not, and True is
            refused.
        checkpoint_every: Not yet: anything but 60 seconds is refused.
        deterministic: Use torch's deterministic algorithms, and raise where there is none.
    """
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic)
    refuse_what_is_not_done(settings)
    folder = RunFolder(Path(out)) if out is not None else None
    with applied(settings):
        members = prepare(jobs, settings.device)
        if folder is not None:
            folder.claim(members)
        try:
            with progress_for(members, progress) as watch:
                units, executor, count = arrange(members, settings)
                workers.run_shared(units, count, executor, watch)
        except KeyboardInterrupt:
            if folder is not None:
                folder.write(collect(members, settings.device))
            raise
        results = collect(members, settings.device)
    if folder is not None:
        folder.write(results)
    return results


def refuse_what_is_not_done(settings: Settings) -> None:
    """No setting silently does nothing."""
    if settings.memory is not None:
        raise ValueError(f"memory is {settings.memory} bytes, but there is no limit on memory yet; leave it at None")
    if settings.checkpoint_every != 60.0:
        raise ValueError(
            f"checkpoint_every is {settings.checkpoint_every:g} seconds, but runs are not checkpointed yet; "
            "leave it at '60s'"
        )
    if settings.compile is True and settings.device.type == "cpu":
        raise ValueError("compile is True, but steps on a CPU are not compiled; use 'auto' or False")


def collect(members: list[Member], device: torch.device) -> Results:
    """Members as results, their models on the CPU."""
    stamp = environment(device)
    return Results(
        [
            Result(
                name=member.name,
                job=member.job,
                model=member.model.to("cpu"),
                history=member.history,
                status=member.status,
                tier=member.tier,
                error=member.error,
                optimizer_state=member.optimizer_state,
                seconds=member.seconds,
                environment=stamp,
                steps=member.step,
            )
            for member in members
        ]
    )


def make_settings(
    device: Any, memory: Any, threads: Any, compile: Any, checkpoint_every: Any, deterministic: Any
) -> Settings:
    """Check and convert what `train` was given."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}; use a whole number, 1 or more")
    if not isinstance(compile, bool) and compile != "auto":
        raise ValueError(f"compile is {compile!r}; use True, False or 'auto'")
    return Settings(
        device=pick_device(device),
        memory=None if memory is None else parse_bytes(memory),
        threads=threads,
        compile=compile,
        checkpoint_every=parse_seconds(checkpoint_every),
        deterministic=bool(deterministic),
    )


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; Shoal runs on 'cpu' and 'cuda'")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device; use 'cpu' or 'auto'")
        index = torch.cuda.current_device() if found.index is None else found.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device is {str(device)!r}, but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return torch.device("cpu")


def parse_bytes(text: int | str) -> int:
    """A size: bytes, or a string such as "8GB" or "512 MiB"."""
    units = {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
    }
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", str(text))
    try:
        size = int(float(found[1]) * units[found[2].lower()]) if found else 0
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise ValueError(f"memory is {text!r}; use a number of bytes, or a size such as '8GB'")
    return size


def parse_seconds(text: float | str) -> float:
    """A time: seconds, or a string such as "60s", "5m" or "1h"."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*(s|m|h|)\s*", str(text))
    try:
        seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"checkpoint_every is {text!r}; use seconds, or a time such as '60s' or '5m'")
    return seconds


@contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """The settings that belong to the process, for the time of the run."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.deterministic:
            if settings.device.type == "cuda":
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
