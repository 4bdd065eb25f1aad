"""Jobs that share a DataLoader, while places are taken away and given back: each reads what it reads alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.runtime.test_elastic import Branching, assert_same, net, run_jobs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal
from shoal.engine.planning.policy import RoundRobin

X = torch.randn(83, 6, generator=torch.Generator().manual_seed(5))
Y = torch.arange(83) % 3


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 83

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return X[row] + torch.randn(6), Y[row]


LOADER = DataLoader(Noisy(), batch_size=8, shuffle=True)
VAL = DataLoader(TensorDataset(X, Y), batch_size=30)


def job(i: int, **more: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": net, "data": LOADER, "loss": F.cross_entropy, "seed": i, "name": f"job {i}"}
    settings |= {"hparams": {"lr": 0.01 * (i + 1)}, **({} if "steps" in more else {"epochs": 2})}
    return shoal.Job(**(settings | more))


JOBS = [
    job(0), job(1, steps=13), job(2, accumulate=3), job(3, accumulate=3, steps=5), job(4, model=Branching),
    job(5, val=VAL, val_every_steps=3), job(6, data_seed=1), job(7, epochs=3), job(8, model=Branching, epochs=3),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("seats", "policy"), [(3, RoundRobin(slice_seconds=1e-3)), (4, None), (9, None)])
def test_places_taken_away_and_given_back(seats: int, policy: RoundRobin | None) -> None:
    for ours, own in zip(run_jobs(JOBS, seats, policy), JOBS, strict=True):
        assert_same(ours, run_jobs([own], 1)[0])


def test_jobs_that_are_added_and_cloned() -> None:
    long = 10_000_000
    run = shoal.start([job(0, epochs=long), job(1, epochs=long)], device="cpu", deterministic=True)
    other = DataLoader(TensorDataset(X, Y), batch_size=8)
    run.add(job(2, epochs=3))
    run.add(job(3, data=other, epochs=3))
    run.clone("job 0", "clone", hparams={"lr": 0.5})
    while any(run.status()[name][0] in ("waiting", "running") for name in ("job 2", "job 3")):
        pass
    for name in ("job 0", "job 1", "clone"):
        run.stop(name)
    added = {result.name: result for result in run.wait()}
    for own in (job(2, epochs=3), job(3, data=other, epochs=3)):
        (alone,) = shoal.train([own], device="cpu", deterministic=True)
        for name, value in alone.model.state_dict().items():
            assert torch.equal(added[own.name].model.state_dict()[name], value)
    assert added["clone"].status == "stopped"
