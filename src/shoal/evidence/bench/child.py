"""One way in one process: its memory is its own, and its crash is a line in the table."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from shoal.evidence.bench.memory import Memory
from shoal.evidence.bench.workloads import Spec


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a child is asked to measure."""

    way: str
    spec: Spec
    device: str
    threads: int | None = None
    """CPU threads of torch; None: as torch chooses."""
    processes: int = 16
    warm_up: int = 3


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A way is set up and warm."""

    setup_s: float
    step_s: float
    """Seconds for a step of all members, roughly: to choose how many make a round."""
    note: str = ""
    scale: float = 1.0
    predicted_ms: float | None = None
    predicted_bytes: int | None = None
    solo: Memory | None = None
    """Peak of one network alone; of the largest where they differ."""
    solo_reserved: int | None = None
    """GPU: the sum over members of their peaks alone."""


class ChildError(Exception):
    """The way failed in its process; the message is its reason, in one line."""


def prepare(device: str, threads: int | None) -> None:
    """The same settings for every way: what a careful user sets."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def _sync(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _solo(order: Order, work: Any) -> tuple[Memory, int | None]:
    """Train the first network of each kind alone, for its peak."""
    import gc

    import torch

    from shoal.evidence.bench.memory import Meter
    from shoal.evidence.bench.ways import Eager

    largest, total = Memory(), 0
    members = Counter(task.kind.name for task in work.tasks)
    for name, number in members.items():
        meter = Meter(order.device)
        way = Eager(work.only([next(t for t in work.tasks if t.kind.name == name)]), torch.device(order.device))
        way.step(order.warm_up)
        _sync(order.device)
        alone = meter.read()
        total += number * (alone.reserved or 0)
        if (alone.reserved or alone.growth or 0) >= (largest.reserved or largest.growth or 0):
            largest = alone
        del way
        gc.collect()
        if order.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return largest, total or None


def _open(order: Order) -> tuple[Any, Any, Ready]:
    import torch

    from shoal.evidence.bench.memory import Meter
    from shoal.evidence.bench.ways import open_way
    from shoal.evidence.bench.workloads import workload

    prepare(order.device, order.threads)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    meter = Meter(order.device)
    work = workload(order.spec)
    solo, solo_reserved = _solo(order, work) if order.way == "eager" else (None, None)
    start = time.perf_counter()
    way = open_way(
        order.way,
        work,
        torch.device(order.device),
        processes=order.processes,
        threads=order.threads or torch.get_num_threads(),
    )
    way.step(1)
    _sync(order.device)
    setup_s = time.perf_counter() - start
    way.step(order.warm_up)
    _sync(order.device)
    start = time.perf_counter()
    way.step(1)
    _sync(order.device)
    ready = Ready(
        setup_s=setup_s,
        step_s=time.perf_counter() - start,
        note=way.note,
        scale=way.scale,
        predicted_ms=way.predicted_ms,
        predicted_bytes=way.predicted_bytes,
        solo=solo,
        solo_reserved=solo_reserved,
    )
    return way, meter, ready


def _serve(order: Order, pipe: Connection) -> None:
    from shoal.errors import describe

    warnings.simplefilter("ignore")  # vmap's remarks about speed are what the table shows
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through `finally`: a service it started must end too
    way = None
    try:
        way, meter, ready = _open(order)
        pipe.send(ready)
        while True:
            command, n = pipe.recv()
            if command == "time":
                _sync(order.device)
                start = time.perf_counter()
                way.step(n)
                _sync(order.device)
                pipe.send(time.perf_counter() - start)
            elif command == "memory":
                pipe.send(way.memory(meter))
            elif command == "losses":
                pipe.send(way.losses())
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other end has no more questions
    except Exception as error:
        with suppress(ConnectionError):
            pipe.send(ChildError(describe(error)))
    finally:
        if way is not None:
            way.close()


def _ceilings(order: Order, pipe: Connection) -> None:
    try:
        import torch

        from shoal.evidence.bench.floor import ceilings

        prepare(order.device, order.threads)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pipe.send(ceilings(torch.device(order.device), order.spec.precision, quick=order.warm_up < 2))
    except KeyboardInterrupt:
        pass  # the other end has been interrupted too, and tells it
    except Exception as error:
        from shoal.errors import describe

        pipe.send(ChildError(describe(error)))


@contextmanager
def deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C until they ask for it: in the middle of its imports one would only
    print a traceback. It ends when it finds that the other end of its pipe is closed."""
    if threading.current_thread() is not threading.main_thread():  # where signals may not be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Child:
    """The other end: start a way in a process of its own, ask it, end it."""

    def __init__(self, order: Order, *, ceilings: bool = False) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_ceilings if ceilings else _serve, args=(order, theirs))
        with deaf():
            self.process.start()
        theirs.close()

    def wait(self, deadline: float) -> Any:
        """Its next answer; ChildError with the reason if there is none by then (time.monotonic)."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise ChildError("no time left: raise --limit")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise ChildError(f"its process died (exit code {self.process.exitcode})") from None
        if isinstance(answer, ChildError):
            raise answer
        return answer

    def ask(self, command: str, n: int, deadline: float) -> Any:
        try:
            self.pipe.send((command, n))
        except OSError:
            raise ChildError(f"its process died (exit code {self.process.exitcode})") from None
        return self.wait(deadline)

    def close(self, patience: float = 15.0) -> None:
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
