"""What a job means, exactly: a plain PyTorch loop. Every tier is held to it, and it is short enough to be read.

- The network is built after `torch.manual_seed(seed)` on the CPU; what it draws in training continues from there.
  `random.seed(seed)` and `numpy.random.seed(seed)` are called before it is built, and before the first step.
- Modules keep the mode they are built in, but a network all in eval mode is put in train mode. A `train()` method of
  the network's own is called before each epoch and after each validation.
- Each epoch goes through one `torch.randperm` of a generator seeded with `data_seed`; the short last batch is used too.
- A DataLoader is iterated once an epoch, after all generators that it may draw from were seeded with a number made of
  `data_seed` and the epoch; the training's own random stream is put back after each batch. An epoch has as many batches
  as the loader gives. A validation iterates its loader in the same way, seeded as in epoch 0 of data_seed 0.
- With `accumulate=k` an optimizer step follows k batches, each batch's loss divided by the number in its group.
  Groups do not span epochs: the last group of an epoch has what is left, and is divided by that number.
- `clip_norm` and `clip_value` are over all of the model's parameters, after accumulation, and (fp16) after unscaling.
- A schedule `step -> factor` sets the learning rate of step t (the first is 0) to base * factor(t); with
  `schedule_every="epoch"` t counts whole epochs. A scheduler is stepped after every optimizer step, or after every
  whole epoch; ReduceLROnPlateau gets the watched value, in epochs that measured it. A step that fp16 skips counts.
- Validation is in eval mode, without gradients, and takes nothing from the training's random stream. val_loss is the
  mean of batch losses weighted by rows. A job's own `step` validates it too. What calls autograd itself has gradients.
- With `average`, torch's AveragedModel is updated after optimizer steps, before the schedule moves. From its first
  update on, validation, the best weights and the result have the averaged weights; training never sees them. Weights
  that are not trained, and buffers (without `use_buffers`), are the network's own.
- An optimizer with train() and eval() is in train mode in training, and in eval mode for validation, the best weights
  and the result. After validation the weights in training are put back bit for bit; train() alone would round.
- A non-finite loss ends the job as diverged, with weights, buffers and optimizer state from before that batch.
- An exception ends the job as failed: from its data, step or optimizer with buffers from before that batch, whose step
  is not counted; from its schedule after the step, which is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from shoal.data import Pool, View
from shoal.data.loader import LoaderSource
from shoal.data.pool import batch_rows
from shoal.engine.members.member import counted, open_data, seeded
from shoal.engine.members.optimizers import make_optimizer, make_schedule
from shoal.engine.members.ownership import build_model
from shoal.engine.members.step import autocast, evaluating, number, run_step
from shoal.engine.optim.kinds import has_modes, learning_rate, needs_closure, set_mode
from shoal.engine.python_state.module_modes import built_in_eval_mode, enter_train_mode, in_eval_mode
from shoal.engine.tiers.evaluate import Sheet
from shoal.environment import environment
from shoal.errors import describe
from shoal.jobs.averaging import EMA, is_due
from shoal.jobs.early_stopping import Monitor, validates
from shoal.jobs.job import Job
from shoal.results import Result
from shoal.utils.random_state import restored, seed_modules
from shoal.utils.torch_flags import training_mode
from shoal.utils.weights import load_weights


@dataclass(slots=True, eq=False)
class Training:
    """All that the loop carries along."""

    job: Job
    device: torch.device
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    monitor: Monitor
    steps_per_epoch: int
    average: AveragedModel | None = None
    step: int = 0
    epoch: int = 0
    losses: list[float] = field(default_factory=list)
    """The loss of every batch."""
    groups: list[int] = field(default_factory=list)
    """How many batches each step had."""
    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Rows, loss and logs of every batch in this epoch."""
    rate: float = float("nan")
    """The learning rate of the first parameter group at the last step."""
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    """Those within epochs."""
    best: dict[str, Tensor] | None = None
    status: str = "running"
    error: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def finished(self) -> bool:
        return self.epoch >= self.job.epochs if self.job.epochs is not None else self.step >= (self.job.steps or 0)


def solo(job: Job, device: str | torch.device = "cpu") -> Result:
    """Train one job by the plain loop."""
    state = train_alone(job, torch.device(device))
    names = {id(p): name for name, p in state.model.named_parameters() if p.requires_grad}
    trained = {names[id(p)]: value.cpu() for p, value in _take_evaluation_weights(state) if id(p) in names}
    if state.best is not None:
        load_weights(state.model, state.best)
    return Result(
        name=job.name or "job-0", job=job, model=in_eval_mode(state.model.to("cpu")), tier="reference",
        status=state.status, error=state.error, steps=state.step, history=state.history,
        validations=state.validations, optimizer_state=state.optimizer.state_dict(), training_weights=trained,
        seconds=time.perf_counter() - state.started, environment=environment(state.device),
    )  # fmt: skip


def train_alone(job: Job, device: torch.device, until: int | None = None, validate: bool = True) -> Training:
    """The plain loop, to its end or through so many steps."""
    pool = Pool(device)
    data = open_data(pool, job, "data")
    val = open_data(pool, job, "val") if job.val is not None else None
    with training_mode(), seeded(job.seed, device):
        model = build_model(job).to(device)
        built_in_eval = built_in_eval_mode(model)
        optimizer = make_optimizer(job, model)
        scaler = torch.amp.GradScaler(device.type) if job.precision == "fp16" else None
        schedule, per_epoch = make_schedule(job, optimizer), steps_per_epoch(job, data)
        state = Training(job, device, model, optimizer, schedule, scaler, Monitor.of(job), per_epoch)
        order = torch.Generator().manual_seed(job.order_seed)
        seed_modules(job.seed)
        try:
            while state.status == "running" and not state.finished():
                enter_train_mode(model, built_in_eval)
                whole = _epoch(state, data, order, until, val if validate else None)
                if state.status == "running" and validate:
                    _end_of_epoch(state, val, whole)
                elif state.status == "running":
                    state.epoch += 1
        finally:
            data.source.close()  # a loader's workers
        state.status = "done" if state.status == "running" else state.status
    return state


def steps_per_epoch(job: Job, data: View) -> int:
    """Optimizer steps in one epoch; 0 where the data does not say how many batches it has."""
    n = len(data)
    batches = n if data.source.batched else n // job.batch_size if job.drop_last else -(-n // job.batch_size)
    return -(-batches // job.accumulate)


_Read = Callable[[], tuple[Any, int]]
"""Reads a batch: it, and how many rows it has."""


def _groups(state: Training, data: View, order: torch.Generator) -> Iterator[tuple[list[_Read], bool]]:
    """An epoch's batches, in groups of an optimizer step each; whether a group is the last."""
    job, n, k, source = state.job, len(data), state.job.accumulate, data.source
    if isinstance(source, LoaderSource):
        reader = source.read(job.order_seed, state.epoch)
        while there := reader.count(k + 1):
            yield [partial(_next_batch, reader)] * min(k, there), there <= k
        return
    rows = torch.randperm(n, generator=order) if job.shuffle else torch.arange(n)
    batches = [b for b in torch.split(rows, job.batch_size) if len(b) == job.batch_size or not job.drop_last]
    for start in range(0, len(batches), k):
        taken: list[_Read] = [partial(_take, state, data, rows) for rows in batches[start : start + k]]
        yield taken, start + k >= len(batches)


def _next_batch(reader: Iterator[Any]) -> tuple[Any, int]:
    batch = next(reader)
    return batch, batch_rows(batch)


def _take(state: Training, data: View, rows: Tensor) -> tuple[Any, int]:
    return data.source.take(data.rows(rows), seed=state.job.order_seed, epoch=state.epoch), len(rows)


def _epoch(state: Training, data: View, order: torch.Generator, until: int | None, val: View | None) -> bool:
    """One epoch, or as much of it as the job's steps allow; whether it was a whole one."""
    job = state.job
    state.records = []
    for group, last in _groups(state, data, order):
        if job.steps is not None and state.step >= job.steps:
            return False
        if until is not None and state.step >= until:
            state.status = "stopped"
            return False
        state.groups.append(len(group))
        _step(state, group)
        if state.status == "running" and val is not None and not last:
            _within_epoch(state, val)
        if state.status != "running":
            return False
    return True


def _within_epoch(state: Training, val: View) -> None:
    """A validation in the middle of an epoch, where it is due: best weights, early stop."""
    job = state.job
    if job.val_every_steps is None or state.step % job.val_every_steps or state.finished():
        return
    try:
        row = {"epoch": state.epoch + 1, "step": state.step, **_validate(state, val)}
    except Exception as error:
        state.status, state.error = "failed", describe(error)
        return
    state.validations.append(row)
    best, stop = state.monitor.see(row)
    if best and job.keep == "best":
        state.best = _copied(state)
    state.status = "stopped" if stop else state.status


def _copied(state: Training) -> dict[str, Any]:
    with _evaluation_weights(state):
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.model.state_dict().items()}


def _step(state: Training, group: list[_Read]) -> None:
    """One optimizer step over a group of batches."""
    job, model, optimizer = state.job, state.model, state.optimizer
    optimizer.zero_grad()
    model.zero_grad()  # parameters that the optimizer does not have
    for number_in_group, read in enumerate(group, 1):
        before = [(module, name, b, b.clone()) for module, name, b in _buffers(model)]
        try:
            batch, rows = read()
            with _drawing(state):
                with autocast(job, state.device):
                    loss, logs = run_step(job, model, batch)
                if torch.isfinite(loss) and not needs_closure(optimizer):  # checkpointing draws again in here
                    mean = loss / len(group) if len(group) > 1 else loss
                    (mean if state.scaler is None else state.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
            if not torch.isfinite(loss):
                state.status, state.error = "diverged", f"the loss became {number(loss)} after step {state.step}"
            elif needs_closure(optimizer):
                _closure_step(state, batch, loss)
            elif number_in_group == len(group):
                _apply(state)
        except Exception as error:
            state.status, state.error = "failed", describe(error)
        if state.status != "running":
            for module, name, buffer, value in before:
                module._buffers[name] = buffer.copy_(value) if buffer.shape == value.shape else value
            return
        state.losses.append(number(loss))
        state.records.append((rows, {"loss": number(loss), **{k: number(v) for k, v in logs.items()}}))
    state.step += 1
    _update_average(state)
    state.rate = learning_rate(optimizer)
    if state.schedule is not None and job.schedule_every == "step":
        _move_schedule(state)


def _update_average(state: Training) -> None:
    rule = state.job.average
    if rule is None or not is_due(rule, state.step, state.steps_per_epoch):
        return
    if state.average is None:
        torchs: Any = get_ema_multi_avg_fn(rule.decay) if isinstance(rule, EMA) else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]

        def update(averages: Any, values: Any, count: Any) -> None:
            if averages[0].is_floating_point() or averages[0].is_complex():  # of whole numbers there is no mean
                torchs(averages, values, int(count))  # of a tensor, torch would round 1 / (count + 1) to float32

        state.average = AveragedModel(state.model, multi_avg_fn=update, use_buffers=rule.use_buffers)
    state.average.update_parameters(state.model)


@torch.no_grad()
def _take_evaluation_weights(state: Training) -> list[tuple[Tensor, Tensor]]:
    """Put the weights that validation uses into the network; which tensors have others now, and what they were."""
    before: list[tuple[Tensor, Tensor]] = []
    if has_modes(state.optimizer):
        before = [(p, p.clone()) for p in state.model.parameters()]
        set_mode(state.optimizer, "eval")
    elif (average := state.average) is not None:
        trained = zip(state.model.parameters(), average.module.parameters(), strict=True)
        pairs: list[tuple[Tensor, Tensor]] = [(tensor, value) for tensor, value in trained if tensor.requires_grad]
        if average.use_buffers:
            pairs += zip(state.model.buffers(), average.module.buffers(), strict=True)
        pairs = [(tensor, value) for tensor, value in pairs if tensor.is_floating_point() or tensor.is_complex()]
        before = [(tensor, tensor.clone()) for tensor, _ in pairs]
        for tensor, value in pairs:
            tensor.copy_(value)
    return before


@contextmanager
def _evaluation_weights(state: Training) -> Iterator[None]:
    """Inside, the network has the weights that validation uses; after, those in training again."""
    before = _take_evaluation_weights(state)
    try:
        yield
    finally:
        if has_modes(state.optimizer):
            set_mode(state.optimizer, "train")
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def _move_schedule(state: Training, *metric: float) -> None:
    try:
        state.schedule.step(*metric)  # type: ignore[union-attr,arg-type]  # ReduceLROnPlateau takes the watched value
    except Exception as error:
        state.status, state.error = "failed", describe(error)


@contextmanager
def _drawing(state: Training) -> Iterator[None]:
    """On a GPU random calls are counted: a draw is a function of (seed, batches so far, call, element)."""
    with nullcontext() if state.device.type == "cpu" else counted(state.job.seed, state.device) as mode:
        if mode is not None:
            mode.begin(len(state.losses))
        yield


def _end_of_epoch(state: Training, val: View | None, whole: bool) -> None:
    """The history's row, validation, the epoch's schedule, best weights, early stop."""
    job = state.job
    state.epoch += 1
    total = sum(rows for rows, _ in state.records)
    row: dict[str, float] = {"epoch": state.epoch, "step": state.step}
    for name in dict.fromkeys(name for _, values in state.records for name in values):
        row[name] = sum(rows * values.get(name, float("nan")) for rows, values in state.records) / total
    if val is not None and validates(job, state.epoch, state.finished()):
        try:
            row |= _validate(state, val)
        except Exception as error:
            state.status, state.error = "failed", describe(error)
            return
    state.history.append(row | {"lr": state.rate, "seconds": time.perf_counter() - state.started})
    state.error = state.monitor.missing(row, val is None or "val_loss" in row)
    if state.error is not None:
        state.status = "failed"
        return
    value = state.monitor.value(row)
    best, stop = state.monitor.see(row)
    if best and job.keep == "best":
        state.best = _copied(state)
    if whole and state.schedule is not None and job.schedule_every == "epoch":
        if not isinstance(state.schedule, ReduceLROnPlateau):
            _move_schedule(state)
        elif value is not None:
            _move_schedule(state, value)
    if stop and state.status == "running" and not state.finished():
        state.status = "stopped"


def _validate(state: Training, val: View) -> dict[str, float]:
    job, model, sheet = state.job, state.model, Sheet(state.job)
    alone = torch.random.fork_rng(devices=[state.device] if state.device.type == "cuda" else [])
    with alone, restored(), _evaluation_weights(state), evaluating(model), autocast(job, state.device):
        for batch in val.feed(job.batch_size):
            sheet.add(model, batch)
        return sheet.values()


def _apply(state: Training) -> None:
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    _clip(state)
    if state.scaler is None:
        state.optimizer.step()
    else:
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer._opt_called = True  # type: ignore[attr-defined]  # a skipped step counts: no warning from the schedule


def _closure_step(state: Training, batch: Any, loss: Tensor) -> None:
    """LBFGS and its like evaluate the loss as often as they want; the first evaluation is the one already made."""
    ready = [loss]

    def closure() -> Tensor:
        state.optimizer.zero_grad()
        state.model.zero_grad()
        with autocast(state.job, state.device):
            again = ready.pop() if ready else run_step(state.job, state.model, batch)[0]
        again.backward()  # type: ignore[no-untyped-call]
        _clip(state)
        return again

    state.optimizer.step(closure)  # type: ignore[arg-type]


def _clip(state: Training) -> None:
    if state.job.clip_norm is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), state.job.clip_norm)
    if state.job.clip_value is not None:
        nn.utils.clip_grad_value_(state.model.parameters(), state.job.clip_value)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer with the module that has it: a step may put another tensor in its place."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not nn.parameter.is_lazy(buffer):
                yield module, name, buffer
