"""With deterministic=True a captured job has the same bits in any company, seen with kernels compiled for the host."""

from __future__ import annotations

import pytest
import torch
from tests.engine.loop import run
from tests.engine.tiers.captured import host_kernels
from tests.engine.tiers.captured.test_captured_on_cpu import CPU, OnCpu, as_on_a_gpu
from torch import Tensor, nn

import shoal
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.captured import _step
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.preparation.checks import prepare

__all__ = ["as_on_a_gpu"]

DATA = torch.randn(10, 6), torch.randint(3, (10,))


def job(seed: int, epochs: int) -> shoal.Job:
    """Ten rows in batches of four: the last one is short."""
    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)), data=DATA,
        loss=nn.functional.cross_entropy, hparams={"lr": 0.01}, batch_size=4, epochs=epochs, seed=seed,
    )  # fmt: skip


def train(jobs: list[shoal.Job], *, deterministic: bool) -> tuple[dict[str, Tensor], set[int]]:
    """Return the first job's weights, and the batch sizes whose steps were captured."""
    members, trace_cache = prepare(jobs, CPU), TraceCache(deterministic=deterministic)
    unit = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=1, compiled=False)
    captured: set[int] = set()
    run([unit], CapturedExecutor(OnCpu()), lambda _: captured.update(unit.graphs))
    return members[0].model.state_dict(), captured


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("as_on_a_gpu", "one_thread")
def test_whether_a_step_is_captured_does_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step, "can_fuse", lambda _: True)
    monkeypatch.setattr(_step.cuda_kernels, "load", host_kernels.load)
    alone, few = train([job(0, 2)], deterministic=True)
    beside, more = train([job(0, 2), job(1, 6)], deterministic=True)
    assert few == {4} and more == {2, 4}, "beside a longer job the short batches are captured, too"
    assert all(torch.equal(beside[name], value) for name, value in alone.items())
    fused, _ = train([job(0, 2)], deterministic=False)
    assert not all(torch.equal(fused[name], value) for name, value in alone.items()), "fused kernels round otherwise"
