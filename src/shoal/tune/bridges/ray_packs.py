"""A Ray Tune trainable that trains a pack of configurations in one Ray trial.

    configs = [space.sample(0, number) for number in range(64)]
    tuner = ray.tune.Tuner(
        pack_trainable(make_job, "accuracy"),
        param_space={"pack": ray.tune.grid_search(packs(configs, size=32))},
    )
    best = best_first(tuner.fit(), "accuracy")[0]

Ray places packs on machines and devices, and Shoal trains the configurations of each together. Ray is not needed until
a trial runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shoal.errors import TuneError, describe_with_place
from shoal.jobs.job import Job
from shoal.jobs.metric_direction import direction
from shoal.reporting.callbacks import MemberView
from shoal.training import train
from shoal.utils.numpy_values import finite

Configuration = dict[str, Any]


def packs(configs: Iterable[Mapping[str, Any]], size: int) -> list[list[Configuration]]:
    """Divide configurations into groups of `size`; the last may be smaller. Each group is one Ray trial.

    >>> [len(pack) for pack in packs([{"lr": 0.1}] * 5, size=2)]
    [2, 2, 1]
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise TuneError(f"size is {size!r}; use a whole number, 1 or more")
    plain = [dict(config) for config in configs]
    return [plain[start : start + size] for start in range(0, len(plain), size)]


def pack_trainable(
    make_job: Callable[[Configuration], Job], metric: str, mode: str | None = None, **settings: Any
) -> Callable[[dict[str, Any]], None]:
    """Return a function that Ray Tune runs as a trial, with the configurations of a pack under the name "pack".

    After each epoch it reports the best value of the pack so far, under the metric's name, with `epoch` and `running`.
    Its last report also has `best_config`, and in `results`, as JSON, an entry for each configuration: config, value,
    epochs, status, error. If make_job raises for a configuration, only that one fails.

    Args:
        make_job: Returns the shoal.Job of a configuration.
        metric: What to report: "val_loss", one of the jobs' metrics, or a name in a step's logs.
        mode: "min" or "max"; None: derived from the metric's name.
        settings: Settings of `shoal.train`, such as device.
    """
    towards = direction(metric) if mode is None else mode
    if towards not in ("min", "max"):
        raise TuneError(f"mode is {mode!r}, and {metric!r} does not say which way is better; use 'min' or 'max'")

    def train_pack(config: dict[str, Any]) -> None:
        from ray import tune

        pack = _Pack(_configurations(config), make_job, metric, towards, tune.report)
        pack.train(settings)

    return train_pack


def best_first(results: Iterable[Any], metric: str, mode: str | None = None) -> list[dict[str, Any]]:
    """Return the configurations of all packs of a finished Ray Tune run, the best first; those without a value last."""
    towards = direction(metric) if mode is None else mode
    if towards not in ("min", "max"):
        raise TuneError(f"mode is {mode!r}, and {metric!r} does not say which way is better; use 'min' or 'max'")
    rows = [row for result in results for row in json.loads((result.metrics or {}).get("results", "[]"))]

    def key(row: dict[str, Any]) -> tuple[bool, float]:
        value = row["value"]
        has_value = isinstance(value, int | float) and not math.isnan(value)
        return not has_value, (-value if towards == "max" else value) if has_value else 0.0

    return sorted(rows, key=key)


class _Pack:
    """The configurations of one Ray trial, as jobs that train together."""

    def __init__(
        self,
        configs: Sequence[Configuration],
        make_job: Callable[[Configuration], Job],
        metric: str,
        mode: str,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.metric, self._report, self._better = metric, report, max if mode == "max" else min
        self.rows: list[dict[str, Any]] = []
        self._jobs: dict[str, Job] = {}
        self._epochs: dict[str, int] = {}  # only jobs that still train
        self._reported = 0
        for number, config in enumerate(configs):
            row = {"config": config, "value": math.nan, "epochs": 0, "status": "failed", "error": None}
            self.rows.append(row)
            try:
                job = make_job(dict(config))
                if not isinstance(job, Job):
                    raise TuneError(f"make_job returned a {type(job).__name__}; return a shoal.Job")
            except Exception as error:
                row["error"] = f"make_job raised {describe_with_place(error)}"
                continue
            job.name = f"configuration {number}"
            self._jobs[job.name] = job
        self._rows = {f"configuration {number}": row for number, row in enumerate(self.rows)}

    def train(self, settings: dict[str, Any]) -> None:
        if not self._jobs:
            raise TuneError(f"no configuration of the pack has a job: {self.rows[0]['error']}")
        self._epochs = dict.fromkeys(self._jobs, 0)
        callbacks = [*settings.get("callbacks", ()), self.after_epoch]
        for result in train(list(self._jobs.values()), **{**settings, "callbacks": callbacks}):
            self._rows[result.name] |= {"status": result.status, "error": result.error}
        last = max(row["epochs"] for row in self.rows)
        best = self._best()
        config = next((row["config"] for row in self.rows if row["value"] == best), None)
        self._report(self._now(last) | {"results": json.dumps(finite(self.rows)), "best_config": finite(config)})

    def after_epoch(self, view: MemberView) -> None:
        """Record a member's epoch, and report it once all members have ended it."""
        row = self._rows[view.name]
        row["epochs"] = view.epoch
        if self.metric in view.metrics:
            row["value"] = view.metrics[self.metric]
        self._epochs[view.name] = view.epoch
        if view.status != "running" or view.epoch >= (self._jobs[view.name].epochs or math.inf):
            self._epochs.pop(view.name, None)
        if self._epochs and min(self._epochs.values()) > self._reported:
            self._reported = min(self._epochs.values())
            self._report(self._now(self._reported))

    def _now(self, epoch: int) -> dict[str, Any]:
        return {self.metric: self._best(), "epoch": epoch, "running": len(self._epochs)}

    def _best(self) -> float:
        values = [row["value"] for row in self.rows if not math.isnan(row["value"])]
        return float(self._better(values)) if values else math.nan


def _configurations(config: dict[str, Any]) -> list[Configuration]:
    configs = config.get("pack")
    if not isinstance(configs, list | tuple) or not configs or not all(isinstance(each, Mapping) for each in configs):
        raise TuneError(
            'the trial has no configurations under "pack"; set '
            'param_space={"pack": ray.tune.grid_search(packs(configs, size=32))}'
        )
    return [dict(each) for each in configs]
