"""The same work, several ways. Each is written as well as it can be without the others.

A way is opened on a workload and then stepped: `step(n)` trains every member for n more batches.
All do the same work: gather the batch from the data set on the device, forward, loss, backward, Adam with the
member's own learning rate, batch norm's running statistics.
"""

from __future__ import annotations

import copy
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from shoal.evidence.bench.memory import Memory, Meter
from shoal.evidence.bench.titles import TITLES
from shoal.evidence.bench.workloads import Task, Workload

WARM_UP = 3  # steps before a capture: lets lazy initialisation and autotuning happen outside the graph


class Way(ABC):
    """One way of training all members of a workload, in progress."""

    note = ""
    """What the reader of the table must know about this measurement."""
    scale = 1.0
    """Members of the workload for each one that this way really runs."""
    predicted_ms: float | None = None
    predicted_bytes: int | None = None

    @abstractmethod
    def step(self, n: int) -> None:
        """Train every member for n more batches."""

    @abstractmethod
    def losses(self) -> list[float]:
        """Every member's loss at its latest batch."""

    def memory(self, meter: Meter) -> Memory:
        """What it takes, in all the processes it uses."""
        return meter.read()

    def close(self) -> None:  # noqa: B027 (most ways hold nothing but tensors)
        """Let go of what garbage collection does not."""


class Eager(Way):
    """One network after the other, in plain PyTorch."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work = work.to(device)
        self.solos = [_Solo(self.work, task, device) for task in work.tasks]

    def step(self, n: int) -> None:
        for solo in self.solos:
            solo.run(n)

    def losses(self) -> list[float]:
        return [float(solo.loss) for solo in self.solos]


class _Solo:
    def __init__(self, work: Workload, task: Task, device: torch.device) -> None:
        self.model = task.build(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.lr)
        self.criterion = task.kind.loss
        self.inputs, self.targets = work.data(task)
        self.orders = work.orders(task)
        self.bf16 = work.precision == "bf16"
        self.device = device
        self.batches: list[Tensor] = []
        self.loss = torch.tensor(torch.nan)

    def run(self, n: int) -> None:
        for _ in range(n):
            if not self.batches:
                self.batches = list(self.orders.epoch().to(self.device).flip(0))
            rows = self.batches.pop()
            x, y = self.inputs[rows], self.targets[rows]
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.criterion(self.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.loss = loss.detach()


class Captured(Way):
    """One network after the other, each step compiled and, on a GPU, captured: the best a loop can be."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        allow_recompiles(len(work.tasks))
        self.work = work.to(device)
        forward = torch.compile(_forward, dynamic=False)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.note = "" if device.type == "cuda" else "compiled; nothing to capture on a CPU"
        self.solos = [_CapturedSolo(self.work, task, device, forward, pool) for task in work.tasks]

    def step(self, n: int) -> None:
        for solo in self.solos:
            solo.feed.run(n)

    def losses(self) -> list[float]:
        return [float(solo.loss) for solo in self.solos]


def _forward(model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y)


class _CapturedSolo:
    def __init__(self, work: Workload, task: Task, device: torch.device, forward: Any, pool: Any) -> None:
        self.model = task.build(device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.lr, fused=True, capturable=cuda)
        self.criterion = task.kind.loss
        self.forward = forward
        self.inputs, self.targets = work.data(task)
        self.device = device
        self.bf16 = work.precision == "bf16"
        self.loss = torch.zeros((), device=device, dtype=next(self.model.parameters()).dtype)
        orders = work.orders(task)
        self.feed = Feed(orders.epoch, self._one, device, pool=pool)

    def _one(self, rows: Tensor) -> None:
        x, y = self.inputs.index_select(0, rows), self.targets.index_select(0, rows)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.forward(self.model, self.criterion, x, y)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


class Feed:
    """Gives a step its rows, from an order that lies on the device with its own counter.

    The counter moves inside the captured graph, so that a step costs the host one launch.
    """

    def __init__(
        self, epoch: Callable[[], Tensor], one: Callable[[Tensor], None], device: torch.device, *,
        pool: Any = None, capture: bool = True,
    ) -> None:  # fmt: skip
        self.epoch = epoch
        self.one = one
        self.order = epoch().to(device)  # [batches, ...]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = 0
        self.replay: Callable[[], None] = self._step
        if not capture:
            self.replay = lambda: self.one(self.order[self.done])  # every step is launched from the host
        elif device.type == "cuda":
            self.replay = self._capture(pool)

    def _step(self) -> None:
        rows = self.order.index_select(0, self.at).squeeze(0)
        self.at.add_(1)
        self.one(rows)

    def _capture(self, pool: Any) -> Callable[[], None]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):  # true training steps, as every other
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.done = WARM_UP
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self._step()
        return self.graph.replay

    def run(self, n: int) -> None:
        for _ in range(n):
            if self.done == len(self.order):
                self.order.copy_(self.epoch())
                self.at.zero_()
                self.done = 0
            self.replay()
            self.done += 1


class Vmap(Way):
    """torch.func: functional_call, grad and vmap over stacked state, Adam by hand for a learning rate per member."""

    def __init__(self, work: Workload, device: torch.device, *, compiled: bool = False) -> None:
        kinds = {task.kind.name for task in work.tasks}
        if len(kinds) > 1:
            raise ValueError(f"vmap needs networks of one architecture; here are {', '.join(sorted(kinds))}")
        self.work = work.to(device)
        models = [task.build(device) for task in work.tasks]
        params, buffers = stack_module_state(models)
        self.params = {name: p.detach().clone() for name, p in params.items()}
        self.buffers = {name: b.detach().clone() for name, b in buffers.items()}
        self.base = copy.deepcopy(models[0]).to("meta")
        del models, params, buffers
        self.first = [torch.zeros_like(p) for p in self.params.values()]
        self.second = [torch.zeros_like(p) for p in self.params.values()]
        dtype = next(iter(self.params.values())).dtype
        self.count = torch.zeros(1, device=device, dtype=dtype)  # 0-dim in float64 is not counted up by torch.compile
        self.lr_M = torch.tensor([task.lr for task in work.tasks], device=device, dtype=dtype)
        self.last_M = torch.zeros(len(work.tasks), device=device, dtype=dtype)
        self.criterion = work.tasks[0].kind.loss
        self.inputs, self.targets = self.work.data(work.tasks[0])
        self.device = device
        self.bf16 = work.precision == "bf16"
        self.each = vmap(grad_and_value(self._loss, has_aux=True), randomness="different")
        self.update = torch.compile(self._update, dynamic=False) if compiled else self._update
        feeds = [work.orders(task) for task in work.tasks]

        def epoch() -> Tensor:
            return torch.stack([orders.epoch() for orders in feeds], 1)  # [batches, M, batch size]

        captured = compiled and device.type == "cuda"
        self.feed = Feed(epoch, self._one, device, capture=captured)
        if compiled and not captured:
            self.note = "compiled; nothing to capture on a CPU"

    def _loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        written = dict(buffers)  # batch norm writes its running statistics into these
        out = functional_call(self.base, (params, written), (x,))
        return self.criterion(out, y), written

    def _update(self, rows_MB: Tensor) -> Tensor:
        x, y = self.inputs[rows_MB], self.targets[rows_MB]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            grads, (loss_M, buffers) = self.each(self.params, self.buffers, x, y)
        with torch.no_grad():
            for name, value in buffers.items():
                self.buffers[name].copy_(value)
            self._adam([grads[name] for name in self.params])
        last_M: Tensor = loss_M.detach()
        return last_M

    def _adam(self, grads: list[Tensor], beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        params = list(self.params.values())
        self.count.add_(1)
        torch._foreach_lerp_(self.first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - beta2)
        root = (1 - beta2**self.count).sqrt()[0]
        size_M = self.lr_M / (1 - beta1**self.count)
        below = torch._foreach_sqrt(self.second)
        torch._foreach_div_(below, root)
        torch._foreach_add_(below, eps)
        sizes = [-size_M.view(-1, *(1,) * (p.dim() - 1)) for p in params]
        torch._foreach_add_(params, torch._foreach_mul(torch._foreach_div(self.first, below), sizes))

    def _one(self, rows_MB: Tensor) -> None:
        self.last_M.copy_(self.update(rows_MB))

    def step(self, n: int) -> None:
        self.feed.run(n)

    def losses(self) -> list[float]:
        return [float(value) for value in self.last_M]


class Packed(Way):
    """Shoal. The only place that touches the engine."""

    def __init__(self, work: Workload, device: torch.device, *, compile: bool | str = "auto") -> None:
        engine = importlib.import_module("shoal.engine.runtime._timing")
        self.pack: Any = engine.open_pack(work.jobs(), device, compile)
        self.note = str(getattr(self.pack, "tier", "") or "")
        self.predicted_ms = getattr(self.pack, "predicted_ms", None)
        self.predicted_bytes = getattr(self.pack, "predicted_bytes", None)

    def step(self, n: int) -> None:
        self.pack.step(n)

    def losses(self) -> list[float]:
        return [float(value) for value in self.pack.losses()]

    def close(self) -> None:
        if hasattr(self.pack, "close"):
            self.pack.close()


def allow_recompiles(members: int) -> None:
    """Let every member have its own compiled code where PyTorch's guards tell them apart."""
    from torch._dynamo import config

    config.recompile_limit = max(8, 4 * members)
    config.accumulated_recompile_limit = max(256, 8 * members)


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def serve_way(way: Way, meter: Meter, device: str, pipe: Connection) -> None:
    """Answer what is asked about an open way, until the other end of the pipe is closed."""
    while True:
        command, n = pipe.recv()
        if command == "time":
            synchronize(device)
            start = time.perf_counter()
            way.step(n)
            synchronize(device)
            pipe.send(time.perf_counter() - start)
        elif command == "memory":
            pipe.send(way.memory(meter))
        elif command == "losses":
            pipe.send(way.losses())


def open_way(name: str, work: Workload, device: torch.device, *, processes: int = 16, threads: int = 1) -> Way:
    """Start a way; ValueError where it cannot do this work."""
    if name == "eager":
        return Eager(work, device)
    if name == "captured":
        return Captured(work, device)
    if name == "vmap":
        return Vmap(work, device)
    if name == "vmap-captured":
        return Vmap(work, device, compiled=True)
    if name == "processes":
        from shoal.evidence.bench.processes import Processes

        return Processes(work, device, at_once=processes, threads=threads)
    if name == "shoal":
        return Packed(work, device)
    raise ValueError(f"no way {name!r}; there are {', '.join(TITLES)}")
