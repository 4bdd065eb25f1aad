"""Predict and measure the peak memory of training a part: weights, gradients, optimizer state, activations,
temporaries.

The prediction runs one step on fake tensors, which have shapes and no data. A ledger notes when each tensor is made and
freed, and torch's FlopCounterMode counts operations. The measurement asks the allocator on a GPU; on a CPU it uses the
same ledger, in one step of each shape of part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.engine.members.member import seeded
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.members.step import autocast, run_step
from shoal.engine.planning.liveness import Ledger
from shoal.graphs.recording import make_fake
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.core.parts import Part, Task

StepOf = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]
"""(network, batch) -> loss and logs."""
_CPU = torch.device("cpu")
WHOLE = "whole"

_KNOWN: WeakKeyDictionary[Method, dict[Any, int]] = WeakKeyDictionary()
"""Measured peak bytes for each method in use, by the shapes of its parts, so that each shape is measured once."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one optimizer step costs, its batch included."""

    peak_bytes: int
    """The most bytes that are held at one time: weights, gradients, optimizer state, batch, activations,
    temporaries."""
    operations: int
    """Multiplications and additions of the forward and backward pass."""
    weight_bytes: int
    """Bytes of parameters and buffers alone."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def measure(
    job: Job, network: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any, *, update: bool = True
) -> Cost:
    """Return the cost of the second step of `network`, when the optimizer has its state.

    Without `update` the step ends when its gradients are computed.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake_network = make_fake(network, fake)
    counter, ledger = FlopCounterMode(display=False), Ledger()
    with warnings.catch_warnings(), fake, seeded(0, _CPU):
        warnings.simplefilter("ignore")
        fake_batch = pytree.tree_map_only(Tensor, fake.from_tensor, batch)
        optimizer = make_optimizer(job, fake_network)

        def run() -> None:
            with autocast(job, _CPU):
                out = step(fake_network, fake_batch)
            loss = out[0] if isinstance(out, tuple) else out
            del out
            loss.backward()
            del loss
            if update:
                optimizer.step()

        with counter:
            run()
        optimizer.zero_grad()
        tensors = held_tensors(fake_network, optimizer)
        start = ledger.know((*tensors, *pytree.tree_leaves(fake_batch)))
        with ledger:
            run()
    peak_bytes = count_bytes([tensors, fake_batch]) + ledger.held(start).working
    return Cost(
        peak_bytes, int(counter.get_total_flops()), count_bytes([*fake_network.parameters(), *fake_network.buffers()])
    )


def count_bytes(value: Any) -> int:
    """Count the bytes of all tensors in a pytree."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def held_tensors(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """List weights, buffers and optimizer state."""
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [*network.parameters(), *network.buffers(), *state]


def step_of(job: Job, method: Method, part: Part) -> StepOf:
    """Return the step that trains a part: the method's if it has one, otherwise the job's."""
    if type(method).step is Method.step:
        return lambda network, batch: run_step(job, network, batch)
    method_step = method.step(part)

    def step(network: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        out = method_step(network, batch)
        return (out[0], out[1]) if isinstance(out, tuple) else (out, {})

    return step


class Meter:
    """Measures the peak memory of one task."""

    def __init__(self, method: Method, task: Task, device: torch.device) -> None:
        self.device = device
        self._shapes = tuple((name, tuple(t.shape)) for name, t in task.tensors.items())
        self._known = _KNOWN.setdefault(method, {})
        self._key = (self._shapes, task.part.role, task.part.learn is None, str(device))
        self._start = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)

    @contextmanager
    def at(self, index: int, steps: int, network: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Measure one step of a task; a context around each step. The second step is measured if there is one, since
        optimizers make their state in the first."""
        if self.device.type == "cuda" or self._key in self._known or index != min(1, steps - 1):
            yield
            return
        state = held_tensors(network, optimizer)
        ledger = Ledger()
        start = ledger.know(state)
        with ledger:
            yield
        self._known[self._key] = count_bytes(state) + ledger.held(start).working

    def peak(self, network: nn.Module) -> int:
        """Return the most bytes that were held, weights included."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device) - self._start)
        return self._known.get(self._key, 0)


def part_costs(method: Method, parts: Sequence[Part]) -> dict[str, Cost]:
    """Predict what a step costs, on fake tensors: for the whole network, and for each part by its number.

    A step that cannot run on fake tensors is left out.
    """
    job, data = method.member.job, method.data
    batch = tuple(data.take(0, min(job.batch_size, len(data))))
    costs: dict[Any, Cost | None] = {WHOLE: _try_cost(job, method.model, lambda n, b: run_step(job, n, b), batch, True)}
    shapes: dict[str, Any] = {WHOLE: WHOLE}
    for part in parts:
        network, part_job = method.network(part), method.job(job, part)
        key = (part.role, *((name, tuple(p.shape)) for name, p in network.named_parameters()))
        shapes[str(part.number)] = key
        if key not in costs:
            step = step_of(part_job, method, part)
            costs[key] = _try_cost(part_job, network, step, method.example(part, batch), method.merge == "weights")
    return {name: cost for name, key in shapes.items() if (cost := costs[key]) is not None}


def _try_cost(job: Job, network: nn.Module, step: StepOf, batch: Any, update: bool) -> Cost | None:
    try:
        return measure(job, network, step, batch, update=update)
    except Exception:
        return None
