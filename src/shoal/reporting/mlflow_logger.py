"""`shoal.MLflow`: a run of MLflow for each member, under one parent run."""

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
"""Tags of runs. They are known again by the last one, a hash of the others: a search has no way to write every name."""
ENDS = {"done": "FINISHED", "stopped": "FINISHED", "cancelled": "KILLED"}


class MLflow(Logger):
    """Logs each member as a run of its own, all of them under one parent run.

    Args:
        experiment: Its name; it is made where there is none.
        group: The name of the parent run; None: a new one, named by the time. A run that is resumed continues its runs
            there if it is given the same group.
        tracking_uri: Where to, such as "sqlite:///mlflow.db" or a server's address; None: as MLflow is set up.
        every_step: Log each so many optimizer steps too; see `shoal.Logger`.
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
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._parent = ""
        self._runs: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        """By a member's name, the last step that an earlier run has logged."""

    def begin(self, view: MemberView) -> int | None:
        from mlflow.entities import Param

        self._parent = self._parent or self._run({GROUP: self.group}, self.group, {})[0]
        self._client.update_run(self._parent, status="RUNNING")
        tags = {GROUP: self.group, MEMBER: view.name}
        run, epoch = self._run(tags, view.name, {"mlflow.parentRunId": self._parent})
        self._runs[view.name] = run
        params = [Param(_name(name), str(value)) for name, value in config(view).items()]
        self._client.log_batch(run, params=params)
        return self._whole(run, epoch, view)

    def _whole(self, run: str, epoch: int | None, view: MemberView) -> int | None:
        """The last epoch that was logged; the one before it where that one is longer now, since the job has more
        steps."""
        if epoch is None:
            return None
        logged = max(metric.step for metric in self._client.get_metric_history(run, "epoch"))
        self._steps[view.name] = logged
        longer = any(row["epoch"] == epoch and row["step"] > logged for row in view.history)
        return epoch - 1 if longer else epoch

    def _run(self, tags: dict[str, str], name: str, more: dict[str, str]) -> tuple[str, int | None]:
        """The run that has these tags, a new one where there is none; and the last epoch that was logged in it."""
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
    """What MLflow takes as a name."""
    return re.sub(r"[^\w./ -]", "_", name)
