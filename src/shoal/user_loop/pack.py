"""`shoal.Pack`, which steps many networks together in the user's own training loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.data import View
from shoal.engine.members.member import Member, draws
from shoal.engine.proof.group import explain_reason
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.forward import joined
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack
from shoal.engine.tiers.unit import Unlike
from shoal.engine.tracing.patches import Untraceable
from shoal.errors import JobError, describe, describe_with_place, warn
from shoal.user_loop import _batches
from shoal.user_loop._batches import Batches, FixedBatchSource, LoopUnit, Losses, check_ids, in_order, step_alone
from shoal.user_loop._changes import LoopChanges
from shoal.user_loop._settings import device_of, make_member, refill, settings_of_each, settings_of_new_member
from shoal.utils.torch_flags import training_mode

UNDECIDED = ("", "decided at its first step")


class Pack:
    """Many networks that train together in your own loop: you supply the batches, and `step` trains all members.

    One step does for each member what a plain loop does: zero_grad, forward, backward, clip, optimizer step, schedule
    step. Members with the same computation are stacked, the others run one after another; `tiers` says which and why.
    Every setting but `models`, `device` and `seeds` is one value for all members, or a list with one value for each.

    Args:
        models: The networks. They are copied, never trained in place.
        optimizer: Any torch.optim.Optimizer class.
        hparams: Keyword arguments of the optimizer.
        loss: The loss function; the step is then loss(model(*inputs), target). Set either this or `step`.
        step: The member's own step, (model, batch) -> loss; the batch is the argument of `Pack.step`.
        params: A function from a model to the optimizer's params; None means model.parameters().
        clip_norm: Scale each member's gradients down to at most this norm.
        clip_value: Clip each element of each member's gradients to at most this absolute value.
        precision: None, "bf16" or "fp16", as in a job.
        schedule: step -> factor, or optimizer -> torch lr_scheduler; it is stepped after every step.
        device: Where to train; None means the device of the first model.
        seeds: A seed for each member's random draws (such as dropout), which are those of a plain loop after
            torch.manual_seed(seed). None means each member's id.

    Examples:
        >>> pack = Pack([nn.Linear(2, 1), nn.Linear(2, 1)], hparams=[{"lr": 0.1}, {"lr": 0.2}], loss=nn.MSELoss())
        >>> pack.step(torch.zeros(4, 2), torch.zeros(4, 1)).shape, pack.tiers[1]
        (torch.Size([2]), ('stacked', 'one computation'))
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        optimizer: Callable[..., Optimizer] | Sequence[Callable[..., Optimizer]] = torch.optim.AdamW,
        hparams: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        loss: Callable[[Any, Any], Tensor] | Sequence[Callable[[Any, Any], Tensor]] | None = None,
        step: Callable[[nn.Module, Any], Any] | Sequence[Callable[[nn.Module, Any], Any]] | None = None,
        params: Callable[[nn.Module], Any] | Sequence[Callable[[nn.Module], Any] | None] | None = None,
        clip_norm: float | Sequence[float | None] | None = None,
        clip_value: float | Sequence[float | None] | None = None,
        precision: Literal["bf16", "fp16"] | None = None,
        schedule: Callable[[Any], Any] | Sequence[Callable[[Any], Any] | None] | None = None,
        device: str | torch.device | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        self._settings = {
            "optimizer": optimizer, "hparams": hparams or {}, "loss": loss, "step": step, "params": params,
            "clip_norm": clip_norm, "clip_value": clip_value, "precision": precision, "schedule": schedule,
            "seeds": seeds,
        }  # fmt: skip
        chosen = settings_of_each(self._settings, models)
        self.device = device_of(models, device)
        self._trace_cache = TraceCache()
        self._changes = LoopChanges(self._trace_cache)
        self._members: dict[int, Member] = {}
        self._units: list[LoopUnit] = []
        self._waiting: list[int] = []
        self._begins: dict[int, int] = {}
        """The steps at which the schedules of waiting members begin."""
        self._tiers, self._next = dict[int, tuple[str, str]](), 0
        lines: list[str] = []
        for model, settings in zip(models, chosen, strict=True):
            try:
                self._add_member(model, settings)
            except JobError as error:
                lines += error.lines
                self._next += 1
        if lines:
            raise JobError(*lines)

    # --- members --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        tiers = [self.tiers[id][0] or "undecided" for id in self.ids]
        return f"Pack({len(self)}: {', '.join(f'{tiers.count(t)} {t}' for t in dict.fromkeys(tiers))})"

    @property
    def ids(self) -> list[int]:
        """The members' ids, in the order of losses and outputs. An id is never used for another member."""
        return list(self._members)

    @property
    def tiers(self) -> dict[int, tuple[str, str]]:
        """id -> (tier, reason). A member's tier is decided when it first sees a batch."""
        return {id: self._tiers.get(id, UNDECIDED) for id in self._members}

    @property
    def status(self) -> dict[int, str]:
        """id -> "running", "diverged" (its loss was not finite) or "failed" (its step raised)."""
        return {id: member.status for id, member in self._members.items()}

    @property
    def errors(self) -> dict[int, str]:
        """id -> why a member has stopped, for members that have."""
        return {id: member.error for id, member in self._members.items() if member.error is not None}

    def add(self, model: nn.Module, *, seed: int | None = None, **settings: Any) -> int:
        """Add a copy of a network, which begins at the next step, and return its id.

        Settings are those of `Pack`: hparams, optimizer, loss, step, params, clip_norm, clip_value, schedule. They
        default to the setting for all members; a setting that was given as a list must be given here too.
        """
        return self._add_member(model, settings_of_new_member({**self._settings, "seeds": seed}, settings))

    def _add_member(self, model: nn.Module, settings: dict[str, Any]) -> int:
        id, data = self._next, View(FixedBatchSource(self.device))
        self._members[id] = make_member(model, id, data, self.device, settings)
        self._waiting.append(id)
        self._next += 1
        return id

    def remove(self, id: int) -> nn.Module:
        """Remove a member and return its network as trained so far. The others continue unchanged."""
        model = self.member(id)
        unit_and_slot = self._unit_of(id)
        if unit_and_slot is not None:
            self._drop(unit_and_slot[0], [unit_and_slot[1]])
        self._waiting = [waiting for waiting in self._waiting if waiting != id]
        del self._members[id]
        self._changes.drop(id)
        self._tiers.pop(id, None)
        return model

    def member(self, id: int) -> nn.Module:
        """Return a copy of a member's current network: of its original class, in train mode, on the pack's device."""
        return copy.deepcopy(self._written(id).model)

    def stacked_state(self) -> dict[str, Tensor]:
        """Return a copy of all members' weights and buffers by name, [M, ...], in the order of `ids`."""
        stack = self._stack_of_all()
        if stack is not None:
            return stack.stacked_state()
        return _batches.stacked_state([self._written(id).model for id in self.ids])

    def optimizer_state(self, id: int) -> dict[str, Any]:
        """Return a copy of a member's optimizer state, in the form of the optimizer's own state_dict()."""
        member = self._written(id)
        if not member.optimizer_state:  # the member has not stepped yet
            with draws(member, keep=False):
                return SerialUnit(member).optimizer.state_dict()
        return copy.deepcopy(member.optimizer_state)

    def load(
        self,
        id: int,
        state_dict: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Replace a member's weights in place by others of the same shapes; nothing is traced or built again.

        Args:
            id: The member. A member that had stopped runs again.
            state_dict: As `model.load_state_dict` takes it.
            optimizer_state: As from the optimizer's own state_dict(); None means a fresh state.
            step: Continue its schedule, a function of the step, as after this many steps; None leaves it.
            seed: Restart its random draws from this seed; None continues them.
        """
        refill(self._written(id), state_dict, optimizer_state, seed)
        unit_and_slot = self._unit_of(id)
        if unit_and_slot is not None:
            unit_and_slot[0].load(unit_and_slot[1], step)
            return
        if id not in self._waiting:
            self._waiting.append(id)
        if step is not None:
            self._begins[id] = step

    def _unit_of(self, id: int) -> tuple[LoopUnit, int] | None:
        """Return the unit that has a member, and the member's slot in it."""
        matches = (
            (unit, slot) for unit in self._units for slot, member in enumerate(unit.members) if member.index == id
        )
        return next(matches, None)

    def _written(self, id: int) -> Member:
        """Return the member, with its weights and optimizer state written into its own model."""
        check_ids([id], self.ids)
        unit_and_slot = self._unit_of(id)
        if unit_and_slot is not None:
            unit_and_slot[0].write_back([unit_and_slot[1]])
        return self._members[id]

    def _drop(self, unit: LoopUnit, slots: Sequence[int]) -> list[LoopUnit]:
        """Remove members from a unit after writing back their state, and return the remaining unit, if there is one."""
        unit.write_back(list(slots))
        staying = [slot for slot in range(len(unit.members)) if slot not in slots]
        return self._replace(unit, [unit.keep(staying)] if staying else [])

    def _replace(self, unit: LoopUnit, units: Sequence[LoopUnit]) -> list[LoopUnit]:
        index = self._units.index(unit)
        self._units[index : index + 1] = units
        return list(units)

    # --- one step -------------------------------------------------------------------------------------------------

    @training_mode()
    def step(self, *batch: Any, per_member: bool = False, members: Sequence[int] | None = None) -> Tensor:
        """Take one training step of every member, and return their losses [M], in the order of `ids`.

        All members see the same batch, or with `per_member=True` each its own, where every tensor has the member axis
        first. With `members`, only those ids take the step, and losses and batches are in their order.

        A member whose loss is not finite keeps its previous weights and stops; so does one whose own step raises, with
        a warning. Their losses are NaN from then on. If the batch fails for all members, the error is raised and
        nothing has changed.
        """
        stepping_ids = self.ids if members is None else check_ids(members, self.ids)
        leaves, spec = self._read(batch, per_member, len(stepping_ids))
        self._look_for_changes()
        batches = Batches(leaves, spec, per_member, stepping_ids)
        if self._waiting:
            self._assign_waiting(batches)
        parts, failed = self._step_units(batches)
        if failed and len(failed) == sum(self._members[id].status == "running" for id in stepping_ids):
            raise next(iter(failed.values()))  # the batch or the loop is at fault
        losses = in_order(parts, stepping_ids, self.device)
        self._end_members(losses, failed, stepping_ids)
        return losses

    def _step_units(self, batches: Batches) -> tuple[Losses, dict[int, Exception]]:
        """Step the members that have a batch, and return their losses and, by id, the errors that some of them raised.

        If only some members of a stack step, they step as a separate stack.
        """
        losses: Losses = []
        failed: dict[int, Exception] = {}
        waiting = list(self._units)
        while waiting:
            unit = waiting.pop(0)
            if not (slots := [slot for slot, member in enumerate(unit.members) if member.index in batches.places]):
                continue
            if isinstance(unit, SerialUnit):
                unit_losses, errors = step_alone(unit, batches)
                losses += unit_losses
                failed |= errors
                continue
            part = unit.part(slots) if len(slots) < len(unit.members) else unit
            try:
                if not part.knows(batches.key):
                    part.learn(batches.key, [batches.of(member) for member in part.members], batches.per_member)
                part_losses, errors = part.step(batches.key, batches.rows(part))
            except (Untraceable, NotStackable) as refusal:
                waiting = [*self._dissolve(unit, f"on a batch of {batches.shapes()}: {refusal}"), *waiting]
                continue
            except Exception as error:
                raising = part.raising([batches.of(member) for member in part.members])
                if not raising:  # they may work when they run alone
                    waiting = [*self._dissolve(unit, f"a stacked step raised {describe(error)}"), *waiting]
                elif len(raising) < len(slots):
                    waiting = [*self._drop(unit, [slots[slot] for slot in raising]), *waiting]
                failed |= {part.members[slot].index: cause for slot, cause in raising.items()}
                continue
            if part is not unit:
                unit.take(slots, part)
            losses.append(([member.index for member in part.members], part_losses))
            failed |= errors
        return losses, failed

    def _read(self, batch: tuple[Any, ...], per_member: bool, count: int) -> tuple[list[Tensor], pytree.TreeSpec]:
        if not self._members:
            raise ValueError("the pack has no members; add one first")
        leaves, spec = pytree.tree_flatten(batch[0] if len(batch) == 1 else batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(f"the batch holds a {type(leaf).__name__}; pass tensors")
            if per_member and (leaf.ndim == 0 or len(leaf) != count):
                raise ValueError(
                    f"the batch has a tensor of shape {list(leaf.shape)}, and per_member=True wants the member axis "
                    f"first: {count} of them"
                )
        if not leaves or (len(leaves) == 1 and any(member.job.loss is not None for member in self._members.values())):
            raise ValueError(f"the batch has {len(leaves)} tensors; pass inputs and targets: pack.step(x, y)")
        return [leaf.to(self.device) for leaf in leaves], spec

    def _assign_waiting(self, batches: Batches) -> None:
        """Assign waiting members to a stack with the same computation, to a new stack, or to run alone."""
        members = [self._members[id] for id in self._waiting if id in batches.places]
        for member in members:
            batches.give(member)
        groups = self._changes.group(members)
        for candidates in groups:
            reason = explain_reason(candidates, groups)
            if candidates.stackable and self._join(candidates.recipes, batches):
                reason = "one computation"
            elif candidates.stackable:
                self._units.append(GivenBatchesStack(candidates.recipes, self._trace_cache))
            else:
                self._units += [SerialUnit(member) for member in candidates.members]
            for member in candidates.members:
                self._tiers[member.index] = ("stacked" if candidates.stackable else "serial", reason)
        self._waiting = [id for id in self._waiting if id not in batches.places]
        for member in members:
            unit_and_slot = self._unit_of(member.index)
            if member.index in self._begins and unit_and_slot is not None:
                unit_and_slot[0].load(unit_and_slot[1], self._begins.pop(member.index))

    def _look_for_changes(self) -> None:
        """Make members wait for a new assignment if something that their steps read has changed."""
        for unit in self._changes.stale(self._units):
            self._waiting += [member.index for member in unit.members]
            self._drop(unit, list(range(len(unit.members))))

    def _join(self, recipes: list[Any], batches: Batches) -> bool:
        for unit in [unit for unit in self._units if isinstance(unit, GivenBatchesStack)]:
            with suppress(Untraceable, NotStackable):
                if unit.key(batches.of(recipes[0].member)) == recipes[0].key:  # the unit's members may have no batch
                    self._replace(unit, [unit.join(recipes)])
                    return True
        return False

    def _dissolve(self, unit: GivenBatchesStack, reason: str) -> list[LoopUnit]:
        alone = unit.dissolve()
        self._tiers |= {one.member.index: ("serial", reason) for one in alone}
        return self._replace(unit, alone)

    def _end_members(self, losses: Tensor, failed: dict[int, Exception], stepped: Sequence[int]) -> None:
        """Stop members whose step raised or whose loss is not finite; they keep what they have."""
        if not failed and bool(torch.isfinite(losses).all()):
            return
        for id, loss in zip(stepped, losses.tolist(), strict=True):
            member = self._members[id]
            if member.status != "running" or (math.isfinite(loss) and id not in failed):
                continue
            member.status = "failed" if id in failed else "diverged"
            member.step -= id not in failed
            diverged = f"the loss became {loss} after step {member.step}"
            member.error = describe_with_place(failed[id]) if id in failed else diverged
            self._tiers[id] = (self._tiers[id][0], f"it stopped: {member.error}")
        for unit in list(self._units):
            if ended := [slot for slot, member in enumerate(unit.members) if member.status != "running"]:
                self._drop(unit, ended)
        for id, error in failed.items():
            text = f"member {id} has stopped: its step raised {describe_with_place(error)}"
            warn(text)

    # --- looking --------------------------------------------------------------------------------------------------

    def eval(self, *inputs: Any) -> Any:
        """Return the eval-mode outputs of all members for the same inputs, [M, ...], in the order of `ids`.

        Raises:
            ValueError: If the members' outputs have different shapes.
        """
        if not self._members:
            raise ValueError("the pack has no members; add one first")
        inputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), inputs)
        self._look_for_changes()
        stack = self._stack_of_all()
        if stack is not None:
            with stack.evaluation_weights([]):
                outputs = stack.outputs(inputs)
            return joined(outputs) if isinstance(outputs, Unlike) else outputs
        return _batches.outputs_of([self._written(id) for id in self._members], inputs)

    def _stack_of_all(self) -> GivenBatchesStack | None:
        """Return the stack that contains all members in their order, or None if there is none."""
        stacks = (unit for unit in self._units if isinstance(unit, GivenBatchesStack))
        return next((stack for stack in stacks if [m.index for m in stack.members] == self.ids), None)
