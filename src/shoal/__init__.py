"""Shoal trains many neural networks at once on one device, and one network across many devices.

Names are imported when they are first used, so that `shoal --help` does not wait for torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import split as split
    from shoal.data.rows import Rows as Rows
    from shoal.engine.planning.policy import FairShare as FairShare
    from shoal.engine.planning.policy import Fifo as Fifo
    from shoal.engine.planning.policy import Policy as Policy
    from shoal.engine.planning.policy import Priority as Priority
    from shoal.engine.planning.policy import RoundRobin as RoundRobin
    from shoal.engine.planning.policy import ShortestFirst as ShortestFirst
    from shoal.engine.planning.policy import Ticket as Ticket
    from shoal.errors import JobError as JobError
    from shoal.errors import ShoalError as ShoalError
    from shoal.errors import ShoalWarning as ShoalWarning
    from shoal.evaluation import Ensemble as Ensemble
    from shoal.evaluation import Evaluation as Evaluation
    from shoal.explanation import Explanation as Explanation
    from shoal.explanation import explain as explain
    from shoal.jobs.averaging import EMA as EMA
    from shoal.jobs.averaging import SWA as SWA
    from shoal.jobs.job import EarlyStop as EarlyStop
    from shoal.jobs.job import Job as Job
    from shoal.live import JobStatus as JobStatus
    from shoal.live import LiveRun as LiveRun
    from shoal.live import start as start
    from shoal.place.api import place as place
    from shoal.preparation.folds import folds as folds
    from shoal.reference import solo as solo
    from shoal.replaying import replay as replay
    from shoal.reporting.callbacks import MemberView as MemberView
    from shoal.reporting.events import Event as Event
    from shoal.reporting.loggers import CSVLogger as CSVLogger
    from shoal.reporting.loggers import Logger as Logger
    from shoal.reporting.mlflow_logger import MLflow as MLflow
    from shoal.reporting.tensorboard import TensorBoard as TensorBoard
    from shoal.reporting.wandb_logger import WandB as WandB
    from shoal.results import Result as Result
    from shoal.results import Results as Results
    from shoal.storage.loading import load as load
    from shoal.training import train as train
    from shoal.tune.studies.api import tune as tune
    from shoal.user_loop.pack import Pack as Pack

# torch.cuda.is_available() then asks NVML and does not initialize CUDA, so that a forked process can use the GPU: see
# shoal.engine.processes.guard.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HOME = {
    "CSVLogger": "shoal.reporting.loggers",
    "EMA": "shoal.jobs.averaging",
    "EarlyStop": "shoal.jobs.job",
    "Ensemble": "shoal.evaluation",
    "Evaluation": "shoal.evaluation",
    "Event": "shoal.reporting.events",
    "Explanation": "shoal.explanation",
    "FairShare": "shoal.engine.planning.policy",
    "Fifo": "shoal.engine.planning.policy",
    "Job": "shoal.jobs.job",
    "JobError": "shoal.errors",
    "JobStatus": "shoal.live",
    "LiveRun": "shoal.live",
    "Logger": "shoal.reporting.loggers",
    "MLflow": "shoal.reporting.mlflow_logger",
    "MemberView": "shoal.reporting.callbacks",
    "Pack": "shoal.user_loop.pack",
    "Policy": "shoal.engine.planning.policy",
    "Priority": "shoal.engine.planning.policy",
    "Result": "shoal.results",
    "Results": "shoal.results",
    "RoundRobin": "shoal.engine.planning.policy",
    "Rows": "shoal.data.rows",
    "SWA": "shoal.jobs.averaging",
    "ShoalError": "shoal.errors",
    "ShoalWarning": "shoal.errors",
    "ShortestFirst": "shoal.engine.planning.policy",
    "TensorBoard": "shoal.reporting.tensorboard",
    "Ticket": "shoal.engine.planning.policy",
    "WandB": "shoal.reporting.wandb_logger",
    "explain": "shoal.explanation",
    "folds": "shoal.preparation.folds",
    "load": "shoal.storage.loading",
    "replay": "shoal.replaying",
    "solo": "shoal.reference",
    "start": "shoal.live",
    "train": "shoal.training",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from shoal.environment import version

        return version()
    if name in ("place", "split", "tune"):  # packages, two of which can be called
        return import_module(f"shoal.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal.utils.caches import bytecode_kept, import_tracer
    from shoal.utils.garbage_collection import paused

    with bytecode_kept(), paused():
        value = getattr(import_module(_HOME[name]), name)
        if name == "Job":  # training follows: import what it needs now, not inside the call of shoal.train
            import_module("shoal.training")
    if name == "Job":
        import_tracer()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
