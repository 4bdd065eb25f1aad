"""Whether splitting pays here: bytes by formula, compute by a few steps, seconds by the link; before any training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from shoal.data import Pool
from shoal.engine.members.member import open_data, seeded
from shoal.engine.members.ownership import build_model
from shoal.errors import ShoalError
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Part
from shoal.split.core.state import State
from shoal.split.executors.local import carry_out
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.sil_method import SILMethod
from shoal.split.net._codec import codec_named
from shoal.split.net._forecast import TrafficForecast
from shoal.split.net._probe import LinkSpeed
from shoal.split.sil import costs
from shoal.utils.tables import duration, render, size

TIMED_STEPS = 5
TRIPS = 4
"""Times that a round waits for the link's latency: two messages, each of two buffers that are announced first."""
PAYS = 1.1
"""Rows in a second, over one machine's, from which it pays."""


@dataclass(kw_only=True, slots=True)
class Forecast:
    """What a round of one method costs a worker here."""

    method: str
    local_steps: int
    round_bytes: int
    """At one worker's socket, both ways."""
    step_bytes: float
    """The same for each local step."""
    link_seconds: float
    """Of a round, for its way out and back."""
    step_seconds: float
    """Of one local step, measured here."""
    round_seconds: float
    speedup: float
    """Rows that all workers train on in a second, over those of one machine with the whole network."""


@dataclass(kw_only=True, slots=True)
class Advice:
    """What splitting would cost and bring here."""

    workers: int
    link: str
    alone_step_seconds: float
    """One machine, the whole network, one step."""
    forecasts: list[Forecast] = field(default_factory=list)
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
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
    others: Mapping[str, Method] | None = None,
) -> Advice:
    """What the chosen method costs a round beside local SGD and data parallel, and whether it pays.

    Every worker has a link of this speed to a coordinator whose own is no narrower than all of them together.
    """
    executor = [Worker(number) for number in range(workers)]
    timer = _Timer(job, torch.device(device))
    alone = LocalSGD(job, 1, local_steps=TIMED_STEPS)
    advice = Advice(
        workers=workers,
        link=str(link),
        alone_step_seconds=timer.step(alone, alone.parts(0, [Worker(0)])[0]),
    )
    for method in _compared(job, chosen, workers, others or {}):
        advice.forecasts.append(_forecast(job, method, executor, link, codec, timer, advice.alone_step_seconds))
    advice.sentence = _sentence(advice)
    return advice


def _compared(job: Job, chosen: Method, workers: int, others: Mapping[str, Method]) -> list[Method]:
    """The chosen method first, then those that it is weighed against."""
    steps = _local_steps(chosen, chosen.parts(0, [Worker(n) for n in range(workers)]))
    found = [chosen, *others.values()]
    for make in (lambda: LocalSGD(job, workers, local_steps=steps), lambda: DataParallel(job, workers)):
        try:
            method: Method = make()
        except ShoalError:  # it cannot be split that way
            continue
        if method.name not in {m.name for m in found}:
            found.append(method)
    return found


def _local_steps(method: Method, parts: Sequence[Part]) -> int:
    return max((part.steps for part in parts), default=1) or 1


class _Timer:
    """Times a few steps of a part, here."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.data = open_data(Pool(device), job, "data")
        with seeded(job.seed, torch.device("cpu")):
            self.whole = build_model(job)

    def step(self, method: Method, part: Part) -> float:
        """Seconds of one step of a part, after one to warm up."""
        state = State.of(self.whole, method.companions())
        slices = method.slices(part)
        taken = []
        for steps in (1, min(TIMED_STEPS, max(part.steps, 1))):
            short = replace(part, steps=steps)
            task = state.task(0, short, slices, extras=method.extras(0, part))
            began = time.perf_counter()
            outcome = carry_out(self.job, method, task, self.device, self.data)
            taken.append((outcome.seconds or time.perf_counter() - began) / steps)
        return taken[-1]


def _forecast(
    job: Job, method: Method, executor: Sequence[Worker], link: LinkSpeed, codec: str, timer: _Timer, alone: float
) -> Forecast:
    number = min(1, method.rounds - 1)
    parts = method.parts(number, executor)
    bytes_of = TrafficForecast(job, method, codec_named(codec))
    traffic = [bytes_of.part(part, number).traffic for part in parts]
    steps = _local_steps(method, parts)
    if isinstance(method, SILMethod):  # its parts read the same rows, and are unlike
        moved = max(t.both for t in traffic) + _across(method)
        step, rows = alone * _largest(method), 1
    else:
        moved = max(t.both for t in traffic)
        step, rows = timer.step(method, parts[0]), len(parts)
    seconds = link.seconds(moved) + TRIPS * link.latency
    whole = steps * step + seconds
    return Forecast(
        method=method.name, local_steps=steps, round_bytes=moved, step_bytes=moved / steps,
        link_seconds=seconds, step_seconds=step, round_seconds=whole, speedup=rows * steps * alone / whole,
    )  # fmt: skip


def _across(method: SILMethod) -> int:
    """Activations that the part with the most of them reads and gives in a round."""
    if not method.lag or not method.windows:
        return 0
    rows = [cut.row_bytes for cut in method.pieces.cuts]
    both = max(before + after for before, after in zip([0, *rows], [*rows, 0], strict=True))
    return method.crossing_bytes() * both // (sum(rows) * method.windows)


def _largest(method: SILMethod) -> float:
    """The largest part's share of the operations."""
    whole, *parts = (cost.operations for cost in costs(method).values())
    return max(parts) / max(1, whole)


def _sentence(advice: Advice) -> str:
    first, *others = advice.forecasts
    better = max(others, key=lambda f: f.speedup, default=first)
    share = first.link_seconds / first.round_seconds
    told = (
        f"{first.method} with {advice.workers} workers over {advice.link.split(',')[0]}: "
        f"{first.speedup:.1f} times the rows a second of one machine, {share:.0%} of the time on the link"
    )
    if first.speedup >= PAYS:
        return f"Splitting pays here: {told}."
    want = first.link_seconds / (advice.workers * advice.alone_step_seconds / PAYS - first.step_seconds)
    if want > 0 and first.method in ("ist", "local_sgd"):  # with the others, bytes go by steps
        return f"Splitting does not pay here: {told}; from about {round(want) + 1} local steps on it would."
    if better.speedup >= PAYS:
        return f"Splitting does not pay here: {told}; {better.method} would ({better.speedup:.1f} times)."
    return f"Splitting does not pay here: {told}; train on one machine, unless its memory or the data's place forbids."
