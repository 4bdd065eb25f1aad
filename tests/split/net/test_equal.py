"""A distributed run gives the weights of the run in one process, bit for bit; its bytes are those of the formula."""

from functools import partial

import pytest
import torch
from tests.split.net.jobs import METHODS, a_job, same_weights

from shoal.split import Serial, train_split
from shoal.split.core.report import Forecast
from shoal.split.net._codec import CODECS
from shoal.split.net._wire import message_bytes
from shoal.split.net.launch import local_workers
from shoal.utils.torch_flags import torch_flags


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", METHODS)
def test_same_bits_as_in_one_process(name: str, workers: int) -> None:
    job = a_job(steps=10)
    method = METHODS[name](job, workers)
    with torch_flags(torch.device("cpu"), threads=1):  # with several, sums depend on how busy the cores are
        alone = train_split(job, method, Serial(job, method, workers))
        with local_workers(job, method, workers) as (executor, _):
            together = train_split(job, method, executor)
    assert same_weights(alone, together) and not executor.lost
    assert [row["loss"] for row in alone.history] == [row["loss"] for row in together.history]
    assert together.split is not None and together.split.tier == "distributed"
    moved = torch.cat([p.flatten() for p in together.model.parameters()])
    assert not torch.equal(moved, torch.cat([p.flatten() for p in method.model.parameters()]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", ["exact", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_bytes_at_the_sockets_are_those_of_the_formula(name: str, codec: str) -> None:
    job = a_job(width=100)
    method = METHODS[name](job, 3)
    with local_workers(job, method, 3, codec=codec) as (executor, _):
        forecast = Forecast(method, partial(message_bytes, codec=CODECS[codec]))
        predicted = forecast.all_rounds(executor.workers_of_round(0))
        result = train_split(job, method, executor)
        measured = executor.traffic
    assert measured.sent == pytest.approx(predicted.sent, rel=0.02)
    assert measured.received == pytest.approx(predicted.received, rel=0.02)
    assert result.split is not None and result.split.bytes_measured == pytest.approx(predicted.both, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_fewer_bits_train_as_well(codec: str) -> None:
    job = a_job(steps=60)
    method = METHODS["local_sgd"](job, 3)
    found = {}
    for name in ("exact", codec):
        with local_workers(job, method, 3, codec=name) as (executor, _):
            found[name] = train_split(job, method, executor)
    exact, rough = (found[name] for name in ("exact", codec))
    assert exact.split is not None and rough.split is not None
    assert rough.split.bytes_measured < 0.65 * exact.split.bytes_measured
    assert rough.history[-1]["accuracy"] >= exact.history[-1]["accuracy"] - 0.04 > 0.5
