"""`shoal.MLflow`, which logs each member as an MLflow run under one parent run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from typing import Any

from shoal.reporting.callbacks import MemberView
from shoal.reporting.loggers import Logger, config

GROUP, MEMBER, KEY = "shoal.group", "shoal.member", "shoal.key"
"""Tags of runs. KEY is a hash of the others and identifies a run, since a search query cannot contain every name."""
ENDS = {"done": "FINISHED", "stopped": "FINISHED", "cancelled": "KILLED"}


class MLflow(Logger):
    """Logs each member as its own run, all of them under one parent run.

    Args:
        experiment: The name of the experiment, which is created if it does not exist.
        group: The name of the parent run; None means a new one, named by the time. A resumed run continues its runs if
            it has the same group.
        tracking_uri: Where to log, such as "sqlite:///mlflow.db" or a server's address; None means MLflow's own
            setting.
        every_step: Also log every this many optimizer steps; see `shoal.Logger`.
    """

    def __init__(
        self,
        experiment: str = "shoal",
        *,
        group: str | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        every_step: int | None = None,
    ) -> None:
        super().__init__(every_step=every_step)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ImportError("MLflow needs the mlflow package: pip install 'shoal[mlflow]'") from None
        self.group = group or time.strftime("shoal-%Y%m%d-%H%M%S")
        self._client: Any = MlflowClient(tracking_uri=None if tracking_uri is None else str(tracking_uri))
        existing = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self._parent = ""
        self._runs: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        """The last step that an earlier run has logged, by member name."""

    def begin(self, view: MemberView) -> int | None:
        from mlflow.entities import Param

        self._parent = self._parent or self._run({GROUP: self.group}, self.group, {})[0]
        self._client.update_run(self._parent, status="RUNNING")
        tags = {GROUP: self.group, MEMBER: view.name}
        run, epoch = self._run(tags, view.name, {"mlflow.parentRunId": self._parent})
        self._runs[view.name] = run
        params = [Param(_name(name), str(value)) for name, value in config(view).items()]
        self._client.log_batch(run, params=params)
        return self._last_complete_epoch(run, epoch, view)

    def _last_complete_epoch(self, run: str, epoch: int | None, view: MemberView) -> int | None:
        """Return the last epoch that was logged completely: the one before `epoch` if the job is longer now."""
        if epoch is None:
            return None
        logged = max(metric.step for metric in self._client.get_metric_history(run, "epoch"))
        self._steps[view.name] = logged
        longer = any(row["epoch"] == epoch and row["step"] > logged for row in view.history)
        return epoch - 1 if longer else epoch

    def _run(self, tags: dict[str, str], name: str, more: dict[str, str]) -> tuple[str, int | None]:
        """Return the run with these tags, creating it if needed, and the last epoch that was logged in it."""
        tags = {**tags, KEY: hashlib.sha256(json.dumps(tags).encode()).hexdigest()[:16]}
        for run in self._client.search_runs([self._experiment], f"tags.`{KEY}` = '{tags[KEY]}'"):
            self._client.update_run(run.info.run_id, status="RUNNING")
            epoch = run.data.metrics.get("epoch")
            return run.info.run_id, None if epoch is None else int(epoch)
        new = self._client.create_run(self._experiment, tags={**tags, **more, "mlflow.runName": name})
        return new.info.run_id, None

    def log(self, view: MemberView, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        if step <= self._steps.get(view.name, 0):
            return
        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._runs[view.name], metrics=metrics)

    def end(self, view: MemberView) -> None:
        run = self._runs.pop(view.name)
        self._steps.pop(view.name, None)
        self._client.set_tag(run, "status", view.status)
        if view.error:
            self._client.set_tag(run, "error", view.error)
        self._client.set_terminated(run, ENDS.get(view.status, "FAILED"))
        if not self._runs:
            self._client.set_terminated(self._parent, "FINISHED")


def _name(name: str) -> str:
    """Return the name with characters that MLflow does not accept replaced."""
    return re.sub(r"[^\w./ -]", "_", name)
