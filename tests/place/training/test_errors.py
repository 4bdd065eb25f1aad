"""What a placed training refuses: one clear line each, before anything is trained."""

from __future__ import annotations

import pytest
import torch
from tests.place.training.jobs import job_of, mlp, placement_of, rows
from torch import nn

import shoal
from shoal.place.devices import divide
from shoal.place.training.roles import chunks


def test_what_is_no_placement() -> None:
    with pytest.raises(ValueError, match=r"placement is a str; pass what shoal\.place returned"):
        shoal.train([job_of(mlp, rows(12))], placement="fast")


def test_two_jobs() -> None:
    job = job_of(mlp, rows(12))
    with pytest.raises(ValueError, match="a placement trains one job, and there are 2"):
        shoal.train([job, job], placement=placement_of(job, 3))


def test_a_placement_of_another_network() -> None:
    job = job_of(mlp, rows(12))
    other = job_of(lambda: nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)), rows(12))
    with pytest.raises(ValueError, match="7 layers at the workers, the job's network 3 layers"):
        shoal.train([other], placement=placement_of(job, 7))
    with pytest.raises(ValueError, match="has ReLU 1 where the job's network has Tanh 1; use a placement of this"):
        shoal.train([other], placement=placement_of(job, 1))


def test_optimizers_that_evaluate_the_loss() -> None:
    job = job_of(mlp, rows(12), optimizer=torch.optim.LBFGS, hparams={})
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times a step; use another optimizer"):
        shoal.train([job], placement=placement_of(job, 3, workers=1))


class Modes(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_averages_and_modes_of_optimizers() -> None:
    job = job_of(mlp, rows(12), average=shoal.EMA(), steps=2)
    with pytest.raises(ValueError, match="average is set, and placed training does not support it"):
        shoal.train([job], placement=placement_of(job, 3, workers=1))
    job = job_of(mlp, rows(12), optimizer=Modes, hparams={"lr": 0.1})
    with pytest.raises(ValueError, match="Modes has a train and an eval mode, which placed training does not support"):
        shoal.train([job], placement=placement_of(job, 3, workers=1))


def test_a_scaler_with_gradients_among_workers() -> None:
    job = job_of(mlp, rows(12), precision="fp16")
    with pytest.raises(ValueError, match="precision is 'fp16'"):
        shoal.train([job], placement=placement_of(job, 3, "allreduce", workers=1))


def test_a_run_folder_of_another_placement(tmp_path: object) -> None:
    job = job_of(mlp, rows(12), steps=2)
    shoal.train([job], placement=placement_of(job, 3, workers=1), out=str(tmp_path))
    with pytest.raises(ValueError, match="placement"):
        shoal.train([job], placement=placement_of(job, 1, workers=1), out=str(tmp_path))


@pytest.mark.parametrize(("total", "shares"), [(10, [1, 1, 1]), (3, [1, 1, 1, 1]), (100, [3, 1]), (1, [1, 5])])
def test_rows_are_divided_completely(total: int, shares: list[float]) -> None:
    rows_of = divide(total, shares)
    assert sum(rows_of) == total and len(rows_of) == len(shares)
    assert all(abs(count - total * share / sum(shares)) < 1 for count, share in zip(rows_of, shares, strict=True))


@pytest.mark.parametrize(("count", "parts"), [(10, 3), (2, 4), (7, 1)])
def test_micro_batches_are_in_order(count: int, parts: int) -> None:
    made = chunks(count, parts)
    assert [row for part in made for row in range(count)[part]] == list(range(count))
    assert len(made) == min(count, parts)
