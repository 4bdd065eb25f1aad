"""What a tier provides to the run loop: a unit is one or more members that advance in lockstep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member, draws
from shoal.engine.members.step import autocast, evaluating
from shoal.errors import MemberError

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe


class Unit(ABC):
    """Members of one tier that run together. Each has its own place in its own epoch.

    A member's `order`, `place`, `losses` and `logs` say where it is; a unit moves them on. A member whose loss turns
    non-finite keeps the weights, buffers and optimizer state from before that batch, and takes no further step. An
    exception in one member's step is raised as MemberError(slot, cause), with that batch undone for it. What a member's
    optimizer or schedule raises ends that member alone, see `failures`.
    """

    tier: str
    members: list[Member]

    @abstractmethod
    def run(self, batches: int) -> None:
        """Run the next `batches` batches of every member; no member's epoch ends before that.

        Raises:
            MemberError: when one member's step raises; the batch is undone for all of them.
            Alone: when some members cannot take the batch together with others; it is undone for all of them.
        """

    def begin_reading(self) -> None:  # noqa: B027  # most data is there
        """Before any unit's turn: open what its members read together with those of other units."""

    def end_reading(self) -> None:  # noqa: B027  # most data is there
        """Give up what `begin_reading` opened: it has no members any more."""

    @abstractmethod
    def rates(self) -> list[float]:
        """The learning rate of each member's first parameter group at its last step."""

    @abstractmethod
    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        """Move the epoch schedules of these slots on; the watched value, where measured, is for ReduceLROnPlateau."""

    def failures(self) -> dict[int, Exception]:
        """Members, by slots, that can take no further step, since their optimizer or their schedule raised.

        `run` stops where there is one, after a batch of all members. An optimizer step that raised is not counted; one
        after which the schedule raised is.
        """
        return {}

    def alone(self, slots: list[int]) -> list[Unit]:
        """Take these members out, each into a unit of its own that continues from where it is."""
        raise NotImplementedError

    @abstractmethod
    def write_back(self, slots: list[int] | None = None) -> None:
        """Write weights, buffers and optimizer state into these members, for `Member.state`; None: all of them."""

    def look_ahead(self, ending: list[int]) -> None:  # noqa: B027  # most have nothing to make ready
        """While the device is busy: make ready for what comes next, the next epoch's rows and the end of some."""

    @abstractmethod
    def keep(self, slots: list[int]) -> Unit:
        """The same training with only these members."""

    def accepts(self, recipe: Recipe, beside: Sequence[Recipe] = ()) -> bool:
        """Whether a member of this recipe may join as it is, together with these, which were accepted before it."""
        return False

    def join(self, recipes: Sequence[Recipe]) -> Unit:
        """The same training with these members too, each accepted `beside` those before it."""
        raise NotImplementedError

    @property
    def at_step_boundary(self) -> bool:
        """Whether all members are between optimizer steps, with nothing of theirs held back by the unit."""
        return all(member.at_step_boundary for member in self.members)

    def forget_evaluations(self) -> None:  # noqa: B027  # most have none
        """Python values that members' code reads have changed: programs of evaluations hold no longer."""

    def begin_epoch(self, orders_MN: Tensor) -> None:
        """Start an epoch for all members with these rows, [M, n] or, the same for all, [1, n]."""
        for slot, member in enumerate(self.members):
            member.order = orders_MN[slot] if len(orders_MN) > 1 else orders_MN[0]
            member.place, member.losses, member.logs = 0, [], {}

    def losses(self) -> Tensor:
        """The losses of this epoch, [M, batches], float64 on the CPU, for members that are at the same place."""
        return torch.tensor([member.losses for member in self.members], dtype=torch.float64)

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        """Eval-mode forward of these members over one shared batch of inputs: a pytree of [M, B, ...].

        Where members disagree on shapes it is `Unlike`, a list with one output per member.
        This general way goes member by member, after `write_back`; tiers that know better replace it.
        """
        outputs = []
        self.write_back(slots)
        for slot in range(len(self.members)) if slots is None else slots:
            member = self.members[slot]
            member.model.to(member.device)
            with draws(member, keep=False), evaluating(member.model), autocast(member.job, member.device):
                outputs.append(evaluated(member.model, partial(member.model, *inputs))[0])
        return stack_outputs(outputs)

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        """Eval-mode step of these members on one shared batch, all at once; None: they must be asked one by one.

        Buffers that the step changes stay changed, as in the solo loop.
        """
        return None

    def undo_validation(self) -> Callable[[], None]:
        """A function that puts back the buffers as they are now, for a validation that does not come to its end."""
        return _nothing

    def evaluation_weights(self, slots: list[int]) -> AbstractContextManager[None]:
        """Inside, `validate` and `write_back` of these members use the weights of validation, which may be others than
        those in training: see `engine/members/evaluation_weights.py`."""
        return nullcontext()

    def adopt_state(self, slots: list[int]) -> None:  # noqa: B027  # most train the members' own models
        """Copy weights and buffers from these members' own models, which validation may have changed."""


def _nothing() -> None:
    return


@dataclass(slots=True)
class Findings:
    """What members make of one validation batch."""

    losses: Tensor
    """[M]"""
    logs: dict[str, Tensor]
    """[M] each."""
    outputs: Any
    """A pytree of [M, B, ...]; None where no metric asks for it."""


def stack_outputs(outputs: list[Any]) -> Any:
    """Outputs of several members as one pytree with the member axis first, or `Unlike` where they do not agree."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [leaf for leaf, _ in flat]
    alike = all(spec == flat[0][1] for _, spec in flat) and all(
        _alike(x, y) for row in leaves for x, y in zip(leaves[0], row, strict=True)
    )
    if not alike:
        return Unlike(outputs)
    columns = [None if column[0] is None else torch.stack(list(column)) for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(columns, flat[0][1])


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype
    return x is None and y is None


class Unlike(list[Any]):
    """Outputs of members that do not agree in shape: one for each, not stacked."""


def member_output(outputs: Any, place: int) -> Any:
    """One member's output out of what `Unit.outputs` gave; a None in it, such as an output that no metric asks for, is
    every member's."""
    if isinstance(outputs, Unlike):
        return outputs[place]
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[place], outputs)


class Alone(Exception):
    """Members, by slots, whose own part of a stacked step raises, and what. Whether that ends them is for a plain loop
    to say: their own Python may handle it, as in `try: cholesky(K) except: cholesky(K + jitter)`."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(next(iter(self.reasons.values())))


@dataclass(slots=True)
class Outcome:
    """What became of one unit's turn."""

    seconds: float
    error: MemberError | None = None
    alone: dict[int, str] = field(default_factory=dict)
    """Slots of members that have to continue by themselves, and why."""
    full: str | None = None
    """The memory was full, in these words: what could be done is done, and nothing is lost. The exception itself would
    keep what filled it."""


LOST = ("device-side assert", "illegal memory access", "misaligned address", "unspecified launch failure")
"""What CUDA says when a process has lost its context."""


def context_lost(error: BaseException | None) -> bool:
    """Whether an exception says that nothing on the device can be reached any more."""
    return isinstance(error, RuntimeError) and any(said in str(error) for said in LOST)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that memory is full, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def words(error: BaseException) -> str:
    """What an exception of full memory says, in a line."""
    return (str(error).splitlines() or ["no room"])[0][:120]


def evaluated(model: nn.Module, call: Callable[[], Any], gradients: bool = False) -> tuple[Any, bool]:
    """What a call of an evaluated model gives, and whether it took gradients.

    It is made without them, as evaluation is. A call that needs them, since it asks autograd itself (for the residual
    of a differential equation, or for forces), raises then: it is made again, with gradients, and its results are
    detached. `gradients`: that is known already.
    """
    if not gradients:
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_lazy(buffer)]
        drawn = torch.get_rng_state()
        try:
            with torch.no_grad():
                return call(), False
        except Exception as error:
            if out_of_memory(error) or context_lost(error):
                raise
            torch.set_rng_state(drawn)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
    with torch.enable_grad():
        return pytree.tree_map_only(Tensor, Tensor.detach, call()), True


SMALL_SECONDS = 2e-3
"""A batch that takes less gains nothing from threads."""
TRIES = 4
"""Batches that are timed with one thread and with several, in turns; the first of each takes longer."""
BETTER, WORSE = 0.9, 2.0
"""Times the seconds with one thread, below which several are taken, and above which they are given up at once."""
AGAIN_SECONDS = 10.0
"""After so long it is tried again: other programs come and go."""


class Threads:
    """How many of torch's threads a unit's steps use: one, or all that there are where that is faster.

    On a busy machine several threads wait for each other at every operator, and can take thirty times as long as one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._several: bool | None = None
        """Whether several are faster; None: not known yet."""
        self._one_seconds: list[float] = []
        self._several_seconds: list[float] = []
        self._until = perf_counter() + AGAIN_SECONDS

    def run(self, unit: Unit, batches: int) -> None:
        """`unit.run`, with the threads that are best; while that is not known, its first batches show it."""
        if perf_counter() > self._until:
            self._begin()
        while batches and self._several is None:
            self._try(unit)
            batches -= 1
        if batches:
            seconds = self._timed(unit, batches, self._most if self._several else 1) / batches
            self._several = self._several and seconds < min(self._one_seconds)

    def _try(self, unit: Unit) -> None:
        one, several = self._one_seconds, self._several_seconds
        if len(one) <= len(several):
            one.append(self._timed(unit, 1, 1))
            if len(one) > 1 and min(one) < SMALL_SECONDS:
                self._several = False
            return
        several.append(self._timed(unit, 1, self._most))
        if len(several) == TRIES or several[-1] > WORSE * min(one):
            self._several = min(several) < BETTER * min(one)

    @staticmethod
    def _timed(unit: Unit, batches: int, threads: int) -> float:
        torch.set_num_threads(threads)
        start = perf_counter()
        try:
            unit.run(batches)
        finally:
            torch.set_num_threads(1)
        return perf_counter() - start


class Executor:
    """Gives units their turns on the device. This one runs them one after another."""

    most_threads = 0
    """What a step may use of torch's threads, with one in use now; 0: as many as are in use."""

    def __init__(self, most_threads: int = 0) -> None:
        self.most_threads = most_threads
        self._threads: dict[int, Threads] = {}
        """By the place of a unit's first member."""

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        """Run each unit for its number of batches; an error in one does not keep the others from running.

        `meanwhile` is for executors that wait for a device: the host's work on what comes next, done once at most.
        """
        return [self._turn(unit, batches) for unit, batches in work]

    def forget(self) -> None:
        """Free what was made for units that may be gone."""

    def _turn(self, unit: Unit, batches: int) -> Outcome:
        start = perf_counter()
        error, full = None, None
        alone: dict[int, str] = {}
        try:
            if self.most_threads > 1:
                first = unit.members[0].index
                self._threads.setdefault(first, Threads(self.most_threads)).run(unit, batches)
            else:
                unit.run(batches)
        except Alone as caught:
            alone = caught.reasons
        except MemberError as caught:
            if context_lost(caught.cause):
                raise caught.cause from caught  # whose it was cannot be seen from here
            error, full = (None, words(caught.cause)) if out_of_memory(caught.cause) else (caught, None)
        except Exception as caught:
            if not out_of_memory(caught):
                raise
            full = words(caught)
        return Outcome(perf_counter() - start, error, alone, full)
