"""A DataLoader, as people have it: every way of training reads what the reference loop reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distances
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import shoal
from shoal.data import Pool
from shoal.data._loader import Loader
from shoal.data.loader import LoaderSource
from shoal.reference import solo
from shoal.replaying import replay

X = torch.randn(44, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(44) % 3
CPU = torch.device("cpu")
LOOKED_AT = 24
"""Rows that are read before training: two batches of eight, and the first again."""


class Noisy(Dataset[Any]):
    """Rows with noise of all three libraries; counts how often it is read."""

    def __init__(self, rows: int = 44) -> None:
        self.rows, self.reads = rows, 0
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.reads += 1
        noise = float(torch.rand(())) + random.random() + np.random.rand() + self.rng.random()
        return X[row % 44] + noise, int(Y[row % 44])


class Counted(IterableDataset[Any]):
    """Rows without a length; in epoch i there are `rows` + i of them."""

    def __init__(self, rows: int = 20, grows: int = 0, most: int = 1_000) -> None:
        self.rows, self.grows, self.most, self.epoch = rows, grows, most, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = torch.randperm(44)
        for row in range(min(self.most, self.rows + self.grows * self.epoch)):
            at = int(order[row % 44])
            yield X[at] + torch.rand(()).double(), int(Y[at])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def jobs(data: Any, count: int = 3, **more: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {"model": Network, "loss": F.cross_entropy, **({} if "steps" in more else {"epochs": 2})}
    settings |= more
    return [shoal.Job(data=data, hparams={"lr": 0.01 * (i + 1)}, seed=i, **settings) for i in range(count)]


def assert_equal(results: shoal.Results, tolerance: float = TOLERANCE) -> None:
    for result in results:
        alone = solo(result.job)
        assert (result.status, result.error, result.steps) == (alone.status, alone.error, alone.steps)
        apart = {name: value for name, value in distances(result, alone).items() if value > tolerance}
        assert not apart, apart


@pytest.mark.parametrize(
    ("workers", "deterministic"),
    [(0, False), (2, True), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((0, True), (2, False)))],
)
def test_stacked_jobs_read_what_the_reference_reads(workers: int, deterministic: bool) -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
    val = DataLoader(Noisy(20), batch_size=6, shuffle=True)
    results = shoal.train(jobs(loader, val=val), deterministic=deterministic)
    assert [result.tier for result in results] == ["stacked"] * 3
    assert_equal(results)


def test_serial_jobs_share_one_reading() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x.add_(float(x.sum().item() > 0))  # no trace can follow it, and it writes to its batch
        return F.cross_entropy(model(x), y)

    dataset = Noisy()
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    some = jobs(loader, loss=None, step=step)
    results = shoal.train(some)
    assert [result.tier for result in results] == ["serial"] * 3
    assert dataset.reads == 2 * 44 + LOOKED_AT
    assert_equal(results)


def test_rows_are_read_once_for_all_members() -> None:
    dataset = Noisy()
    results = shoal.train(jobs(DataLoader(dataset, batch_size=8, shuffle=True), count=8))
    assert {result.tier for result in results} == {"stacked"}
    assert dataset.reads == 2 * 44 + LOOKED_AT


@pytest.mark.parametrize("accumulate", [1, 3])
def test_epochs_of_unknown_and_changing_length(accumulate: int) -> None:
    results = shoal.train(jobs(DataLoader(Counted(grows=6), batch_size=4), accumulate=accumulate, epochs=3))
    assert [row["step"] for row in results[0].history] == ([5, 12, 20] if accumulate == 1 else [2, 5, 8])
    assert_equal(results)


def test_an_iterable_dataset_by_itself_gets_the_jobs_batches() -> None:
    results = shoal.train(jobs(Counted(21), batch_size=8, drop_last=True, val=Counted(9)))
    assert [row["step"] for row in results[0].history] == [2, 4]
    assert_equal(results)


def test_an_endless_dataset_and_steps() -> None:
    results = shoal.train(jobs(DataLoader(Counted(10**9, most=10**9), batch_size=4), steps=7))
    assert [result.steps for result in results] == [7] * 3 and len(results[0].history) == 1
    assert_equal(results)


def test_steps_that_end_with_an_epoch_close_it() -> None:
    loader = DataLoader(Noisy(16), batch_size=4, shuffle=True)
    schedule = lambda step: 0.5**step  # noqa: E731
    assert_equal(shoal.train(jobs(loader, steps=8, schedule=schedule, schedule_every="epoch")))
    assert_equal(shoal.train(jobs(loader, steps=6, schedule=schedule, schedule_every="epoch")))


def test_orders_differ_between_epochs_and_data_seeds_and_repeat() -> None:
    source = Pool(CPU).open(DataLoader(Noisy(), batch_size=44, shuffle=True)).source
    assert isinstance(source, LoaderSource)
    first, again, later, other = (next(source.read(*at))[0] for at in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert torch.equal(first, again) and not torch.equal(first, later) and not torch.equal(first, other)


def test_a_weighted_sampler_and_generators_of_the_loaders_own() -> None:
    sampler = WeightedRandomSampler([1.0 + row % 3 for row in range(44)], 30)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    loaders = [DataLoader(Noisy(), batch_size=10, shuffle=True, generator=generator) for generator in generators]
    next(iter(loaders[1]))  # drawing from a generator before changes nothing
    sources = [Pool(CPU).open(loader).source for loader in loaders]
    one, same, other = (next(source.read(0, 0))[0] for source in sources if isinstance(source, LoaderSource))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert_equal(shoal.train(jobs(DataLoader(Noisy(), batch_size=8, sampler=sampler))))


def test_batches_do_not_depend_on_what_has_looked_at_the_loader() -> None:
    """Python keeps the attributes of an object in another way once somebody has asked for its `__dict__`."""

    def read() -> Tensor:
        sampler = RandomSampler(range(44), generator=torch.Generator().manual_seed(3))
        loader = DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 5, drop_last=True))
        if looked:
            assert vars(sampler) and vars(loader.batch_sampler)
        source = Pool(CPU).open(loader).source
        assert isinstance(source, LoaderSource)
        return torch.stack([batch[0] for batch in source.read(0, 1)])

    looked = False
    before, looked = read(), True
    assert torch.equal(before, read())


def test_reading_takes_nothing_from_the_process() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    shoal.train(jobs(DataLoader(Noisy(), batch_size=8, shuffle=True)))
    assert torch.equal(torch.rand(3), expected)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_other_data_seeds_read_by_themselves() -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    some = [*jobs(loader, count=2), *jobs(loader, count=2, data_seed=7)]
    for number, job in enumerate(some):
        job.name = f"job {number}"
    results = shoal.train(some)
    assert_equal(results)
    assert "data_seed" in str(shoal.explain(some))


def test_two_loaders_and_tensors_in_one_run() -> None:
    class Broken(Noisy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            if row == 30:
                raise OSError("no such file: 30.png")
            return super().__getitem__(row)

    some = [
        *jobs(DataLoader(Broken(), batch_size=8), count=2),
        *jobs(DataLoader(Noisy(), batch_size=11), count=2),
        *jobs((X, Y), count=2),
    ]
    for number, job in enumerate(some):
        job.name = f"job {number}"
    results = shoal.train(some)
    assert [result.status for result in results] == ["failed"] * 2 + ["done"] * 4
    assert results[0].error is not None and "batch 4 of epoch 1 of the DataLoader over Broken" in results[0].error
    assert "no such file: 30.png" in results[0].error
    assert results[0].steps == 3
    assert_equal(results)


def test_a_worker_that_raises_is_named_in_a_line() -> None:
    class Broken(Noisy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            if row == 30:
                raise OSError("no such file: 30.png")
            return super().__getitem__(row)

    (result,) = shoal.train(jobs(DataLoader(Broken(), batch_size=8, num_workers=1), count=1))
    assert result.error is not None and "\n" not in result.error and "no such file: 30.png" in result.error


def test_what_cannot_be_read_is_refused() -> None:
    def refused(match: str, **given: Any) -> None:
        with pytest.raises(shoal.JobError, match=match):
            shoal.train(jobs(**given, count=1))

    loader = DataLoader(Noisy(), batch_size=8)
    refused("shuffle=False would do nothing", data=loader, shuffle=False)
    refused("batch_size=64 would do nothing", data=loader, batch_size=64)
    refused("drop_last=True would do nothing", data=loader, drop_last=True)
    refused("collate=.* would do nothing", data=loader, collate=list)
    refused("gave no batch in epoch 1", data=DataLoader(Noisy(3), batch_size=8, drop_last=True))
    refused("gave no batch in epoch 1", data=loader, val=DataLoader(Counted(0), batch_size=8))
    refused("generator, which can be read once", data=(batch for batch in loader))
    refused("asks for rows of a DataLoader", data=shoal.Rows(loader, [0, 1]))


def test_an_epoch_without_batches_ends_the_job() -> None:
    results = shoal.train(jobs(DataLoader(Counted(8, grows=-8), batch_size=4), count=2, epochs=3))
    assert [result.status for result in results] == ["failed"] * 2
    assert results[0].error is not None and "gave no batch in epoch 2" in results[0].error
    assert_equal(results)


def test_batches_that_are_dicts_with_metrics() -> None:
    class Dicts(Noisy):
        def __getitem__(self, row: int) -> Any:  # type: ignore[override]
            x, y = super().__getitem__(row)
            return {"x": x, "labels": y}

    accuracy = {"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).double().mean()}
    loader, val = DataLoader(Dicts(), batch_size=8, shuffle=True), DataLoader(Dicts(20), batch_size=8)
    results = shoal.train(jobs(loader, val=val, metrics=accuracy))
    assert {result.tier for result in results} == {"stacked"} and "accuracy" in results[0].history[0]
    assert_equal(results)
    assert_equal(shoal.train(jobs(Dicts(), batch_size=8, val=Dicts(20), metrics=accuracy)))


def ragged(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Rows as a sequence whose length is other in each batch."""
    length = 1 + sum(y for _, y in rows) % 3
    return torch.stack([x for x, _ in rows]).unsqueeze(1).expand(-1, length, -1), torch.tensor([y for _, y in rows])


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).mean(1)
        return out


def test_batches_of_many_shapes_are_stacked() -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, collate_fn=ragged)
    results = shoal.train(jobs(loader, epochs=3, model=Pooling))
    assert {result.tier for result in results} == {"stacked"}
    assert_equal(results)


def test_too_many_shapes_leave_the_stack() -> None:
    class Lengths(Noisy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            x, y = super().__getitem__(row)
            return x.expand(row + 1, 4), y

    results = shoal.train(jobs(DataLoader(Lengths(20)), model=Pooling))
    assert {result.tier for result in results} == {"serial"}
    assert_equal(results)


def test_one_loader_for_data_and_val() -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    assert_equal(shoal.train(jobs(loader, val=loader, val_every_steps=4)))


def test_results_are_evaluated_on_a_loader() -> None:
    results = shoal.train(jobs((X, Y)))
    loader = DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=7)
    accuracy = {"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).double().mean()}
    by_loader, by_tensors = (results.evaluate(data, metrics=accuracy) for data in (loader, (X, Y)))
    for a, b in zip(by_loader, by_tensors, strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"]) and a["loss"] == pytest.approx(b["loss"])


def test_a_replay_reads_the_same_batches() -> None:
    (job,) = jobs(DataLoader(Counted(10, grows=2), batch_size=4), count=1, accumulate=2)
    whole, part = replay(job), replay(job, from_step=2, steps=2)
    assert len(whole.losses) == 4 and whole.losses[2:4] == part.losses


def test_networks_are_evaluated_and_asked_on_a_loader_without_metrics() -> None:
    results = shoal.train(jobs((X, Y)))
    loader = DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=7)
    assert results.evaluate(loader)[0]["loss"] == pytest.approx(results.evaluate((X, Y))[0]["loss"])
    assert torch.allclose(results.predict(loader), results.predict(X))
    for call in (results.predict, results.evaluate):
        with pytest.raises(ValueError, match="batch_size=3 would do nothing"):
            call(loader, batch_size=3)


def test_the_last_trials_of_a_search_leave_their_stack_between_epochs() -> None:
    """Where they have read an epoch to its end, and the next one is not open yet."""
    loader, events = DataLoader(Noisy(), batch_size=8, shuffle=True), list[Any]()
    study = shoal.tune(
        lambda params: shoal.Job(
            model=Network, data=loader, loss=F.cross_entropy, hparams=params, val=(X, Y), average=shoal.EMA(decay=0.8)
        ),
        {"lr": ("log", 1e-3, 0.3)}, max_epochs=9, eta=3, num_trials=9, scheduler="asha", events=events.append,
    )  # fmt: skip
    assert "too few are left to gain from a stack" in [
        event.data["reason"] for event in events if event.kind == "split"
    ]
    for trial in study.trials:
        result = study.result(trial)
        alone = solo(dataclasses.replace(result.job, epochs=len(result.history)))
        assert max(distances(result, alone).values()) < TOLERANCE


class Pinning(DataLoader[Any]):
    """Notes whether it would pin memory."""

    noted: list[bool]

    def __iter__(self) -> Any:
        self.noted.append(bool(self.pin_memory))
        return iter(())


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), ("cuda", True)])
def test_memory_is_pinned_where_a_gpu_reads_it(device: str, pins: bool) -> None:
    """A run on a GPU is prepared in a process that must not touch it: its own process would be refused then."""
    loader = Pinning(Noisy(), batch_size=8, pin_memory=True)
    loader.noted = []
    Loader(loader, torch.device(device), "it").begin(0)
    assert loader.noted == [pins] and loader.pin_memory
