"""Evaluate trained networks on a test set, all in one program where possible, and combine them as an ensemble."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from shoal.data import Pool, Rows
from shoal.data.pool import batch_rows
from shoal.engine.members.step import TARGETS, call_model, number, targets_of
from shoal.engine.recipes.recipe import Evaluation as Computation
from shoal.engine.tiers.evaluate import ValidationTotals, join_batches
from shoal.engine.tiers.stacked.forward import Forward
from shoal.engine.tiers.unit import map_tensors
from shoal.errors import JobError, NoSuchJob, ShoalError, describe
from shoal.jobs.job import Job
from shoal.utils.numpy_values import tensor_of
from shoal.utils.tables import render

LARGEST_BATCH = 1024
"""The number of rows in a batch if the caller does not set it."""


def usable(device: Any) -> torch.device:
    """Return the device of this name, or the CPU if this machine does not have it."""
    chosen = torch.device(device if device else "cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return chosen


def named_device(device: str | torch.device) -> torch.device:
    """Return the device of this name, or raise a ValueError if there is none."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device is {str(device)!r}, and torch sees {count} CUDA devices; use 'cpu'")
    return chosen


def predict(models: Sequence[nn.Module], inputs: tuple[Any, ...], size: int | None, device: torch.device) -> Any:
    """Return the outputs of all models, [M, ...], on the device of the inputs.

    Args:
        size: The number of rows in a batch; None runs all rows at once.
    """
    if not models:
        raise ValueError("there are no results, so there is nothing to predict with")
    if any(isinstance(each, DataLoader | Dataset | Rows) for each in inputs):
        return _predict_batches(models, inputs, size, device)
    inputs = pytree.tree_map_only(np.ndarray, tensor_of, inputs)
    input_device = next((leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), device)
    batch: Any = inputs
    computations = None
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) and _takes_entries(models[0], inputs[0]):
        batch, computations = dict(inputs[0]), [Computation("inputs", _outputs)] * len(models)
    with Forward(models, whats=computations, device=device) as forward:

        def run(chunk: Any) -> Any:
            moved = pytree.tree_map_only(Tensor, lambda x: x.to(device), chunk)
            with _inputs_explained(models[0], moved):
                return map_tensors(lambda x: x.to(input_device), forward(moved))

        if size is None:
            return run(batch)
        leaves, spec = pytree.tree_flatten(batch)
        split = zip(*(leaf.split(size) for leaf in leaves), strict=True)
        chunks = [run(pytree.tree_unflatten(chunk, spec)) for chunk in split]
    return join_batches(chunks, dim=1)


@contextmanager
def _inputs_explained(model: nn.Module, inputs: Any) -> Iterator[None]:
    """If the network fails and the inputs are of another dtype than its weights, or no tensors, say so."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and (hint := _dtype_hint(model, inputs)):
            raise ValueError(hint) from error
        others = [each for each in inputs if not isinstance(each, Tensor | Mapping)] if type(inputs) is tuple else []
        if not isinstance(error, TypeError | AttributeError) or not others:
            raise
        raise ValueError(
            f"predict: a network raised {describe(error)} with a {type(others[0]).__name__} as its input; pass a "
            "tensor or an array for each argument of its forward, a dict of them, or a Dataset or DataLoader"
        ) from error


def _dtype_hint(model: nn.Module, inputs: Any) -> str | None:
    """Return what to do where the inputs have another floating-point dtype than the network, or None."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    given, known = ([t.dtype for t in ts if t.is_floating_point()] for ts in (leaves, model.parameters()))
    if not given or not known or set(given) <= set(known):
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (given[0], known[0])]
    return f"inputs are {names[0]} and the network is {names[1]}; pass x.to(torch.{names[1]})"


def _takes_entries(model: nn.Module, entries: Mapping[Any, Any]) -> bool:
    """Return whether the model takes the entries of a dict as keyword arguments, as in training; some take the dict
    itself."""
    try:
        inspect.signature(model.forward).bind(**{name: x for name, x in entries.items() if name not in TARGETS})
    except TypeError:
        return False
    return True


def _predict_batches(
    models: Sequence[nn.Module], inputs: tuple[Any, ...], size: int | None, device: torch.device
) -> Any:
    """Return the outputs for all batches of a DataLoader or rows of a Dataset, on the CPU. Targets in them are ignored,
    as in training."""
    if len(inputs) > 1 or (size is not None and isinstance(inputs[0], DataLoader)):
        what = "other inputs" if len(inputs) > 1 else f"batch_size={size}"
        kind = next(type(each).__name__ for each in inputs if isinstance(each, DataLoader | Dataset | Rows))
        raise ValueError(f"predict: a {kind} gives whole batches, so {what} would do nothing; pass it alone")
    try:
        view = Pool(device).open(inputs[0], batch_size=size or LARGEST_BATCH)
    except JobError as error:
        raise JobError(*(f"predict: data {line}" for line in error.lines)) from None
    chunks = []
    with Forward(models, whats=[Computation("inputs", _outputs)] * len(models), device=device) as forward:
        for batch in view.feed(size or LARGEST_BATCH):
            with _inputs_explained(models[0], batch):
                chunks.append(map_tensors(lambda x: x.to("cpu"), forward(batch)))
    return join_batches(chunks, dim=1)


def _outputs(model: nn.Module, batch: Any) -> Any:
    """Return a model's outputs for a batch with or without targets."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return model(*batch)
    if isinstance(batch, Mapping) and not any(name in batch for name in TARGETS):
        return model(**batch)
    return call_model(model, batch)


def evaluation_job(name: str, model: nn.Module, job: Any, data: Any, metrics: Any, loss: Any, collate: Any) -> Job:
    """Return a job that evaluates a trained network.

    Args:
        job: The job that trained the network, or only its settings if the result was read from a folder.
    """
    training_job = job if isinstance(job, Job) else None
    if training_job is None and metrics is None and loss is None:
        raise ValueError(f"{name!r} was read from a folder, which holds no code; pass metrics= or loss= to evaluate")
    step = training_job.step if training_job is not None and loss is None else None
    if loss is None and step is None:
        loss = no_loss if training_job is None else training_job.loss
    if metrics is None:
        metrics = {} if training_job is None else training_job.metrics
    return Job(
        model=model, data=data, step=step, loss=loss, metrics=metrics, collate=collate, precision=job.precision,
        epochs=0,
    )  # fmt: skip


def evaluate(
    names: Sequence[str], jobs: Sequence[Job], data: Any, batch_size: int, device: torch.device
) -> list[dict[str, float]]:
    """Return the loss, logs and metrics of the jobs' networks on the same data. Each job's `model` is its trained
    network.

    Args:
        batch_size: The number of rows in a batch, for data that does not come in batches.
    """
    try:
        view = Pool(device).open(data, jobs[0].collate, batch_size)
    except JobError as error:
        raise JobError(*(f"evaluate: data {line}" for line in error.lines)) from None
    all_totals = [ValidationTotals(job) for job in jobs]
    models = [job.model for job in jobs if isinstance(job.model, nn.Module)]
    computations = [Computation.validation(job, bool(job.metrics)) for job in jobs]
    with Forward(models, whats=computations, device=device) as forward:
        for batch in view.feed(batch_size):
            _check_pairs(names, jobs, batch)
            try:
                outputs = forward.each(batch)
            except Exception as error:
                inputs = batch[:-1] if isinstance(batch, tuple | list) else batch
                hint = _dtype_hint(models[0], inputs) if isinstance(error, RuntimeError) else None
                more = "" if hint is None else f"; {hint}"
                what = f"evaluate: a network raised {describe(error)} on a batch of the data"
                raise ShoalError(what + more) from error
            for totals, ((loss, logs), output) in zip(all_totals, outputs, strict=True):
                totals.add_loss(number(loss), {name: number(value) for name, value in logs.items()}, batch_rows(batch))
                if totals.job.metrics:
                    totals.outputs.append(output)
                    totals.targets.append(targets_of(batch))
    return [_values(name, totals) for name, totals in zip(names, all_totals, strict=True)]


def _check_pairs(names: Sequence[str], jobs: Sequence[Job], batch: Any) -> None:
    """Raise a JobError if the batch has no targets and a job's loss or metrics need them."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return
    if isinstance(batch, Mapping) and len(batch) > 1 and any(name in batch for name in TARGETS):
        return
    for name, job in zip(names, jobs, strict=True):
        if job.step is None or job.metrics:
            raise JobError(
                f"evaluate: a batch of the data is a {type(batch).__name__} of {len(batch)}; a loss and metrics of "
                f"{name!r} take (outputs, targets): pass a tuple of inputs and targets, or a dict with targets under "
                f"one of {', '.join(TARGETS)}; only a job with a step of its own takes other batches, without metrics= "
                "and loss="
            )


def _values(name: str, totals: ValidationTotals) -> dict[str, float]:
    try:
        values = totals.values()
    except Exception as error:
        raise ShoalError(f"evaluate: a metric of {name!r} raised {describe(error)}") from error
    if totals.job.loss is no_loss:
        del values["val_loss"]
    return {column.removeprefix("val_"): value for column, value in values.items()}


def no_loss(outputs: Any, targets: Any) -> Tensor:
    """Stand in for the loss of networks that have none, so that their metrics can be computed."""
    return torch.zeros(())


class Evaluation(Sequence[Mapping[str, float]]):
    """The numbers that networks reached on a test set: a dict for each network, by index or by the job's name."""

    def __init__(self, names: Sequence[str], rows: Sequence[dict[str, float]]) -> None:
        self.names, self._rows = list(names), list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int | str) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Evaluation: ...
    def __getitem__(self, index: int | str | slice) -> dict[str, float] | Evaluation:
        if isinstance(index, slice):
            return Evaluation(self.names[index], self._rows[index])
        if isinstance(index, str):
            if index not in self.names:
                raise NoSuchJob(f"no job {index!r}; there are {', '.join(map(repr, self.names[:10]))}")
            return self._rows[self.names.index(index)]
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Evaluation({len(self)} networks: {', '.join(self.columns())})"

    def columns(self) -> list[str]:
        """Return the names of the measured values."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def column(self, name: str) -> dict[str, float]:
        """Return one measured value of every network, by job name."""
        if name not in self.columns():
            raise KeyError(f"no {name!r} was measured; there are {', '.join(self.columns())}")
        return {job_name: row[name] for job_name, row in zip(self.names, self._rows, strict=True) if name in row}

    def records(self) -> list[dict[str, Any]]:
        """Return a flat dict for each network."""
        return [{"name": name, **row} for name, row in zip(self.names, self._rows, strict=True)]

    def table(self) -> str:
        """Return the values as text, one line per network."""
        head = self.columns()
        cells = [[f"{row[name]:.4g}" if name in row else "-" for name in head] for row in self._rows]
        return render(["name", *head], [[name, *row] for name, row in zip(self.names, cells, strict=True)], left=(0,))

    def to_dataframe(self) -> Any:
        """Return `records` as a pandas.DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.records())


@dataclass(frozen=True)
class Ensemble:
    """The outputs of several networks for the same inputs, and ways to combine them."""

    outputs: Tensor
    """The outputs of each network, [M, ...]."""

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the members' outputs."""
        return self.outputs.mean(0)

    @cached_property
    def spread(self) -> Tensor:
        """The standard deviation between the members, which shows how far they disagree; 0 for one member."""
        return self.outputs.std(0, correction=0)

    @cached_property
    def votes(self) -> Tensor:
        """The number of members whose largest output is each class, [..., classes]."""
        winners = self.outputs.argmax(-1)
        return nn.functional.one_hot(winners, self.outputs.shape[-1]).sum(0)

    @cached_property
    def vote(self) -> Tensor:
        """The class that most members have as their largest output; in a tie, the one with the larger mean."""
        most = self.votes == self.votes.amax(-1, keepdim=True)
        return self.mean.masked_fill(~most, -torch.inf).argmax(-1)

    @cached_property
    def agreement(self) -> Tensor:
        """The fraction of the members that voted for the winning class, from 0 to 1."""
        return self.votes.amax(-1) / len(self.outputs)


def combine(outputs: Any, activation: Callable[[Any], Tensor] | None) -> Ensemble:
    """Return an ensemble of these outputs, after applying `activation` to them if it is given."""
    if activation is not None and not callable(activation):
        raise ValueError(f"activation is {activation!r}; pass a function, such as lambda z: z.softmax(-1)")
    if activation is not None and not isinstance(outputs, Tensor):
        outputs, activation = activation(outputs), None
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the networks return a {type(outputs).__name__}, not a tensor; combine what predict returns, or say which "
            "tensor: activation=lambda out: out.logits, or out[0]"
        )
    values = outputs if outputs.is_floating_point() else outputs.float()
    return Ensemble(values if activation is None else activation(values))
