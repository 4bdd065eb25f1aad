"""What comes out: one result per job, in the order of the jobs."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.jobs.early_stopping import best_row, in_order, kept_row
from shoal.jobs.job import Job
from shoal.jobs.metric_direction import direction
from shoal.jobs.names import named
from shoal.jobs.pickling import without_unpicklable
from shoal.utils.numpy_values import finite, plain_int
from shoal.utils.tables import render

if TYPE_CHECKING:
    from shoal.engine.planning.planner import Plan
    from shoal.evaluation import Ensemble, Evaluation

MOST_ERRORS = 10
"""Errors shown below a table."""
NOT_VALUES = ("epoch", "step", "seconds")
"""Columns of a history that say when, not what."""


class StoredWeights(Protocol):
    """Weights that are in a file."""

    def state_dict(self) -> dict[str, Any]: ...

    def model(self) -> nn.Module: ...

    @property
    def training_weights(self) -> Callable[[], dict[str, Tensor]]: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Result:
    """What came of one job."""

    name: str
    job: Job
    """The job; of a result that was read from a folder, its plain settings alone."""
    model: nn.Module
    """The user's own class, in eval mode, on the CPU; `Results.to` moves it."""
    history: list[dict[str, float]]
    """One row an epoch: epoch, step, loss, a step's logs, val_loss, metrics, lr, seconds."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Validations within epochs, where `val_every_steps` is set: epoch (the one under way), step, val_loss, metrics."""
    status: str
    """done, stopped (early), diverged, failed or cancelled; in a folder that was read also unfinished or running."""
    tier: str
    """How it was run: stacked, streams or serial."""
    error: str | None = None
    """Why it diverged or failed, in one line."""
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    """As from the optimizer's own state_dict()."""
    seconds: float = 0.0
    """This job's share of the time."""
    environment: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    """Optimizer steps done."""
    split: Any = None
    """What a split did and cost: a `shoal.split.SplitReport` (in a folder that was read: its numbers as a dict); None
    where the job was trained as one."""
    training_weights: dict[str, Tensor] = field(default_factory=dict)
    """By name, the weights as training left them, where `model` has others: an average, or those of an optimizer's eval
    mode. Empty elsewhere."""
    stored: StoredWeights | None = None
    """Where the weights are, of a result that was read from a folder."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What is read from a folder when it is first asked for: the network, weights as training left them."""
            if name not in ("model", "training_weights") or self.stored is None:
                raise AttributeError(f"a result has no {name!r}")
            try:
                setattr(self, name, getattr(self.stored, name)())
            except AttributeError as error:  # Python would take it for a missing attribute, and hide why
                raise ShoalError(str(error)) from error
            return getattr(self, name)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For pickle: all but what cannot be pickled of the job, and its data."""
        with suppress(ShoalError):  # one that was read from a folder may have no network
            _ = self.model
        values = self._values()
        return None, values | ({"job": without_unpicklable(self.job)} if isinstance(self.job, Job) else {})

    def __copy__(self) -> Result:
        return _result_with(self._values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        memo |= {id(shared): shared for shared in (self.job, self.stored)}  # what it came from is not copied
        return _result_with(copy.deepcopy(self._values(), memo))

    def _values(self) -> dict[str, Any]:
        """All fields, but those that have not been read from a folder yet."""
        values = {}
        for each in fields(self):
            with suppress(AttributeError):
                values[each.name] = object.__getattribute__(self, each.name)
        return values

    def __repr__(self) -> str:
        return f"Result({self.name!r}, {self.status}, {self.steps} steps)"

    def last(self, metric: str) -> float | None:
        """The last value of a column of the history, or of a validation within an epoch."""
        rows = in_order(self.history, self.validations)
        return next((row[metric] for row in reversed(rows) if metric in row), None)

    def value(self, metric: str) -> float | None:
        """A column of the history as it was at the weights that `model` has: its best epoch with keep="best", else its
        last."""
        if self.job.keep != "best":
            return self.last(metric)
        return self.values.get(metric)

    @property
    def values(self) -> dict[str, float]:
        """The row of the history whose weights `model` has: that of the best epoch with keep="best", else the last."""
        return dict(kept_row(self.job, in_order(self.history, self.validations)) or {})

    @property
    def best_epoch(self) -> int | None:
        """The epoch that was best by what the job's `stop` watches (without one: the smallest val_loss, or loss)."""
        row = best_row(self.job, in_order(self.history, self.validations))
        return None if row is None else int(row["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """The weights, as from the model's own state_dict(). Of a result that was read from a folder: from its file,
        without the network's code."""
        return self.model.state_dict() if self.stored is None else self.stored.state_dict()

    def to_dict(self) -> dict[str, Any]:
        """All but the weights, as plain data."""
        split = self.split if isinstance(self.split, Mapping | None) else self.split.to_dict()
        return {
            "name": self.name,
            "status": self.status,
            "tier": self.tier,
            "error": self.error,
            "steps": self.steps,
            "seconds": self.seconds,
            "hparams": dict(self.job.hparams),
            **({"config": dict(self.job.config)} if self.job.config else {}),
            "best_epoch": self.best_epoch,
            "values": self.values,
            "history": self.history,
            **({"validations": self.validations} if self.validations else {}),
            "environment": self.environment,
            **({} if split is None else {"split": split}),
        }

    def to_record(self) -> dict[str, Any]:
        """One flat row for a table: the name, how it ended, config and hyper-parameters, values of its weights."""
        settings = {**self.job.config, **self.job.hparams}
        values = {name: value for name, value in self.values.items() if name not in (*NOT_VALUES, *settings)}
        return {
            "name": self.name, "status": self.status, "tier": self.tier, "epochs": len(self.history),
            "steps": self.steps, **settings, **values, "best_epoch": self.best_epoch, "seconds": self.seconds,
            "error": self.error,
        }  # fmt: skip


def _result_with(values: Mapping[str, Any]) -> Result:
    result = object.__new__(Result)
    for name, value in values.items():
        setattr(result, name, value)
    return result


class Results(Sequence[Result]):
    """The results of a list of jobs, in its order."""

    plan: Plan | None = None
    """Which jobs ran together, what that should have cost and what it did; None where nothing had to be trained."""
    running: float = 0.0
    """Members that ran at the same time, on average."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = list(results)

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int | str) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | str | slice) -> Result | Results:
        """A result by its place or by its job's name; several by a slice."""
        if isinstance(index, str):
            return named(self._results, index)
        return Results(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __contains__(self, item: object) -> bool:
        return any(item is result or item == result.name for result in self._results)

    def __repr__(self) -> str:
        counts = {status: sum(r.status == status for r in self) for status in sorted({r.status for r in self})}
        return f"Results({len(self)}: {', '.join(f'{n} {status}' for status, n in counts.items())})"

    def columns(self) -> list[str]:
        """Names in the histories, in order of appearance."""
        return list(dict.fromkeys(name for result in self for row in result.history for name in row))

    def best(self, metric: str = "val_loss", mode: Literal["min", "max"] | None = None) -> Result:
        """The result with the best `metric`, at the weights that each one has.

        Args:
            metric: A column of the histories.
            mode: Which way is better. None: as the jobs' own `stop` says that watches this metric, else as its name
                does: small for a loss or an error, large for an accuracy or a score.
        """
        scores = [(result.value(metric), result) for result in self]
        known = [(score, result) for score, result in scores if score is not None and math.isfinite(score)]
        if not known:
            raise ValueError(
                f"no result has a value of {metric!r}; the histories have: {', '.join(self.columns()) or 'nothing'}"
            )
        return (max if self._mode(metric, mode) == "max" else min)(known, key=lambda pair: pair[0])[1]

    def _mode(self, metric: str, mode: str | None) -> str:
        if mode in ("min", "max"):
            return mode
        if mode is not None:
            raise ValueError(f"mode is {mode!r}; it says which way is better: use 'min' or 'max'")
        said = {r.job.stop.mode for r in self if r.job.stop is not None and r.job.stop.metric == metric}
        known = said.pop() if len(said) == 1 else direction(metric)
        if known is None:
            raise ValueError(f"the name {metric!r} does not say which way is better; set mode='min' or mode='max'")
        return known

    def table(self) -> str:
        """The results as text, one line each, and below it why some of them failed or diverged. Values are those at
        the weights that each result has.

        With lines and colour where rich is installed and this is a terminal.
        """
        names = [name for name in self.columns() if name not in NOT_VALUES]
        noted = list(dict.fromkeys(key for r in self for key in r.job.config))
        epochs = [len(r.history) if r.split is None else None for r in self]  # the rows of a split are rounds
        best = [r.best_epoch if count is not None else None for r, count in zip(self, epochs, strict=True)]
        shown = ["best_epoch"] if best != epochs and any(best) else []
        head = ["name", "status", "tier", *noted, "epochs", "steps", *names, *shown, "seconds"]
        rows = [
            [
                r.name, r.status, r.tier, *(_text(r.job.config.get(key)) for key in noted),
                "" if count is None else str(count), str(r.steps), *(_text(r.value(n)) for n in names),
                *([_text(epoch)] if shown else []), f"{r.seconds:.2f}",
            ]
            for r, count, epoch in zip(self, epochs, best, strict=True)
        ]  # fmt: skip
        wrong = [f"{r.name}: {r.error}" for r in self if r.error]
        more = [f"... and {len(wrong) - MOST_ERRORS} more"] if len(wrong) > MOST_ERRORS else []
        return "\n".join([render(head, rows), *([""] if wrong else []), *wrong[:MOST_ERRORS], *more])

    def plot(self, path: str | os.PathLike[str], metric: str | None = None) -> Path:
        """Draw all learning curves into a picture; without `metric`: the loss, and val_loss where there is one."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from None
        metrics = [metric] if metric else [name for name in ("loss", "val_loss") if name in self.columns()] or ["loss"]
        if metric is not None and metric not in self.columns():
            raise ValueError(f"no history has {metric!r}; they have: {', '.join(self.columns()) or 'nothing'}")
        figure = Figure(figsize=(6 * len(metrics), 4), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            for result in self:
                points = [(row["epoch"], row[name]) for row in result.history if name in row]
                axis.plot([x for x, _ in points], [y for _, y in points], label=result.name, linewidth=1)
            axis.set(xlabel="epoch", ylabel=name)
            if 1 < len(self) <= 12:
                axis.legend(fontsize="small")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return Path(path)

    def predict(self, *inputs: Any, batch_size: int | None = None, device: str | torch.device | None = None) -> Any:
        """Outputs of all members for the same inputs, in eval mode: [M, ...], in one stacked forward where it can be.

        Args:
            inputs: Tensors or arrays; a dict of them, passed by name; or a DataLoader or an IterableDataset alone.
                Targets in a dict or a batch are left out.
            batch_size: Rows at a time; None: all at once. A DataLoader has its own.
            device: Where to compute; None: where the members were trained, if this machine has it. Outputs are where
                the inputs are.

        Raises:
            ValueError: when the members' outputs have different shapes.
        """
        from shoal.evaluation import predict

        models = [result.model for result in self]
        return predict(models, inputs, _rows_at_once(batch_size), self._device(device))

    def ensemble(
        self,
        *inputs: Any,
        activation: Callable[[Any], torch.Tensor] | None = None,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> Ensemble:
        """What the members say together: their mean, the class that most of them vote for, how far they disagree.

        Args:
            inputs: As for `predict`, and so are `batch_size` and `device`.
            activation: Applied to the outputs before they are combined, such as `lambda z: z.softmax(-1)` where
                networks return logits and probabilities are to be averaged.
        """
        from shoal.evaluation import combine

        return combine(self.predict(*inputs, batch_size=batch_size, device=device), activation)

    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> Evaluation:
        """Loss and metrics of all members on the same data, in eval mode, in one program where it can be.

        Args:
            data: A test set, in any form that a job's `val` may have. A DataLoader is read in its own batches.
            metrics: Name -> (outputs, targets) -> number, over all of the data; None: each job's own.
            loss: The loss; None: each job's own loss or step. Results that were read from a folder have none.
            collate: How items of a Dataset become a batch.
            batch_size: Rows at a time; None: the largest of the jobs' own, at least 1,024.
            device: Where to compute; None: where the members were trained, if this machine has it.
        """
        from shoal.evaluation import LARGEST_BATCH, Evaluation, evaluate, evaluation_job

        if batch_size is not None and isinstance(data, torch.utils.data.DataLoader):
            raise ValueError(
                f"evaluate: data is a DataLoader, so batch_size={batch_size} would do nothing; leave it out"
            )
        size = _rows_at_once(batch_size) or max([LARGEST_BATCH, *(result.job.batch_size for result in self)])
        tests = [evaluation_job(result.name, result.model, result.job, data, metrics, loss, collate) for result in self]
        names = [result.name for result in self]
        return Evaluation(names, evaluate(names, tests, data, size, self._device(device)) if names else [])

    def _device(self, device: str | torch.device | None) -> torch.device:
        from shoal.evaluation import usable

        trained = next((result.environment.get("device") for result in self), None)
        return usable(trained) if device is None else torch.device(device)

    def to(self, device: str | torch.device) -> Results:
        """Move all networks to a device; the same results."""
        for result in self:
            result.model.to(device)
        return self

    def records(self, *, history: bool = False) -> list[dict[str, Any]]:
        """Flat rows: one for each job, or with `history` one for each epoch of each job."""
        if not history:
            return [result.to_record() for result in self]
        return [{"name": result.name, **row} for result in self for row in result.history]

    def to_dataframe(self, *, history: bool = False) -> Any:
        """`records` as a pandas.DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.records(history=history))

    def to_json(self) -> str:
        """All but the weights."""
        return json.dumps([finite(result.to_dict()) for result in self], indent=1)


def _rows_at_once(batch_size: Any) -> int | None:
    size: int | None = plain_int(batch_size)
    if size is not None and size < 1:
        raise ValueError(f"batch_size is {size}; use a whole number, 1 or more")
    return size


def _text(value: float | str | None) -> str:
    """A number in short, other values as they are."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
