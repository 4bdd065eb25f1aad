"""The job: one training run, written as its owner would run it alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.errors import JobError
from shoal.jobs.averaging import EMA, SWA
from shoal.jobs.loaders import DefaultInt, batch_size_of, gives_batches, loader_problems
from shoal.jobs.loop_variables import remember
from shoal.jobs.metric_direction import direction
from shoal.utils.numpy_values import plain_int, plain_number, plain_numbers

Step = Callable[[nn.Module, Any], Any]

RESERVED = ("epoch", "step", "loss", "val_loss", "lr", "seconds")
"""Names of the history's own columns, which no metric may have."""


_length: ContextVar[int | None] = ContextVar("length", default=None)


@contextmanager
def default_epochs(epochs: int) -> Iterator[None]:
    """Give jobs without epochs and steps this number of epochs inside the context, as a search decides their length."""
    token = _length.set(epochs)
    try:
        yield
    finally:
        _length.reset(token)


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """End a job when a value stops improving.

    Examples:
        >>> EarlyStop("accuracy", mode="max", patience=3).better(0.9, 0.8)
        True
    """

    metric: str = "val_loss"
    """The value to watch: "loss", "val_loss", a name in `metrics`, or a name in a step's logs."""
    mode: Literal["min", "max"] | None = None
    """Whether smaller or larger is better; None takes it from the metric's name ("min" for a loss or an error, "max"
    for an accuracy or a score)."""
    patience: int = 3
    """How many measurements in a row may fail to improve before the job is stopped."""
    min_delta: float = 0.0
    """An improvement smaller than this does not count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience", plain_int(self.patience))
        object.__setattr__(self, "min_delta", plain_number(self.min_delta))
        if self.mode is None and isinstance(self.metric, str):
            object.__setattr__(self, "mode", direction(self.metric))
        if self.mode is None:
            raise JobError(
                f"EarlyStop: the name {self.metric!r} does not say which way is better; set mode='min' or 'max'"
            )
        if self.mode not in ("min", "max"):
            raise JobError(f"EarlyStop: mode is {self.mode!r}; it says which way is better: use 'min' or 'max'")
        if not _is_int(self.patience) or self.patience < 1:
            raise JobError(f"EarlyStop: patience is {self.patience!r}; use a whole number, 1 or more")
        if not self.min_delta >= 0:
            raise JobError(f"EarlyStop: min_delta is {self.min_delta!r}; use 0 or more")

    def better(self, value: float, best: float | None) -> bool:
        """Return whether `value` improves on `best`; NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best + self.min_delta if self.mode == "max" else value < best - self.min_delta


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Job:
    """One training run: model, data, loss, optimizer, schedule, length, seed.

    `shoal.solo`, a plain PyTorch loop, defines what these fields mean together.
    """

    model: nn.Module | Callable[[], nn.Module]
    """A function that builds the network under the job's seed, or an nn.Module, which is copied. Weights that the
    function would return again, such as those of a shared backbone, are copied too, so that each job trains its own."""
    data: Any = field(repr=False)
    """Tensors or arrays in any tuple, dict or nesting with the same first dimension, a map-style Dataset, a
    DataLoader, or an IterableDataset."""
    val: Any = field(default=None, repr=False)
    """Validation data, in any of these forms; None means no validation."""
    collate: Callable[[list[Any]], Any] | None = None
    """How items of a Dataset become a batch; None means torch's default_collate. For Datasets only."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """The loss function; the step is then loss(model(*batch[:-1]), batch[-1]). Set either this or `step`."""
    step: Step | None = None
    """The job's own step: (model, batch) -> loss, or (loss, logs) with a dict of numbers that go into the history."""
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    """Any torch.optim.Optimizer class."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer, such as lr."""
    params: Callable[[nn.Module], Any] | None = None
    """A function from the model to the optimizer's params, such as parameter groups; None means model.parameters()."""
    schedule: Callable[[Any], Any] | None = None
    """A function step -> factor of the learning rate (the first step is 0), or optimizer -> torch lr_scheduler."""
    schedule_every: Literal["step", "epoch"] = "step"
    """When the schedule is stepped: after each optimizer step, or after each complete epoch."""
    batch_size: int = DefaultInt(64)
    """The number of rows in a batch. A DataLoader has its own."""
    epochs: int | None = None
    """The number of passes over the data. Set either this or `steps`."""
    steps: int | None = None
    """The number of optimizer steps. Set either this or `epochs`."""
    seed: int = 0
    """Seeds the network's weights and its random operations."""
    data_seed: int | None = None
    """Seeds the order of the rows, random Datasets and DataLoaders. None means `seed`, or 0 if data is a DataLoader
    or an IterableDataset, so that jobs with the same loader read the same batches."""
    shuffle: bool = True
    """Use a new random order of the rows each epoch; if False, keep their order."""
    drop_last: bool = False
    """Leave out a shorter last batch of each epoch instead of training on it."""
    accumulate: int = 1
    """The number of batches in one optimizer step, which uses the mean of their losses. An epoch may end in a
    smaller group."""
    clip_norm: float | None = None
    """Scale gradients down to at most this norm over all parameters of the model; None means no clipping."""
    clip_value: float | None = None
    """Clip each element of the gradients to at most this absolute value; None means no clipping."""
    precision: Literal["bf16", "fp16"] | None = None
    """None uses the model's own dtype; "bf16" and "fp16" use autocast, "fp16" with a gradient scaler."""
    average: EMA | SWA | None = None
    """An average of the weights, shoal.EMA(...) or shoal.SWA(...), which validation, `keep` and the result use
    instead of the weights; None means no average."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Name -> (outputs, targets) -> number, over the whole validation set."""
    val_every: int = 1
    """Validate after every this many epochs, and after the last."""
    val_every_steps: int | None = None
    """Also validate within epochs, after every this many optimizer steps; None means only at the ends of epochs."""
    stop: EarlyStop | None = None
    """When to end early; None means never."""
    keep: Literal["last", "best"] = "last"
    """Which weights to return: the last, or the best by the value that `stop` watches (without it, the smallest
    val_loss)."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Other values to record, such as {"dropout": 0.1, "width": 256}, which results, tables and loggers show.
    Training does not use them."""
    name: str = ""
    """A unique name in the list of jobs; if empty, the job is named by its index."""
    owner: str = ""
    """The owner of the job, for policies that share a device among owners."""
    priority: int = 0
    """Jobs with a larger priority go first if jobs wait for a device. It never changes a result."""

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            self.epochs = _length.get()
        for name in _INT_FIELDS:
            setattr(self, name, plain_int(getattr(self, name)))
        if isinstance(self.data, DataLoader) and isinstance(self.batch_size, DefaultInt):
            self.batch_size = batch_size_of(self.data, self.batch_size)
        for name in ("clip_norm", "clip_value", "shuffle", "drop_last"):
            setattr(self, name, plain_number(getattr(self, name)))
        for name in ("hparams", "config"):
            if isinstance(getattr(self, name), Mapping):
                setattr(self, name, plain_numbers(getattr(self, name)))
        lines = self.problems()
        if lines:
            label = f"job {self.name!r}" if self.name else "job"
            raise JobError(*(f"{label}: {line}" for line in lines))
        remember(self, self.functions().values())

    def problems(self) -> list[str]:
        """Return one line for each invalid field, with the value, the rule and the fix."""
        return [*_shape_problems(self), *loader_problems(self), *_length_problems(self), *_training_problems(self)]

    def functions(self) -> dict[str, Any]:
        """Return the job's own code by what it is for."""
        names = ("model", "loss", "step", "collate", "params", "schedule")
        metrics = {f"metric {name!r}": metric for name, metric in self.metrics.items()}
        return {name: getattr(self, name) for name in names} | metrics

    @property
    def order_seed(self) -> int:
        """The seed of the row order: `data_seed`, or if that is None `seed`, or 0 for a loader."""
        if self.data_seed is not None:
            return self.data_seed
        return 0 if gives_batches(self.data) else self.seed


_INT_FIELDS = (
    "batch_size",
    "epochs",
    "steps",
    "seed",
    "data_seed",
    "accumulate",
    "val_every",
    "val_every_steps",
    "priority",
)
"""Fields that are whole numbers, as Python's int or another library's type."""


_EXPECTED = {
    "optimizer": "a torch.optim class such as torch.optim.AdamW",
    "loss": "a function (outputs, targets) -> loss, such as F.cross_entropy",
    "step": "a function (model, batch) -> loss",
    "schedule": "a function: step -> factor, or optimizer -> lr_scheduler, such as lambda opt: StepLR(opt, 10)",
}
"""What a field takes that is no function."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape_problems(job: Job) -> list[str]:
    """Return a line for each field of the wrong type."""
    lines = []
    if not callable(job.model) or (isinstance(job.model, type) and not issubclass(job.model, nn.Module)):
        lines.append(f"model is {_short(job.model)}; pass an nn.Module, or a function that builds one")
    if job.data is None:
        lines.append("data is None; pass tensors, a Dataset or a DataLoader")
    if job.loss is None and job.step is None:
        lines.append(
            "it has neither loss nor step; set loss=F.cross_entropy or the like, or step=(model, batch) -> loss"
        )
    if job.loss is not None and job.step is not None:
        lines.append("it has both loss and step, and step would hide loss; remove one of them")
    for name in ("loss", "step", "collate", "params", "schedule", "optimizer"):
        value = getattr(job, name)
        if isinstance(value, Optimizer):
            kind = type(value).__name__
            lines.append(f"{name} is an instance of {kind}; pass the class {kind}, and its settings as hparams={{...}}")
        elif not callable(value) and (value is not None or name == "optimizer"):
            lines.append(f"{name} is {_short(value)}; pass {_EXPECTED.get(name, 'a function')}")
    if isinstance(job.loss, type) and issubclass(job.loss, nn.Module):
        kind = job.loss.__name__
        lines.append(f"loss is the class {kind}; pass an instance, {kind}()")
    for name, example in (
        ("hparams", '{"lr": 1e-3}'),
        ("metrics", '{"accuracy": accuracy}'),
        ("config", '{"dropout": 0.1}'),
    ):
        if not isinstance(getattr(job, name), Mapping):
            lines.append(f"{name} is {_short(getattr(job, name))}; pass a dict, such as {example}")
    if isinstance(job.config, Mapping):
        lines += _config_problems(job.config)
    if isinstance(job.metrics, Mapping):
        lines += [f"metric {n!r} is {_short(f)}; pass a function" for n, f in job.metrics.items() if not callable(f)]
        lines += [
            f"metric {n!r} is the class {f.__name__}; pass an object of it, with its arguments: {f.__name__}(...)"
            for n, f in job.metrics.items()
            if isinstance(f, type) and hasattr(f, "compute")
        ]
        lines += [
            f"metric {n!r} has the name of a history column; call it something else"
            for n in job.metrics
            if n in RESERVED
        ]
    return lines


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    lines = [f"config has the key {key!r}; use a string" for key in config if not isinstance(key, str)]
    return lines + [
        f"config[{key!r}] is {_short(value)}; use a number, a string, True, False or None"
        for key, value in config.items()
        if not isinstance(value, (bool, int, float, str, type(None)))
    ]


def _length_problems(job: Job) -> list[str]:
    """Return a line for each invalid length, size or seed."""
    lines = []
    if (job.epochs is None) == (job.steps is None):
        both = "both epochs and steps" if job.epochs is not None else "neither epochs nor steps"
        lines.append(f"it has {both}; set one of the two")
    for name in ("epochs", "steps"):
        value = getattr(job, name)
        if value is not None and (not _is_int(value) or value < 0):
            lines.append(f"{name} is {value!r}; use a whole number, 0 or more")
    for name in ("batch_size", "accumulate", "val_every"):
        value = getattr(job, name)
        if not _is_int(value) or value < 1:
            lines.append(f"{name} is {value!r}; use a whole number, 1 or more")
    if job.val_every_steps is not None and (not _is_int(job.val_every_steps) or job.val_every_steps < 1):
        lines.append(f"val_every_steps is {job.val_every_steps!r}; use a whole number, 1 or more, or None")
    for name in ("seed", "data_seed"):
        value = getattr(job, name)
        if not (value is None and name == "data_seed") and not (_is_int(value) and -(2**63) <= value < 2**64):
            lines.append(f"{name} is {value!r}; use a whole number of 64 bits")
    return lines


def _training_problems(job: Job) -> list[str]:
    """Return a line for each invalid setting of the training."""
    lines = []
    for name, allowed in (
        ("schedule_every", ("step", "epoch")),
        ("keep", ("last", "best")),
        ("precision", (None, "bf16", "fp16")),
    ):
        value = getattr(job, name)
        if not any(value is a or value == a for a in allowed):
            lines.append(f"{name} is {value!r}; use one of {', '.join(repr(a) for a in allowed)}")
    for name in ("shuffle", "drop_last"):
        if not isinstance(getattr(job, name), bool):
            lines.append(f"{name} is {getattr(job, name)!r}; use True or False")
    for name in ("clip_norm", "clip_value"):
        value = getattr(job, name)
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            lines.append(f"{name} is {value!r}; use a number above 0, or None for no clipping")
    if job.clip_norm is not None and job.clip_value is not None:
        lines.append("it has both clip_norm and clip_value; set one of the two")
    if not isinstance(getattr(job, "stop"), (EarlyStop, type(None))):  # noqa: B009  # annotations are not checked
        lines.append(f"stop is {_short(job.stop)}; use shoal.EarlyStop(...)")
    if not isinstance(getattr(job, "average"), (EMA, SWA, type(None))):  # noqa: B009
        lines.append(f"average is {_short(job.average)}; use shoal.EMA(...) or shoal.SWA(...)")
    for name in ("name", "owner"):
        if not isinstance(getattr(job, name), str):
            lines.append(f"{name} is {_short(getattr(job, name))}; use a string")
    if not _is_int(job.priority):
        lines.append(f"priority is {job.priority!r}; use a whole number")
    return lines


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
