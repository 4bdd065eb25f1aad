"""The settings in which jobs differ, which are columns in tables of their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

SETTINGS = (
    "optimizer", "batch_size", "accumulate", "clip_norm", "clip_value", "precision", "average", "shuffle", "drop_last",
    "seed", "data_seed",
)  # fmt: skip
"""Fields of a job that are shown where they differ; `hparams` and `config` are columns anyway."""
SEEDS = ("seed", "data_seed")


def differing(jobs: Sequence[Any], besides: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return, for each job, its values of the settings in which these jobs differ, as numbers and text.

    Args:
        jobs: Jobs, or what a run folder has of them.
        besides: Names that are columns already, such as a metric called "precision".

    Examples:
        >>> from types import SimpleNamespace
        >>> differing([SimpleNamespace(seed=0, batch_size=8), SimpleNamespace(seed=0, batch_size=16)])
        [{'batch_size': 8}, {'batch_size': 16}]
    """
    values = [{name: _plain(getattr(job, name, None)) for name in SETTINGS} for job in jobs]
    names = [name for name in SETTINGS if name not in besides and len({repr(each[name]) for each in values}) > 1]
    return [{name: each[name] for name in names} for each in values]


def _plain(value: Any) -> Any:
    """Return a setting as a table has it: a class by its name, an average as it is written."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
