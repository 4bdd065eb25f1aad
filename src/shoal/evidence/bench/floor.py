"""The least a step can cost: bytes that must move, operations that must be done, over what the device can do.

No way runs much faster than its floor where the data come from memory; a pack that fits into a CPU's cache can.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.evidence.bench.workloads import kind_of
from shoal.jobs.job import Job

ADAM_BYTES = 28  # a float32 parameter's step: read p, gradient and both moments, write p and both moments
GRADIENT_BYTES = 4  # written once by the backward pass


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One step of one network."""

    parameters: int
    flops: int
    state_bytes: int
    """Weights, gradients and Adam's moments."""
    activation_bytes: int
    """What the forward pass keeps for the backward pass, written once and read once. An estimate."""
    batch_bytes: int
    """Gathering the batch: read once, written once."""

    @property
    def bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.batch_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f: getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this device does at best, measured."""

    bandwidth: float
    """Bytes per second, read plus written, of a large copy."""
    rate: float
    """Floating-point operations per second of a large matrix product in this precision."""

    def floor_ms(self, cost: Cost) -> float:
        return 1e3 * max(cost.bytes / self.bandwidth, cost.flops / self.rate)


def count(job: Job) -> Cost:
    """Run one step on tensors without storage and count.

    >>> from shoal.evidence.bench.workloads import Spec, workload
    >>> count(workload(Spec(network="tiny", members=1, batches=1))[0]).parameters
    2410
    """
    narrow = 0.5 if job.precision == "bf16" else 1.0
    model = job.model().to("meta").train()
    x, y = (t[: job.batch_size].to("meta") for t in job.data)
    weights_storage = {p.untyped_storage()._cdata for p in model.parameters()}
    saved_tensors: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in weights_storage:
            saved_tensors[key] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert job.loss is not None
        loss = job.loss(model(x), y)
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]
    # The counter takes a grouped convolution's backward pass for a dense one; the first layer needs no input gradient.
    flops = min(counter.get_total_flops(), 3 * forward)
    saved = sum(t.untyped_storage().nbytes() * (narrow if t.is_floating_point() else 1) for t in saved_tensors.values())
    parameters = sum(p.numel() for p in model.parameters())
    batch = sum(t.numel() * t.element_size() for t in (x, y))
    weights = 2 * 4 * narrow  # read in the forward and in the backward pass
    return Cost(
        parameters=parameters,
        flops=flops,
        state_bytes=int(parameters * (ADAM_BYTES + GRADIENT_BYTES + weights)),
        activation_bytes=int(2 * saved),
        batch_bytes=2 * batch,
    )


def count_all(jobs: Sequence[Job]) -> Cost:
    """One step of all members."""
    each = {kind_of(job): job for job in jobs}
    costs = {name: count(job) for name, job in each.items()}
    total, *rest = [costs[kind_of(job)] for job in jobs]
    for cost in rest:
        total = total + cost
    return total


def _seconds(call: Any, device: torch.device, repeats: int) -> float:
    times = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings(device: torch.device, precision: str | None, *, quick: bool = False) -> Ceilings:
    """Measure a large copy and a large matrix product."""
    cuda = device.type == "cuda"
    megabytes = 1024 if cuda else (16 if quick else 128)
    side = 8192 if cuda else (256 if quick else 1024)
    source = torch.empty(megabytes * 2**18, device=device).normal_()
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), device, 5 if quick else 15)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = _seconds(lambda: a @ b, device, 3 if quick else 9)
    return Ceilings(bandwidth=2 * source.numel() * 4 / copy, rate=2 * side**3 / product)
