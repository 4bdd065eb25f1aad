"""The worker's side: join, train tasks, send the outcomes back, and join again after the link was lost."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from shoal.errors import SplitError, describe
from shoal.jobs.job import Job
from shoal.net.joining import join_and_serve
from shoal.net.links import Address, Link
from shoal.net.messages import END, PROBE, RAISED, TASK, Message, WireError, text_message
from shoal.split.core.method import Method
from shoal.split.executors.local import train_task
from shoal.split.net._codec import OutcomeCodec, codec_named
from shoal.split.net._wire import read_task, to_message
from shoal.split.net.job_description import describe_job
from shoal.utils.tables import Log

SEND_SECONDS = 3600.0
"""How long sending an outcome may take; the coordinator cuts the link when it has waited long enough."""
DAY = 86400.0


class CoordinatorEnded(SplitError):
    """The coordinator ended with an error."""


def serve_worker(
    job: Job,
    method: Method,
    where: Address,
    *,
    device: torch.device | str = "cpu",
    codec: str = "exact",
    shard: int | None = None,
    patience: float = 60.0,
    log: Log | None = None,
) -> int:
    """Train tasks for the coordinator at `where` until it ends the run, and return how many tasks were trained.

    Args:
        shard: The job's data is only this worker's shard, and none of its rows is sent.
        patience: How long to look for a coordinator that cannot be reached, at the beginning or after it was lost.

    Raises:
        Refused: If the coordinator has another job (a SplitError).
        SplitError: If the coordinator ended with an error or cannot be reached.
    """
    worker = _Worker(job, method, torch.device(device), codec, shard)
    join_and_serve(where, worker.ask, worker.serve, leader="coordinator", patience=patience, error=SplitError, log=log)
    return worker.done


class _Worker:
    """The state of a worker, which outlives its links."""

    def __init__(self, job: Job, method: Method, device: torch.device, codec: str, shard: int | None) -> None:
        self.job, self.method, self.device, self.shard = job, method, device, shard
        self.codec = codec_named(codec)
        self.data = method.data_on(device)
        self.done = 0
        self.ask: dict[str, Any] = {
            "name": f"{socket.gethostname()}:{os.getpid()}",
            "job": describe_job(job, method, private=shard is not None),
            "codec": codec,
            "shard": shard,
        }

    def serve(self, link: Link) -> None:
        """Train the tasks that come through a link, until the end."""
        outcomes = OutcomeCodec(self.method, self.codec)
        while True:
            message = link.receive(DAY)
            if message.header.kind == END:
                if message.text:
                    raise CoordinatorEnded(message.text)
                return
            if message.header.kind == PROBE:
                link.send(message, SEND_SECONDS)
            elif message.header.kind == TASK:
                link.send(self._train(message, outcomes), SEND_SECONDS)
                self.done += 1
            else:
                raise WireError(f"the coordinator sent a message of kind {message.header.kind}")

    def _train(self, message: Message, outcomes: OutcomeCodec) -> Message:
        task = read_task(message)
        try:
            outcome = train_task(
                self.job, self.method, task, self.device, self.data, private=self.shard is not None
            )  # fmt: skip
        except Exception as error:
            return text_message(RAISED, describe(error))
        return to_message(outcomes.sent(task, outcome), self.codec)
