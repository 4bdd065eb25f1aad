"""Every scheduler of torch, every step and every epoch: a checkpoint at any moment continues with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.stateful import Signs, X, Y, linear
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as S
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.members.member import Member
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.storage import _store

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3, 3, 7], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 6, 0.7),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 4, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=isinstance(o, torch.optim.SGD)),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=isinstance(o, torch.optim.SGD)),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1), S.MultiStepLR(o, [1, 4], 0.5)], [2]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 2), S.MultiStepLR(o, [1, 4], 0.5)]),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "rule": {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.05, "momentum": 0.9}},
    "no rule": {"optimizer": Signs, "hparams": {"lr": 0.02}},
}


def test_no_scheduler_is_left_out() -> None:
    kinds = {name for name, kind in vars(S).items() if isinstance(kind, type) and issubclass(kind, S.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys()


def jobs(optimizer: str, every: str) -> list[shoal.Job]:
    settings = {"model": linear, "data": (X, Y), "loss": F.mse_loss, "batch_size": 8, "accumulate": 2, "epochs": 4}
    settings |= OPTIMIZERS[optimizer] | {"schedule_every": every}
    names = [name for name in SCHEDULES if every == "epoch" or name != "ReduceLROnPlateau"]
    return [shoal.Job(name=name, schedule=SCHEDULES[name], **settings) for name in names]


def trained(members: list[Member], between: Callable[[Run], object] | None = None) -> list[Member]:
    run = Run(members, PlanningContext(members, timed=False), between=None if between is None else lambda: between(run))
    run.turn_seconds = 1e-9
    run.go()
    assert [member.status for member in members] == ["done"] * len(members)
    return members


def content(member: Member) -> list[Any]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in member.history]
    leaves = pytree.tree_leaves([dict(member.model.state_dict()), member.optimizer_state, rows])
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_schedule_continues(optimizer: str, every: str, tmp_path: Path) -> None:
    def prepared() -> list[Member]:
        return prepare(jobs(optimizer, every), torch.device("cpu"))

    saved: list[list[Path]] = []

    def save(run: Run) -> None:
        if run.runners and all(runner.unit.at_step_boundary for runner in run.runners):
            for runner in run.runners:
                runner.unit.write_back()
            saved.append([tmp_path / f"{len(saved)}-{index}" for index in run.members])
            for member, file in zip(run.members.values(), saved[-1], strict=True):
                _store.save(file, member.state())

    alone = [content(member) for member in trained(prepared(), save)]
    assert len(saved) > 8
    for files in saved[1::3]:
        again = prepared()
        for member, file in zip(again, files, strict=True):
            member.load_state(_store.load(file))
        assert [content(member) for member in trained(again)] == alone
