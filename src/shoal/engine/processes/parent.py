"""The parent of a worker, as the worker sees it, and the state of members that is sent between them."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from shoal.engine.members.member import Member
from shoal.engine.processes import _messages
from shoal.errors import ShoalError, describe
from shoal.reporting.events import Event

_STATE = ("status", "error", "tier", "step", "epoch", "seconds", "batches", "losses", "logs", "closed", "validations")


class ParentHandle:
    """The parent of a worker, as the worker sees it: what it sends there."""

    def __init__(self, pipe: Connection, frozen: Sequence[Member] = ()) -> None:
        """`frozen`: the members whose frozen weights the parent has, so that they are sent only if they have moved."""
        self.pipe = pipe
        self._frozen = {member.index: _frozen_weights(member) for member in frozen}

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
            self.send(kind, what, self._without_frozen(member, give(member, complete=complete)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            state = give(member, complete=False)
            state |= {"status": "failed", "error": f"its state cannot be sent between processes ({describe(error)})"}
            self.send(kind, what, state)

    def _without_frozen(self, member: Member, state: dict[str, Any]) -> dict[str, Any]:
        """Return a complete state without the frozen weights that are as they were when this process was forked."""
        held = self._frozen.get(member.index, {})
        if not held or "whole" not in state:
            return state
        now, sent, unsent = _frozen_weights(member), {}, []
        for name, value in state["whole"]["model"].items():
            before, after = held.get(name), now.get(name)
            if before is not None and after is not None and before[1] == after[1] and _is(before[0], after[0], value):
                unsent.append(name)
            else:
                sent[name] = value
        return {"whole": state["whole"] | {"model": sent}, "unsent": unsent}

    def raised(self, error: Exception) -> None:
        """Make the parent raise the error that ended this worker."""
        is_own = isinstance(error, ShoalError)
        self.send("raised", error if is_own else RuntimeError(f"a worker process raised {describe(error)}"))


def _is(tensor: Tensor, *others: Any) -> bool:
    """Return whether all of these are the same part of the memory."""
    return all(
        isinstance(other, Tensor) and tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
        for other in others
    )


def _frozen_weights(member: Member) -> dict[str, tuple[Tensor, int]]:
    """Return by name the frozen weights of a member, and how often they were written.

    The tensors share the weights' memory, so that no other tensor can be at the same address while they exist.
    """
    named = member.model.named_parameters(remove_duplicate=False)
    frozen = ((name, weight) for name, weight in named if not weight.requires_grad and not is_lazy(weight))
    return {name: (weight.detach(), weight._version) for name, weight in frozen if weight.layout == torch.strided}


def give(member: Member, *, complete: bool) -> dict[str, Any]:
    """Return a member's progress; with `complete`, its whole state."""
    if complete:
        return {"whole": member.state()}
    first = max(0, len(member.history) - 1)
    return {**{name: getattr(member, name) for name in _STATE}, "history": (first, member.history[first:])}


def take(member: Member, state: dict[str, Any]) -> None:
    """Apply what `give` returned to a member."""
    if "whole" in state:
        own = dict(member.model.named_parameters(remove_duplicate=False))
        unsent = {name: own[name] for name in state.get("unsent", ())}
        member.load_state(state["whole"] | {"model": state["whole"]["model"] | unsent})
        return
    for name in _STATE:
        setattr(member, name, state[name])
    first, rows = state["history"]
    member.history[first:] = rows
