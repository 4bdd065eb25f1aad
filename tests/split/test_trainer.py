"""The one loop of every split, held to plain loops over the same order of rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.split.networks import accuracy, distance, make_job, mlp, rows, same_bits
from torch import nn

import shoal
from shoal import Job
from shoal.engine.members.member import seeded
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.members.ownership import build_model
from shoal.errors import JobError, SplitError
from shoal.split.core.checks import prepare_job
from shoal.split.core.method import Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.core.reading import Reading
from shoal.split.executors.local import Serial
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.trainer import train_split


def plain_loop(job: Job, steps: int) -> nn.Module:
    """Ordinary training of the whole network on one shard, written out."""
    with seeded(job.seed, torch.device("cpu")):
        model = build_model(job)
    optimizer = make_optimizer(job, model)
    reading, (x, y) = Reading(job, len(job.data[0])), job.data
    base = optimizer.param_groups[0]["lr"]
    for step, (_, group) in enumerate(reading.groups(0, steps)):
        if job.schedule is not None:
            optimizer.param_groups[0]["lr"] = base * job.schedule(step)
        optimizer.zero_grad()
        for batch in group:
            loss = F.cross_entropy(model(x[batch]), y[batch])
            (loss / len(group) if len(group) > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return model


SETTINGS: list[dict[str, Any]] = [
    {},
    {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}},
    {"hparams": {"lr": 0.1, "momentum": 0.9}, "clip_norm": 0.5, "schedule": lambda step: 0.97**step},
    {"optimizer": torch.optim.AdamW, "hparams": {"lr": 0.01, "amsgrad": True}, "accumulate": 2},
    {"optimizer": torch.optim.Rprop, "hparams": {"lr": 0.01}, "shuffle": False},
    {"optimizer": torch.optim.Adagrad, "hparams": {"lr": 0.1, "initial_accumulator_value": 0.5}, "drop_last": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "sgd")
def test_one_worker_is_ordinary_training_bit_for_bit(settings: dict[str, Any]) -> None:
    job = make_job(steps=17, **settings)  # no whole number of windows, and more than one epoch
    result = shoal.split.local_sgd(job, workers=1, local_steps=5)
    assert same_bits(result.model, plain_loop(job, 17))
    assert result.steps == 17


def test_the_last_step_of_a_window_and_the_tail_of_an_epoch_count() -> None:
    """90 rows in batches of 8: the twelfth batch of an epoch has two rows, and windows of 5 end in its middle."""
    job = make_job(epochs=2)
    result = shoal.split.local_sgd(job, workers=1, local_steps=5)
    assert result.steps == 24
    assert same_bits(result.model, plain_loop(job, 24))
    assert not same_bits(result.model, plain_loop(job, 23))


class Watched(Serial):
    """Notes what was asked for."""

    tasks: list[Task]
    outcomes: list[Outcome | None]

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        self.tasks = [*getattr(self, "tasks", []), *tasks]
        found = list(super().run(tasks))
        self.outcomes = [*getattr(self, "outcomes", []), *found]
        return found


@pytest.mark.parametrize(("count", "local_steps"), [(90, 1), (91, 4), (74, 50)])
def test_every_row_is_read_by_one_worker_as_often_as_there_are_epochs(count: int, local_steps: int) -> None:
    job = make_job(data=rows(count), epochs=3)
    method = LocalSGD(job, 4, local_steps)
    executor = Watched(job, method, 4)
    train_split(job, method, executor)
    reads: dict[int, list[int]] = {shard: [] for shard in range(4)}
    for task in executor.tasks:
        reading = Reading(job, count, task.part.shard)
        for _, group in reading.groups(task.part.start, task.part.steps):
            reads[task.part.shard[0]] += torch.cat(group).tolist()
    for shard, seen in reads.items():
        assert sorted(seen) == sorted([*Reading(job, count, (shard, 4)).rows().tolist()] * 3)
    assert sorted(row for seen in reads.values() for row in set(seen)) == list(range(count))
    assert sum(outcome.rows for outcome in executor.outcomes if outcome is not None) == 3 * count


def test_workers_draw_different_batches_and_different_randomness() -> None:
    job = make_job(lambda: mlp(6, 12, 3, dropout=0.5), steps=6)
    parts = LocalSGD(job, 3, 2).parts(1, [Worker(n) for n in range(3)])
    first = [next(Reading(job, 90, part.shard).groups(part.start, 1))[1][0].tolist() for part in parts]
    assert len({*map(tuple, first)}) == 3 and len({row for batch in first for row in batch}) == 24
    assert len({part.seed for part in parts}) == 3


def test_epochs_have_different_orders_and_the_seed_decides() -> None:
    reading = Reading(make_job(), 90, (1, 3))
    other = Reading(make_job(data_seed=7), 90, (1, 3))
    assert reading.order(0).tolist() != reading.order(1).tolist()
    assert sorted(reading.order(0).tolist()) == sorted(reading.order(1).tolist())
    assert sorted(reading.rows().tolist()) != sorted(other.rows().tolist())


def big_batches(job: Job, workers: int, steps: int) -> nn.Module:
    """The reference of data parallel: one network, one batch of all the workers' rows."""
    with seeded(job.seed, torch.device("cpu")):
        model = build_model(job)
    optimizer, (x, y) = make_optimizer(job, model), job.data
    readings = [Reading(job, len(x), (shard, workers)) for shard in range(workers)]
    streams = [reading.groups(0, steps) for reading in readings]
    lengths = [2 * reading.steps for reading in readings]
    for step in range(steps):
        batches = [torch.cat(next(s)[1]) for s, length in zip(streams, lengths, strict=True) if step < length]
        optimizer.zero_grad()
        batch = torch.cat(batches)
        F.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"hparams": {"lr": 0.1, "momentum": 0.9}},
        {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}, "clip_norm": 0.3},
    ],
    ids=["momentum", "adam"],
)
def test_data_parallel_is_one_large_batch(settings: dict[str, Any]) -> None:
    """Shards of 31, 30 and 30 rows: short last batches of different size, and they still count by their rows."""
    job = make_job(lambda: mlp(6, 12, 3, norm=False), data=rows(91), epochs=2, **settings)
    result = shoal.split.data_parallel(job, workers=3)
    assert result.steps == 8
    assert distance(result.model, big_batches(job, 3, 8)) < 1e-9


def test_local_sgd_averages_what_plain_loops_give() -> None:
    job = make_job(steps=3)
    result = shoal.split.local_sgd(job, workers=3, local_steps=3)
    total: dict[str, Any] = {}
    for shard in range(3):
        with seeded(job.seed, torch.device("cpu")):
            model = build_model(job)
        optimizer, (x, y) = make_optimizer(job, model), job.data
        for _, (batch,) in Reading(job, 90, (shard, 3)).groups(0, 3):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for name, value in model.state_dict().items():
            total[name] = total.get(name, 0) + value.double()
    for name, value in result.model.state_dict().items():
        assert torch.allclose(value.double(), total[name] / 3, atol=1e-12)
    assert int(result.model.state_dict()["1.num_batches_tracked"]) == 3


def test_the_users_network_is_copied_and_its_class_comes_back() -> None:
    model = mlp(6, 8, 3)
    before = copy.deepcopy(model)
    result = shoal.split.local_sgd(make_job(model, steps=2), workers=2, local_steps=1)
    assert same_bits(model, before) and not same_bits(result.model, before)
    mlp(6, 8, 3).load_state_dict(result.model.state_dict(), strict=True)


def test_the_history_and_the_report() -> None:
    lines: list[str] = []
    job = make_job(val=rows(40), metrics={"accuracy": accuracy}, epochs=6)
    method = LocalSGD(job, 2, 3)
    result = train_split(job, method, Serial(job, method, 2), log=lines.append, val_every=2)
    assert [row["round"] for row in result.history] == [2, 4, 6, 8, 10, 12]
    assert {"epoch", "step", "loss", "val_loss", "accuracy", "bytes", "seconds"} <= result.history[0].keys()
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.history[-1]["epoch"] == 6 and len(lines) == 6
    report = result.split
    assert report.bytes_predicted == report.bytes_measured == result.history[-1]["bytes"]
    weights = sum(t.nbytes for t in result.model.state_dict().values())
    assert report.bytes_measured == 12 * 2 * 2 * weights
    assert report.peak_measured.keys() == {"0", "1"}
    assert 0.7 < report.peak_predicted["0"] / report.peak_measured["0"] < 1.1
    assert "2 workers" in str(report) and result.to_dict()["split"]["rounds"] == 12


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_bytes_of_moments_are_foreseen(optimizer: Any) -> None:
    job = make_job(steps=6, optimizer=optimizer, hparams={"lr": 0.01})
    for moments in ("travel", "fresh"):
        report = shoal.split.local_sgd(job, 2, 2, moments=moments).split
        assert report.bytes_predicted == report.bytes_measured, moments


def test_fresh_moments_are_another_training() -> None:
    job = make_job(steps=6, hparams={"lr": 0.1, "momentum": 0.9})
    a, b = (shoal.split.local_sgd(job, 1, 2, moments=m).model for m in ("travel", "fresh"))
    assert not same_bits(a, b) and same_bits(a, plain_loop(job, 6))


def poisoned(bad: set[int], step: int = 3) -> Any:
    """A loss that is NaN whenever a batch holds one of these rows."""

    def own(model: nn.Module, batch: Any) -> Any:
        x, y, number = batch
        loss = F.cross_entropy(model(x), y)
        return loss * float("nan") if bad & set(number.tolist()) else loss

    return own


def test_a_part_that_diverges_is_left_out() -> None:
    x, y = rows()
    data = (x, y, torch.arange(90))
    bad = set(Reading(make_job(), 90, (1, 3)).rows().tolist())
    job = make_job(data=data, loss=None, step=poisoned(bad), steps=4)
    lines: list[str] = []
    method = LocalSGD(job, 3, 2)
    executor = Watched(job, method, 3)
    result = train_split(job, method, executor, log=lines.append)
    assert result.status == "done" and result.split.lost == 2
    assert sum("part 1 was not finite" in line for line in lines) == 2
    assert all(torch.isfinite(t).all() for t in result.model.state_dict().values() if t.is_floating_point())
    alone = [outcome for outcome in executor.outcomes[3:] if outcome is not None and outcome.tensors]
    expected = (alone[0].tensors["0.weight"] + alone[1].tensors["0.weight"]) / 2
    assert torch.equal(result.model.state_dict()["0.weight"], expected)


def test_when_all_parts_diverge_the_last_good_weights_are_kept() -> None:
    job = make_job(lambda: mlp(6, 8, 3, norm=False), steps=20, hparams={"lr": 1e200})
    result = shoal.split.local_sgd(job, workers=2, local_steps=4)
    assert result.status == "diverged" and result.error is not None and "smaller learning rate" in result.error
    assert all(torch.isfinite(t).all() for t in result.model.state_dict().values())


class Losing(Serial):
    """Loses the second part of the second round."""

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        found = list(super().run(tasks))
        return [None if task.round == 1 and task.part.number == 1 else o for task, o in zip(tasks, found, strict=True)]


def test_a_lost_part_does_not_count() -> None:
    job = make_job(steps=4)
    method = LocalSGD(job, 2, 2)
    lines: list[str] = []
    result = train_split(job, method, Losing(job, method, 2), log=lines.append)
    assert result.split.lost == 1 and any("part 1 was lost" in line for line in lines)
    assert result.status == "done"


def test_early_stop_and_best_weights() -> None:
    stop = shoal.EarlyStop("val_loss", patience=1)
    job = make_job(val=rows(30), stop=stop, keep="best", epochs=60, hparams={"lr": 2.0})
    result = shoal.split.local_sgd(job, workers=2, local_steps=2)
    assert result.status == "stopped"
    x, y = rows(30)
    best = min(row["val_loss"] for row in result.history)
    with torch.no_grad():
        whole = sum(
            float(F.cross_entropy(result.model.eval()(a), b)) * len(b)
            for a, b in zip(torch.split(x, 8), torch.split(y, 8), strict=True)
        )
    assert whole / 30 == pytest.approx(best)


def test_data_parallel_counts_the_schedule_and_validates() -> None:
    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 1.0

    job = make_job(steps=5, schedule=schedule)
    shoal.split.data_parallel(job, workers=2)
    assert set(seen) == set(range(5))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)}, "under a split use step -> factor"),
        ({"precision": "fp16"}, "under a split use 'bf16'"),
        ({"optimizer": torch.optim.LBFGS, "hparams": {"lr": 0.1}}, "cannot be split"),
        ({"hparams": {"lr": -1.0}}, "learning rate must be 0 or more"),
    ],
)
def test_jobs_that_cannot_be_split_are_told_before_anything_runs(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(JobError, match=line):
        prepare_job(make_job(**settings))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ({"workers": 0}, "workers is 0; use a whole number, 1 or more"),
        ({"workers": 91}, "data has 90 rows; use at most one worker a row"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"moments": "none"}, "use 'travel' or 'fresh'"),
        ({"val_every": 0}, "val_every is 0"),
        ({"tier": "fast"}, "tier is 'fast'"),
    ],
)
def test_bad_settings_are_one_clear_line(call: dict[str, Any], line: str) -> None:
    with pytest.raises(SplitError, match=line):
        shoal.split.local_sgd(make_job(), **call)


def test_drop_last_that_leaves_nothing() -> None:
    with pytest.raises(SplitError, match="drop_last leaves no batch"):
        shoal.split.local_sgd(make_job(drop_last=True, batch_size=40), workers=4)


def test_a_shard_that_ends_in_one_row_is_told() -> None:
    with pytest.raises(JobError, match="a shard of 4 has 17, batch_size is 8"):
        shoal.split.local_sgd(make_job(data=rows(67)), workers=4)
    assert shoal.split.local_sgd(make_job(lambda: mlp(6, 8, 3, norm=False), data=rows(67)), workers=4).status == "done"


def test_a_lazy_network_is_refused() -> None:
    job = make_job(lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)).double())
    with pytest.raises(SplitError, match="run one batch through the network"):
        shoal.split.local_sgd(job)


def test_gradients_of_a_frozen_parameter_stay_away() -> None:
    def frozen() -> nn.Module:
        model = mlp(6, 8, 3)
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        return model

    job = make_job(frozen, steps=3)
    for run in (shoal.split.data_parallel, shoal.split.local_sgd):
        start = shoal.split.local_sgd(make_job(frozen, steps=0), 2).model
        assert torch.equal(run(job, 2).model.state_dict()["0.weight"], start.state_dict()["0.weight"])


def test_who_reads_which_shard_when_workers_come_and_go() -> None:
    method = LocalSGD(make_job(), 3)
    assert method.shards_of([Worker(0), Worker(2)]) == [(0, 3), (2, 3)]
    assert method.shards_of([Worker(0), Worker(2), Worker(3)]) == [(0, 3), (2, 3), (1, 3)]
    assert method.shards_of([Worker(5, shard=1), Worker(1)]) == [(1, 3), (0, 3)]
    assert method.shards_of([Worker(n) for n in range(4)]) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_data_parallel_of_one_worker_is_ordinary_training() -> None:
    job = make_job(steps=7, hparams={"lr": 0.1, "momentum": 0.9})
    method = DataParallel(job, 1)
    result = train_split(job, method, Serial(job, method, 1))
    assert same_bits(result.model, plain_loop(job, 7))


def test_what_training_holds_is_counted_once() -> None:
    """Weights, gradients, momentum, and beside them activations and a temporary or two: not the weights again."""
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    wide = shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 3)), data=(x, y),
        loss=F.cross_entropy, optimizer=torch.optim.SGD, hparams={"lr": 0.1, "momentum": 0.9}, batch_size=2, steps=3,
    )  # fmt: skip
    report = shoal.split.local_sgd(wide, workers=1, local_steps=3, device="cpu").split
    assert report is not None
    weights = 4 * (2000 * 8 + 2000 + 2000 * 3 + 3)
    for peak in (report.peak_measured["0"], report.peak_predicted["whole"]):
        assert 2.9 * weights < peak < 4.6 * weights
