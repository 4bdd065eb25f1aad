"""Small searches for the tests, and a program that runs one in a folder: `python problems.py KIND OUT`,
with `shared` after it in two processes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.processes import temporary_workers, training_run
from shoal.tune import ASHA, PBT

G = torch.Generator().manual_seed(11)
X = torch.randn(240, 10, generator=G)
Y = (X @ torch.randn(10, 4, generator=G)).argmax(1)
DATA, VAL = (X[:160], Y[:160]), (X[160:], Y[160:])
SPACE = {"lr": ("log", 1e-3, 1.0), "momentum": ("uniform", 0.0, 0.9)}


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def net(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))


def make_job(params: dict[str, Any], **changes: Any) -> shoal.Job:
    hparams = {"lr": params["lr"], "momentum": params["momentum"]}
    given: dict[str, Any] = {"batch_size": 16, "metrics": {"accuracy": accuracy}, "val": VAL}
    return shoal.Job(
        model=lambda: net(params.get("width", 12)), data=DATA, loss=F.cross_entropy, optimizer=torch.optim.SGD,
        hparams=hparams, **{**given, **changes},
    )  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "hyperband": {"max_epochs": 9},
    "in-turn": {"max_epochs": 9, "scheduler": shoal.tune.Hyperband(together=False)},
    "asha": {"max_epochs": 9, "scheduler": ASHA(parallel=4), "num_trials": 14},
    "pbt": {"max_epochs": 12, "scheduler": PBT(interval=2), "num_trials": 8},
    "none": {"max_epochs": 4, "scheduler": "none", "num_trials": 4},
}


def tune(kind: str = "hyperband", **changes: Any) -> shoal.tune.Study:
    settings = {"metric": "accuracy", "deterministic": True, "device": "cpu", **KINDS[kind], **changes}
    return shoal.tune(settings.pop("make_job", make_job), settings.pop("space", SPACE), **settings)


def share(setattr: Any = setattr) -> None:
    """Have studies train in two processes, also for little work, and where bits are compared."""
    os.environ["SHOAL_WORKERS"] = "2"
    setattr(
        training_run.TrainingRun, "_may_share", property(lambda work: work.search is not None and work.search.shareable)
    )
    for name, seconds in (("LEAST_SECONDS", 0.0), ("SLICE_SECONDS", 0.05), ("ROUND_SECONDS", 0.01)):
        setattr(temporary_workers, name, seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[3:] == ["shared"]:
        share()
    study = tune(sys.argv[1], out=sys.argv[2], checkpoint_every=0.05)
    print(json.dumps(study.to_dict()))
