"""Predict whether splitting saves time: bytes by formula, compute from a few timed steps, seconds from the link's
speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from shoal.engine.tiers.threads import threads_to_time
from shoal.errors import ShoalError
from shoal.jobs.job import Job
from shoal.net.link_speed import LinkSpeed
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Part
from shoal.split.core.report import Forecast
from shoal.split.core.state import State
from shoal.split.executors.local import train_task
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.sil_method import SILMethod
from shoal.split.net._codec import codec_named
from shoal.split.net._wire import message_bytes
from shoal.split.sil import costs
from shoal.utils.tables import duration, render, size
from shoal.utils.torch_flags import torch_flags

TIMED_STEPS = 5
TRIPS = 1
"""How often a round waits for the link's latency there and back: for a task and its outcome."""
PAYS = 1.1
"""The ratio of rows per second to those of one machine from which splitting is worth it."""


@dataclass(kw_only=True, slots=True)
class MethodForecast:
    """The costs of one round of a method for a worker here."""

    method: str
    local_steps: int
    round_bytes: int
    """The bytes at one worker's socket, both ways."""
    step_bytes: float
    """The same bytes for each local step."""
    link_seconds: float
    """The seconds of a round for sending out and back."""
    step_seconds: float
    """The measured seconds of one local step."""
    round_seconds: float
    speedup: float
    """The rows that all workers train on per second, relative to one machine with the whole network."""


@dataclass(kw_only=True, slots=True)
class Advice:
    """The costs and the gain of splitting here."""

    workers: int
    link: str
    alone_step_seconds: float
    """The seconds of one step of the whole network on one machine."""
    forecasts: list[MethodForecast] = field(default_factory=list)
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                f.method, str(f.local_steps), size(f.round_bytes), size(f.step_bytes), duration(f.link_seconds),
                duration(f.step_seconds * f.local_steps), f"{f.speedup:.2f}x",
            ]
            for f in self.forecasts
        ]  # fmt: skip
        head = ["method", "local steps", "bytes a round", "a step", "link a round", "compute a round", "rows a second"]
        return "\n".join([render(head, rows, left=(0,)), "", self.sentence])


def advise(
    job: Job,
    chosen: Method,
    workers: int,
    link: LinkSpeed,
    *,
    codec: str = "exact",
    device: torch.device | str = "cpu",
) -> Advice:
    """Return the costs of a round of the chosen method, of local SGD and of data parallel, and whether splitting pays.

    Every worker is assumed to have a link of this speed, and the coordinator one as fast as all of them together.
    """
    all_workers, device = [Worker(number) for number in range(workers)], torch.device(device)
    alone = LocalSGD(chosen.member, 1, local_steps=TIMED_STEPS)
    with torch_flags(device, threads_to_time(device)):
        step_seconds = _time_step(alone, alone.parts(0, [Worker(0)])[0], device)
        advice = Advice(workers=workers, link=str(link), alone_step_seconds=step_seconds)
        for method in _compared(chosen, all_workers):
            advice.forecasts.append(_forecast(method, all_workers, link, codec, device, step_seconds))
    advice.sentence = _sentence(advice)
    return advice


def _compared(chosen: Method, workers: Sequence[Worker]) -> list[Method]:
    """Return the chosen method, then those that it is compared with."""
    steps = _local_steps(chosen.parts(0, workers))
    methods = [chosen]
    for kind, options in ((LocalSGD, {"local_steps": steps}), (DataParallel, {})):
        with suppress(ShoalError):  # the job cannot be split by this method
            if kind.name != chosen.name:
                methods.append(kind(chosen.member, len(workers), **options))
    return methods


def _local_steps(parts: Sequence[Part]) -> int:
    return max((part.steps for part in parts), default=1) or 1


def _time_step(method: Method, part: Part, device: torch.device) -> float:
    """Return the seconds of one step of a part here, after a warm-up step."""
    state, slices = State.of(method.model, method.extra_tensors()), method.slices(part)
    seconds = 0.0
    for steps in (1, min(TIMED_STEPS, max(part.steps, 1))):
        task = state.task(0, replace(part, steps=steps), slices, extras=method.extras(0, part))
        began = time.perf_counter()
        outcome = train_task(method.member.job, method, task, device, method.data_on(device))
        seconds = (outcome.seconds or time.perf_counter() - began) / steps
    return seconds


def _forecast(
    method: Method, workers: Sequence[Worker], link: LinkSpeed, codec: str, device: torch.device, alone: float
) -> MethodForecast:
    """Predict the costs of a round of one method."""
    number = min(1, method.rounds - 1)
    parts = method.parts(number, workers)
    forecast = Forecast(method, partial(message_bytes, codec=codec_named(codec)))
    steps = _local_steps(parts)
    if isinstance(method, SILMethod):  # its parts differ, and read the same rows
        parts = [method.part_of(index if method.lag else 0, index) for index in range(method.count)]
        step, rows = alone * _largest(method), 1
    else:
        step, rows = _time_step(method, parts[0], device), len(parts)
    round_bytes = max(forecast.part(number, part).both for part in parts)
    seconds = link.seconds(round_bytes) + TRIPS * link.latency
    total = steps * step + seconds
    return MethodForecast(
        method=method.name, local_steps=steps, round_bytes=round_bytes, step_bytes=round_bytes / steps,
        link_seconds=seconds, step_seconds=step, round_seconds=total, speedup=rows * steps * alone / total,
    )  # fmt: skip


def _largest(method: SILMethod) -> float:
    """Return the largest part's share of the operations."""
    whole, *parts = (cost.operations for cost in costs(method).values())
    return max(parts) / max(1, whole)


def _sentence(advice: Advice) -> str:
    """Return the advice as one sentence."""
    first, *others = advice.forecasts
    better = max(others, key=lambda f: f.speedup, default=first)
    share = first.link_seconds / first.round_seconds
    measured = (
        f"{first.method} with {advice.workers} workers over {advice.link.split(',')[0]}: "
        f"{first.speedup:.1f} times the rows a second of one machine, {share:.0%} of the time on the link"
    )
    if first.speedup >= PAYS:
        return f"Splitting pays here: {measured}."
    want = first.link_seconds / (advice.workers * advice.alone_step_seconds / PAYS - first.step_seconds)
    if want > 0 and first.method in ("ist", "local_sgd"):  # bytes of the others grow with the steps
        return f"Splitting does not pay here: {measured}; from about {round(want) + 1} local steps on it would."
    if better.speedup >= PAYS:
        return f"Splitting does not pay here: {measured}; {better.method} would ({better.speedup:.1f} times)."
    return f"Splitting does not pay here: {measured}; train on one machine if it has the memory and the data."
