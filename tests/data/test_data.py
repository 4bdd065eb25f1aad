"""Data is kept once, and read the same whoever reads it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distance, reasons
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import shoal
from shoal.data import Pool, Rows, TensorSource, dataset
from shoal.data.dataset import DatasetSource
from shoal.utils import random_state

X, Y = torch.randn(23, 4), torch.arange(23) % 3
CPU = torch.device("cpu")


class Items(Dataset[Any]):
    """Counts how often it is read; with `noise`, draws from all three global generators."""

    def __init__(self, noise: bool = False, ragged: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.noise, self.ragged, self.dtype, self.reads = noise, ragged, dtype, 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.reads += 1
        x = X[row].to(self.dtype)
        if self.noise:
            x = x + torch.randn(4) + random.random() + float(np.random.rand())
        return (x[: 1 + row % 3] if self.ragged else x), int(Y[row])


def test_a_data_set_is_opened_once_and_a_tensor_moved_once() -> None:
    pool = Pool(CPU)
    assert pool.open((X, Y)).source is pool.open((X, Y)).source
    other = pool.open((X, Y.clone())).source
    assert other is not pool.open((X, Y)).source
    assert isinstance(other, TensorSource) and other.leaves[0].data_ptr() == X.data_ptr()
    assert pool.open({"x": X}).source is not pool.open((X,)).source
    data = Items(noise=True)
    assert pool.open(data).source is pool.open(data).source


def test_take_rows_for_one_and_for_many_members() -> None:
    source = Pool(CPU).open({"x": X, "y": (Y, X.numpy())}).source
    rows = torch.tensor([[3, 1], [0, 22], [5, 5]])
    batch = source.take(rows)
    assert batch["x"].shape == (3, 2, 4)
    assert torch.equal(batch["x"][1], source.take(rows[1])["x"]) and torch.equal(batch["y"][1][2], X[rows[2]])


def test_rows_share_what_is_behind_them() -> None:
    pool = Pool(CPU)
    nested = pool.open(Rows(Rows((X, Y), [4, 5, 6]), torch.tensor([False, True, True])))
    assert nested.source is pool.open((X, Y)).source
    assert torch.equal(nested.take(0, 2)[0], X[5:7])
    assert pool.open(Subset(TensorDataset(X, Y), [1, 2])).source is nested.source
    assert len(nested) == 2
    assert nested.same(pool.open(Rows((X, Y), [5, 6]))) and not nested.same(pool.open((X, Y)))
    assert nested.fingerprint() != pool.open((X, Y)).fingerprint()
    assert pool.open((X, Y)).fingerprint() == Pool(CPU).open((X.clone(), Y.clone())).fingerprint()
    with pytest.raises(ValueError, match="one dimension of whole numbers"):
        Rows((X, Y), [0.5])


def test_plain_datasets_become_tensors_and_random_ones_do_not() -> None:
    pool = Pool(CPU)
    plain = pool.open(Items()).source
    assert isinstance(plain, TensorSource) and "held as tensors" in plain.note
    assert torch.equal(plain.take(torch.tensor([2, 3]))[0], X[2:4])
    state = torch.get_rng_state(), random.getstate()
    for data in (Items(noise=True), Items(ragged=True), [("a", 1), ("b", 2)]):
        source = pool.open(data, (lambda items: items) if isinstance(data, list) else None).source
        assert isinstance(source, DatasetSource) and source.streamed
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()


def test_states_of_generators_are_read_for_many_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes longer than reading a cheap row."""
    looks = []
    original = random_state.get_state
    monkeypatch.setattr(random_state, "get_state", lambda generator: looks.append(1) or original(generator))
    table = TensorDataset(torch.randn(640, 3))
    assert dataset.materialise(Subset(table, range(640))) is not None
    assert len(looks) < 640 / 8
    looks.clear()
    source = DatasetSource(table, list, torch.device("cpu"))
    looks.clear()
    batches = list(itertools.islice(source.feed(torch.arange(640), 64), 10))
    assert len(batches) == 10 and len(looks) < 640 / 8


def test_a_row_that_draws_late_is_found_and_changes_no_generator() -> None:
    class Late(Dataset[Any]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, row: int) -> Tensor:
            return torch.rand(3) if row == 150 else torch.full((3,), float(row))

    before = torch.get_rng_state()
    assert dataset.materialise(Late()) is None
    assert torch.equal(before, torch.get_rng_state())


def test_a_random_item_depends_on_seed_epoch_and_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Pool(CPU).open(Items(noise=True)).source
    rows = torch.tensor([3, 1, 4, 15, 9])
    alone = source.take(rows, seed=1, epoch=2)[0]
    assert torch.equal(alone[2:4], source.take(rows[2:4], seed=1, epoch=2)[0])
    assert not torch.equal(alone, source.take(rows, seed=1, epoch=3)[0])
    assert not torch.equal(alone, source.take(rows, seed=2, epoch=2)[0])
    monkeypatch.setattr(dataset, "SLOW_BATCH", 0.0)  # every batch is worth worker processes
    monkeypatch.setattr(dataset, "SLOW_EPOCH", 0.0)
    fed = torch.cat([batch[0] for batch in source.feed(rows, 2, seed=1, epoch=2)])
    assert torch.equal(alone, fed)


def test_readers_in_the_same_order_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SLOW_BATCH", float("inf"))  # no workers, whose reads could not be counted here
    data = Items(noise=True)
    source = Pool(CPU).open(data).source
    data.reads = 0
    order = torch.randperm(23)
    first, second = source.feed(order, 4), source.feed(order, 4)
    batches = [(a[0], b[0]) for a, b in zip(first, second, strict=True)]
    assert all(a is b for a, b in batches) and data.reads == 23
    list(source.feed(order, 4))
    assert data.reads == 46, "who comes late reads for itself"


@pytest.mark.parametrize("noise", [False, True])
def test_training_on_a_dataset(noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SLOW_BATCH", float("inf"))
    data = Items(noise=noise, dtype=torch.float64)
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3).double(),
        "data": data,
        "loss": F.cross_entropy,
        "batch_size": 4,
    }
    jobs = [shoal.Job(**settings, val=(X.double(), Y), epochs=2, seed=s, data_seed=5, name=str(s)) for s in range(3)]
    results = shoal.train(jobs, device="cpu")
    reads = data.reads
    for result, job in zip(results, jobs, strict=True):
        alone = shoal.solo(job)
        assert distance(result.model.state_dict()["weight"], alone.model.state_dict()["weight"]) <= TOLERANCE
    if noise:
        assert reads < 23 * 2 * 2 + 40, "three members with one order read the data more than once"


@pytest.mark.parametrize(("seconds", "workers"), [(0.001, False), (0.1, True)])
def test_workers_are_started_for_epochs_that_take_long(
    seconds: float, workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(dataset, "DataLoader", lambda *_, num_workers, **more: started.append(num_workers) or [])
    source = DatasetSource(Items(), None, CPU)
    source.item_seconds = seconds
    with pytest.raises(RuntimeError):  # there are no batches
        next(source._load([list(range(23))], 0, 0))
    assert (started[-1] > 0) == workers


def test_collate_and_items_of_different_length() -> None:
    def pad(items: list[Any]) -> tuple[Tensor, Tensor]:
        rows = [F.pad(x, (0, 4 - len(x))) for x, _ in items]
        return torch.stack(rows), torch.tensor([y for _, y in items])

    data = Items(ragged=True)
    job = shoal.Job(model=lambda: nn.Linear(4, 3), data=data, collate=pad, loss=F.cross_entropy, epochs=1)
    assert shoal.train([job], device="cpu")[0].status == "done"
    bare = shoal.Job(model=lambda: nn.Linear(4, 3), data=data, loss=F.cross_entropy, epochs=1)
    with pytest.raises(ValueError, match="job 'job-0': reading the first 23 rows of data raised RuntimeError"):
        shoal.train([bare], device="cpu")


class Counting:
    """A collate function that scales each batch by how many there were."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, items: list[Any]) -> Any:
        self.count += 1
        x, y = default_collate(items)
        return x * (1 + 0.1 * self.count), y


def test_a_collate_that_counts_is_called_for_batches_of_the_training_alone(tmp_path: Path) -> None:
    def job(**fields: Any) -> shoal.Job:
        return shoal.Job(model=lambda: nn.Linear(4, 3).double(), data=TensorDataset(X.double(), Y), collate=Counting(),
                         loss=F.cross_entropy, batch_size=8, epochs=3, hparams={"lr": 0.1}, **fields)  # fmt: skip

    def by_hand(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model, order, collate = nn.Linear(4, 3).double(), torch.Generator().manual_seed(seed), Counting()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            for rows in torch.randperm(23, generator=order).split(8):
                x, y = collate([(X[row].double(), Y[row]) for row in rows])
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model.state_dict()

    jobs = [job(seed=seed) for seed in range(2)]
    assert "its collate changes a state of its own (collate.count)" in reasons(jobs)
    for _ in range(2):  # the second time, the folder has them
        for seed, result in enumerate(shoal.train(jobs, device="cpu", out=tmp_path)):
            assert distance(result.model.state_dict()["weight"], by_hand(seed)["weight"]) <= TOLERANCE


def test_multi_input_and_nested_data() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, a: Tensor, b: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.layer(torch.cat([a, b["x"]], dim=1))
            return out

    job = shoal.Job(model=Two, data=(X, {"x": X}, Y), val=(X, {"x": X}, Y), loss=F.cross_entropy, epochs=2)
    result = shoal.train([job], device="cpu")[0]
    assert result.status == "done" and result.history[-1]["val_loss"] > 0
