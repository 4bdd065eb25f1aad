"""Callbacks: functions of the user that are called with a view of one member after each of its epochs and at its
end."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.engine.members.evaluation_weights import with_evaluation_weights
from shoal.engine.members.member import Member, seeded
from shoal.engine.members.ownership import build_model
from shoal.engine.python_state.module_modes import in_eval_mode
from shoal.errors import ShoalError, describe_with_place, warn
from shoal.reporting.events import Event, Listener, title

WriteBack = Callable[[], None]
"""Copies a member's weights from its unit into its model."""


class ViewError(ShoalError, RuntimeError):
    """A view was used after its callback had returned."""


class MemberView:
    """A read-only view of one member, passed to callbacks. Everything it returns is a copy."""

    __slots__ = ("_member", "_model", "_open", "_reason", "_run", "_write_back")

    def __init__(self, member: Member, write_back: WriteBack | None = None, run: Any = None) -> None:
        self._member = member
        self._run = run
        self._write_back = write_back
        self._model: nn.Module | None = None
        self._reason: str | None = None
        self._open = True

    def __repr__(self) -> str:
        return f"MemberView({self.name!r}, {self.status}, epoch {self.epoch}, step {self.step})"

    @property
    def name(self) -> str:
        """The job's name."""
        return self._member.name

    @property
    def index(self) -> int:
        """The job's index in the list."""
        return self._member.index

    @property
    def owner(self) -> str:
        """The job's owner."""
        return self._member.job.owner

    @property
    def hparams(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters, as the job has them."""
        return dict(self._member.job.hparams)

    @property
    def settings(self) -> dict[str, Any]:
        """The job's other main settings: optimizer, batch_size, seed, and its `config`."""
        job = self._member.job
        return {"optimizer": title(job.optimizer), "batch_size": job.batch_size, "seed": job.seed, **job.config}

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._member.epoch

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self._member.step

    @property
    def status(self) -> str:
        """The status: "running", and at the member's end "done", "stopped", "diverged", "failed" or "cancelled"."""
        return self._member.status

    @property
    def error(self) -> str | None:
        """Why the member ended, in one line, if there is a reason to report."""
        return self._member.error

    @property
    def tier(self) -> str:
        """How the member is run: stacked, streams or serial."""
        return self._member.tier

    @property
    def history(self) -> list[dict[str, float]]:
        """A row for every epoch so far."""
        return [dict(row) for row in self._member.history]

    @property
    def metrics(self) -> dict[str, float]:
        """The last row of the history; empty before the first."""
        return dict(self._member.history[-1]) if self._member.history else {}

    @property
    def validations(self) -> list[dict[str, float]]:
        """A row for every validation within an epoch so far."""
        return [dict(row) for row in self._member.validations]

    @property
    def losses(self) -> list[float]:
        """The loss of each batch of the last epoch."""
        return list(self._member.losses or self._member.closed[0])

    @property
    def logs(self) -> dict[str, list[float]]:
        """What the job's step logged, for each batch of the last epoch; NaN where it did not."""
        logs = self._member.logs if self._member.losses else self._member.closed[1]
        return {name: list(values) for name, values in logs.items()}

    @property
    def model(self) -> nn.Module:
        """A copy of the network as it is now: the job's own class, in eval mode, on the CPU. Made on first access."""
        if self._model is None:
            self._check("model")
            if self._write_back is not None:
                self._write_back()
            self._model = own_copy(self._member)
        return self._model

    @property
    def run(self) -> Any:
        """The shoal.LiveRun of this member, in which a callback may stop, cancel, add and clone jobs."""
        if self._run is None:
            raise ViewError(
                "view.run: a run of shoal.train cannot be controlled; start it with shoal.start(jobs, callbacks=[...])"
            )
        return self._run

    def stop(self, reason: str = "") -> None:
        """End this member now, as "stopped"; the reason becomes its `error`. After the member's end this has no
        effect."""
        self._check("stop()")
        if self._reason is None:
            self._reason = str(reason)

    def _check(self, what: str) -> None:
        if not self._open:
            raise ViewError(f"{what} of {self.name!r} was asked for after its callback had returned; use it inside")

    def _close(self) -> None:
        self._open = False
        self._write_back = None


def own_copy(member: Member) -> nn.Module:
    """Return a copy of a member's network in eval mode on the CPU; a network that cannot be copied is built again."""
    with with_evaluation_weights(member):
        try:
            model = copy.deepcopy(member.model)
        except Exception:
            with seeded(member.job.seed, member.device):
                model = build_model(member.job)
            model.load_state_dict(member.model.state_dict())
    return in_eval_mode(model.to("cpu"))


Callback = Callable[[MemberView], Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a callback ended its member."""

    status: str
    """Either "stopped" or "failed"."""
    error: str | None
    """The reason."""


class Callbacks:
    """The callbacks of a run.

    A callback with a true attribute `only_watches`, such as a logger, neither uses the model nor stops a member. It is
    called for members of all processes, and dropped if it raises. All other callbacks are called by `after` in the
    process that trains the member, which must be the calling one, since they may change the caller's objects.

    A callback with a method `after_round` decides about all members together that have ended an epoch in a round: it is
    called without arguments, and returns how members must end, by their indices. Runs of `shoal.place` do not call it.
    """

    def __init__(self, callbacks: Sequence[Callback] | None = None, run: Any = None) -> None:
        """Check the callbacks; `run` is the shoal.LiveRun that they may send commands to."""
        checked = _checked(callbacks)
        self._run = run
        self._callbacks = [f for f in checked if not getattr(f, "only_watches", False)]
        self._watchers = [f for f in checked if getattr(f, "only_watches", False)]
        self._raised: set[tuple[int, int]] = set()
        """(callback, member) pairs where the callback has raised: it is not called for that member again."""

    def __bool__(self) -> bool:
        """Return whether there are callbacks for `after` to call."""
        return bool(self._callbacks)

    def listeners(self) -> list[Listener]:
        """Return the callbacks that only watch, as listeners."""
        return [_Watching(callback) for callback in self._watchers]

    def after(self, member: Member, write_back: WriteBack | None = None) -> Ending | None:
        """Call all callbacks, after an epoch (the member's status is "running") or at the member's end.

        Returns how the member must end, if a callback stopped it or raised. At the member's end only an exception
        counts, and only if the member had not failed already.
        """
        ending: Ending | None = None
        for index, callback in enumerate(self._callbacks):
            if (index, member.index) in self._raised:
                continue
            result = _call(callback, MemberView(member, write_back, self._run))
            if result is not None and result.status == "failed":
                self._raised.add((index, member.index))
            if ending is None or (result is not None and result.status == "failed" != ending.status):
                ending = result
        if ending is None:
            return None
        if ending.status == "stopped":
            return ending if member.status == "running" and not member.finished() else None
        if member.status in ("failed", "diverged", "cancelled"):
            warn(f"{member.name} ({member.status}): {ending.error}")
            return None
        return ending

    def after_round(self, end: Callable[[set[int], str, str | None], Any]) -> None:
        """Let callbacks decide about the members of a round. `end` is called once for all that end in the same way."""
        together: dict[Ending, set[int]] = {}
        for callback in self._callbacks:
            decide = getattr(callback, "after_round", None)
            for index, ending in (decide() if decide is not None else {}).items():
                together.setdefault(ending, set()).add(index)
        for ending, indices in together.items():
            end(indices, ending.status, ending.error)


def _call(callback: Callback, view: MemberView) -> Ending | None:
    try:
        callback(view)
    except Exception as error:
        return Ending("failed", f"the callback {title(callback)} raised {describe_with_place(error)}")
    finally:
        view._close()
    return None if view._reason is None else Ending("stopped", view._reason or None)


def _checked(callbacks: Any) -> list[Callback]:
    """Return the callbacks as a list, or raise a ValueError."""
    if callbacks is None:
        return []
    if callable(callbacks) or isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise ValueError(f"callbacks is {callbacks!r}; pass a list of functions of a member's view")
    for callback in callbacks:
        if not callable(callback):
            raise ValueError(f"a callback is {callback!r}; pass a function of a member's view")
        if isinstance(callback, type):
            raise ValueError(f"a callback is the class {callback.__qualname__}; pass an object of it")
        if inspect.iscoroutinefunction(callback):
            raise ValueError(f"the callback {title(callback)} is async and would never be awaited; use a plain def")
    return list(callbacks)


class _Watching:
    """Makes a listener of a callback that only watches."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self.__qualname__ = title(callback)

    def __call__(self, event: Event) -> None:
        if event.member is None or event.kind not in ("epoch", "leave"):
            return
        view = MemberView(event.member, None if event.kind == "leave" else self._refuse)
        try:
            self._callback(view)
            if view._reason is not None:
                self._refuse()
        finally:
            view._close()

    def _refuse(self) -> None:
        raise ViewError(f"{self.__qualname__} has only_watches set: it may not stop a member, nor ask for its model")
