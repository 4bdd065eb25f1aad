"""The most memory that a part's training holds: weights, gradients, optimizer state, activations, temporaries.

On a GPU the allocator knows. On a CPU a ledger notes, in one step of each shape of part, every tensor that an operator
makes and when it is gone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.data import View
from shoal.engine.members.member import autocast, run_step, seeded
from shoal.engine.planning.liveness import Ledger
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.core.parts import Part, Task
from shoal.split.core.report import moments_per_weight

StepOf = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]
"""(network, batch) -> loss and logs."""
_CPU = torch.device("cpu")

_KNOWN: WeakKeyDictionary[Method, dict[Any, int]] = WeakKeyDictionary()
"""What parts of a shape hold, for each method that is at work."""


def step_of(job: Job, method: Method, part: Part) -> StepOf:
    """The part's step: the method's own, or else the job's."""
    if type(method).step is Method.step:
        return lambda network, batch: run_step(job, network, batch)
    own = method.step(part)

    def step(network: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        out = own(network, batch)
        return (out[0], out[1]) if isinstance(out, tuple) else (out, {})

    return step


class Meter:
    """Finds the peak of one task."""

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
        """Around each step: one of them is watched, the second where there is one, since optimizers make their state
        in the first."""
        if self.device.type == "cuda" or self._key in self._known or index != min(1, steps - 1):
            yield
            return
        held = held_tensors(network, optimizer)
        ledger = Ledger()
        start = ledger.know(held)
        with ledger:
            yield
        self._known[self._key] = sum(tensor.nbytes for tensor in held) + ledger.held(start).working

    def peak(self, network: nn.Module) -> int:
        """The most bytes that were held, weights included."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device) - self._start)
        return self._known.get(self._key, 0)


def held_tensors(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Weights, buffers and optimizer state."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*network.parameters(), *network.buffers(), *kept]


def predicted_peaks(job: Job, method: Method, parts: Sequence[Part], whole: nn.Module, data: View) -> dict[str, int]:
    """What training holds at most, found without memory: the whole network, and each part by its number.

    A step that cannot be run on shapes alone is left out.
    """
    batch = data.take(0, min(job.batch_size, len(data)))
    found: dict[str, int] = {}
    known: dict[Any, int | None] = {}
    networks: list[tuple[str, Job, nn.Module, StepOf, bool]] = [
        ("whole", job, whole, lambda network, given: run_step(job, network, given), True)
    ]
    for part in parts:
        own = method.job(job, part)
        step = step_of(own, method, part)
        networks.append((str(part.number), own, method.network(part), step, method.merge == "weights"))
    for name, own, network, step, update in networks:
        key = (*((n, tuple(t.shape)) for n, t in network.named_parameters()), update, name == "whole")
        if key not in known:
            known[key] = _fake_peak(own, network, step, batch, update)
        peak = known[key]
        if peak is not None:
            found[name] = peak
    return found


def _fake_peak(job: Job, network: nn.Module, step: StepOf, batch: Any, update: bool) -> int | None:
    """The peak of a step on tensors that have shapes and no data: of forward and backward, or of the update."""
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode, seeded(0, _CPU):
            warnings.simplefilter("ignore")
            swapped: dict[int, Any] = {id(b): mode.from_tensor(b.detach()) for b in network.buffers()}
            for p in network.parameters():
                swapped[id(p)] = nn.Parameter(mode.from_tensor(p.detach()), requires_grad=p.requires_grad)
            twin = copy.deepcopy(network, swapped)
            given = pytree.tree_map_only(Tensor, mode.from_tensor, batch)
            ledger = Ledger()
            start = ledger.know((*twin.parameters(), *twin.buffers(), *pytree.tree_leaves(given)))
            with ledger:
                with autocast(job, _CPU):
                    loss = step(twin, given)[0]
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
    except Exception:
        return None
    grads = [p.nbytes for p in network.parameters() if p.requires_grad]
    kept = int(moments_per_weight(job)[0] * sum(grads)) if update else 0
    weights = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    read = sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    updating = sum(grads) + 2 * max(grads, default=0)  # a plain optimizer makes a temporary or two for each weight
    return weights + kept + max(int(ledger.held(start).working) + read, updating if update else 0)
