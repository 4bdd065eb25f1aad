"""The exact meaning of a job, as a plain PyTorch training loop. Every faster way to run a job must give its results.

- The network is built on the CPU after `torch.manual_seed(seed)`; the random numbers of training continue from there.
  `random.seed(seed)` and `numpy.random.seed(seed)` are called before it is built and again before the first step.
- Modules keep the mode that they are built in, but a network that is entirely in eval mode is put in train mode. If the
  network overrides `train()`, that method is called before each epoch and after each validation.
- Each epoch follows one `torch.randperm` from a generator seeded with `data_seed`; a shorter last batch is used too.
- A DataLoader is iterated once per epoch. Before that, all generators that it may draw from are seeded with a number
  made from `data_seed` and the epoch; after each batch, the random state of the training is restored. An epoch has as
  many batches as the loader yields. Validation iterates its loader likewise, seeded as for epoch 0 of data_seed 0.
- With `accumulate=k`, an optimizer step follows every k batches, and each loss is divided by the size of its group.
  Groups do not span epochs: the last group of an epoch has the remaining batches, and divides by their number.
- `clip_norm` and `clip_value` apply to all parameters of the model, after accumulation and, for fp16, after unscaling.
- A schedule `step -> factor` sets the learning rate of step t (the first is 0) to base * factor(t); with
  `schedule_every="epoch"`, t counts complete epochs. A scheduler is stepped after every optimizer step, or after every
  complete epoch; ReduceLROnPlateau gets the watched value, in epochs that measured it. A step that fp16 skips counts.
- Validation runs in eval mode, without gradients unless the code calls autograd itself, and leaves the random state of
  the training alone. val_loss is the mean of batch losses, weighted by rows. A job's own `step` validates it too.
- With `average`, torch's AveragedModel is updated after optimizer steps, before the schedule. From its first update on,
  validation, the best weights and the result use the averaged weights; training never does. Weights that are not
  trained, and buffers (without `use_buffers`), are those of the network.
- An optimizer with train() and eval() methods is in eval mode for validation, the best weights and the result. After
  validation, the training weights are restored bit for bit, because its train() alone would round them.
- A non-finite loss ends the job as diverged; weights, buffers and optimizer state are those from before that batch.
- An exception ends the job as failed. If data, step or optimizer raised it, buffers are those from before that batch,
  and its step is not counted; if the schedule raised it, the step is counted.
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
from shoal.engine.tiers.evaluate import ValidationTotals
from shoal.environment import environment
from shoal.errors import describe_with_place
from shoal.jobs.averaging import EMA, is_due
from shoal.jobs.early_stopping import Monitor, validates
from shoal.jobs.job import Job
from shoal.results import Result
from shoal.utils.random_state import restored, seed_modules
from shoal.utils.torch_flags import training_mode
from shoal.utils.weights import load_weights


@dataclass(slots=True, eq=False)
class Training:
    """The state of one plain training loop."""

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
    """The loss of every batch so far."""
    groups: list[int] = field(default_factory=list)
    """The number of batches in each optimizer step."""
    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """For every batch of the current epoch: its number of rows, and its loss and logs."""
    rate: float = float("nan")
    """The learning rate of the first parameter group at the last step."""
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    """The results of validations within epochs."""
    best: dict[str, Tensor] | None = None
    status: str = "running"
    error: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def finished(self) -> bool:
        return self.epoch >= self.job.epochs if self.job.epochs is not None else self.step >= (self.job.steps or 0)


def solo(job: Job, device: str | torch.device = "cpu") -> Result:
    """Train one job alone with the plain loop and return its result."""
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
    """Run the plain loop until the job ends, or only for its first `until` optimizer steps."""
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
                complete = _epoch(state, data, order, until, val if validate else None)
                if state.status == "running" and validate:
                    _end_of_epoch(state, val, complete)
                elif state.status == "running":
                    state.epoch += 1
        finally:
            data.source.close()  # ends the worker processes of a DataLoader
        state.status = "done" if state.status == "running" else state.status
    return state


def steps_per_epoch(job: Job, data: View) -> int:
    """Return the number of optimizer steps in one epoch, or 0 if the data does not say how many batches it has."""
    n = len(data)
    batches = n if data.source.batched else n // job.batch_size if job.drop_last else -(-n // job.batch_size)
    return -(-batches // job.accumulate)


_Read = Callable[[], tuple[Any, int]]
"""A function that reads the next batch and returns it with its number of rows."""


def _groups(state: Training, data: View, order: torch.Generator) -> Iterator[tuple[list[_Read], bool]]:
    """Yield the batches of each optimizer step in an epoch, and whether that step is the last one."""
    job, n, k, source = state.job, len(data), state.job.accumulate, data.source
    if isinstance(source, LoaderSource):
        reader = source.read(job.order_seed, state.epoch)
        while num_ready := reader.count(k + 1):
            yield [partial(_next_batch, reader)] * min(k, num_ready), num_ready <= k
        return
    rows = torch.randperm(n, generator=order) if job.shuffle else torch.arange(n)
    batches = [b for b in torch.split(rows, job.batch_size) if len(b) == job.batch_size or not job.drop_last]
    for start in range(0, len(batches), k):
        reads: list[_Read] = [partial(_take, state, data, rows) for rows in batches[start : start + k]]
        yield reads, start + k >= len(batches)


def _next_batch(reader: Iterator[Any]) -> tuple[Any, int]:
    batch = next(reader)
    return batch, batch_rows(batch)


def _take(state: Training, data: View, rows: Tensor) -> tuple[Any, int]:
    return data.source.take(data.rows(rows), seed=state.job.order_seed, epoch=state.epoch), len(rows)


def _epoch(state: Training, data: View, order: torch.Generator, until: int | None, val: View | None) -> bool:
    """Train for one epoch, or until the job has all its steps, and return whether the epoch is complete."""
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
            _validate_within_epoch(state, val)
        if state.status != "running":
            return False
    return True


def _validate_within_epoch(state: Training, val: View) -> None:
    """Validate within an epoch if `val_every_steps` says so, and update the best weights and the early stopping."""
    job = state.job
    if job.val_every_steps is None or state.step % job.val_every_steps or state.finished():
        return
    try:
        row = {"epoch": state.epoch + 1, "step": state.step, **_validate(state, val)}
    except Exception as error:
        state.status, state.error = "failed", describe_with_place(error)
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
    """Take one optimizer step over a group of batches."""
    job, model, optimizer = state.job, state.model, state.optimizer
    optimizer.zero_grad()
    model.zero_grad()  # also parameters that the optimizer does not have
    for number_in_group, read in enumerate(group, 1):
        saved_buffers = [(module, name, b, b.clone()) for module, name, b in _buffers(model)]
        try:
            batch, rows = read()
            with _drawing(state):
                with autocast(job, state.device):
                    loss, logs = run_step(job, model, batch)
                if torch.isfinite(loss) and not needs_closure(optimizer):  # backward may draw again (checkpointing)
                    mean = loss / len(group) if len(group) > 1 else loss
                    (mean if state.scaler is None else state.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
            if not torch.isfinite(loss):
                state.status, state.error = "diverged", f"the loss became {number(loss)} after step {state.step}"
            elif needs_closure(optimizer):
                _closure_step(state, batch, loss)
            elif number_in_group == len(group):
                _apply(state)
        except Exception as error:
            state.status, state.error = "failed", describe_with_place(error)
        if state.status != "running":
            for module, name, buffer, value in saved_buffers:
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
        torch_average: Any = get_ema_multi_avg_fn(rule.decay) if isinstance(rule, EMA) else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]

        def update(averages: Any, values: Any, count: Any) -> None:
            if averages[0].is_floating_point() or averages[0].is_complex():  # integers have no mean
                torch_average(averages, values, int(count))  # a tensor's 1 / (count + 1) would be rounded to float32

        state.average = AveragedModel(state.model, multi_avg_fn=update, use_buffers=rule.use_buffers)
    state.average.update_parameters(state.model)


@torch.no_grad()
def _take_evaluation_weights(state: Training) -> list[tuple[Tensor, Tensor]]:
    """Load the weights that validation uses into the network, and return the replaced tensors with their old values."""
    replaced: list[tuple[Tensor, Tensor]] = []
    if has_modes(state.optimizer):
        replaced = [(p, p.clone()) for p in state.model.parameters()]
        set_mode(state.optimizer, "eval")
    elif (average := state.average) is not None:
        trained = zip(state.model.parameters(), average.module.parameters(), strict=True)
        pairs: list[tuple[Tensor, Tensor]] = [(tensor, value) for tensor, value in trained if tensor.requires_grad]
        if average.use_buffers:
            pairs += zip(state.model.buffers(), average.module.buffers(), strict=True)
        pairs = [(tensor, value) for tensor, value in pairs if tensor.is_floating_point() or tensor.is_complex()]
        replaced = [(tensor, tensor.clone()) for tensor, _ in pairs]
        for tensor, value in pairs:
            tensor.copy_(value)
    return replaced


@contextmanager
def _evaluation_weights(state: Training) -> Iterator[None]:
    """Give the network the weights that validation uses, and on exit its training weights again."""
    replaced = _take_evaluation_weights(state)
    try:
        yield
    finally:
        if has_modes(state.optimizer):
            set_mode(state.optimizer, "train")
        with torch.no_grad():
            for tensor, value in replaced:
                tensor.copy_(value)


def _move_schedule(state: Training, *metric: float) -> None:
    try:
        state.schedule.step(*metric)  # type: ignore[union-attr,arg-type]  # ReduceLROnPlateau takes the watched value
    except Exception as error:
        state.status, state.error = "failed", describe_with_place(error)


@contextmanager
def _drawing(state: Training) -> Iterator[None]:
    """Number the random calls on a GPU, where each draw is a function of (seed, batches so far, call, element)."""
    with nullcontext() if state.device.type == "cpu" else counted(state.job.seed, state.device) as mode:
        if mode is not None:
            mode.begin(len(state.losses))
        yield


def _end_of_epoch(state: Training, val: View | None, complete: bool) -> None:
    """Validate, extend the history, step the epoch's schedule, and update the best weights and the early stopping."""
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
            state.status, state.error = "failed", describe_with_place(error)
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
    if complete and state.schedule is not None and job.schedule_every == "epoch":
        if not isinstance(state.schedule, ReduceLROnPlateau):
            _move_schedule(state)
        elif value is not None:
            _move_schedule(state, value)
    if stop and state.status == "running" and not state.finished():
        state.status = "stopped"


def _validate(state: Training, val: View) -> dict[str, float]:
    job, model, totals = state.job, state.model, ValidationTotals(state.job)
    forked = torch.random.fork_rng(devices=[state.device] if state.device.type == "cuda" else [])
    with forked, restored(), _evaluation_weights(state), evaluating(model), autocast(job, state.device):
        for batch in val.feed(job.batch_size):
            totals.add(model, batch)
        return totals.values()


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
    """Step an optimizer such as LBFGS, which may evaluate the loss several times; its first evaluation is `loss`."""
    evaluated = [loss]

    def closure() -> Tensor:
        state.optimizer.zero_grad()
        state.model.zero_grad()
        with autocast(state.job, state.device):
            new_loss = evaluated.pop() if evaluated else run_step(state.job, state.model, batch)[0]
        new_loss.backward()  # type: ignore[no-untyped-call]
        _clip(state)
        return new_loss

    state.optimizer.step(closure)  # type: ignore[arg-type]


def _clip(state: Training) -> None:
    if state.job.clip_norm is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), state.job.clip_norm)
    if state.job.clip_value is not None:
        nn.utils.clip_grad_value_(state.model.parameters(), state.job.clip_value)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every buffer with the module that holds it, since a step may replace the buffer by another tensor."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not nn.parameter.is_lazy(buffer):
                yield module, name, buffer
