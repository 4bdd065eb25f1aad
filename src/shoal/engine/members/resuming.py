"""Members of a run that is resumed, or that began in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine.members.member import Member
from shoal.jobs.early_stopping import Monitor


def as_trained(tiers: Mapping[int, str], members: Sequence[Member]) -> dict[int, str]:
    """Return the forms in which members on a GPU have trained, by index.

    This is the recorded form, or the tier in the member's checkpoint if they disagree: folders of earlier versions
    recorded planned tiers that were not used.
    """
    known = {member.index: (member.tier, tiers.get(member.index, "")) for member in members if member.batches}
    return {index: form if form.partition(" ")[0] == tier else tier for index, (tier, form) in known.items() if tier}


def closes_early(member: Member) -> bool:
    """Return whether a member that ends here closes its epoch differently than if it continued.

    It does so in the middle of an epoch, with a validation that is not due, or by taking its best weights.
    """
    job, epoch = member.job, member.epoch + 1
    if epoch < job.epochs if job.epochs is not None else member.step < (job.steps or 0):
        return False
    not_due = job.val is not None and epoch % job.val_every > 0
    return job.keep == "best" or member.place < member.num_batches or not_due


def reopened(member: Member, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state from which a finished member continues if its job has become longer; otherwise the state
    unchanged.

    Returns None if the member must start over, since its state before its end was not saved.
    """
    job = member.job
    if state["status"] != "done" or (
        state["epoch"] >= job.epochs if job.epochs is not None else state["step"] >= (job.steps or 0)
    ):
        return state
    before = state.get("before_end")
    if before is not None:
        return {**before, "seconds": state["seconds"]}
    if "before_end" not in state and (job.keep == "best" or state["place"] or job.val_every > 1):
        return None  # written by a version that could not do this
    # early stopping was due, but the end came first
    stops = job.stop is not None and state["monitor"]["misses"] >= job.stop.patience
    return {**state, "status": "stopped" if stops else "running"}


def beginning(member: Member) -> None:
    """Reset a member that has trained only in another process to its state after it was built."""
    member.step = member.epoch = member.batches = member.place = member.first_step = 0
    member.history, member.validations, member.losses, member.logs = [], [], [], {}
    member.rows, member.epoch_length = [], None
    member.seconds, member.monitor = 0.0, Monitor.of(member.job)
