"""The results of a run: one per job, in the order of the jobs."""

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
from shoal.jobs.differing import differing
from shoal.jobs.early_stopping import best_row, in_order, kept_row
from shoal.jobs.job import Job
from shoal.jobs.metric_direction import direction
from shoal.jobs.names import named
from shoal.jobs.pickling import without_unpicklable
from shoal.jobs.results_table import NOT_VALUES, results_table
from shoal.utils.numpy_values import finite, plain_int

if TYPE_CHECKING:
    from shoal.engine.planning.planner import Plan
    from shoal.evaluation import Ensemble, Evaluation


class StoredWeights(Protocol):
    """Weights that are stored in a file."""

    def state_dict(self) -> dict[str, Any]: ...

    def model(self) -> nn.Module: ...

    @property
    def training_weights(self) -> Callable[[], dict[str, Tensor]]: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Result:
    """The outcome of one job: its trained network, history and status."""

    name: str
    job: Job
    """The job; in a result that was read from a folder, only its plain settings."""
    model: nn.Module
    """The trained network, an instance of the user's class, in eval mode and on the CPU; `Results.to` moves it."""
    history: list[dict[str, float]]
    """One row per epoch: epoch, step, loss, the step's logs, val_loss, metrics, lr, seconds."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Validations within epochs, if `val_every_steps` is set: the current epoch, step, val_loss, metrics."""
    status: str
    """done, stopped (early), diverged, failed or cancelled; in a folder that was read also unfinished or running."""
    tier: str
    """How the job was run: stacked, streams or serial."""
    error: str | None = None
    """Why the job diverged or failed, in one line."""
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    """The optimizer's state_dict()."""
    seconds: float = 0.0
    """This job's share of the time."""
    environment: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    """The number of optimizer steps taken."""
    split: Any = None
    """The report of a split, a `shoal.split.SplitReport` (as a dict if it was read from a folder); None if there was
    no split."""
    training_weights: dict[str, Tensor] = field(default_factory=dict)
    """The weights as training left them, by name, if `model` has different ones: averages, or those of an
    optimizer's eval mode. Empty otherwise."""
    stored: StoredWeights | None = None
    """Where the weights are stored, if the result was read from a folder."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read the network or the training weights from the folder when they are first used."""
            if name not in ("model", "training_weights") or self.stored is None:
                raise AttributeError(f"a result has no {name!r}")
            try:
                setattr(self, name, getattr(self.stored, name)())
            except AttributeError as error:  # Python would treat it as a missing attribute
                raise ShoalError(str(error)) from error
            return getattr(self, name)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state for pickle, without the job's data and what else of the job cannot be pickled."""
        with suppress(ShoalError):  # reading it from a folder may fail
            _ = self.model
        values = self._values()
        return None, values | ({"job": without_unpicklable(self.job)} if isinstance(self.job, Job) else {})

    def __copy__(self) -> Result:
        return _result_with(self._values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        memo |= {id(shared): shared for shared in (self.job, self.stored)}  # job and files are shared
        return _result_with(copy.deepcopy(self._values(), memo))

    def _values(self) -> dict[str, Any]:
        """Return all fields except those that have not been read from the folder yet."""
        values = {}
        for each in fields(self):
            with suppress(AttributeError):
                values[each.name] = object.__getattribute__(self, each.name)
        return values

    def __repr__(self) -> str:
        return f"Result({self.name!r}, {self.status}, {self.steps} steps)"

    def last(self, metric: str) -> float | None:
        """Return the last value of a column of the history, or of a validation within an epoch."""
        rows = in_order(self.history, self.validations)
        return next((row[metric] for row in reversed(rows) if metric in row), None)

    def value(self, metric: str) -> float | None:
        """Return a history column's value for the weights that `model` has: at the best epoch with keep="best", else
        the last."""
        if self.job.keep != "best":
            return self.last(metric)
        return self.values.get(metric)

    @property
    def values(self) -> dict[str, float]:
        """The row of the history whose weights `model` has: that of the best epoch with keep="best", else the last."""
        return dict(kept_row(self.job, in_order(self.history, self.validations)) or {})

    @property
    def best_epoch(self) -> int | None:
        """The best epoch by the metric that the job's `stop` watches, or else by the smallest val_loss or loss."""
        row = best_row(self.job, in_order(self.history, self.validations))
        return None if row is None else int(row["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict(). If the result was read from a folder, no code of the network is needed."""
        return self.model.state_dict() if self.stored is None else self.stored.state_dict()

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights as plain data."""
        split = self.split if isinstance(self.split, Mapping | None) else self.split.to_dict()
        return {
            "name": self.name,
            "status": self.status,
            "tier": self.tier,
            "error": self.error,
            "steps": self.steps,
            "seconds": self.seconds,
            **{name: getattr(self.job, name) for name in ("seed", "batch_size", "precision")},
            "hparams": dict(self.job.hparams),
            **({"config": dict(self.job.config)} if self.job.config else {}),
            "best_epoch": self.best_epoch,
            "values": self.values,
            "history": self.history,
            **({"validations": self.validations} if self.validations else {}),
            "environment": self.environment,
            **({} if split is None else {"split": split}),
        }

    def to_record(self, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return one flat row for a table: name, status, `others`, config, hyper-parameters, and the values of the
        kept weights."""
        settings = {**(others or {}), **self.job.config, **self.job.hparams}
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
    """The results of a list of jobs, in the order of the list."""

    plan: Plan | None = None
    """Which jobs ran together, with predicted and measured costs; None if nothing had to be trained."""
    running: float = 0.0
    """The average number of members that ran at the same time."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = list(results)

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int | str) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | str | slice) -> Result | Results:
        """Return the result at an index or of the job with this name, or several results for a slice."""
        if isinstance(index, str):
            return named(self._results, index)
        return Results(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __contains__(self, item: object) -> bool:
        return any(item is result or item == result.name for result in self._results)

    def __repr__(self) -> str:
        counts = {status: sum(r.status == status for r in self) for status in sorted({r.status for r in self})}
        return f"Results({len(self)}: {', '.join(f'{n} {status}' for status, n in counts.items())})"

    def columns(self) -> list[str]:
        """Return the column names of all histories, in order of appearance."""
        return list(dict.fromkeys(name for result in self for row in result.history for name in row))

    def best(self, metric: str = "val_loss", mode: Literal["min", "max"] | None = None) -> Result:
        """Return the result with the best `metric`, each measured at the weights that the result has.

        Args:
            metric: A column of the histories.
            mode: Which direction is better. None takes it from the jobs' `stop` if that watches this metric, else from
                the name: "min" for a loss or an error, "max" for an accuracy or a score.
        """
        scores = [(result.value(metric), result) for result in self]
        finite_scores = [(score, result) for score, result in scores if score is not None and math.isfinite(score)]
        if not finite_scores:
            raise ValueError(
                f"no result has a value of {metric!r}; the histories have: {', '.join(self.columns()) or 'nothing'}"
            )
        return (max if self._mode(metric, mode) == "max" else min)(finite_scores, key=lambda pair: pair[0])[1]

    def _mode(self, metric: str, mode: str | None) -> str:
        if mode in ("min", "max"):
            return mode
        if mode is not None:
            raise ValueError(f"mode is {mode!r}; it says which way is better: use 'min' or 'max'")
        modes = {r.job.stop.mode for r in self if r.job.stop is not None and r.job.stop.metric == metric}
        chosen = modes.pop() if len(modes) == 1 else direction(metric)
        if chosen is None:
            raise ValueError(f"the name {metric!r} does not say which way is better; set mode='min' or mode='max'")
        return chosen

    def table(self) -> str:
        """Return the results as text, one line each, followed by the errors of jobs that failed or diverged.

        Values are those of the weights that each result has; of `hparams` and other settings those are shown that
        differ, seeds aside. Uses lines and colour in a terminal if rich is installed.
        """
        return results_table(self)

    def plot(self, path: str | os.PathLike[str], metric: str | None = None) -> Path:
        """Draw all learning curves into an image file: of `metric`, or of the loss and, if there is one, the
        val_loss."""
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
        """Return the outputs of all members for the same inputs, [M, ...], in eval mode and stacked where possible.

        Args:
            inputs: Tensors or arrays; a dict of them, passed by name; or only a DataLoader, a Dataset or a fold's Rows.
                Targets in a dict, a batch or an item are ignored.
            batch_size: Rows at a time; None means all at once. A DataLoader has its own.
            device: Where to compute; None means where the members were trained, if this machine has it. Outputs are on
                the device of the inputs.

        Raises:
            ValueError: If the members' outputs have different shapes.
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
        """Combine the members' outputs: their mean, the class that most of them vote for, and how far they disagree.

        Args:
            inputs: As for `predict`, and so are `batch_size` and `device`.
            activation: Applied to the outputs before they are combined, such as `lambda z: z.softmax(-1)` to average
                probabilities when the networks return logits.
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
        """Return loss and metrics of all members on the same data, in eval mode, and in one program where possible.

        Args:
            data: A test set, in any form that a job's `val` may have. A DataLoader is read in its own batches.
            metrics: Name -> (outputs, targets) -> number, over all of the data; None means each job's own.
            loss: The loss; None means each job's own loss or step. Results that were read from a folder have none.
            collate: How items of a Dataset become a batch.
            batch_size: Rows at a time; None means the largest of the jobs' own, and at least 1,024.
            device: Where to compute; None means where the members were trained, if this machine has it.
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
        from shoal.evaluation import named_device, usable

        trained = next((result.environment.get("device") for result in self), None)
        return usable(trained) if device is None else named_device(device)

    def to(self, device: str | torch.device) -> Results:
        """Move all networks to a device and return these results."""
        from shoal.evaluation import named_device

        device = named_device(device)
        for result in self:
            result.model.to(device)
        return self

    def records(self, *, history: bool = False) -> list[dict[str, Any]]:
        """Return flat rows: one for each job, or with `history` one for each epoch of each job.

        A job's row has its `config`, its hyper-parameters, and the settings in which the jobs differ, such as the seed.
        """
        if not history:
            settings = differing([result.job for result in self], besides=self.columns())
            return [result.to_record(others) for result, others in zip(self, settings, strict=True)]
        return [{"name": result.name, **row} for result in self for row in result.history]

    def to_dataframe(self, *, history: bool = False) -> Any:
        """Return `records` as a pandas.DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.records(history=history))

    def to_json(self) -> str:
        """Return everything but the weights as JSON."""
        return json.dumps([finite(result.to_dict()) for result in self], indent=1)


def _rows_at_once(batch_size: Any) -> int | None:
    size: int | None = plain_int(batch_size)
    if size is not None and size < 1:
        raise ValueError(f"batch_size is {size}; use a whole number, 1 or more")
    return size
