"""Steps that Inductor compiles, on a CPU: what it finds again, and views of results that it lays out differently."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.engine.tiers.captured.test_captured_on_cpu import CPU
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import decomposition

import shoal
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.captured import compiling
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.preparation.checks import prepare

X, Y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def unit() -> CapturedUnit:
    jobs = [
        shoal.Job(
            model=lambda: nn.Linear(4, 2).double(), data=(X, Y), loss=nn.functional.mse_loss, hparams={"lr": 0.1},
            batch_size=4, epochs=1, seed=seed,
        )
        for seed in range(2)
    ]  # fmt: skip
    members, trace_cache = prepare(jobs, CPU), TraceCache()
    return CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=2, compiled=True)


def compiled() -> compiling.Executable:
    (chunk,) = unit().chunks
    return compiling.executable(chunk.step(4), chunk.inputs, compiled=True)


def test_what_was_compiled_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    limit = sys.getrecursionlimit()
    compiled()
    assert sys.getrecursionlimit() == limit, "Inductor raises it"
    assert counters["inductor"]["fxgraph_cache_miss"] == 1 and not counters["inductor"]["fxgraph_cache_bypass"]
    compiled()
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and not counters["inductor"]["fxgraph_cache_bypass"]


def test_a_result_that_is_laid_out_differently_is_viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_columns(x: Tensor) -> Tensor:
        return torch.ops.aten.exp(x).t().contiguous().t()

    def function(tensors: list[Tensor]) -> list[Tensor]:
        x, result = tensors
        result.copy_(x.expm1().view(12))
        return []

    table = decomposition.select_decomp_table()
    changed = {**table, torch.ops.aten.expm1.default: lambda x: by_columns(x) - 1}
    monkeypatch.setattr(decomposition, "select_decomp_table", lambda: changed)
    x, result = torch.randn(3, 4), torch.empty(12)
    compiling._pure_graph(function, [x, result])(x, result)
    assert torch.allclose(result, x.expm1().view(12))
