"""The serial tier: a plain PyTorch loop, one member at a time. It works for every job."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.data.pool import batch_rows
from shoal.engine.members.batch_stream import Stream, has_another_batch, own_batch
from shoal.engine.members.evaluation_weights import complete_average, update_average, with_evaluation_weights
from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer, make_optimizer_again, make_schedule, trying
from shoal.engine.members.step import autocast, number, run_step
from shoal.engine.optim.fused_steps import clearing, step_of
from shoal.engine.optim.gradients import clip_gradients
from shoal.engine.optim.kinds import learning_rate, needs_closure
from shoal.engine.optim.schedules import jump_to
from shoal.engine.optim.state import load_optimizer
from shoal.engine.tiers.unit import Unit, context_lost, out_of_memory
from shoal.errors import MemberError


class SerialUnit(Unit):
    """One member, trained with its own optimizer and scheduler objects."""

    tier = "serial"
    traced = False
    """Whether its step has been traced, which shows that its Python code has no side effects."""

    def __init__(self, member: Member) -> None:
        self.members = [member]
        self.member = member
        self.job = member.job
        self.model = member.model.to(member.device)
        member.saved_state.begin(self.job, self.model)
        # for a member that has trained, a new schedule starts over, which must not change state that its step reads
        with draws(member, keep=not member.batches), trying(self.job) if member.batches else nullcontext():
            self.optimizer = make_optimizer(self.job, self.model)
            self._update, self._clear_grads = step_of(self.optimizer), clearing(self.optimizer)
            self.schedule = make_schedule(self.job, self.optimizer)
        self.scaler = torch.amp.GradScaler(member.device.type) if self.job.precision == "fp16" else None
        self.closure = needs_closure(self.optimizer)
        self._stream = Stream()
        self._rate: float | None = None
        """The learning rate of the last step, if the schedule has advanced since."""
        self._stuck = False
        self._rows = 0
        """Rows of the last batch, for data that comes in batches."""
        self._failed: Exception | None = None
        """The exception that its schedule raised."""
        self._buffers = Buffers(self.model)
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._others = [p for p in self.model.parameters() if id(p) not in optimized]
        """Parameters that are not in the optimizer. It does not clear their gradients, but clipping uses them."""
        self._resume()

    def _resume(self) -> None:
        """Continue from the member's saved state."""
        member = self.member
        complete_average(member)
        if member.optimizer_state:
            load_optimizer(self.optimizer, member.optimizer_state)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # it has taken steps elsewhere; avoids torch's warning about the order of calls
        if self.schedule is not None and member.schedule_state is not None:
            self.schedule.load_state_dict(copy.deepcopy(member.schedule_state))
        if self.scaler is not None and member.scaler_state is not None:
            self.scaler.load_state_dict(member.scaler_state)
        started = member.batches > 0
        member.saved_state.attach(self.optimizer, self.schedule, self.model, member.device, started=started)

    def run(self, batches: int) -> None:
        """Run batches in the member's own random stream, which is swapped in once for all of them."""
        member = self.member
        feed = self._stream.at(member)
        with draws(member) as begin:
            for _ in range(batches):
                begin()
                if not has_another_batch(feed, self.members):
                    break
                self._batch(feed)
                member.batches += 1
                if self._failed is not None:
                    break
        self._stream.note_position(member)

    def begin_reading(self) -> None:
        if self.member.batched:
            self._stream.open(self.member)

    def end_reading(self) -> None:
        self._stream = Stream()

    def failures(self) -> dict[int, Exception]:
        return {} if self._failed is None else {0: self._failed}

    def _advance_schedule(self, *metric: float) -> None:
        """Advance the schedule by one step."""
        assert self.schedule is not None
        try:
            self.schedule.step(*metric)  # type: ignore[arg-type]  # ReduceLROnPlateau takes the watched value
        except Exception as error:
            self._failed = error

    def rates(self) -> list[float]:
        return [self._current_rate() if self._rate is None else self._rate]

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        if self.schedule is None or self.job.schedule_every != "epoch" or 0 not in values:
            return
        if isinstance(self.schedule, ReduceLROnPlateau):
            if values[0] is not None:
                self._advance_schedule(values[0])
        else:
            self._advance_schedule()

    def write_back(self, slots: list[int] | None = None) -> None:
        member = self.member
        member.optimizer_state = self.optimizer.state_dict()
        member.schedule_state = None if self.schedule is None else self.schedule.state_dict()
        member.scaler_state = None if self.scaler is None else self.scaler.state_dict()

    @contextmanager
    def evaluation_weights(self, slots: list[int]) -> Iterator[None]:
        self.write_back()
        with with_evaluation_weights(self.member):
            yield

    def load(self, slot: int, step: int | None) -> None:
        """Continue from the member's current weights and optimizer state."""
        member, self.job, self._stuck, self._failed = self.member, self.member.job, False, None
        if member.optimizer_state:
            load_optimizer(self.optimizer, member.optimizer_state)
        else:
            with draws(member, keep=False):
                again = make_optimizer_again(self.job, self.model, self.optimizer, self.schedule)
            self.optimizer, self.schedule = again
            self._update, self._clear_grads = step_of(self.optimizer), clearing(self.optimizer)
        if step is not None and self.schedule is not None:
            jump_to(self.schedule, step)

    def keep(self, slots: list[int]) -> Self:
        assert slots == [0], "a serial unit has one member"
        return self

    def _batch(self, feed: Iterator[Any]) -> None:
        """Run one batch and note its loss; if it raises or its loss is not finite, undo it."""
        member = self.member
        if self._stuck:
            member.losses.append(float("nan"))
            member.place += 1
            return
        self._buffers.save()
        rng_state = torch.get_rng_state()
        try:
            loss, logs = self._step(feed)
        except Exception as error:
            can_retry = out_of_memory(error) and member.place % self.job.accumulate == 0
            self._stuck = not can_retry
            self._buffers.restore()
            torch.set_rng_state(rng_state)
            raise MemberError(0, error) from error
        member.losses.append(loss)
        member.place += 1
        if member.batched:
            member.rows.append(self._rows)
        if logs or member.logs:
            member.log(1, {name: [number(x)] for name, x in logs.items()})
        if not _finite(loss):
            self._stuck = True
            self._buffers.restore()

    def _step(self, feed: Iterator[Any]) -> tuple[float, dict[str, Any]]:
        """Run one batch: forward, backward, and the optimizer at the end of its group. Stops at a non-finite loss."""
        place, k = self.member.place, self.job.accumulate
        group_start = place - place % k
        group = min(k, self.member.num_batches - group_start)
        batch = own_batch(feed)
        if self.member.batched:
            self._rows = batch_rows(batch)
        if place == group_start:
            self._clear()
        loss, logs = self._forward(batch)
        if self.closure:
            value: float = loss.item()
            if not _finite(value):
                return value, logs
            self._step_with_closure(batch, loss)
        else:
            value = self._backward(loss, group)
            if not _finite(value) or place + 1 < group_start + group:
                return value, logs
            self._apply()
        update_average(self.member, self.member.first_step + place // k + 1)
        if self.schedule is not None and self.job.schedule_every == "step":
            self._rate = self._current_rate()
            self._advance_schedule()
        return value, logs

    def _forward(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        if self.job.precision is None:
            return run_step(self.job, self.model, batch)
        with autocast(self.job, self.member.device):
            return run_step(self.job, self.model, batch)

    def _backward(self, loss: Tensor, group: int) -> float:
        """Run the backward pass of a batch in a group of this many, unless the loss is not finite, and return the loss.

        On a GPU the loss is read when the backward pass has been launched, so that the device does not wait.
        """
        value: float = 0.0 if loss.is_cuda else loss.item()
        if _finite(value):
            part = loss / group if group > 1 else loss
            try:
                (self.scaler.scale(part) if self.scaler is not None else part).backward()  # type: ignore[no-untyped-call]
            except Exception as error:  # such as anomaly detection, which finds NaN
                if context_lost(error) or not loss.is_cuda or _finite(loss.item()):
                    raise
        return loss.item() if loss.is_cuda else value

    def _apply(self) -> None:
        if self.scaler is None:
            self._clip()
            self._update()
            return
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a skipped step counts too; avoids the scheduler's warning

    def _step_with_closure(self, batch: Any, first: Tensor) -> None:
        """Take a step of an optimizer that evaluates the loss itself; the first evaluation is the one already made."""
        ready: list[Tensor] = [first]

        def closure() -> Tensor:
            self._clear()
            if ready:
                loss = ready.pop()
            else:
                with autocast(self.job, self.member.device):
                    loss, _ = run_step(self.job, self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip()
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]

    def _clear(self) -> None:
        self._clear_grads()
        for parameter in self._others:
            parameter.grad = None

    def _clip(self) -> None:
        clip_gradients(self.job, self.model)

    def _current_rate(self) -> float:
        return learning_rate(self.optimizer)


def serial_unit(member: Member, grads: Mapping[str, Tensor | None] | None = None) -> SerialUnit:
    """Return a unit of one member, from its current state.

    Args:
        grads: Gradients of earlier batches, if the member is in the middle of an accumulation group.
    """
    unit = SerialUnit(member)
    params = dict(unit.model.named_parameters())
    for name, grad in (grads or {}).items():
        params[name].grad = grad
    return unit


def _finite(value: float) -> bool:
    return value - value == 0.0


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers. TorchScript, which never replaces one, does not store them in a dict."""
    return dict(module._buffers.items()) if isinstance(module, torch.jit.ScriptModule) else module._buffers


class Buffers:
    """Saves a model's buffers, since a forward pass may change them before its loss turns out not to be finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        self.held: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self.noted: list[Tensor | None] = []
        self.now: list[Tensor] = []
        self.saved: list[Tensor] = []
        self.calls = 0

    def save(self) -> None:
        """Save the buffers' values, into the same memory each time."""
        self.calls += 1
        if self.calls <= 2:  # lazy layers create their buffers in the first forward pass
            module_buffers = [_buffers_of(module) for module in self.model.modules()]
            self.places = [(buffers, name) for buffers in module_buffers for name in buffers]
            self.saved = []
        if not self.places:
            return
        present = [buffers.get(name) for buffers, name in self.places]
        same = all(a is b for a, b in zip(present, self.noted, strict=False))
        if self.saved and same and all(a.shape == b.shape for a, b in zip(self.saved, self.now, strict=True)):
            torch._foreach_copy_(self.saved, self.now)
            return
        self.noted = present
        pairs = zip(self.places, present, strict=True)
        self.held = [(*owner, b) for owner, b in pairs if b is not None and not is_lazy(b)]
        self.now = [buffer for _, _, buffer in self.held]
        self.saved = [b.detach().clone() for b in self.now]

    def restore(self) -> None:
        """Restore the buffers that existed, with the values that they had."""
        with torch.no_grad():
            for (buffers, name, buffer), saved in zip(self.held, self.saved, strict=True):
                if buffer.shape != saved.shape:  # the step has resized it
                    buffer = saved.clone()
                buffer.copy_(saved)
                buffers[name] = buffer
