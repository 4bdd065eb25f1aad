"""Shoal trains many neural networks at once on one device, and one network across many devices.

Names are loaded when they are used, so that `shoal --help` does not wait for torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import split as split
    from shoal.callbacks import MemberView as MemberView
    from shoal.data.rows import Rows as Rows
    from shoal.errors import JobError as JobError
    from shoal.errors import ShoalError as ShoalError
    from shoal.errors import ShoalWarning as ShoalWarning
    from shoal.events import Event as Event
    from shoal.explanation import Explanation as Explanation
    from shoal.explanation import explain as explain
    from shoal.job import EarlyStop as EarlyStop
    from shoal.job import Job as Job
    from shoal.kfold import folds as folds
    from shoal.live import LiveRun as LiveRun
    from shoal.live import start as start
    from shoal.pack.own import Pack as Pack
    from shoal.pack.policy import FairShare as FairShare
    from shoal.pack.policy import Fifo as Fifo
    from shoal.pack.policy import Policy as Policy
    from shoal.pack.policy import Priority as Priority
    from shoal.pack.policy import RoundRobin as RoundRobin
    from shoal.pack.policy import ShortestFirst as ShortestFirst
    from shoal.pack.policy import Ticket as Ticket
    from shoal.reference import replay as replay
    from shoal.reference import solo as solo
    from shoal.results import Result as Result
    from shoal.results import Results as Results
    from shoal.tensorboard import TensorBoard as TensorBoard
    from shoal.training import train as train

# torch.cuda.is_available() then asks the driver's monitor instead of CUDA itself, and a forked process can use the GPU:
# see shoal.pack.guard.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HOME = {
    "EarlyStop": "shoal.job",
    "Event": "shoal.events",
    "Explanation": "shoal.explanation",
    "FairShare": "shoal.pack.policy",
    "Fifo": "shoal.pack.policy",
    "Job": "shoal.job",
    "JobError": "shoal.errors",
    "LiveRun": "shoal.live",
    "MemberView": "shoal.callbacks",
    "Pack": "shoal.pack.own",
    "Policy": "shoal.pack.policy",
    "Priority": "shoal.pack.policy",
    "Result": "shoal.results",
    "Results": "shoal.results",
    "RoundRobin": "shoal.pack.policy",
    "Rows": "shoal.data.rows",
    "ShoalError": "shoal.errors",
    "ShoalWarning": "shoal.errors",
    "ShortestFirst": "shoal.pack.policy",
    "TensorBoard": "shoal.tensorboard",
    "Ticket": "shoal.pack.policy",
    "explain": "shoal.explanation",
    "folds": "shoal.kfold",
    "replay": "shoal.reference",
    "solo": "shoal.reference",
    "start": "shoal.live",
    "train": "shoal.training",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from shoal.version import version

        return version()
    if name == "split":
        return import_module("shoal.split")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
