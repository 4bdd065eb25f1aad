"""The parent of a worker, as the worker sees it, and the state of members that is sent between them."""

from __future__ import annotations

import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

from shoal.engine.members.member import Member
from shoal.engine.processes import _messages
from shoal.errors import ShoalError, describe
from shoal.reporting.events import Event

_STATE = ("status", "error", "tier", "step", "epoch", "seconds", "batches", "losses", "logs", "closed", "validations")


class ParentHandle:
    """The parent of a worker, as the worker sees it: what it sends there."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def send(self, *message: Any) -> None:
        """Send a message. SIGTERM is blocked meanwhile, since a partial message would make all later ones
        unreadable."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            _messages.send(self.pipe, message)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def notify(self, event: Event) -> None:
        """Send an event, with the progress of its member."""
        member, leaves = event.member, event.kind == "leave"
        if member is None or event.kind not in ("epoch", "leave"):
            self.send("event", event.to_wire(), None)
            return
        self._send_member("event", event.to_wire(), member, complete=leaves)

    def return_member(self, member: Member) -> None:
        """Send back a member that has not ended, with its complete state."""
        self._send_member("returned", member.index, member, complete=True)

    def _send_member(self, kind: str, what: Any, member: Member, *, complete: bool) -> None:
        try:
            self.send(kind, what, give(member, complete=complete))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            state = give(member, complete=False)
            state |= {"status": "failed", "error": f"its state cannot be sent between processes ({describe(error)})"}
            self.send(kind, what, state)

    def raised(self, error: Exception) -> None:
        """Make the parent raise the error that ended this worker."""
        is_own = isinstance(error, ShoalError)
        self.send("raised", error if is_own else RuntimeError(f"a worker process raised {describe(error)}"))


def give(member: Member, *, complete: bool) -> dict[str, Any]:
    """Return a member's progress; with `complete`, its whole state."""
    if complete:
        return {"whole": member.state()}
    first = max(0, len(member.history) - 1)
    return {**{name: getattr(member, name) for name in _STATE}, "history": (first, member.history[first:])}


def take(member: Member, state: dict[str, Any]) -> None:
    """Apply what `give` returned to a member."""
    if "whole" in state:
        member.load_state(state["whole"])
        return
    for name in _STATE:
        setattr(member, name, state[name])
    first, rows = state["history"]
    member.history[first:] = rows
