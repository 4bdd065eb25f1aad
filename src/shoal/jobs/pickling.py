"""The job of a pickled result: its settings, without its data and without code that cannot be pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from shoal.errors import ShoalError
from shoal.jobs.job import Job


class LeftOut:
    """Stands for a field that was left out when a result's job was pickled."""

    def __init__(self, job: str, field: str) -> None:
        self.job, self.field = job, field

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShoalError(f"{self.field!r} of job {self.job!r} was left out when its result was pickled; give it again")

    def __repr__(self) -> str:
        return "<left out by pickle>"


def without_unpicklable(job: Job) -> Job:
    """Return a copy of a job without its network, its data and functions that cannot be pickled, such as lambdas."""
    reduced = copy.copy(job)
    for name in (field.name for field in fields(Job)):
        value, left_out = getattr(job, name), LeftOut(job.name, name)
        if isinstance(value, Mapping):
            setattr(reduced, name, {key: item if _can_pickle(item) else left_out for key, item in value.items()})
        elif value is not None and (name in ("model", "data", "val") or not _can_pickle(value)):
            setattr(reduced, name, left_out)
    return reduced


def _can_pickle(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a user's class raises
        return False
    return True
