"""Processes that torchrun starts: what they agree on before they train."""

from __future__ import annotations

import socket
import threading

from tests.place.training.jobs import job_of, mlp, placement_of, rows

from shoal.net.links import Address
from shoal.net.torchrun import Torchrun
from shoal.place.training.api import run_process
from shoal.settings import make_settings

SETTINGS = make_settings("cpu", None, 1, "auto", "60s", False, "fifo")


def test_one_machine_waits_for_processes_that_begin_after_its_training() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = Address("127.0.0.1", free.getsockname()[1])
    job, results = job_of(mlp, rows(12), steps=1), list[object]()
    placement = placement_of(job, 4, mode="one machine")
    first = threading.Thread(
        target=lambda: results.append(
            run_process(job, placement, SETTINGS, Torchrun(0, 2, where), out=None, patience=20.0)
        )
    )
    first.start()
    first.join(2.0)  # a process that is slow to begin: the training has ended
    assert first.is_alive()
    assert run_process(job, None, SETTINGS, Torchrun(1, 2, where), patience=1.0) is None
    first.join(20.0)
    assert len(results) == 1
