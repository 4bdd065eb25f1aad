"""Measure different ways to train the same networks: in turns on a CPU, one at a time on a GPU.

The speed of a CPU changes with the load of others, so all ways stay ready and take turns; a ratio is the median over
rounds of ratios within a round. On a GPU each way has the device alone and ends before the next begins.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.errors import describe
from shoal.evidence.bench.child import Child, ChildError, prepare_torch
from shoal.evidence.bench.memory import Driver, Memory, Meter
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.bench.titles import TITLES
from shoal.evidence.bench.ways import Loop, open_way
from shoal.evidence.bench.workloads import Spec, kind_of, workload
from shoal.jobs.job import Job
from shoal.utils.tables import Log

BASE = "eager"
SETUP_SHARE = 0.7  # the fraction of a network's time for set-up; the rest is for the rounds


@dataclass(kw_only=True)
class Settings:
    """How to measure; a Spec says what to measure."""

    ways: tuple[str, ...] = tuple(TITLES)
    device: str = "cpu"
    rounds: int = 20
    round_seconds: float = 0.25
    """Seconds of a round, long enough that starting and stopping the clock does not matter."""
    warm_up: int = 3
    threads: int | None = None
    """CPU threads for every way; None leaves torch's choice."""
    limit: float = 1800.0
    """Seconds for everything."""

    def __post_init__(self) -> None:
        unknown = [way for way in self.ways if way not in TITLES]
        if unknown:
            raise ValueError(f"no way {unknown[0]!r}; there are {', '.join(TITLES)}")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; measure at least 1")
        if self.limit <= 0:
            raise ValueError(f"limit is {self.limit:g} s; use more than 0")


@dataclass(kw_only=True)
class Outcome:
    """One way on one network: a row of the table."""

    network: str
    way: str
    members: int
    error: str | None = None
    note: str = ""
    setup_s: float | None = None
    times_ms: list[float] = field(default_factory=list)
    """Milliseconds for a step of all members, one number per round."""
    memory: Memory | None = None
    ratio: float | None = None
    """How many times faster than sequential eager."""
    predicted_ms: float | None = None
    solo_reserved: int | None = None
    """On a GPU, in the row of sequential eager: the sum of what the members would reserve alone."""

    @property
    def ms(self) -> float | None:
        return statistics.median(self.times_ms) if self.times_ms else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ms": self.ms}


def synchronize(device: str) -> None:
    """Wait for a GPU to finish."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _measure_alone(jobs: Sequence[Job], settings: Settings) -> tuple[Memory, int | None]:
    """Train the first network of each kind alone, and return the largest peak and the sum of reserved bytes over
    members."""
    largest, total = Memory(), 0
    for name, number in Counter(map(kind_of, jobs)).items():
        meter = Meter(settings.device)
        way = Loop([next(job for job in jobs if kind_of(job) == name)], torch.device(settings.device))
        way.step(settings.warm_up)
        synchronize(settings.device)
        alone = meter.read()
        total += number * (alone.reserved or 0)
        if (alone.reserved or alone.growth or 0) >= (largest.reserved or largest.growth or 0):
            largest = alone
        del way
        gc.collect()
        if settings.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return largest, total or None


def _serve(name: str, spec: Spec, settings: Settings, pipe: Connection) -> None:
    """Set up one way to train in a child process, and send its outcome so far and the seconds of a step. Then take
    steps, or measure the memory, on request."""
    device = settings.device
    prepare_torch(device, settings.threads)
    meter, jobs = Meter(device), workload(spec)
    outcome = Outcome(network=spec.network, way=name, members=spec.members)
    if name == BASE:  # a loop trains one network at a time and needs the memory of one
        outcome.memory, outcome.solo_reserved = _measure_alone(jobs, settings)

    def timed(n: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        way.step(n)
        synchronize(device)
        return time.perf_counter() - start

    start = time.perf_counter()
    with closing(open_way(name, jobs, torch.device(device))) as way:
        timed(1)
        outcome.setup_s = time.perf_counter() - start
        timed(settings.warm_up)
        outcome.note, outcome.predicted_ms = way.note, way.predicted_ms
        pipe.send((outcome, timed(1)))
        while True:
            steps = pipe.recv()
            pipe.send(timed(steps) if steps else meter.read())


class _Row:
    """An outcome while its child process is alive."""

    def __init__(self, outcome: Outcome, settings: Settings) -> None:
        self.outcome = outcome
        self.settings = settings
        self.child: Child | None = None
        self.steps = 1

    def start(self, spec: Spec, deadline: float) -> None:
        self.child = Child(_serve, self.outcome.way, spec, self.settings)
        self.outcome, step_s = self.child.receive(deadline)
        self.steps = max(1, round(self.settings.round_seconds / max(step_s, 1e-6)))

    def round(self, deadline: float) -> None:
        assert self.child is not None
        seconds = self.child.ask(self.steps, deadline)
        self.outcome.times_ms.append(1e3 * seconds / self.steps)

    def finish(self, driver: Driver, before: int | None, deadline: float) -> None:
        """Read the memory of the child while it is still there."""
        assert self.child is not None
        if self.outcome.way != BASE:
            self.outcome.memory = self.child.ask(0, deadline)
            used = driver.used()
            if used is not None and before is not None and self.outcome.memory is not None:
                self.outcome.memory.driver = used - before

    def fail(self, error: Exception) -> None:
        self.outcome.error = str(error) if isinstance(error, ChildError) else describe(error)
        self.close(1.0)

    def close(self, patience: float = 15.0) -> None:
        if self.child is not None:
            self.child.close(patience)
            self.child = None


def _share(end: float, left: int) -> float:
    """Return when the first of `left` tasks must be done, so that a slow one takes no time from the others."""
    now = time.monotonic()
    return now + (end - now) / left


def _take_turns(spec: Spec, rows: list[_Row], deadline: float, driver: Driver, log: Log) -> None:
    """Set up the rows, then measure them in turns, round by round, while there is time."""
    used_before = driver.used()
    share = SETUP_SHARE if len(rows) > 1 else 1.0
    setup_end = time.monotonic() + share * (deadline - time.monotonic())
    for i, row in enumerate(rows):
        log(f"{spec.members} x {spec.network}: setting up {TITLES[row.outcome.way]}")
        try:
            row.start(spec, _share(setup_end, len(rows) - i))
        except (ChildError, OSError) as error:
            row.fail(error)
    longest = 0.0
    for number in range(rows[0].settings.rounds):
        alive = [row for row in rows if row.child is not None]
        if not alive or (number > 0 and time.monotonic() + longest > deadline):
            break
        log(f"{spec.members} x {spec.network}: round {number + 1}")
        start = time.monotonic()
        turn = number % len(alive)
        for row in alive[turn:] + alive[:turn]:
            try:
                row.round(deadline)
            except ChildError as error:
                row.fail(error)
        longest = max(longest, time.monotonic() - start)
    for row in rows:
        if row.child is not None:
            _finish(row, driver, used_before, deadline)


def _finish(row: _Row, driver: Driver, before: int | None, deadline: float) -> None:
    try:
        row.finish(driver, before, max(deadline, time.monotonic() + 20))
    except ChildError as error:
        row.outcome.note = f"{row.outcome.note} (memory: {error})".strip()
    if len(row.outcome.times_ms) < row.settings.rounds:
        row.outcome.note = f"{row.outcome.note} ({len(row.outcome.times_ms)} rounds in the time)".strip()
    row.close()


def compare(spec: Spec, settings: Settings, deadline: float, driver: Driver, log: Log) -> list[Outcome]:
    """Measure every way on one network."""
    ways = sorted(dict.fromkeys(settings.ways), key=list(TITLES).index)
    rows = [_Row(Outcome(network=spec.network, way=way, members=spec.members), settings) for way in ways]
    try:
        groups = [[row] for row in rows] if settings.device.startswith("cuda") else [rows]
        for i, group in enumerate(groups):
            _take_turns(spec, group, _share(deadline, len(groups) - i), driver, log)
    finally:
        for row in rows:
            row.close()
    outcomes = [row.outcome for row in rows]
    set_ratios(outcomes, paired=not settings.device.startswith("cuda"))
    return outcomes


def set_ratios(outcomes: list[Outcome], *, paired: bool) -> None:
    """Set the ratios to sequential eager, round by round if the rounds took turns."""
    base = next((o for o in outcomes if o.way == BASE), None)
    if base is None or not base.times_ms:
        return
    for outcome in outcomes:
        if not outcome.times_ms:
            continue
        if paired:
            pairs = zip(base.times_ms, outcome.times_ms, strict=False)  # rounds in which both took part
            outcome.ratio = statistics.median(b / t for b, t in pairs)
        else:
            outcome.ratio = statistics.median(base.times_ms) / statistics.median(outcome.times_ms)


def bench(specs: list[Spec], settings: Settings, log: Log = lambda _: None) -> dict[str, Any]:
    """Measure everything and return the result as plain data.

    Each network may use an equal share of the remaining time.
    """
    end = time.monotonic() + settings.limit - min(5.0, settings.limit / 10)  # the rest is for ending processes
    outcomes: list[Outcome] = []
    with Driver(settings.device) as driver:
        for i, spec in enumerate(specs):
            outcomes += compare(spec, settings, _share(end, len(specs) - i), driver, log)
    return {
        "stamp": stamp(settings.device, settings.threads),
        "settings": asdict(settings),
        "specs": [asdict(spec) for spec in specs],
        "results": [outcome.to_dict() for outcome in outcomes],
    }
