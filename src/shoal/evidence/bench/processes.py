"""One process per network, sharing the device: what a platform does that starts every user's script.

On a GPU through NVIDIA's multi-process service where its control program is installed: our own daemon, in its
own folder, stopped with us; a service that already runs is never touched.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.evidence.bench.child import Child, ChildError, prepare_torch
from shoal.evidence.bench.memory import Memory, Meter, host_cores
from shoal.evidence.bench.ways import Eager, Way, serve_way
from shoal.evidence.bench.workloads import Workload

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 180.0  # torch and a context, in many processes on few cores


class Mps:
    """Our own multi-process service, or none where there is no such program."""

    def __init__(self) -> None:
        self.folder: str | None = None

    def start(self) -> bool:
        """Whether processes started from now on share the GPU through a service."""
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            return True  # somebody else's: ours to use, not to stop
        if shutil.which(CONTROL) is None:
            return False
        self.folder = tempfile.mkdtemp(prefix="shoal-mps-")
        done = subprocess.run([CONTROL, "-d"], env=self.environment(), capture_output=True, timeout=60, check=False)
        if done.returncode != 0:
            self.stop()
            return False
        return True

    def environment(self) -> dict[str, str]:
        if self.folder is None:
            return dict(os.environ)
        return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": self.folder, "CUDA_MPS_LOG_DIRECTORY": self.folder}

    def stop(self) -> None:
        if self.folder is None:
            return
        with suppress(subprocess.TimeoutExpired):  # its clients are gone; an idle daemon in our folder does no harm
            subprocess.run(
                [CONTROL], input=b"quit\n", env=self.environment(), capture_output=True, timeout=60, check=False
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


def _train_one(work: Workload, device: str, threads: int, pipe: Connection) -> None:
    """A process with one network, which loads its own data."""
    prepare_torch(device, threads)
    meter = Meter(device)
    kinds = {task.kind.name: task.kind for task in work.tasks}
    way = Eager(replace(work, tensors={name: kind.rows() for name, kind in kinds.items()}), torch.device(device))
    pipe.send(None)
    serve_way(way, meter, device, pipe)


class Processes(Way):
    """As many processes as members, or `at_once` of them and the result scaled. Each loads its own data."""

    def __init__(self, work: Workload, device: torch.device, *, at_once: int = 16, threads: int = 1) -> None:
        self.members = len(work.tasks)
        self.tasks = work.tasks[: max(1, at_once)]
        self.scale = self.members / len(self.tasks)
        self.mps = Mps()
        self.children: list[Child] = []
        with_mps = device.type == "cuda" and self.mps.start()
        try:
            try:
                self._start(work, device, threads)
            except ChildError:
                if not with_mps:
                    raise
                self.close()  # the service is installed but does not work here
                with_mps = False
                self._start(work, device, threads)
        except BaseException:
            self.close()
            raise
        self.note = f"{len(self.tasks)} at once, scaled to {self.members}" if self.scale > 1 else ""
        if device.type == "cuda":
            self.note = ", ".join(filter(None, [self.note, "with MPS" if with_mps else "no MPS here"]))

    def _start(self, work: Workload, device: torch.device, threads: int) -> None:
        each = max(1, min(threads, host_cores() // len(self.tasks))) if device.type == "cpu" else 1
        environment = {**self.mps.environment(), "OMP_NUM_THREADS": str(each)}
        for task in self.tasks:
            one = replace(work, tasks=[task], tensors={})
            self.children.append(Child(_train_one, one, str(device), each, environment=environment))
        until = time.monotonic() + START_SECONDS
        for child in self.children:
            child.receive(until)

    def _ask(self, command: str, n: int = 0) -> list[Any]:
        for child in self.children:
            child.send((command, n))
        return [child.receive() for child in self.children]

    def step(self, n: int) -> None:
        self._ask("time", n)

    def losses(self) -> list[float]:
        return [loss for losses in self._ask("losses") for loss in losses]

    def memory(self, meter: Meter) -> Memory:
        first, *others = self._ask("memory")
        total: Memory = functools.reduce(Memory.plus, others, first)
        return total.times(self.scale)

    def close(self) -> None:
        for child in self.children:
            child.pipe.close()
        for child in self.children:
            child.close()
        self.children = []
        self.mps.stop()
