"""`shoal.WandB`, which logs each member as a Weights & Biases run, all in one group."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from shoal.reporting.callbacks import MemberView
from shoal.reporting.loggers import Logger, config


class WandB(Logger):
    """Logs each member as its own run, all of them in one group.

    Args:
        project: The project of the runs.
        group: The group of the runs; None means a new one, named by the time. A resumed run continues its runs if it
            has the same group.
        every_step: Also log every this many optimizer steps; see `shoal.Logger`.
        settings: Other arguments of `wandb.init`, such as `mode="offline"`, `dir`, `entity`, `tags`.
    """

    def __init__(
        self, project: str, *, group: str | None = None, every_step: int | None = None, **settings: Any
    ) -> None:
        super().__init__(every_step=every_step)
        try:
            import wandb
        except ImportError:
            raise ImportError("WandB needs the wandb package: pip install 'shoal[wandb]'") from None
        fixed = sorted(settings.keys() & {"name", "id", "config", "reinit"})
        if fixed:
            raise ValueError(f"WandB sets {', '.join(fixed)} for each member itself; leave it out")
        self._wandb: Any = wandb
        self.project, self.settings = project, settings
        self.group = group or time.strftime("shoal-%Y%m%d-%H%M%S")
        self._runs: dict[str, Any] = {}

    def begin(self, view: MemberView) -> int | None:
        offline = (self.settings.get("mode") or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun")
        run_id = hashlib.sha256(f"{self.group}/{view.name}".encode()).hexdigest()[:16]
        resume = {} if offline else {"resume": "allow"}
        self._runs[view.name] = self._wandb.init(
            project=self.project, group=self.group, name=view.name, id=run_id, config=config(view),
            reinit="create_new", **{**resume, **self.settings},
        )  # fmt: skip
        return None

    def log(self, view: MemberView, values: dict[str, float], step: int) -> None:
        self._runs[view.name].log(values, step=step)

    def end(self, view: MemberView) -> None:
        run = self._runs.pop(view.name)
        run.summary["status"] = view.status
        if view.error:
            run.summary["error"] = view.error
        run.finish(exit_code=0 if view.status in ("done", "stopped") else 1)
