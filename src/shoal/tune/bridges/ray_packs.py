"""A Ray Tune trainable that trains a pack of configurations in one trial of Ray's.

    configs = [space.sample(0, number) for number in range(64)]
    tuner = ray.tune.Tuner(
        pack_trainable(make_job, "accuracy"),
        param_space={"pack": ray.tune.grid_search(packs(configs, size=32))},
    )
    best = best_first(tuner.fit(), "accuracy")[0]

Ray places packs on machines and devices, Shoal trains the configurations of each together. This file itself does not
need Ray until a trial runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shoal.errors import TuneError, describe
from shoal.jobs.job import Job
from shoal.jobs.metric_direction import direction
from shoal.reporting.callbacks import MemberView
from shoal.training import train
from shoal.utils.numpy_values import finite

Configuration = dict[str, Any]


def packs(configs: Iterable[Mapping[str, Any]], size: int) -> list[list[Configuration]]:
    """Configurations in groups of `size`, the last of what is left: one group is one trial of Ray's.

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
    """A function that Ray Tune runs as a trial, with the configurations of a pack under the name "pack".

    After each epoch it reports the best value of the pack so far, under the metric's name, with `epoch` and `running`.
    Its last report also has `best_config`, and in `results`, as JSON, an entry for each configuration: config, value,
    epochs, status, error. A configuration whose make_job raises costs itself alone.

    Args:
        make_job: From a configuration to its shoal.Job.
        metric: What to report: "val_loss", one of the jobs' metrics, or a name in a step's logs.
        mode: "min" or "max"; None: as the metric's name says.
        settings: Those of `shoal.train`, such as device.
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
    """The configurations of all packs of a finished Ray Tune run, the best one first; those without a value last."""
    towards = direction(metric) if mode is None else mode
    if towards not in ("min", "max"):
        raise TuneError(f"mode is {mode!r}, and {metric!r} does not say which way is better; use 'min' or 'max'")
    rows = [row for result in results for row in json.loads((result.metrics or {}).get("results", "[]"))]

    def key(row: dict[str, Any]) -> tuple[bool, float]:
        value = row["value"]
        known = isinstance(value, int | float) and not math.isnan(value)
        return not known, (-value if towards == "max" else value) if known else 0.0

    return sorted(rows, key=key)


class _Pack:
    """The configurations of one trial of Ray's, as jobs that train together."""

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
        self._epochs: dict[str, int] = {}  # of those that train
        self._reported = 0
        for number, config in enumerate(configs):
            row = {"config": config, "value": math.nan, "epochs": 0, "status": "failed", "error": None}
            self.rows.append(row)
            try:
                job = make_job(dict(config))
                if not isinstance(job, Job):
                    raise TuneError(f"make_job returned a {type(job).__name__}; return a shoal.Job")
            except Exception as error:
                row["error"] = f"make_job raised {describe(error)}"
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
        """Follow a member; where all have ended an epoch, report it."""
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
    given = config.get("pack")
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, Mapping) for each in given):
        raise TuneError(
            'the trial has no configurations under "pack"; set '
            'param_space={"pack": ray.tune.grid_search(packs(configs, size=32))}'
        )
    return [dict(each) for each in given]
