"""The state is kept where the parts are trained: what comes of a split is the same wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.split.networks import accuracy, distance, make_job, mlp, rows, same_bits
from torch import Tensor

from shoal import Job
from shoal.results import Result
from shoal.split.core.method import Method
from shoal.split.core.parts import Outcome, Slice, Task
from shoal.split.core.state import State, disjoint, merge_
from shoal.split.executors.local import Serial
from shoal.split.executors.packed import Packed
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.trainer import train_split

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = [CPU, pytest.param(GPU, marks=gpu)]
WAYS: dict[str, Callable[[Job], Method]] = {
    "ist": lambda job: IST(job, 3, 2, overlap=0.2),
    "fresh": lambda job: IST(job, 3, 2, moments="fresh", recovery=0),
    "local_sgd": lambda job: LocalSGD(job, 3, 2),
    "data_parallel": lambda job: DataParallel(job, 3),
}


class Seen:
    """A crew that notes where tasks and outcomes are, and may be killed."""

    def __init__(self, executor: Serial, result_device: torch.device, kill: int | None = None) -> None:
        self.executor, self.result_device, self.kill = executor, result_device, kill
        executor.result_device = result_device
        self.places: set[str] = set()

    def workers_of_round(self, number: int) -> Any:
        return self.executor.workers_of_round(number)

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        if tasks[0].round == self.kill:
            raise KeyboardInterrupt
        found = self.executor.run(tasks)
        for given in (*tasks, *found):
            assert given is not None
            self.places |= {t.device.type for t in (*given.tensors.values(), *_arrays(given.moments))}
            assert all(t.device.type == "cpu" for t in given.moments.values() if not t.dim())
        return found


def _arrays(moments: dict[str, Tensor]) -> list[Tensor]:
    return [moment for moment in moments.values() if moment.dim()]


def job_of(**settings: Any) -> Job:
    chosen = {"val": rows(30), "metrics": {"accuracy": accuracy}, "steps": 12, "keep": "best", **settings}
    return make_job(lambda: mlp(6, 12, 10, 3), optimizer=torch.optim.Adam, **(chosen | {"hparams": {"lr": 0.01}}))


def run(
    way: str,
    tier: type[Serial],
    device: torch.device,
    result_device: torch.device,
    out: Path | None = None,
    **kill: int,
) -> tuple[Result, Seen]:
    job = job_of()
    method = WAYS[way](job)
    executor = Seen(tier(job, method, 3, device), result_device, **kill)
    return train_split(job, method, executor, device=device, out=out, val_every=2), executor


@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("tier", [Serial, Packed])
@pytest.mark.parametrize("way", WAYS)
def test_a_split_is_the_same_wherever_its_state_is(way: str, tier: type[Serial], device: torch.device) -> None:
    there, executor = run(way, tier, device, device)
    here, _ = run(way, tier, device, CPU)
    assert executor.places == {device.type}
    assert all(tensor.device.type == "cpu" for tensor in there.model.state_dict().values())
    assert there.split is not None and here.split is not None
    assert there.split.bytes_measured == here.split.bytes_measured
    if device.type == "cpu":
        assert same_bits(there.model, here.model)
    else:  # a bias before a norm has no gradient but rounding, which Adam makes larger
        assert distance(there.model, here.model) < 1e-7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])
def test_a_pack_of_parts_is_the_parts_one_by_one(way: str, device: torch.device) -> None:
    (one, _), (packed, _) = (run(way, tier, device, device) for tier in (Serial, Packed))
    assert distance(packed.model, one.model) < 1e-7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_state_that_does_not_fit_on_the_device_stays_on_the_host() -> None:
    job = make_job(lambda: mlp(6, 2048, 2048, 3), steps=4)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200e6) / total)
    try:
        method = IST(job, 4, 2, moments="fresh", recovery=0)
        executor = Serial(job, method, 4, GPU)
        result = train_split(job, method, executor, device=GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.status == "done" and executor.result_device == CPU


@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("tier", [Serial, Packed])
def test_a_run_goes_on_from_its_folder_on_the_device(tier: type[Serial], device: torch.device, tmp_path: Path) -> None:
    whole, _ = run("ist", tier, device, device)
    with pytest.raises(KeyboardInterrupt):
        run("ist", tier, device, device, tmp_path, kill=3)
    again, executor = run("ist", tier, device, device, tmp_path)
    assert executor.places == {device.type}
    assert distance(whole.model, again.model) < 1e-9
    if device.type == "cpu":
        assert same_bits(whole.model, again.model)


class Sent(State):
    """A state that sends rows as to another device."""

    def _near(self, piece: Slice) -> Slice:
        return Slice(piece.name, tuple(r if r is None else self._sent(r, CPU) for r in piece.index))


def test_rows_are_sent_once_a_round_and_merged_alike() -> None:
    method = IST(job_of(), 3, 2, overlap=0.0)
    executor = Serial(job_of(), method, 3)
    states = [State.of(method.model), Sent.of(method.model)]
    parts = method.parts(0, executor.workers_of_round(0))
    slices = [method.slices(part) for part in parts]
    for state in states:
        tasks = [state.task(0, part, own) for part, own in zip(parts, slices, strict=True)]
        if isinstance(state, Sent):
            assert len(state._rows) == 6, "two groups of three workers"
        state.commit(parts, [method.returns(part) for part in parts], executor.run(tasks))
        assert not state._rows
    assert all(torch.equal(states[0].tensors[name], tensor) for name, tensor in states[1].tensors.items())
    assert all(torch.equal(states[0].moments[name], tensor) for name, tensor in states[1].moments.items())


def test_pieces_that_nobody_shares_are_copied_as_they_would_be_merged() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 5, 4, generator=generator)
    order = torch.randperm(6, generator=generator)
    for index in (
        [(own.sort()[0],) for own in order.view(3, 2)],
        [(own, None, torch.tensor([0, 3])) for own in order.view(2, 3)],
    ):
        pieces = [Slice("w", own) for own in index]
        values = [torch.randn(piece.shape(whole.shape), generator=generator) for piece in pieces]
        assert disjoint(pieces, {})
        merged, copied = whole.clone(), whole.clone()
        merge_(merged, [(piece, value, 1.0) for piece, value in zip(pieces, values, strict=True)])
        for piece, value in zip(pieces, values, strict=True):
            piece.put(copied, value)
            assert torch.equal(piece.take(copied), value)
        assert torch.equal(merged, copied)
    assert not disjoint([Slice("w", (torch.tensor([0, 1]),)), Slice("w", (torch.tensor([1, 2]),))], {})
    assert not disjoint([Slice("w"), Slice("w", (torch.tensor([1, 2]),))], {})
