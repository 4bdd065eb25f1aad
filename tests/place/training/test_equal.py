"""Placed training gives what the plain loop gives: each way to synchronise, each kind of network, each mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.place.training.jobs import cnn, job_of, largest_difference, mlp, placement_of, rows
from torch import Tensor, nn

import shoal
from shoal.place.training.api import build
from shoal.place.training.back import Back


def trained(job: shoal.Job, placement: Any, **settings: Any) -> shoal.Result:
    (result,) = shoal.train([job], placement=placement, **settings)
    return result


@pytest.mark.parametrize("sync", ["server", "allreduce", "sharded", "factors"])
def test_each_way_to_synchronise(sync: str) -> None:
    job = job_of(mlp, rows(12))
    result = trained(job, placement_of(job, 4, sync))
    assert largest_difference(result, job) < 1e-9
    assert result.tier == "placed" and not result.split.lost


def test_fewer_sharded_parameters_than_workers() -> None:
    job = job_of(mlp, rows(12))
    result = trained(job, placement_of(job, 1, "sharded"))  # a weight and a bias, three workers
    assert largest_difference(result, job) < 1e-9
    assert not result.split.lost


@pytest.mark.parametrize("cut", [4, 7])
def test_a_scaler_at_the_server(cut: int) -> None:
    x, y = rows(12)
    job = shoal.Job(
        model=mlp, data=(x.float(), y), loss=F.cross_entropy, optimizer=torch.optim.SGD, hparams={"lr": 0.1},
        batch_size=12, steps=6, seed=3, precision="fp16", clip_norm=1.0,
    )  # fmt: skip
    result, plain = trained(job, placement_of(job, cut)), shoal.solo(job)
    assert result.status == "done", result.error
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(result.model.state_dict()[name], value, atol=2e-3), name


class Noisy(nn.Module):
    """Noise, and stochastic depth as transformers and torchvision draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        kept = (0.7 + torch.rand((len(x), 1), dtype=x.dtype, device=x.device)).floor_()
        also = torch.empty(len(x), 1, dtype=x.dtype, device=x.device).bernoulli_(0.8)
        return x + kept * also * self.fc(x) + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_noise_with_rows(micro_batches: int) -> None:
    job = job_of(lambda: nn.Sequential(nn.Linear(12, 16), Noisy(), Noisy(), nn.Linear(16, 3)), rows(12))
    assert largest_difference(trained(job, placement_of(job, "1.fc", micro_batches=micro_batches)), job) < 1e-9
    assert (
        largest_difference(trained(job, placement_of(job, "2.fc", "allreduce", micro_batches=micro_batches)), job)
        < 1e-9
    )


@pytest.mark.parametrize("sync", ["server", "factors"])
def test_micro_batches_with_dropout_on_both_sides(sync: str) -> None:
    job = job_of(mlp, rows(12), clip_norm=0.5, accumulate=2, schedule=lambda step: 0.9**step)
    assert largest_difference(trained(job, placement_of(job, 4, sync, micro_batches=2)), job) < 1e-9


@pytest.mark.parametrize("sync", ["allreduce", "sharded"])
def test_clipping_and_accumulation_of_gradients_that_workers_have(sync: str) -> None:
    job = job_of(
        mlp, rows(12), clip_norm=0.5, accumulate=2, optimizer=torch.optim.SGD, hparams={"lr": 0.1, "momentum": 0.9},
        schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40),
    )  # fmt: skip
    assert largest_difference(trained(job, placement_of(job, 3, sync)), job) < 1e-9


@pytest.mark.parametrize("sync", ["server", "allreduce", "sharded"])
def test_gradients_are_clipped_by_value(sync: str) -> None:
    job = job_of(mlp, rows(12), clip_value=1e-3, accumulate=2, optimizer=torch.optim.SGD, hparams={"lr": 0.1})
    assert largest_difference(trained(job, placement_of(job, 3, sync)), job) < 1e-9


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def _penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * penalty


@pytest.mark.parametrize("step", [None, _penalised], ids=["a layer that mixes rows", "a penalty"])
def test_what_cannot_be_divided_is_refused(step: Any) -> None:
    layers = [nn.Identity() if step else Centered(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)]
    job = job_of(lambda: nn.Sequential(*layers), rows(12), **({"step": step, "loss": None} if step else {}))
    with pytest.raises(shoal.errors.PlaceError, match="divided after '1' is not exact"):
        trained(job, placement_of(job, "1"))


@pytest.mark.parametrize("sync", ["server", "allreduce"])
def test_all_layers_on_the_workers(sync: str) -> None:
    job = job_of(mlp, rows(12))
    assert largest_difference(trained(job, placement_of(job, 7, sync)), job) < 1e-9


@pytest.mark.parametrize(("cut", "sync"), [(8, "server"), (6, "allreduce"), (13, "allreduce")])
def test_batch_norm_over_the_joined_batch(cut: int, sync: str) -> None:
    # without biases before batch norm, whose exact gradient is zero: they would amplify rounding
    def network() -> nn.Module:
        model = cnn()
        for place in (0, 4, 8):
            model[place].bias = None  # type: ignore[index]
        return model

    job = job_of(network, rows(1, 8, 8), val=rows(1, 8, 8, seed=1))
    assert largest_difference(trained(job, placement_of(job, cut, sync, workers=2)), job) < 1e-9


def test_a_last_batch_with_fewer_rows_than_workers() -> None:
    def network() -> nn.Module:
        return nn.Sequential(*(layer for layer in cnn() if not isinstance(layer, nn.BatchNorm1d)))

    job = job_of(network, rows(1, 8, 8, count=26), optimizer=torch.optim.SGD)
    assert largest_difference(trained(job, placement_of(job, 8, "allreduce")), job) < 1e-9


def test_workers_with_unequal_shares() -> None:
    job = job_of(mlp, rows(12))
    assert largest_difference(trained(job, placement_of(job, 4, rows=(6, 4, 2))), job) < 1e-9


def test_a_loss_that_is_no_mean_over_rows_and_a_step_of_its_own() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + out.std(0).prod(), {"spread": out.std()}

    job = job_of(mlp, rows(12), step=step)
    assert largest_difference(trained(job, placement_of(job, 4, micro_batches=2)), job) < 1e-9
    with pytest.raises(shoal.ShoalError, match="not a mean over rows"):
        train_whole(job)


def train_whole(job: shoal.Job) -> shoal.Result:
    return trained(job, placement_of(job, 7))


def test_one_machine_is_ordinary_training() -> None:
    job = job_of(mlp, rows(12))
    result = trained(job, placement_of(job, 4, mode="one machine"), deterministic=True)
    assert result.tier != "placed"
    assert largest_difference(result, job) < 1e-9


SEEN: list[int] = []
"""On how many rows `Counted` was called."""


class Counted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        SEEN.append(len(input))
        return super().forward(input)


def counted() -> nn.Module:
    return nn.Sequential(Counted(12, 16), *list(mlp())[1:])


def back_of(job: shoal.Job, cut: int) -> tuple[Back, Any]:
    built = build(job, placement_of(job, cut), torch.device("cpu"))
    return Back(built), built.member.data.take(0, job.batch_size)


def test_the_server_runs_a_network_of_the_workers_on_a_few_rows_only() -> None:
    SEEN.clear()
    back, batch = back_of(job_of(counted, rows(12)), 7)
    assert back.can_split(None, batch, 12)
    assert max(SEEN) <= 6  # 4 and 6 rows when it is recorded, 4 when it is tried


@pytest.mark.parametrize("kind", ["a mean over some rows", "rows that are compared", "whole batches only"])
def test_a_loss_of_workers_must_be_a_mean_over_rows(kind: str) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        if kind == "whole batches only":
            out = out.view(12, 3)
        if kind == "rows that are compared":
            out = out - out.mean(0)
        losses = F.cross_entropy(out, batch[1], reduction="none")
        if kind == "a mean over some rows":  # which the first rows do not show
            first = (batch[1] == 1) if len(batch[1]) > 4 else torch.ones(len(batch[1]), dtype=torch.bool)
            return losses[first].mean()
        return losses.mean()

    data = rows(12)
    back, batch = back_of(job_of(mlp, data, step=step), 7)
    assert not back.can_split(None, batch, 12)
