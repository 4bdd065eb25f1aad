"""Runs on a GPU, against the reference loop there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance
from torch import nn

import shoal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

X = torch.randn(37, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (37,), generator=torch.Generator().manual_seed(2))


def net() -> nn.Module:
    # no bias before the norm: its gradient is zero but for rounding, which Adam makes large
    layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": net, "data": (X, Y), "val": (X, Y), "loss": F.cross_entropy, "batch_size": 8}
    return shoal.Job(**(settings | {"hparams": {"lr": 0.01}, "epochs": 2, "seed": 3} | changes))


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 1.0}, {"accumulate": 2}])
def test_two_equal_the_reference_loop(changes: dict[str, Any]) -> None:
    jobs = [job(name="other", seed=9), job(name="this", **changes)]
    result = shoal.train(jobs, device="cuda")[1]
    alone = shoal.solo(jobs[1], device="cuda")
    assert result.status == alone.status == "done"
    assert result.environment["device_name"] == torch.cuda.get_device_name()
    for name, value in alone.model.state_dict().items():
        assert result.model.state_dict()[name].device.type == "cpu"
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_an_index_out_of_range_is_found_on_the_cpu_and_the_device_lives_on() -> None:
    model = lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).double()  # noqa: E731
    bad = job(model=model, data=(torch.full((37,), 5), Y), val=None, name="bad")
    with pytest.raises(ValueError, match="job 'bad': forward raised IndexError"):
        shoal.train([bad], device="cuda")
    with pytest.raises(ValueError, match="labels from 1 to 3"):
        shoal.train([job(data=(X, Y + 1), name="labels")], device="cuda")
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_jobs_with_data_of_their_own_are_one_stack() -> None:
    own = [(torch.randn(37, 6, dtype=torch.float64), Y) for _ in range(3)]
    jobs = [job(data=data, val=data, seed=i, name=f"{i}") for i, data in enumerate([*own, (own[0][0].clone(), Y)])]
    results = shoal.train(jobs, device="cuda", compile=False)
    assert results.plan is not None and len(results.plan.parts) == 1
    for result, own_job in zip(results, jobs, strict=True):
        assert result.status == "done" and result.tier == "stacked"
        for name, value in shoal.solo(own_job, device="cuda").model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_the_deterministic_switch() -> None:
    a, b = (shoal.train([job()], device="cuda", deterministic=True)[0].model.state_dict() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}])
def test_a_deterministic_job_has_the_same_bits_in_any_company(changes: dict[str, Any]) -> None:
    jobs = [job(name=f"{seed}", seed=seed, epochs=2 + 3 * seed, **changes) for seed in range(6)]
    alone = shoal.train(jobs[:1], device="cuda", deterministic=True)[0].model.state_dict()
    for count in (2, 6):
        result = shoal.train(jobs[:count], device="cuda", deterministic=True)[0]
        assert all(torch.equal(value, alone[name]) for name, value in result.model.state_dict().items())


def test_data_is_on_the_device_once() -> None:
    x, y = torch.randn(1 << 19, 64), torch.zeros(1 << 19, dtype=torch.int64)
    torch.zeros(1, device="cuda")  # with CUDA in use here the run stays in this process, where `seen` is
    before = torch.cuda.memory_allocated()
    seen: list[int] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(torch.cuda.memory_allocated())
        return F.cross_entropy(model(batch[0]), batch[1])

    common: dict[str, Any] = {
        "data": (x, y),
        "val": None,
        "loss": None,
        "step": step,
        "epochs": 1,
        "batch_size": 1 << 11,
    }
    shoal.train([job(model=lambda: nn.Linear(64, 3), name=str(s), seed=s, **common) for s in range(8)], device="cuda")
    batches = 8 * x.nbytes // 256  # one of each member
    workspaces = 2 << 25  # of cuBLAS, on two streams
    assert max(seen) - before < 1.5 * (x.nbytes + y.nbytes) + 2 * batches + workspaces


class Reader(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.head = kind(2, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x.view(-1, 3, 2))[0][:, -1])
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_networks_ride_together(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """Their equality alone would not tell: one after another they are right too, and a hundred times slower."""
    jobs = [
        job(model=lambda: Reader(kind).to(dtype), data=(X.to(dtype), Y), val=None, seed=seed, name=str(seed))
        for seed in range(3)
    ]
    results = shoal.train(jobs, device="cuda", compile=False)
    assert {part.tier for part in results.plan.parts} <= {"stacked", "streams"}, results.plan.parts[0].reason
    for one, given in zip(results, jobs, strict=True):
        alone = shoal.solo(given, device="cuda").model.state_dict()
        other = shoal.solo(given, device="cpu").model.state_dict()  # sums in another order
        for name, value in alone.items():
            rounding = max(torch.finfo(dtype).eps, distance(other[name], value))
            bound = 1e-9 if dtype is torch.float64 else 10 * rounding
            assert distance(one.model.state_dict()[name], value) <= bound, name
