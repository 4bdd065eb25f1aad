"""What the coordinator and the workers of a split must agree on."""

from __future__ import annotations

from shoal.jobs.job import Job
from shoal.net.handshake import Plan, describe_training, plain
from shoal.split.core.method import Method


def describe_job(job: Job, method: Method, *, private: bool = False) -> Plan:
    """Return what both sides must agree on, as plain data.

    Args:
        private: The rows here are only this worker's, so their number may differ.
    """
    plan = describe_training(job, method.member, method.model, private=private)
    rounds = method.rounds  # they follow from all of the others
    return plan | plain({"method": method.name, "settings": dict(method.settings), "rounds": rounds})
