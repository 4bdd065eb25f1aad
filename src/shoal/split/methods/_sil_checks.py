"""Mistakes in the settings of a cut network, told before anything is trained: the value, the rule, the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.methods.labels import Labels

PER_PART = ("optimizer", "hparams", "clip_norm", "schedule")
"""What one part may have of its own."""


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise SplitError(f"{name} is {value!r}; use one of {', '.join(repr(a) for a in allowed)}")
    return value


def whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_counts(recovery: Any, local_steps: Any) -> None:
    if not whole_number(recovery, 0):
        raise SplitError(f"recovery is {recovery!r}; use a whole number of epochs, 0 or more")
    if local_steps is not None and not whole_number(local_steps, 1):
        raise SplitError(f"local_steps is {local_steps!r}; use a whole number, 1 or more, or None for an epoch")


def check_variant(way: str, variant: Any) -> str:
    """Of labels; "A" where nothing is said."""
    if variant is not None and way == "heads":
        raise SplitError(f"variant is {variant!r}, and method='heads' has none; use method='labels', or leave it out")
    return str(one_of("variant", "A" if variant is None else variant, ("A", "B")))


def check_labels(way: str, variant: str, labels: Labels | None, head_width: int | None) -> Labels | None:
    """The labels' settings; a setting of the other way is refused."""
    if way == "heads":
        if labels is not None and labels != Labels():
            raise SplitError(
                "method='heads' has no labels, so their settings would do nothing; leave them out, or use 'labels'"
            )
        return None
    if head_width is not None:
        raise SplitError(f"head_width is {head_width!r} and method='labels' has no heads; leave it out")
    labels = labels if labels is not None else Labels()
    if variant == "B" and labels.noise:
        raise SplitError(f"noise is {labels.noise!r} and variant 'B' reads activations, not labels; use 0")
    return labels


def check_batch(job: Job, batch: Any, few: Any) -> tuple[Any, ...]:
    """The inputs of a few rows."""
    if job.loss is None:
        raise SplitError("the job has a step of its own, so a part's loss is not known; use loss= in place of step=")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise SplitError(f"a batch is a {type(batch).__name__}; cut networks need (inputs, ..., targets)")
    return tuple(few[:-1])


def num_parts(cuts: int | None) -> int:
    parts = 2 if cuts is None else cuts
    if not whole_number(parts, 2):
        raise SplitError(f"cuts is {cuts!r}; use names of modules, or a number of parts, 2 or more")
    return parts


def cut_names(cuts: Any) -> list[str]:
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not cuts:
        raise SplitError(f"cuts is {cuts!r}; use a list of module names, such as ['fc3'], or None")
    return list(cuts)


def check_per_part(per_part: Any, count: int) -> dict[int, dict[str, Any]]:
    found = {key: dict(value) for key, value in (per_part or {}).items()}
    for key, value in found.items():
        if not whole_number(key, 0) or key >= count:
            raise SplitError(f"per_part has settings of part {key!r}; there are parts 0 to {count - 1}")
        odd = next((name for name in value if name not in PER_PART), None)
        if odd is not None:
            raise SplitError(f"per_part: part {key} has {odd!r}; a part may have {', '.join(PER_PART)} of its own")
    return found
