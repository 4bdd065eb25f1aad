"""Several ways to train the same jobs, each written as well as it can be.

A way is opened on jobs and then stepped: `step(n)` trains every member for n more batches. All do the same work: gather
the batch from the data set on the device, forward, loss, backward, Adam with the member's own learning rate, batch
norm's running statistics.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from shoal.evidence.bench.titles import TITLES
from shoal.evidence.bench.workloads import Loss, kind_of
from shoal.jobs.job import Job

WARM_UP = 3  # steps before a capture, so that lazy initialisation and autotuning happen outside the graph
ON_CPU = "compiled; nothing to capture on a CPU"


class Way(ABC):
    """A way to train all members, ready to step."""

    note = ""
    """What a reader of the table must know about this measurement."""
    predicted_ms: float | None = None

    @abstractmethod
    def step(self, n: int) -> None:
        """Train every member for n more batches."""

    @abstractmethod
    def losses(self) -> list[float]:
        """Return every member's loss at its latest batch."""

    def close(self) -> None:  # noqa: B027 (most ways hold nothing but tensors)
        """Free what garbage collection does not."""


def build(job: Job, device: torch.device) -> nn.Module:
    """Build the job's network as its owner would."""
    torch.manual_seed(job.seed)
    return job.model().to(device).train()


def epochs(job: Job) -> Callable[[], Tensor]:
    """Return a function that returns a new order of all rows for each epoch."""
    generator = torch.Generator().manual_seed(job.order_seed)
    return lambda: torch.randperm(len(job.data[0]), generator=generator)


class Loop(Way):
    """Trains one network after the other in plain PyTorch.

    With `compiled`, each step is compiled and, on a GPU, captured, which is the best that a loop can do.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device, *, compiled: bool = False) -> None:
        forward, pool = _forward, None
        if compiled:
            allow_recompiles(len(jobs))
            forward = torch.compile(_forward, dynamic=False)
            pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
            self.note = "" if device.type == "cuda" else ON_CPU
        data = {id(job.data): tuple(t.to(device) for t in job.data) for job in jobs}
        self.solos = [_Solo(job, data[id(job.data)], device, forward, compiled, pool) for job in jobs]

    def step(self, n: int) -> None:
        for solo in self.solos:
            solo.feed.run(n)

    def losses(self) -> list[float]:
        return [float(solo.loss) for solo in self.solos]


def _forward(model: nn.Module, criterion: Loss, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y)


class _Solo:
    def __init__(
        self, job: Job, data: tuple[Tensor, ...], device: torch.device, forward: Any, compiled: bool, pool: Any
    ) -> None:
        self.job, self.data, self.device, self.forward = job, data, device, forward
        self.model = build(job, device)
        captured = compiled and device.type == "cuda"
        how: dict[str, Any] = {"fused": True, "capturable": captured} if compiled else {}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **job.hparams, **how)
        self.loss = torch.tensor(torch.nan)
        order = epochs(job)

        def batches() -> Any:
            rows = order().to(device)
            return rows.view(-1, job.batch_size) if captured else torch.split(rows, job.batch_size)

        self.feed = Feed(batches, self._one, device, pool=pool, capture=captured)

    def _one(self, rows: Tensor) -> None:
        x, y = (t[rows] for t in self.data)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.precision == "bf16"):
            loss = self.forward(self.model, self.job.loss, x, y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()


class Feed:
    """Gives a step its rows: from the host, or from an order on the device with its own counter.

    The counter advances inside the captured graph, so that a step costs the host one launch.
    """

    def __init__(
        self, epoch: Callable[[], Any], one: Callable[[Tensor], None], device: torch.device, *, pool: Any, capture: bool
    ) -> None:
        self.epoch, self.one, self.capture = epoch, one, capture
        self.order = epoch()  # [batches, ...]
        self.done = 0
        self.replay: Callable[[], None] = lambda: self.one(self.order[self.done])
        if capture:
            self.at = torch.zeros(1, dtype=torch.int64, device=device)
            self.replay = self._captured(pool)

    def _step(self) -> None:
        rows = self.order.index_select(0, self.at).squeeze(0)
        self.at.add_(1)
        self.one(rows)

    def _captured(self, pool: Any) -> Callable[[], None]:
        """Take some steps on a side stream, then capture one."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):  # these are real training steps
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
                self._next_epoch()
            self.replay()
            self.done += 1

    def _next_epoch(self) -> None:
        self.done = 0
        if self.capture:
            self.order.copy_(self.epoch())
            self.at.zero_()
        else:
            self.order = self.epoch()


class Vmap(Way):
    """torch.func: functional_call, grad and vmap over stacked state, Adam by hand for a learning rate per member."""

    def __init__(self, jobs: Sequence[Job], device: torch.device, *, compiled: bool = False) -> None:
        kinds = {kind_of(job) for job in jobs}
        if len(kinds) > 1:
            raise ValueError(f"vmap needs networks of one architecture; here are {', '.join(sorted(kinds))}")
        self.job, self.device = jobs[0], device
        self.data = tuple(t.to(device) for t in jobs[0].data)
        models = [build(job, device) for job in jobs]
        params, buffers = stack_module_state(models)
        self.params = {name: p.detach().clone() for name, p in params.items()}
        self.buffers = {name: b.detach().clone() for name, b in buffers.items()}
        self.base = copy.deepcopy(models[0]).to("meta")
        del models, params, buffers
        self.first = [torch.zeros_like(p) for p in self.params.values()]
        self.second = [torch.zeros_like(p) for p in self.params.values()]
        dtype = next(iter(self.params.values())).dtype
        self.count = torch.zeros(1, device=device, dtype=dtype)  # 0-dim in float64 is not counted up by torch.compile
        self.lr_M = torch.tensor([job.hparams["lr"] for job in jobs], device=device, dtype=dtype)
        self.last_M = torch.zeros(len(jobs), device=device, dtype=dtype)
        self.each = vmap(grad_and_value(self._loss, has_aux=True), randomness="different")
        self.update = torch.compile(self._update, dynamic=False) if compiled else self._update
        orders, size = [epochs(job) for job in jobs], self.job.batch_size

        def batches() -> Tensor:
            return torch.stack([order().view(-1, size) for order in orders], 1).to(device)  # [batches, M, batch size]

        captured = compiled and device.type == "cuda"
        self.feed = Feed(batches, self._one, device, pool=None, capture=captured)
        if compiled and not captured:
            self.note = ON_CPU

    def _loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        written = dict(buffers)  # batch norm writes its running statistics into these
        out = functional_call(self.base, (params, written), (x,))
        assert self.job.loss is not None
        return self.job.loss(out, y), written

    def _update(self, rows_MB: Tensor) -> Tensor:
        x, y = (t[rows_MB] for t in self.data)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.precision == "bf16"):
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
    """Trains with Shoal."""

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        from shoal.evidence.bench.timed_pack import open_pack  # other ways do not load the engine

        self.pack = open_pack(jobs, device)
        self.note, self.predicted_ms = self.pack.tier, self.pack.predicted_ms

    def step(self, n: int) -> None:
        self.pack.step(n)

    def losses(self) -> list[float]:
        return [float(value) for value in self.pack.losses()]

    def close(self) -> None:
        self.pack.close()


def allow_recompiles(members: int) -> None:
    """Allow separate compiled code for every member if PyTorch's guards distinguish them."""
    from torch._dynamo import config

    config.recompile_limit = max(8, 4 * members)
    config.accumulated_recompile_limit = max(256, 8 * members)


def open_way(name: str, jobs: Sequence[Job], device: torch.device) -> Way:
    """Start a way, or raise a ValueError if it cannot do this work."""
    if name not in TITLES:
        raise ValueError(f"no way {name!r}; there are {', '.join(TITLES)}")
    if name == "shoal":
        return Packed(jobs, device)
    kind = Vmap if name.startswith("vmap") else Loop
    return kind(jobs, device, compiled=name.endswith("captured"))
