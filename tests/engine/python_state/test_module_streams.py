"""Random numbers of the modules `random` and `numpy.random` are a job's own, as torch's are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import shoal
from shoal.engine.python_state.module_streams import ModuleStreams
from shoal.preparation.checks import prepare

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (40,), generator=GENERATOR)
VAL = (X[:10], Y[:10])
WEIGHTS = np.array([1.0, 2.0, 0.5])
Step = Callable[[nn.Module, Any], Tensor]


def mixup(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    share, noise, order = float(np.random.beta(0.4, 0.4)), float(np.random.randn()), list(range(len(x)))
    random.shuffle(order)
    out = model(share * x + (1 - share) * x[order] + 0.1 * noise)
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


def sometimes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Its first step draws from torch alone."""
    scale = 1.0 + float(np.random.rand()) if float(torch.rand(())) < 0.3 else 1.0
    return scale * F.cross_entropy(model(batch[0]), batch[1])


def in_a_library(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """scipy draws from numpy's module, which this code does not mention."""
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + float(stats.uniform.rvs()))


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.from_numpy(WEIGHTS))


def noisy_score(outputs: Tensor, targets: Tensor) -> float:
    return random.random() + float(np.random.rand())


def job(step: Step, seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3).double(), "data": (X, Y), "hparams": {"lr": 0.05}, "batch_size": 16,
        "epochs": 3,
    }  # fmt: skip
    return shoal.Job(step=step, seed=seed, **(settings | {"name": f"{seed}"} | changes))


def by_hand(step: Step, seed: int) -> nn.Module:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    order = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for rows in torch.randperm(40, generator=order).split(16):
            optimizer.zero_grad()
            step(model, (X[rows], Y[rows])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


@pytest.mark.parametrize("step", [mixup, sometimes, in_a_library])
def test_a_job_draws_as_after_seeding_them_whatever_runs_beside_it(step: Step) -> None:
    random.seed(77)
    np.random.seed(77)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    changes: dict[str, Any] = {"val": VAL, "metrics": {"score": noisy_score}}
    results = shoal.train([job(step, seed, **changes) for seed in (3, 4, 5)], device="cpu")
    (one,) = shoal.train([job(step, 4)], device="cpu")
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    for result, seed in [*zip(results, (3, 4, 5), strict=True), (one, 4), (shoal.solo(job(step, 5, **changes)), 5)]:
        assert torch.allclose(result.model.weight, by_hand(step, seed).weight, rtol=1e-12, atol=1e-12)


def test_a_factory_draws_by_the_seed_of_its_job() -> None:
    def network() -> nn.Module:
        model = nn.Linear(4, 3).double()
        model.weight.data = torch.from_numpy(np.random.randn(3, 4) * random.random())
        return model

    results = shoal.train([job(plain, 1, model=network, epochs=0, name=name) for name in "ab"], device="cpu")
    for result in results:
        np.random.seed(1)
        random.seed(1)
        assert torch.equal(result.model.weight, network().weight)


def test_the_modules_are_left_alone_for_jobs_that_do_not_draw_from_them() -> None:
    drawing = [prepare([job(step, 0)], torch.device("cpu"))[0].modules.used for step in (plain, mixup, sometimes)]
    assert drawing == [False, True, True]


def test_streams_that_are_not_kept_are_restored_whatever_is_done_inside() -> None:
    streams = ModuleStreams()
    streams.used = True
    with streams.swapped_in(3, keep=False), streams.swapped_in(3, keep=True):
        inside = random.random()
    with streams.swapped_in(3, keep=True):
        assert random.random() == inside
