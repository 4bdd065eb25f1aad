"""The interface between a tier and the run loop: a unit is one or more members that advance together, batch by
batch."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.data.source import cloned
from shoal.engine.members.member import Member, draws
from shoal.engine.members.step import autocast, evaluating
from shoal.engine.tiers.threads import Threads
from shoal.errors import MemberError

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe


class Unit(ABC):
    """Members of one tier that run together, each at its own position in its own epoch.

    A member's `order`, `place`, `losses` and `logs` say where it is; the unit updates them. A member whose loss is not
    finite keeps the weights, buffers and optimizer state from before that batch, and takes no further step. An
    exception in one member's step is raised as MemberError(slot, cause), with that batch undone for it. An exception in
    a member's optimizer or schedule ends that member alone, see `failures`.
    """

    tier: str
    members: list[Member]

    @abstractmethod
    def run(self, batches: int) -> None:
        """Run the next `batches` batches of every member; no member's epoch ends before that.

        Raises:
            MemberError: If one member's step raises; the batch is undone for all of them.
            Alone: If some members cannot run the batch together with others; it is undone for all of them.
        """

    @property
    def form(self) -> str:
        """The tier, and whether the step is compiled, as run folders and the performance cache name it."""
        return self.tier

    def begin_reading(self) -> None:  # noqa: B027  # most data needs no opening
        """Open data that members read together with those of other units. Called before any unit's turn."""

    def end_reading(self) -> None:  # noqa: B027  # most data needs no opening
        """Close what `begin_reading` opened, since the unit has no members any more."""

    @abstractmethod
    def rates(self) -> list[float]:
        """Return the learning rate of each member's first parameter group at its last step."""

    @abstractmethod
    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        """Advance the per-epoch schedules of these slots; the watched value is for ReduceLROnPlateau."""

    def failures(self) -> dict[int, Exception]:
        """Return the exceptions of members' optimizers or schedules, by slot. These members cannot take another step.

        `run` stops after the batch in which one occurs. An optimizer step that raised is not counted; one after which
        the schedule raised is.
        """
        return {}

    def alone(self, slots: list[int]) -> list[Unit]:
        """Remove these members, and return a unit for each of them that continues from its current state."""
        raise NotImplementedError

    @abstractmethod
    def write_back(self, slots: list[int] | None = None) -> None:
        """Write weights, buffers and optimizer state into these members, for `Member.state`; None: all of them."""

    def look_ahead(self, ending: list[int]) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare what comes next while the device is busy: the next epoch's rows, and the end of the members in
        `ending`."""

    @abstractmethod
    def keep(self, slots: list[int]) -> Unit:
        """Return a unit with only these members, with their current state."""

    def accepts(self, recipe: Recipe, beside: Sequence[Recipe] = ()) -> bool:
        """Return whether a member of this recipe may join now, together with `beside`, which were accepted before
        it."""
        return False

    def join(self, recipes: Sequence[Recipe]) -> Unit:
        """Return a unit with these members added, each of which was accepted `beside` those before it."""
        raise NotImplementedError

    @property
    def at_step_boundary(self) -> bool:
        """Whether all members are between optimizer steps, and the unit holds no partial results of theirs."""
        return all(member.at_step_boundary for member in self.members)

    def forget_evaluations(self) -> None:  # noqa: B027  # most have none
        """Drop the programs of evaluations, since Python values that members' code reads have changed."""

    def begin_epoch(self, orders_MN: Tensor) -> None:
        """Start an epoch for all members with these rows: [M, n], or [1, n] if they are the same for all."""
        for slot, member in enumerate(self.members):
            member.order = orders_MN[slot] if len(orders_MN) > 1 else orders_MN[0]
            member.place, member.losses, member.logs = 0, [], {}

    def losses(self) -> Tensor:
        """Return the losses of this epoch, [M, batches], float64 on the CPU, for members at the same position."""
        return torch.tensor([member.losses for member in self.members], dtype=torch.float64)

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        """Return the eval-mode outputs of these members on one shared batch of inputs: a pytree of [M, B, ...].

        If their shapes differ it is `Unlike`, a list with one output per member. This general implementation calls
        member after member, after `write_back`; some tiers override it.
        """
        outputs = []
        self.write_back(slots)
        for slot in range(len(self.members)) if slots is None else slots:
            member = self.members[slot]
            member.model.to(member.device)
            with draws(member, keep=False), evaluating(member.model), autocast(member.job, member.device):
                outputs.append(evaluated(member.model, partial(member.model, *cloned(inputs)))[0])
        return stack_outputs(outputs)

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        """Run the eval-mode step of these members on one shared batch; None: each member must be evaluated separately.

        Buffers that the step changes stay changed, as in the solo loop.
        """
        return None

    def undo_validation(self) -> Callable[[], None]:
        """Return a function that restores the current buffers, for a validation that is not completed."""
        return _nothing

    def evaluation_weights(self, slots: list[int]) -> AbstractContextManager[None]:
        """Let `validate` and `write_back` of these members use the weights of validation inside this context.

        They may differ from those in training, see `engine/members/evaluation_weights.py`.
        """
        return nullcontext()

    def adopt_state(self, slots: list[int]) -> None:  # noqa: B027  # most train the members' own models
        """Copy weights and buffers from these members' own models, which validation may have changed."""


def _nothing() -> None:
    return


@dataclass(slots=True)
class Findings:
    """The results of members on one validation batch."""

    losses: Tensor
    """[M]"""
    logs: dict[str, Tensor]
    """[M] each."""
    outputs: Any
    """A pytree of [M, B, ...]; None if no metric needs it."""


def stack_outputs(outputs: list[Any]) -> Any:
    """Stack the outputs of several members into one pytree with the member axis first, or return `Unlike` if they
    differ."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [leaf for leaf, _ in flat]
    can_stack = all(spec == flat[0][1] for _, spec in flat) and all(
        _same_shape(x, y) for row in leaves for x, y in zip(leaves[0], row, strict=True)
    )
    if not can_stack:
        return Unlike(outputs)
    columns = [None if column[0] is None else torch.stack(list(column)) for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(columns, flat[0][1])


def map_fields(call: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """Return a dataclass like the first of these, with what `call` returns for each field of all of them."""
    made = copy.copy(values[0])
    for each in dataclasses.fields(made):
        object.__setattr__(made, each.name, call([getattr(value, each.name) for value in values]))  # it may be frozen
    return made


def is_own_dataclass(value: Any) -> bool:
    """Return whether a value is a dataclass that is not a pytree, as the outputs of transformers are."""
    return dataclasses.is_dataclass(value) and pytree.tree_structure(value).is_leaf()


def map_tensors(call: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Replace the tensors in outputs, also in dataclasses."""

    def replaced(leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf):
            return map_fields(lambda values: map_tensors(call, values[0]), [leaf])
        return call(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(replaced, outputs)


def _same_shape(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype
    return x is None and y is None


class Unlike(list[Any]):
    """Outputs of members that differ in shape: one for each, not stacked."""


def member_output(outputs: Any, index: int) -> Any:
    """Return one member's output from what `Unit.outputs` returned. A None in it, such as an output that no metric
    needs, stays None."""
    if isinstance(outputs, Unlike):
        return outputs[index]
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[index], outputs)


class Alone(Exception):
    """Raised with the slots of members whose own part of a stacked step raises, and why.

    A plain loop decides whether that ends them: their own Python may handle it, as in `try: cholesky(K) except:
    cholesky(K + jitter)`.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(next(iter(self.reasons.values())))


@dataclass(slots=True)
class Outcome:
    """The result of one unit's turn."""

    seconds: float
    error: MemberError | None = None
    alone: dict[int, str] = field(default_factory=dict)
    """Slots of members that must continue by themselves, and why."""
    full: str | None = None
    """The message if memory was full: what could be done is done, and nothing is lost. The exception itself is not
    kept, since it would keep the memory alive."""


LOST = ("device-side assert", "illegal memory access", "misaligned address", "unspecified launch failure")
"""Messages of CUDA after which a process has lost its context."""


def context_lost(error: BaseException | None) -> bool:
    """Return whether an exception means that nothing on the device can be reached any more."""
    return isinstance(error, RuntimeError) and any(message in str(error) for message in LOST)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception means that memory is full, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def memory_message(error: BaseException) -> str:
    """Return the message of an out-of-memory exception in one line."""
    return (str(error).splitlines() or ["no room"])[0][:120]


def evaluated(model: nn.Module, call: Callable[[], Any], gradients: bool = False) -> tuple[Any, bool]:
    """Call a model in evaluation, and return the result and whether it needed gradients.

    It is first called without gradients. A call that uses autograd itself (for the residual of a differential equation,
    or for forces) raises then; it is repeated with gradients, and its results are detached.

    Args:
        gradients: The call is known to need gradients.
    """
    if not gradients:
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_lazy(buffer)]
        rng_state = torch.get_rng_state()
        try:
            with torch.no_grad():
                return call(), False
        except Exception as error:
            if out_of_memory(error) or context_lost(error):
                raise
            torch.set_rng_state(rng_state)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
    with torch.enable_grad():
        return pytree.tree_map_only(Tensor, Tensor.detach, call()), True


def _size_of(unit: Unit) -> Hashable:
    """Return a key that is equal for units whose steps take about the same time."""
    model, job = unit.members[0].model, unit.members[0].job
    weights = sum(param.numel() for param in model.parameters() if not is_lazy(param))
    return unit.tier, len(unit.members), type(model), weights, job.batch_size


class Executor:
    """Runs units on the device. This one runs them one after another."""

    most_threads = 0
    """The most of torch's threads that a step may use, if one is in use now; 0: the number in use."""

    def __init__(self, most_threads: int = 0) -> None:
        self.most_threads = most_threads
        self._threads: dict[Hashable, Threads] = {}
        """By `_size_of` a unit, so that of many units that are alike only the first tries."""

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        """Run each unit for its number of batches. An error in one does not keep the others from running.

        Args:
            meanwhile: Work of the host for the next turn. Executors that wait for a device call it once at most.
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
                self._threads.setdefault(_size_of(unit), Threads(self.most_threads)).run(unit, batches)
            else:
                unit.run(batches)
        except Alone as caught:
            alone = caught.reasons
        except MemberError as caught:
            if context_lost(caught.cause):
                raise caught.cause from caught  # it is unknown here which member caused it
            error, full = (None, memory_message(caught.cause)) if out_of_memory(caught.cause) else (caught, None)
        except Exception as caught:
            if not out_of_memory(caught):
                raise
            full = memory_message(caught)
        return Outcome(perf_counter() - start, error, alone, full)
