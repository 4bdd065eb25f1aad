"""Forked processes and what is said between them and their parent."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import torch

from shoal.engine.members.member import Member
from shoal.errors import ShoalError, describe
from shoal.reporting.events import Event
from shoal.utils.torch_flags import flush_output

_STATE = ("status", "error", "tier", "step", "epoch", "seconds", "batches")
_parents: list[Connection] = []
"""This process's ends of the pipes to its workers; a later worker must not keep them open."""


def fork(body: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Run `body` in a forked process that ends with its parent. Returns its process id and the pipe to it."""
    ours, theirs = Pipe()
    flush_output()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the worker touches none of theirs
        pid = os.fork()
    if pid:
        theirs.close()
        _parents.append(ours)
        return pid, ours
    _child(body, theirs, ours)


def forget(pipe: Connection) -> None:
    """Close the pipe to a worker that has ended."""
    if pipe in _parents:
        _parents.remove(pipe)
        pipe.close()


def _child(body: Callable[[Connection], None], pipe: Connection, ours: Connection) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says what to do
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for inherited in (*_parents, ours):
            inherited.close()
        _end_with_parent()
        torch.set_num_threads(1)
        body(pipe)
        code = 0
    except BaseException:
        code = 1
    finally:
        flush_output()
        os._exit(code)


def _end_with_parent() -> None:
    """A worker whose parent was killed is nobody's: the kernel ends it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Line:
    """A worker's end of the pipe to its parent."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # half a message would be the end of all others
        self.pipe.send_bytes(data)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def tell(self, event: Event) -> None:
        """Pass an event on, with what has become of its member."""
        member, left = event.member, event.kind == "leave"
        if member is None or event.kind not in ("epoch", "leave"):
            self.send("event", event.to_wire(), None)
            return
        try:
            self.send("event", event.to_wire(), give(member, whole=left))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            state = give(member, whole=False)
            state |= {"status": "failed", "error": f"its state cannot be sent between processes ({describe(error)})"}
            self.send("event", event.to_wire(), state)

    def raised(self, error: Exception) -> None:
        """Have the parent raise what ended this worker."""
        own = isinstance(error, ShoalError)
        self.send("raised", error if own else RuntimeError(f"a worker process raised {describe(error)}"))


def give(member: Member, *, whole: bool) -> dict[str, Any]:
    """A member's progress; with `whole`, all it has become."""
    if whole:
        return {"whole": member.state()}
    first = max(0, len(member.history) - 1)
    return {**{name: getattr(member, name) for name in _STATE}, "history": (first, member.history[first:])}


def take(member: Member, state: dict[str, Any]) -> None:
    """Make the member what `give` told of it."""
    if "whole" in state:
        member.load_state(state["whole"])
        return
    for name in _STATE:
        setattr(member, name, state[name])
    first, rows = state["history"]
    member.history[first:] = rows


def ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
