"""One process of a distributed run, coordinator or worker, as the command line or torchrun says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.net.link_speed import LinkSpeed
from shoal.net.links import Address, LinkLost, read_offer
from shoal.net.torchrun import Torchrun
from shoal.results import Result
from shoal.settings import parse_seconds, pick_device
from shoal.split.api import add_notes
from shoal.split.core.method import Method
from shoal.split.core.report import Forecast
from shoal.split.methods.sil_method import SILMethod
from shoal.split.net._advice import Advice, advise
from shoal.split.net._wire import message_bytes
from shoal.split.net.coordinator import Distributed
from shoal.split.net.launch import local_workers
from shoal.split.net.worker import serve_worker
from shoal.split.settings import Settings
from shoal.split.sil import report as report_of_parts
from shoal.split.trainer import train_split
from shoal.utils.tables import Log, duration


@dataclass(kw_only=True, slots=True)
class ProcessRole:
    """The role of this process in a run."""

    coordinator: str | None = None
    """HOST:PORT at which this process is the coordinator."""
    join: str | None = None
    """HOST:PORT of the coordinator whose worker this process is."""
    local: int | None = None
    """How many of the workers are started here."""
    shard: int | None = None
    """The data of this worker is only this shard."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        if self.coordinator is not None and self.join is not None:
            raise SplitError("this process cannot be the coordinator and join one; give --coordinator or --join")
        if self.shard is not None and self.worker_of is None:
            raise SplitError("--shard is for the data of a worker; give it with --join")

    @property
    def torchrun(self) -> Torchrun | None:
        """The information of torchrun, if it started this process and no role was given."""
        return None if self.coordinator or self.join else Torchrun.read(self.environment)

    @property
    def worker_of(self) -> Address | None:
        """The address of the coordinator whose worker this process is, or None if it is the coordinator."""
        if self.join is not None:
            return Address.parse(self.join)
        started = self.torchrun
        return started.where if started is not None and started.rank > 0 else None

    @property
    def address(self) -> Address:
        """The address at which the coordinator listens."""
        if self.coordinator is not None:
            return Address.parse(self.coordinator, any_port=True)
        started = self.torchrun
        return started.where if started is not None else Address("127.0.0.1", 0)

    def local_of(self, workers: int) -> int:
        """Return how many of `workers` workers are started here."""
        if self.local is not None:
            if self.local > workers:
                raise SplitError(f"--local is {self.local} and there are {workers} workers; use at most {workers}")
            return self.local
        return 0 if self.coordinator is not None else 1 if self.torchrun is not None else workers


@dataclass(kw_only=True, slots=True)
class DistributedSplit:
    """A job, how to split it, and the role of this process."""

    job: Job
    given: Mapping[str, Any]
    """The settings given to this process."""
    role: ProcessRole
    device: str = "cpu"
    out: str | None = None
    checkpoint_every: str | float = "60s"
    deadline: float | None = None
    patience: float = 60.0
    link: str | None = None
    log: Log | None = None

    def go(self) -> Result | None:
        """Train, and return the result at the coordinator."""
        self._check()
        where = self.role.worker_of
        if where is not None:
            self._serve(where)
            return None
        settings, job, method = self._prepare()
        with self._executor(settings, job, method, settings.workers) as executor:
            executor.workers_of_round(0)
            return self._train(settings, job, method, executor)

    def _check(self) -> None:
        """Raise errors that show before any process is started."""
        if self.link is not None:
            LinkSpeed.parse(self.link)
        if not self.patience > 0:
            raise SplitError(f"patience is {self.patience:g}; use seconds above 0")
        parse_seconds(self.checkpoint_every)

    def _prepare(self) -> tuple[Settings, Job, Method]:
        """Return the settings, the job and the method at the coordinator. Mistakes raise here, before waiting for
        workers."""
        started = self.role.torchrun
        settings = Settings.read({"workers": started.world} if started is not None else {}, self.given)
        job = settings.job(self.job)
        method = settings.build(job)
        if "workers" not in self.given and started is None:
            settings.workers = method.num_workers
        if isinstance(method, SILMethod) and settings.workers > method.count:
            spare = settings.workers - method.count
            self._say(f"{method.count} parts, {settings.workers} workers: {spare} in reserve if one is lost")
        return settings, job, method

    def _device(self) -> torch.device:
        return pick_device(self.device)

    @contextmanager
    def _executor(self, settings: Settings, job: Job, method: Method, workers: int) -> Iterator[Distributed]:
        """Start the coordinator with its local workers."""
        local = self.role.local_of(workers)
        with local_workers(
            job, method, local, others=workers - local, worker={"device": self._device(), "patience": 10.0},
            address=self.role.address, offer=settings.given(), codec=settings.codec, deadline=self.deadline,
            patience=max(self.patience, 60.0), start_seconds=self.patience, log=self.log,
        ) as (executor, _):  # fmt: skip
            if local < workers:
                self._say(f"coordinator at {executor.address}, waiting for {workers - local} workers")
            yield executor

    def _say(self, line: str) -> None:
        if self.log is not None:
            self.log(line)

    def _train(self, settings: Settings, job: Job, method: Method, executor: Distributed) -> Result:
        """Print the advice, train at the coordinator, and return the result with its report."""
        workers = executor.workers_of_round(0)
        speed = LinkSpeed.parse(self.link) if self.link is not None else executor.probe()
        try:
            self._say(advise(job, method, len(workers), speed, codec=settings.codec, device=self._device()).sentence)
        except SplitError as error:
            self._say(f"whether it pays is not known: {error}")
        predicted = Forecast(method, partial(message_bytes, codec=executor.codec)).all_rounds(workers)
        executor.forget_traffic()
        result = train_split(
            job, method, executor, device=self._device(), out=self.out, log=self.log,
            checkpoint_every=self.checkpoint_every,
        )  # fmt: skip
        report = result.split
        if report is not None:
            report.bytes_predicted = predicted.both
            limit = max((lost.waited for lost in executor.lost), default=0.0)
            if executor.lost:
                report.notes.append(
                    f"workers were lost {len(executor.lost)} times; the longest wait was {duration(limit)}"
                )
            add_notes(result, method)
            if isinstance(method, SILMethod):
                result.split = report_of_parts(result, method)
        return result

    def _serve(self, where: Address) -> None:
        """Run as a worker, with the coordinator's settings."""
        started = self.role.torchrun
        if started is not None:
            settings = Settings.read({"workers": started.world}, self.given)
        else:
            try:
                settings = Settings.read(read_offer(where, self.patience), self.given)
            except LinkLost as error:
                raise SplitError(str(error)) from None
        job = settings.job(self.job)
        method = settings.build(job)
        done = serve_worker(
            job, method, where, device=self._device(), codec=settings.codec, shard=self.role.shard,
            patience=self.patience, log=self.log,
        )  # fmt: skip
        self._say(f"the coordinator at {where} has finished; {done} tasks were trained here")

    def advice(self) -> Advice:
        """Return what the split would cost and whether it would save time, without training."""
        self._check()
        settings, job, method = self._prepare()
        if self.link is not None:
            speed = LinkSpeed.parse(self.link)
        else:
            self.role.local = 1
            with self._executor(settings, job, method, 1) as executor:
                executor.workers_of_round(0)
                speed = executor.probe()
        return advise(job, method, settings.workers, speed, codec=settings.codec, device=self._device())
