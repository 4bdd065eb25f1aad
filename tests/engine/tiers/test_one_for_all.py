"""What one job does ends that job alone, as it does by itself: schedules, optimizers, data and steps that raise."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, assert_same_bits, numbers, train
from tests.engine.tiers.captured.test_captured_on_cpu import as_on_a_gpu
from tests.engine.tiers.captured.test_captured_on_cpu import train as train_captured
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import Dataset

import shoal
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reference import solo
from shoal.training import collect

X, Y = numbers(1, 24, 6), numbers(2, 24, 1)
PATHS = ("stacked", "serial", "workers")


class Net(nn.Module):
    """With a buffer that every training step moves, and dropout, so that draws and buffers are held too."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5, bias=False), nn.Linear(5, 1)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        assert isinstance(out, Tensor)
        return out


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: Net().double(),
        "data": (X, Y),
        "loss": F.mse_loss,
        "optimizer": SGD,
        "hparams": {"lr": 0.05, "momentum": 0.9},
        "batch_size": 8,
        "epochs": 4,
        "name": f"{seed}",
    }
    return shoal.Job(seed=seed, **(settings | changes))


def run(jobs: list[shoal.Job], path: str, monkeypatch: pytest.MonkeyPatch) -> shoal.Results:
    """Train in one process with all in one tier, or in two processes."""
    monkeypatch.setattr("shoal.data.dataset.SLOW_BATCH", math.inf)  # no workers that read, for so few rows
    if path == "workers":
        monkeypatch.setenv("SHOAL_WORKERS", "2")
        return train(jobs)
    members = prepare(jobs, torch.device("cpu"))
    planning = PlanningContext(members, timed=False, tiers={member.index: path for member in members})
    Run(members, planning).go()
    return collect(members, {})


def assert_as_alone(jobs: list[shoal.Job], path: str, monkeypatch: pytest.MonkeyPatch) -> shoal.Results:
    results = run(jobs, path, monkeypatch)
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))
    return results


class LateError(SGD):
    """An optimizer whose sixth step raises."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 6:
            raise ArithmeticError("the sixth step")
        return super().step(closure)


SCHEDULES: dict[str, dict[str, Any]] = {
    "one cycle": {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5)},
    "a table": {"schedule": [1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1].__getitem__},
    "its last step": {"schedule": ([1.0] * 12).__getitem__},
    "epochs": {"schedule": [1.0, 0.5].__getitem__, "schedule_every": "epoch"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_raises_late(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(0), job(1, **SCHEDULES[kind]), job(2, schedule=lambda step: 0.9**step), job(3, **SCHEDULES[kind])]
    results = assert_as_alone(jobs, path, monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "done", "failed"]
    assert results[1].steps == {"one cycle": 6, "a table": 7, "its last step": 12, "epochs": 6}[kind]


@pytest.mark.parametrize("path", PATHS)
def test_a_schedule_that_raises_with_an_optimizer_of_its_own(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(SGD):
        pass

    late = {"optimizer": Mine, **SCHEDULES["a table"]}
    results = assert_as_alone([job(0), job(1, **late), job(2, optimizer=Mine)], path, monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "done"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_that_raises(path: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(i, accumulate=accumulate, optimizer=LateError if i in (1, 3) else SGD) for i in range(4)]
    results = assert_as_alone(jobs, path, monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "done", "failed"]
    assert results[1].steps == 5 and results[1].error is not None
    assert results[1].error.startswith("ArithmeticError: the sixth step (test_one_for_all.py:")


class Rows(Dataset[Any]):
    """Row 13 of some cannot be read; some are read as training goes."""

    def __init__(self, bad: bool, random: bool = False) -> None:
        self.bad, self.random = bad, random

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if self.bad and row == 13:
            raise OSError("cannot read image 13")
        return X[row] + (torch.randn(6, dtype=torch.float64) if self.random else 0), Y[row]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("random", [False, True])
def test_an_item_that_cannot_be_read(path: str, random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Rows(True, random)
    jobs = [job(0, data=Rows(False, random)), job(1, data=data), job(2, data=data), job(3, data=Rows(False, random))]
    results = assert_as_alone(jobs, path, monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "failed", "done"]
    text = "OSError: cannot read image 13 (reading row 13 of its Dataset) (test_one_for_all.py:"
    assert all(result.error is not None and result.error.startswith(text) for result in results[1:3])


def test_validation_data_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    results = assert_as_alone([job(0), job(1, val=Rows(True)), job(2, val=Rows(False))], "stacked", monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "done"]


def test_a_data_set_of_which_nothing_can_be_read_is_a_mistake() -> None:
    class Broken(Rows):
        def __getitem__(self, row: int) -> Any:
            raise OSError("no such folder")

    with pytest.raises(shoal.JobError, match=r"job '0': reading the first 8 rows of data raised OSError: no such f"):
        train([job(0, data=Broken(True))])


NEGATIVE = torch.where(torch.arange(24)[:, None] // 8 == 2, -1 - X.abs(), X)
"""The last of three batches has no positive number, where rows come in order."""


def kernel(hidden: Tensor, batch: Any) -> Tensor:
    """Positive definite where the batch has a positive number, and far from it where it has none."""
    mean = hidden.mean(0)[:4]
    return torch.eye(4, dtype=hidden.dtype) * batch[0].max() + 0.1 * torch.outer(mean, mean)


def jittered(model: nn.Module, batch: Any) -> Tensor:
    """The usual loop of Gaussian processes: add to the diagonal until it can be factored."""
    hidden = model(batch[0])
    for jitter in (0.0, 9.0, 99.0):
        try:
            factor = torch.linalg.cholesky(kernel(hidden, batch) + jitter * torch.eye(4, dtype=hidden.dtype))
            break
        except RuntimeError:
            continue
    return factor.diagonal().log().mean() + (hidden - batch[1]).square().mean()


def factored(model: nn.Module, batch: Any) -> Tensor:
    """The same, without a second try."""
    hidden = model(batch[0])
    factor = torch.linalg.cholesky(kernel(hidden, batch))
    return factor.diagonal().log().mean() + (hidden - batch[1]).square().mean()


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1)).double()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_that_handles_what_it_raises(path: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        job(i, model=wide, step=jittered, loss=None, accumulate=accumulate, data=(rows, Y), shuffle=False)
        for i, rows in enumerate((X, X + 1, NEGATIVE))
    ]
    results = assert_as_alone(jobs, path, monkeypatch)
    assert [result.status for result in results] == ["done"] * 3
    if path == "stacked":
        assert [result.tier for result in results] == ["stacked", "stacked", "serial"]


@pytest.mark.parametrize("path", PATHS)
def test_a_step_that_raises_late(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (X, NEGATIVE, X + 1)
    jobs = [job(i, model=wide, step=factored, loss=None, data=(x, Y), shuffle=False) for i, x in enumerate(rows)]
    results = assert_as_alone(jobs, path, monkeypatch)
    assert [result.status for result in results] == ["done", "failed", "done"]
    assert results[1].steps == 2


LABELS = torch.arange(24) % 12
STEPS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "labels": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "gather": lambda model, batch: model(batch[0]).gather(1, batch[1][:, None]).square().mean(),
    "rows": lambda model, batch: model(batch[0]).T.index_select(0, batch[1]).square().mean(),
    "sums": lambda model, batch: torch.zeros(12, 12).double().index_add(0, batch[1], model(batch[0])).square().mean(),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_label_that_is_out_of_range(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = LABELS.clone()
    bad[20] = 99
    settings: dict[str, Any] = {"model": wide, "step": STEPS[kind], "loss": None, "shuffle": False}
    jobs = [job(i, data=(X, labels), **settings) for i, labels in enumerate((LABELS, bad, LABELS))]
    results = assert_as_alone(jobs, "stacked", monkeypatch)
    assert [(result.status, result.tier) for result in results[::2]] == [("done", "stacked")] * 2
    assert (results[1].status, results[1].steps) == ("failed", 2)


def gaussian(model: nn.Module, batch: Any) -> Tensor:
    """Fails, by a check of torch.distributions, where the batch has no positive number."""
    hidden = model(batch[0])
    scale = batch[0].max() + 0.1 * hidden[:, 1:2].tanh()
    return -torch.distributions.Normal(hidden[:, :1], scale.expand(len(hidden), 1)).log_prob(batch[1]).mean()


def careful(model: nn.Module, batch: Any) -> Tensor:
    """Handles the failure of that check."""
    try:
        return gaussian(model, batch)
    except ValueError:
        out = model(batch[0]).square().mean()
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("step", [gaussian, careful])
def test_a_check_in_a_step_that_fails_late(
    step: Callable[[nn.Module, Any], Tensor], accumulate: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": wide, "step": step, "loss": None, "shuffle": False, "accumulate": accumulate}
    jobs = [job(i, data=(x, Y), **settings) for i, x in enumerate((X, NEGATIVE, X + 1, NEGATIVE))]
    results = assert_as_alone(jobs, path, monkeypatch)
    wanted = "failed" if step is gaussian else "done"
    assert [result.status for result in results] == ["done", wanted, "done", wanted]
    if path == "stacked":
        assert [result.tier for result in results] == ["stacked", "serial"] * 2


def test_those_who_stay_have_the_bits_that_they_had_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"model": wide, "step": jittered, "loss": None, "shuffle": False}
    quiet, noisy = [job(i, **settings) for i in range(2)], job(9, **settings, data=(NEGATIVE, Y))
    alone, beside = run(quiet, "stacked", monkeypatch), run([*quiet, noisy], "stacked", monkeypatch)
    assert [result.tier for result in beside] == ["stacked", "stacked", "serial"]
    for a, b in zip(alone, beside, strict=False):
        for name, value in a.model.state_dict().items():
            assert torch.equal(value, b.model.state_dict()[name])


def test_a_member_that_left_its_stack_is_resumed_outside_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": wide, "step": jittered, "loss": None, "shuffle": False}
    jobs = [job(i, **settings, data=(x, Y)) for i, x in enumerate((X, NEGATIVE, X + 1))]

    def interrupt(view: Any) -> None:
        if view.name == "1" and len(view.history) == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        shoal.train(jobs, device="cpu", out=tmp_path, callbacks=[interrupt])
    told: list[shoal.Event] = []
    whole, resumed = shoal.train(jobs, device="cpu"), shoal.train(jobs, device="cpu", out=tmp_path, events=told.append)
    joined = {event.member.name: event.data["tier"] for event in told if event.kind == "join" and event.member}
    assert joined == {"0": "stacked", "1": "serial", "2": "stacked"} and "split" not in {event.kind for event in told}
    for a, b in zip(whole, resumed, strict=True):
        assert_same_bits(a, b)


@pytest.mark.usefixtures(as_on_a_gpu.__name__)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_captured_steps_end_with_their_schedule(chunk: int) -> None:
    jobs = [job(0), job(1, **SCHEDULES["one cycle"]), job(2, **SCHEDULES["a table"]), job(3, schedule=lambda s: 0.9**s)]
    results = train_captured(jobs, chunk)
    assert [result.status for result in results] == ["done", "failed", "failed", "done"]
    assert [result.steps for result in results] == [12, 6, 7, 12]
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))


class Loop:
    """A user's own loop over a pack."""

    def __init__(self, **settings: Any) -> None:
        self.models = [wide() for _ in range(3)]
        self.pack = shoal.Pack(self.models, hparams={"lr": 1e-3}, **settings)

    def alone(self, step: Callable[[nn.Module, Any], Tensor], steps: int) -> list[nn.Module]:
        found = []
        for seed, model in enumerate(self.models):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                for i in range(steps):
                    optimizer.zero_grad()
                    step(model, self.batch(i)).backward()
                    optimizer.step()
            found.append(model)
        return found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return NEGATIVE[8 * (step % 3) :][:8], Y[:8]


def test_a_pack_whose_stacked_step_raises_goes_on_member_by_member() -> None:
    loop = Loop(step=jittered)
    for i in range(6):
        loop.pack.step(*loop.batch(i))
    assert set(loop.pack.status.values()) == {"running"}
    assert {tier for tier, _ in loop.pack.tiers.values()} == {"serial"}
    for id, model in zip(loop.pack.ids, loop.alone(jittered, 6), strict=True):
        for a, b in zip(loop.pack.member(id).parameters(), model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("some", [False, True])
def test_a_pack_ends_the_member_whose_schedule_or_optimizer_raises(some: bool) -> None:
    pack = shoal.Pack(
        [nn.Linear(6, 1).double() for _ in range(4)], loss=F.mse_loss, hparams={"lr": 0.1},
        optimizer=[SGD, LateError, SGD, SGD], schedule=[None, None, [1.0, 0.5, 0.1].__getitem__, None],
    )  # fmt: skip
    with pytest.warns(shoal.ShoalWarning, match="has stopped"):
        for _ in range(7):
            pack.step(X[:8], Y[:8], members=[1, 2, 0] if some else None)
    assert pack.status == {0: "running", 1: "failed", 2: "failed", 3: "running"}
    assert pack.errors[1].startswith("ArithmeticError: the sixth step (test_one_for_all.py:")
    assert pack.errors[2] == "IndexError: list index out of range" and len(pack.errors) == 2


def test_a_pack_takes_no_ids_that_it_does_not_have() -> None:
    pack = shoal.Pack([nn.Linear(6, 1).double() for _ in range(3)], loss=F.mse_loss)
    before = [pack.member(id).weight.clone() for id in pack.ids]
    for wrong in ([0, 7], [3], [-1], ["0"]):
        with pytest.raises(KeyError, match=r"no member .* in this pack; it has 0, 1, 2"):
            pack.step(X[:8], Y[:8], members=wrong)
    with pytest.raises(ValueError, match="members has 1 more than once"):
        pack.step(X[:8], Y[:8], members=[1, 0, 1])
    assert all(torch.equal(pack.member(id).weight, w) for id, w in zip(pack.ids, before, strict=True))
