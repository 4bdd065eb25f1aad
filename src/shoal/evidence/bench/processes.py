"""One process per network, sharing the device: what a platform does that starts every user's script.

On a GPU through NVIDIA's multi-process service where its control program is installed: our own daemon, in its
own folder, stopped with us; a service that already runs is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.evidence.bench.memory import Memory, Meter, host_cores
from shoal.evidence.bench.ways import Eager, Way
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
        with suppress(subprocess.TimeoutExpired):  # its clients are gone; an idle daemon in our folder harms nobody
            subprocess.run(
                [CONTROL], input=b"quit\n", env=self.environment(), capture_output=True, timeout=60, check=False
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """What a spawned process inherits, for as long as we spawn."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _one(work: Workload, device: str, threads: int, pipe: Connection) -> None:
    """A process with one network: answers each command on its pipe until the other end is gone."""
    from shoal.evidence.bench.child import prepare

    try:
        prepare(device, threads)
        meter = Meter(device)
        kinds = {task.kind.name: task.kind for task in work.tasks}
        data = {name: kind.rows() for name, kind in kinds.items()}
        way = Eager(replace(work, tensors=data), torch.device(device))
        pipe.send(None)
        while True:
            command, n = pipe.recv()
            if command == "step":
                way.step(n)
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                pipe.send(None)
            elif command == "losses":
                pipe.send(way.losses())
            elif command == "memory":
                pipe.send(way.memory(meter))
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except Exception as error:  # told to the parent, who puts it in the table
        with suppress(OSError):
            pipe.send(error if isinstance(error, (RuntimeError, ValueError)) else RuntimeError(repr(error)))


class Processes(Way):
    """As many processes as members, or `at_once` of them and the result scaled. Each loads its own data."""

    def __init__(self, work: Workload, device: torch.device, *, at_once: int = 16, threads: int = 1) -> None:
        self.members = len(work.tasks)
        self.tasks = work.tasks[: max(1, at_once)]
        self.scale = self.members / len(self.tasks)
        self.mps = Mps()
        self.workers: list[tuple[Any, Connection]] = []
        with_mps = device.type == "cuda" and self.mps.start()
        try:
            try:
                self._spawn(work, device, threads)
            except (RuntimeError, TimeoutError):
                if not with_mps:
                    raise
                self.close()  # the service is installed but does not work here
                with_mps = False
                self._spawn(work, device, threads)
        except BaseException:
            self.close()
            raise
        self.note = f"{len(self.tasks)} at once, scaled to {self.members}" if self.scale > 1 else ""
        if device.type == "cuda":
            self.note = ", ".join(filter(None, [self.note, "with MPS" if with_mps else "no MPS here"]))

    def _spawn(self, work: Workload, device: torch.device, threads: int) -> None:
        context = get_context("spawn")
        each = max(1, min(threads, host_cores() // len(self.tasks))) if device.type == "cpu" else 1
        with environment({**self.mps.environment(), "OMP_NUM_THREADS": str(each)}):
            for task in self.tasks:
                ours, theirs = context.Pipe()
                args = (replace(work, tasks=[task], tensors={}), str(device), each, theirs)
                process = context.Process(target=_one, args=args)
                process.start()
                theirs.close()
                self.workers.append((process, ours))
        for _ in self._answers(START_SECONDS):
            pass

    def _answers(self, timeout: float | None = None) -> Iterator[Any]:
        for process, pipe in self.workers:
            try:
                if timeout is not None and not pipe.poll(timeout):
                    raise TimeoutError(f"a process did not start within {timeout:.0f} s")
                answer = pipe.recv()
            except EOFError:
                process.join(5)
                raise RuntimeError(f"a process died (exit code {process.exitcode})") from None
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def _tell(self, command: str, n: int = 0) -> Iterator[Any]:
        for _, pipe in self.workers:
            pipe.send((command, n))
        return self._answers()

    def step(self, n: int) -> None:
        for _ in self._tell("step", n):
            pass

    def losses(self) -> list[float]:
        return [loss for losses in self._tell("losses") for loss in losses]

    def memory(self, meter: Meter) -> Memory:
        total = meter.read()
        total = Memory(**{f: 0 if getattr(total, f) is not None else None for f in total.__dataclass_fields__})
        for memory in self._tell("memory"):
            total = total.plus(memory)
        return total.times(self.scale)

    def close(self) -> None:
        for _, pipe in self.workers:
            pipe.close()
        for process, _ in self.workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers = []
        self.mps.stop()
