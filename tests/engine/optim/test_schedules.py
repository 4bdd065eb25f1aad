"""A schedule's columns equal what the real scheduler leaves in the real optimizer's param groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.engine.optim.hparams import numbers, split_hparams
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.python_state import preserve

S = lr_scheduler
FACTORIES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: S.StepLR(o, 7, 0.3),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [3, 11, 12], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.3, 9),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 0.8, 13),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.93),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 20, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 5, 2),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [0.7, 0.5], total_steps=60),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.4, 6, mode="triangular2"),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 25, 2.0),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1, 8), S.CosineAnnealingLR(o, 30)], [8]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.2, 5), S.ExponentialLR(o, 0.9)], o),
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda e: 1 - 0.5 / (e + 1)),
}
OPTIMIZERS: dict[str, tuple[type[Optimizer], list[dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, [{"lr": 0.2, "momentum": 0.8}, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}]),
    "adamw": (torch.optim.AdamW, [{"lr": 0.2}, {"lr": 0.05, "betas": (0.8, 0.9)}]),
    "tensor-lr": (torch.optim.Adam, [{"lr": torch.tensor(0.25)}, {"lr": torch.tensor(0.05)}]),
}


class Real:
    """The user's own loop: a real optimizer with real parameters, stepped and scheduled."""

    def __init__(self, cls: type[Optimizer], hparams: list[dict[str, Any]], schedule: Callable[[Any], Any]) -> None:
        self.params = [torch.ones(3, requires_grad=True) for _ in hparams]
        copies = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()} for own in hparams]
        groups = [{"params": [p], **own} for p, own in zip(self.params, copies, strict=True)]
        self.optimizer = cls(groups)
        self.scheduler = schedule(self.optimizer)

    def values(self) -> list[dict[str, float]]:
        return [numbers(group) for group in self.optimizer.param_groups]

    def step(self, *metric: float) -> None:
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.scheduler.step(*metric)


def assert_equal(runner: ScheduleRunner, real: Real) -> None:
    for ours, theirs in zip(runner.values(), real.values(), strict=True):
        assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_schedule_equals_the_real_one(name: str, optimizer: str) -> None:
    cls, hparams = OPTIMIZERS[optimizer]
    runner, real = ScheduleRunner(hparams, cls, FACTORIES[name]), Real(cls, hparams, FACTORIES[name])
    changed = set()
    first = runner.values()
    for _ in range(50):
        assert_equal(runner, real)
        changed |= {n for now, then in zip(runner.values(), first, strict=True) for n in now if now[n] != then[n]}
        runner.step()
        runner.epoch(None)  # not an epoch schedule: nothing
        real.step()
    assert_equal(runner, real)
    assert "lr" in changed and changed <= runner.moves()
    if name in ("OneCycleLR", "CyclicLR"):
        assert changed == {"lr", "momentum" if optimizer == "sgd" else "beta1"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_table_is_the_future_and_leaves_no_trace(name: str, optimizer: str) -> None:
    cls, hparams = OPTIMIZERS[optimizer]
    runner, real = ScheduleRunner(hparams, cls, FACTORIES[name]), Real(cls, hparams, FACTORIES[name])
    for _ in range(4):
        runner.step()
        real.step()
    table = runner.table(21)
    assert table is not None and table.shape == (2, len(runner.names), 21)
    for index in range(21):
        assert_equal(runner, real)
        for group, values in enumerate(runner.values()):
            assert table[group, :, index].tolist() == [values[n] for n in runner.names]
        runner.step()
        real.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_schedule_resumes(name: str, optimizer: str, tmp_path: Any) -> None:
    cls, hparams = OPTIMIZERS[optimizer]
    runner, real = ScheduleRunner(hparams, cls, FACTORIES[name]), Real(cls, hparams, FACTORIES[name])
    for _ in range(9):
        runner.step()
        real.step()
    saved = runner.state_dict()
    runner.step(5)  # what is saved does not move on with the runner
    torch.save(saved, tmp_path / "schedule.pt")
    again = ScheduleRunner(hparams, cls, FACTORIES[name])
    again.load_state_dict(torch.load(tmp_path / "schedule.pt", weights_only=False))
    for _ in range(30):
        assert_equal(again, real)
        again.step()
        real.step()


def test_reduce_on_plateau_watches_each_epoch() -> None:
    def factory(o: Optimizer) -> Any:
        return S.ReduceLROnPlateau(o, factor=0.5, patience=2)

    cls, hparams = OPTIMIZERS["sgd"]
    runner, real = ScheduleRunner(hparams, cls, factory, "epoch"), Real(cls, hparams, factory)
    assert runner.needs_metric and runner.moves() == {"lr"}
    for epoch in range(20):
        metric = math.sin(epoch) + 2
        if epoch == 8:
            saved, runner = runner.state_dict(), ScheduleRunner(hparams, cls, factory, "epoch")
            runner.load_state_dict(saved)
        runner.step(3)  # steps within the epoch: nothing
        runner.epoch(metric)
        real.step(metric)
        assert_equal(runner, real)
    assert runner.values()[0]["lr"] < 0.2
    table = runner.table(4)
    assert table is not None
    assert table[:, 0].tolist() == [[values["lr"]] * 4 for values in runner.values()]
    with pytest.raises(ValueError, match="needs a value each epoch"):
        runner.epoch(None)
    with pytest.raises(ValueError, match="schedule_every='epoch'"):
        ScheduleRunner(hparams, cls, factory, "step")


@pytest.mark.parametrize(
    "factor", [lambda step: 0.9**step, lambda step: 1.0 if step < 5 else 0.1, lambda step: math.cos(step / 100)]
)
def test_a_function_of_the_step_is_a_factor(factor: Callable[[int], float]) -> None:
    runner = ScheduleRunner([{"lr": 0.5}, {"lr": 0.25}], torch.optim.Adam, factor)
    for step in range(12):
        assert [v["lr"] for v in runner.values()] == [0.5 * factor(step), 0.25 * factor(step)]
        runner.step()


def test_the_users_own_error_is_what_is_raised() -> None:
    with pytest.raises(TypeError, match="T_max"):
        ScheduleRunner([{"lr": 0.5}], torch.optim.Adam, lambda o: S.CosineAnnealingLR(o))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="schedule gave a str"):
        ScheduleRunner([{"lr": 0.5}], torch.optim.Adam, lambda step: "fast")
    with pytest.raises(ZeroDivisionError):
        ScheduleRunner([{"lr": 0.5}], torch.optim.Adam, lambda step: 1 / step if step == 0 else 1.0)


def test_without_a_schedule_nothing_moves() -> None:
    runner = ScheduleRunner([{"lr": 0.5, "weight_decay": 0.1}], torch.optim.SGD)
    runner.step()
    runner.epoch(None)
    assert runner.values() == [{"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1}]
    assert runner.moves() == frozenset()


def test_a_momentum_that_a_schedule_starts_is_not_left_out() -> None:
    """OneCycleLR sets a momentum on an SGD that was built without one."""
    hparams = {"lr": 0.1}
    runner = ScheduleRunner([hparams], torch.optim.SGD, lambda o: S.OneCycleLR(o, 0.5, total_steps=9))
    split = split_hparams(torch.optim.SGD, hparams, scheduled=runner.moves())
    assert split is not None and "momentum" in split[0] and "weight_decay" not in split[0]


class DecayWeights(LRScheduler):
    """A scheduler of the user's own that moves something torch's never do."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_of_the_users_own() -> None:
    cls, hparams = OPTIMIZERS["adamw"]
    runner, real = ScheduleRunner(hparams, cls, DecayWeights), Real(cls, hparams, DecayWeights)
    assert runner.moves() == set(runner.names)
    table = runner.table(5)
    assert table is not None and table[0, runner.names.index("weight_decay")].tolist() == pytest.approx(
        [0, 0.01, 0.02, 0.03, 0.04]
    )
    for _ in range(5):
        assert_equal(runner, real)
        runner.step()
        real.step()


class Forgetful(S.StepLR):
    """Its state_dict leaves something out, so a table could not be taken back."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_no_table_when_it_could_not_be_taken_back() -> None:
    runner = ScheduleRunner([{"lr": 0.5}], torch.optim.SGD, lambda o: Forgetful(o, 2))
    assert not runner.can_table() and runner.table(3) is None


@pytest.mark.parametrize("name", FACTORIES)
def test_a_table_of_torchs_schedules_searches_no_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search through all loaded modules takes longer than an epoch of a small network."""
    searched: list[Any] = []
    monkeypatch.setattr(preserve, "in_library_tables", lambda values: set(searched.extend(values) or ()))
    cls, hparams = OPTIMIZERS["sgd"]
    runner = ScheduleRunner(hparams, cls, FACTORIES[name])
    assert runner.table(21) is not None
    assert not searched


class Counting:
    """An object as the function of a schedule, which notes its calls in a list."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def __call__(self, step: float) -> float:
        self.calls.append(step)
        return 1 / len(self.calls)


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_table_leaves_no_trace_in_objects_of_the_user(cyclic: bool) -> None:
    count = Counting()
    schedule: Any = count
    if cyclic:
        schedule = lambda o: S.CyclicLR(o, 0.01, 0.4, 6, scale_fn=count, cycle_momentum=False)  # noqa: E731
    runner = ScheduleRunner([{"lr": 0.5}], torch.optim.SGD, schedule)
    before = list(count.calls)
    assert runner.table(9) is not None and count.calls == before


def test_the_users_tensors_are_not_touched() -> None:
    lr = torch.tensor(0.5)
    runner = ScheduleRunner([{"lr": lr}, {"lr": lr}], torch.optim.Adam, lambda step: 0.5**step)
    runner.step(3)
    assert lr.item() == 0.5 and [v["lr"] for v in runner.values()] == [0.0625, 0.0625]
