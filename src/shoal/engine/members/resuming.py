"""Members of a run that is resumed, or that began in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine.members.member import Member
from shoal.jobs.early_stopping import Monitor


def as_trained(tiers: Mapping[int, str], members: Sequence[Member]) -> dict[int, str]:
    """The forms that members on a GPU have trained in: what was written down of those that have, or else the tier that
    is in their checkpoints. Folders of earlier versions have tiers written down that were planned and not taken."""
    known = {member.index: (member.tier, tiers.get(member.index, "")) for member in members if member.batches}
    return {index: form if form.partition(" ")[0] == tier else tier for index, (tier, form) in known.items() if tier}


def closes_early(member: Member) -> bool:
    """Whether a member ends here, which closes its epoch otherwise than if it were to continue: in the middle, with a
    validation that is not due, or by taking its best weights."""
    job, epoch = member.job, member.epoch + 1
    if epoch < job.epochs if job.epochs is not None else member.step < (job.steps or 0):
        return False
    not_due = job.val is not None and epoch % job.val_every > 0
    return job.keep == "best" or member.place < member.num_batches or not_due


def reopened(member: Member, state: dict[str, Any]) -> dict[str, Any] | None:
    """The state from which a member continues whose job has become longer since it was done; else the state as it is.

    None: it has to begin anew, as what it was before its end was not saved.
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
        return None  # written before this could be done
    stops = job.stop is not None and state["monitor"]["misses"] >= job.stop.patience  # its end came first
    return {**state, "status": "stopped" if stops else "running"}


def beginning(member: Member) -> None:
    """To where it was when it was built, for a member that has trained in another process only."""
    member.step = member.epoch = member.batches = member.place = member.first_step = 0
    member.history, member.validations, member.losses, member.logs = [], [], [], {}
    member.rows, member.epoch_length = [], None
    member.seconds, member.monitor = 0.0, Monitor.of(member.job)
