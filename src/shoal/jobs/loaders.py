"""Data that comes in batches, a DataLoader or an IterableDataset, whose rows cannot be indexed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from shoal.errors import JobError

if TYPE_CHECKING:
    from shoal.jobs.job import Job


class DefaultInt(int):
    """The default of a field, which can be distinguished from the same number given by a user."""


def batch_size_of(loader: DataLoader[Any], default: int) -> DefaultInt:
    """Return the number of rows in a loader's batches, or `default` if the loader does not say."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return DefaultInt(size if isinstance(size, int) else default)


def gives_batches(data: Any) -> bool:
    """Return whether the data is read batch by batch, in its own order."""
    return isinstance(data, (DataLoader, IterableDataset))


def loader_problems(job: Job) -> list[str]:
    """Return a line for each setting without effect beside a DataLoader, and for data that can be read only once."""
    lines: list[str] = []
    for which in ("data", "val"):
        if isinstance(getattr(job, which), Iterator):
            kind = type(getattr(job, which)).__name__
            lines.append(
                f"{which} is a {kind}, which can be read once; pass a map-style Dataset, a DataLoader, or an "
                "IterableDataset whose __iter__ makes a new one each epoch"
            )
    if not isinstance(job.data, DataLoader):
        return lines
    set_fields: dict[str, Any] = {"batch_size": job.batch_size} if not isinstance(job.batch_size, DefaultInt) else {}
    set_fields |= {"shuffle": job.shuffle} if job.shuffle is not True else {}
    set_fields |= {"drop_last": job.drop_last} if job.drop_last is not False else {}
    set_fields |= {"collate": job.collate} if job.collate is not None and not _for_val(job) else {}
    lines += [
        f"data is a DataLoader, so {name}={getattr(value, '__name__', value)} would do nothing; set it on the "
        "DataLoader, and leave it out here"
        for name, value in set_fields.items()
        if name != "batch_size" or not _for_val(job)
    ]
    return lines


def loader_defaults(job: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of settings that have no effect once a DataLoader replaces a job's data."""
    loader = changes.get("data")
    if not isinstance(loader, DataLoader):
        return {}
    val = changes.get("val", job.val)
    rows = {} if _in_rows(val) else {"batch_size": batch_size_of(loader, job.batch_size), "collate": None}
    return {"shuffle": True, "drop_last": False, **rows}


def _for_val(job: Job) -> bool:
    """Return whether the validation data is made into batches by the job's own settings."""
    return _in_rows(job.val)


def _in_rows(val: Any) -> bool:
    return val is not None and not isinstance(val, DataLoader)


def refuse_batches(job: Job, what: str) -> None:
    """Raise a JobError if the job's data has no row indices, which `what` needs."""
    if gives_batches(job.data):
        label = f"job {job.name!r}" if job.name else "job"
        raise JobError(
            f"{label}: data is a {type(job.data).__name__}, and {what} needs the numbers of rows; pass its dataset (a "
            "map-style one), with batch_size= and collate= on the job"
        )
