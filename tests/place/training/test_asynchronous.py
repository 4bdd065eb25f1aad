"""Asynchronous training: with one worker it is ordinary training, with several it learns and loses nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.place.training.jobs import cnn, job_of, largest_difference, placement_of, rows
from tests.place.training.test_faults import Acting, kill, run
from torch import Tensor, nn

import shoal


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def learnable() -> tuple[Tensor, Tensor]:
    x, _ = rows(12, count=96)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("cut", [2, 5])
def test_one_worker_is_ordinary_training(cut: int) -> None:
    job = job_of(plain, rows(12), clip_norm=0.5, schedule=lambda step: 0.95**step)
    placement = placement_of(job, cut, workers=1, rows=(12,), staleness=0)
    (result,) = shoal.train([job], placement=placement)
    assert largest_difference(result, job) < 1e-9


@pytest.mark.parametrize("staleness", [0, 2])
def test_several_workers_learn(staleness: int) -> None:
    job = job_of(plain, learnable(), val=learnable(), epochs=8, steps=None, val_every=8)
    (result,) = shoal.train([job], placement=placement_of(job, 2, staleness=staleness))
    (reference,) = shoal.train([job])
    assert result.status == "done" and result.steps == reference.steps == 64
    assert result.history[-1]["val_loss"] < 0.5 * result.history[0]["loss"]


def test_a_killed_workers_batch_is_computed_by_another_one(tmp_path: Path) -> None:
    job = job_of(plain, learnable(), epochs=4, steps=None)
    acting = Acting(tmp_path, 4, partial(kill, which=0))
    result = run(job, placement_of(job, 2, staleness=1), acting)
    assert result.status == "done" and result.steps == 32
    assert len(result.split.lost) == 1


def test_what_cannot_be_asynchronous() -> None:
    job = job_of(plain, rows(12))
    with pytest.raises(shoal.ShoalError, match="sync='server'"):
        shoal.train([job], placement=placement_of(job, 2, "allreduce", staleness=1))
    normed = job_of(cnn, rows(1, 8, 8))
    with pytest.raises(shoal.ShoalError, match="batch_norm='own'"):
        shoal.train([normed], placement=placement_of(normed, 8, staleness=1))
    with pytest.raises(shoal.ShoalError, match="staleness is -1; use 0 or more"):
        shoal.train([job], placement=placement_of(job, 2, staleness=-1))


def test_a_loss_that_is_not_finite_ends_it() -> None:
    job = job_of(plain, rows(12), optimizer=torch.optim.SGD, hparams={"lr": 1e200})
    (result,) = shoal.train([job], placement=placement_of(job, 2, staleness=1))
    assert result.status == "diverged"
