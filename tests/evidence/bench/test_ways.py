"""Every way trains the same networks to the same losses: else its time means nothing.

In float64: in float32 another order of summation may flip a ReLU, and Adam makes a full step of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distance
from torch import nn

from shoal.evidence.bench.ways import Loop, Vmap, Way, open_way
from shoal.evidence.bench.workloads import Spec, workload
from shoal.jobs.job import Job

CPU = torch.device("cpu")
TINY = Spec(network="tiny", members=3, batches=2)


@contextmanager
def opened(name: str, work: list[Job]) -> Iterator[Way]:
    way = open_way(name, work, CPU)
    try:
        yield way
    finally:
        way.close()


def losses(way: Way, steps: int) -> torch.Tensor:
    found = []
    for _ in range(steps):
        way.step(1)
        found.append(way.losses())
    return torch.tensor(found, dtype=torch.float64)


def in_float64(jobs: list[Job]) -> list[Job]:
    """The same jobs with networks and data in float64."""
    data = {id(job.data): (job.data[0].double(), job.data[1]) for job in jobs}
    return [replace(job, model=lambda make=job.model: make().double(), data=data[id(job.data)]) for job in jobs]


def test_vmap_trains_as_the_loop_does_over_the_end_of_an_epoch() -> None:
    work = in_float64(workload(TINY))
    with opened("eager", work) as eager, opened("vmap", work) as vmap:
        assert distance(losses(vmap, 5), losses(eager, 5)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize("name", ["captured", "vmap-captured"])
def test_compiled_ways_train_as_the_loop_does(name: str) -> None:
    work = in_float64(workload(TINY))
    with opened("eager", work) as eager, opened(name, work) as compiled:
        assert distance(losses(compiled, 3), losses(eager, 3)) <= TOLERANCE


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its exact gradient is zero, and Adam would blow up the rounding.
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return out


def test_vmap_keeps_running_statistics_as_the_loop_does() -> None:
    def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        return torch.randn(rows, 3, 6, 6, generator=g), torch.randint(5, (rows,), generator=g)

    jobs = [
        Job(model=Normed, data=data(12), loss=F.cross_entropy, optimizer=torch.optim.Adam, hparams={"lr": 1e-3},
            batch_size=4, epochs=1, seed=i, name=f"normed-{i}")
        for i in range(2)
    ]  # fmt: skip
    work = in_float64(jobs)
    eager, vmap = Loop(work, CPU), Vmap(work, CPU)
    eager.step(3)
    vmap.step(3)
    for i, solo in enumerate(eager.solos):
        for name, buffer in solo.model.named_buffers():
            assert distance(vmap.buffers[name][i], buffer) <= TOLERANCE
    assert int(vmap.buffers["norm.num_batches_tracked"][0]) == 3


def test_vmap_says_that_it_cannot_mix_architectures() -> None:
    work = workload(Spec(network="mixed", members=2, batches=1, batch_size=2))
    with pytest.raises(ValueError, match="one architecture; here are cnn, mlp"):
        open_way("vmap", work, CPU)


def test_bf16_is_applied() -> None:
    full, half = (workload(Spec(network="tiny", members=1, batches=2, precision=p)) for p in (None, "bf16"))
    a, b = losses(Loop(full, CPU), 1), losses(Loop(half, CPU), 1)
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(ValueError, match="no way 'magic'"):
        open_way("magic", workload(TINY), CPU)


def test_shoal_is_opened_on_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this benchmark asks of the engine, kept by a stand-in."""
    seen: dict[str, object] = {}

    class Stand:
        tier, predicted_ms = "stacked", 1.5

        def step(self, n: int) -> None:
            seen["steps"] = n

        def losses(self) -> torch.Tensor:
            return torch.tensor([1.0, 2.0])

        def close(self) -> None:
            seen["closed"] = True

    def open_pack(jobs: list[object], device: torch.device) -> Stand:
        seen.update(jobs=len(jobs), device=device)
        return Stand()

    engine = ModuleType("shoal.evidence.bench.timed_pack")
    engine.open_pack = open_pack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shoal.evidence.bench.timed_pack", engine)
    with opened("shoal", workload(TINY)) as way:
        way.step(7)
        assert way.losses() == [1.0, 2.0]
        assert (way.note, way.predicted_ms) == ("stacked", 1.5)
    assert seen == {"jobs": 3, "device": CPU, "steps": 7, "closed": True}
