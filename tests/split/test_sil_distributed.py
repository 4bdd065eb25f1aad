"""SIL over processes: one part a worker, the bits of the run in one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal import Job
from shoal.split import Serial, train_split
from shoal.split.methods.sil_method import SILMethod
from shoal.split.net.launch import local_workers
from shoal.split.sil import report


def a_job() -> Job:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 6, generator=generator), torch.arange(50) % 3
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)]
    return Job(
        model=nn.Sequential(*layers), data=(x, y), loss=F.cross_entropy, optimizer=torch.optim.Adam,
        batch_size=8, epochs=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [{"method": "labels", "noise": 0.3}, {"method": "labels", "variant": "B"}, {"method": "heads"}],
    ids=["A", "B", "heads"],
)
def test_same_bits_as_in_one_process(way: dict[str, Any]) -> None:
    job = a_job()

    def method() -> SILMethod:
        return SILMethod(job, ["2", "5"], recovery=1, **way)

    serial, over = method(), method()
    alone = train_split(job, serial, Serial(job, serial, 3))
    with local_workers(job, over, 3) as (executor, _):
        together = train_split(job, over, executor)
    a, b = alone.model.state_dict(), together.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    here, there = report(alone, serial), report(together, over)
    assert here.joined == there.joined
    assert here.own == there.own
    assert here.cut_bytes_measured == there.cut_bytes_measured == here.cut_bytes_predicted
    assert there.tier == "distributed"
