"""Captured steps on a GPU, held to the reference loop there (which draws by the same public function)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.loop import run
from torch import nn

import shoal
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.graphs import Recorder
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.preparation.checks import prepare
from shoal.reference import solo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

torch.manual_seed(0)
X, Y = torch.randn(203, 6, dtype=torch.float64), torch.randint(4, (203,))
IMAGES = torch.randn(70, 3, 8, 8, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.drop, self.b = nn.Dropout(p), nn.Linear(16, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.drop(F.relu(self.norm(self.a(x)))))
        return out


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.drop, self.out = nn.Dropout2d(0.2), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.c(x))), 2)
        out: torch.Tensor = self.out(self.drop(h).mean((2, 3)))
        return out


def job(i: int, **changes: object) -> shoal.Job:
    settings: dict[str, object] = {
        "model": lambda: Net(0.1 * (i % 3)), "data": (X, Y), "val": (X[:50], Y[:50]), "loss": F.cross_entropy,
        "optimizer": torch.optim.AdamW, "hparams": {"lr": 1e-3 * (i + 1)}, "batch_size": 32, "epochs": 3, "seed": i,
        "name": f"j{i}",
    }  # fmt: skip
    return shoal.Job(**{**settings, **changes})  # type: ignore[arg-type]


def worst(a: shoal.Result, b: shoal.Result) -> float:
    found = 0.0
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    for name, value in theirs.items():
        scale = max(float(value.double().abs().max()), 1e-12)
        found = max(found, float((ours[name].double() - value.double()).abs().max()) / scale)
    for place, entry in b.optimizer_state["state"].items():
        for name, value in entry.items():
            mine = a.optimizer_state["state"][place][name].double().cpu()
            scale = max(float(value.double().abs().max()), 1e-12)
            found = max(found, float((mine - value.double().cpu()).abs().max()) / scale)
    for mine, row in zip(a.history, b.history, strict=True):
        for name, value in row.items():
            if name != "seconds":
                found = max(found, abs(mine[name] - value) / max(abs(value), 1e-12))
    return found


KINDS: list[dict[str, object]] = [
    {"optimizer": torch.optim.Adam, "clip_norm": 0.3},
    {"optimizer": torch.optim.SGD, "schedule": lambda t: 0.95**t},
    {"optimizer": torch.optim.RMSprop},
    {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.05, "momentum": 0.9}},
    {"optimizer": torch.optim.AdamW, "schedule": lambda t: 0.5**t, "schedule_every": "epoch"},
    {
        "optimizer": torch.optim.Adam,
        "schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=7),
        "epochs": None,
        "steps": 7,
    },
]
"""Members with different optimizers, and schedules for some of them."""


def logging_step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, object]]:
    """Logs a share, a count, a tensor of one dimension, a number of the module and one of Python."""
    x, y = batch
    out = model(x)
    loss = F.cross_entropy(out, y)
    right = out.argmax(1) == y
    return loss, {
        "accuracy": right.double().mean(), "right": right.sum(), "loss again": loss, "rate": model.drop.p, "two": 2,
        "spread": out.std().reshape(1),
    }  # fmt: skip


CASES = {
    "dropout rates": [job(i) for i in range(4)],
    "one order": [job(i, data_seed=7) for i in range(4)],
    "alone": [job(0)],
    "schedule": [
        job(i, schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=30)) for i in range(3)
    ],
    "clip": [job(i, clip_norm=None if i == 1 else 0.1 * (i + 1)) for i in range(3)],
    "clip by value": [job(i, **({} if i == 1 else {"clip_value": 0.01 * (i + 1)})) for i in range(3)],
    "clip by value and by norm": [job(0, clip_value=0.01), job(1, clip_norm=0.1), job(2)],
    "logs": [job(i, loss=None, step=logging_step, epochs=1 + i % 2) for i in range(4)],
    "logs, one order": [job(i, loss=None, step=logging_step, data_seed=7) for i in range(3)],
    "lengths": [job(i, epochs=1 + i) for i in range(5)],
    "steps": [job(i, epochs=None, steps=5 + 3 * i) for i in range(5)],
    "optimizers": [job(i, optimizer=[torch.optim.SGD, torch.optim.RMSprop][i % 2]) for i in range(4)],
    "kinds of optimizers": [job(i, **changes) for i, changes in enumerate(KINDS)],
    "accumulate": [job(i, accumulate=3) for i in range(3)],
    "images": [job(i, model=Conv, data=(IMAGES, Y[:70]), val=None, batch_size=16) for i in range(3)],
    "one diverges": [job(i, hparams={"lr": 1e200 if i == 1 else 1e-3}, optimizer=torch.optim.SGD) for i in range(4)],
    "unlike": [job(0), job(1, model=Conv, data=(IMAGES, Y[:70]), val=None, batch_size=16), job(2, batch_size=16)],
}


@pytest.mark.parametrize("case", CASES)
def test_train_equals_the_reference_loop(case: str) -> None:
    for ours, theirs in zip(
        shoal.train(CASES[case], device="cuda"), [solo(j, "cuda") for j in CASES[case]], strict=True
    ):
        assert ours.status == theirs.status
        if ours.status == "done":
            assert ours.tier in ("stacked", "streams")
        assert worst(ours, theirs) < 1e-9


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("model", [Net, Conv])
def test_every_form_equals_the_reference_loop(compiled: bool, chunk: int, model: type[nn.Module]) -> None:
    data = (X[:70], Y[:70]) if model is Net else (IMAGES, Y[:70])
    jobs = [job(i, model=model, data=data, val=None, batch_size=16) for i in range(4)]
    members, trace_cache = prepare(jobs, torch.device("cuda", 0)), TraceCache()
    unit = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=chunk, compiled=compiled)
    assert compiled or all(part.step(16).fused is None for part in unit.chunks)
    run([unit], CapturedExecutor())
    assert compiled or all(part.step(16).fused is not None for part in unit.chunks)
    for member, own in zip(members, jobs, strict=True):
        theirs = solo(own, "cuda").model.state_dict()
        for name, value in member.model.state_dict().items():
            scale = float(theirs[name].double().abs().max())
            assert float((value.double().cpu() - theirs[name].double()).abs().max()) <= 1e-9 * max(scale, 1e-12), name


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_step_that_is_compiled_meanwhile_equals_the_reference_loop(chunk: int) -> None:
    """Side by side, members have the same step: different steps are not compiled meanwhile."""

    class Patient(CapturedExecutor):
        """Waits for the other process after its first turn."""

        def run(self, work: Any, meanwhile: Any = None) -> Any:
            outcomes = super().run(work, meanwhile)
            if unit._background is not None and unit._background._process is not None:
                unit._background._process._process.wait()
            return outcomes

    class Halving(Recorder):
        """Says that each graph that it times takes half as long as the one before."""

        seconds = 1.0

        def time(self, graph: Any, before: Any) -> float:
            super().time(graph, before)
            self.seconds /= 2
            return self.seconds

    same: dict[str, object] = {"model": lambda: Net(0.1)} if chunk == 1 else {}
    jobs = [job(i, val=None, batch_size=16, **same) for i in range(4)]
    members, trace_cache = prepare(jobs, torch.device("cuda", 0)), TraceCache()
    unit = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=chunk, compiled=False)
    measured: list[float | None] = []
    unit.compile_meanwhile(lambda *seconds: measured.extend(seconds))
    unit.step_seconds = 60.0  # the batches that are left take long enough for the compiled step to be loaded
    run([unit], Patient(Halving()))
    assert unit.compiled and measured[:1] == [Halving.seconds / 4]
    for member, own in zip(members, jobs, strict=True):
        theirs = solo(own, "cuda").model.state_dict()
        for name, value in member.model.state_dict().items():
            scale = float(theirs[name].double().abs().max())
            assert float((value.double().cpu() - theirs[name].double()).abs().max()) <= 1e-9 * max(scale, 1e-12), name


def test_a_float32_member_is_as_close_as_another_summation_order() -> None:
    float_data = (X.float(), Y)
    jobs = [job(i, model=lambda: Net(0.0).float(), data=float_data, val=None, epochs=2) for i in range(4)]
    results = shoal.train(jobs, device="cuda")
    for ours, own in zip(results, jobs, strict=True):
        reference = solo(own, "cuda").model.state_dict()
        other = solo(own, "cpu").model.state_dict()
        for name, value in ours.model.state_dict().items():
            scale = float(reference[name].double().abs().max()) or 1.0
            noise = float((reference[name].double() - other[name].double()).abs().max()) / scale
            assert float((value.double() - reference[name].double()).abs().max()) / scale <= max(10 * noise, 1e-6)
        assert math.isfinite(ours.history[-1]["loss"])
