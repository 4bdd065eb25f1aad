"""Values that something else changes between epochs take effect; what is changed within one is not stacked."""

from __future__ import annotations

import argparse
import array
import configparser
import contextvars
import copy
import ctypes
import functools
import io
import multiprocessing
import os
import queue
import string
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distance, numbers
from tests.engine.tiers.captured.test_captured_on_cpu import Seats
from torch import Tensor, nn

import shoal
from shoal.data import dataset
from shoal.engine.python_state import watch
from shoal.engine.python_state.watch import Watch
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reporting.callbacks import Callbacks
from shoal.training import collect

X, Y = numbers(1, 24, 6), numbers(2, 24, 1)
BETA = 0.0
CONFIG: dict[str, float] = {"beta": 0.0}
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("beta", default=0.0)


class Settings:
    beta = 0.0


@dataclass(slots=True)
class Slotted:
    beta: float = 0.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 1), nn.Dropout(0.2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


class Scaled(Net):
    """Reads a value that hangs on the model."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + self.settings.beta)


def penalised(beta: Callable[[], Any]) -> Callable[[nn.Module, Any], Tensor]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.mse_loss(out, batch[1]) + beta() * out.pow(2).mean()

    return step


def set_global(value: float) -> None:
    global BETA
    BETA = value


class Loss:
    """An object that is called, with its value in an attribute."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target) + self.beta * out.pow(2).mean()


Way = tuple[dict[str, Any], Callable[[float], object]]
"""Settings of a job, and how its value is set."""


def in_a_closure() -> Way:
    beta = 0.0

    def put(value: float) -> None:
        nonlocal beta
        beta = value

    return {"step": penalised(lambda: beta)}, put


def in_a_loss() -> Way:
    loss = Loss()
    return {"loss": loss}, lambda value: setattr(loss, "beta", value)


def in_a_tensor() -> Way:
    beta = torch.zeros((), dtype=torch.float64)
    return {"step": penalised(lambda: beta)}, lambda value: beta.fill_(value)


def in_a_tensors_data() -> Way:
    beta = torch.zeros((), dtype=torch.float64)
    return {"step": penalised(lambda: beta)}, lambda value: beta.data.fill_(value)


def in_an_array() -> Way:
    beta = np.zeros(3)
    return {"step": penalised(lambda: float(beta[1]))}, lambda value: beta.__setitem__(1, value)


def in_a_partial() -> Way:
    def step(model: nn.Module, batch: Any, beta: float) -> Tensor:
        return penalised(lambda: beta)(model, batch)

    bound = functools.partial(step, beta=0.0)
    return {"step": bound}, lambda value: bound.keywords.update(beta=value)


def on_the_model(settings: Any) -> Way:
    return {"model": lambda: Scaled(settings), "loss": F.mse_loss}, lambda value: setattr(settings, "beta", value)


def an_attribute() -> Way:
    made: list[Any] = []

    def build() -> nn.Module:
        net = Scaled(argparse.Namespace(beta=0.0))
        made.append(net)
        return net

    def put(value: float) -> None:
        for net in made:
            net.settings.beta = value

    return {"model": build, "loss": F.mse_loss}, put


WAYS: dict[str, Callable[[], Way]] = {
    "a closure": in_a_closure,
    "a global": lambda: ({"step": penalised(lambda: BETA)}, set_global),
    "a dict": lambda: ({"step": penalised(lambda: CONFIG["beta"])}, lambda value: CONFIG.update(beta=value)),
    "a class": lambda: ({"step": penalised(lambda: Settings.beta)}, lambda value: setattr(Settings, "beta", value)),
    "a context variable": lambda: ({"step": penalised(VARIABLE.get)}, VARIABLE.set),
    "a loss": in_a_loss,
    "a tensor": in_a_tensor,
    "a tensor's data": in_a_tensors_data,
    "an array": in_an_array,
    "a partial": in_a_partial,
    "a namespace that the model holds": lambda: on_the_model(argparse.Namespace(beta=0.0)),
    "slots that the model holds": lambda: on_the_model(Slotted()),
    "an attribute of the models": an_attribute,
}


def jobs(way: dict[str, Any], count: int = 3, **settings: Any) -> list[shoal.Job]:
    common = {"model": Net, "data": (X, Y), "batch_size": 8, "epochs": 3} | way | settings
    return [shoal.Job(seed=seed, hparams={"lr": 0.01 * (seed + 1)}, **common) for seed in range(count)]


def annealed(epoch: int) -> float:
    return 0.5 * (epoch // 2)


def plain_loop(job: shoal.Job, put: Callable[[float], object], *, until: int | None = None) -> nn.Module:
    """The job as its owner would run it, with the value set after each epoch."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    put(annealed(0))
    for epoch in range(until or job.epochs or 0):
        for rows in torch.randperm(len(X), generator=order).split(job.batch_size):
            optimizer.zero_grad()
            batch = (X[rows], Y[rows])
            loss = job.step(model, batch) if job.step is not None else job.loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
        put(annealed(epoch + 1))
    return model


def assert_equal(results: shoal.Results, expected: list[nn.Module]) -> None:
    for result, model in zip(results, expected, strict=True):
        for name, value in model.state_dict().items():
            assert distance(result.model.state_dict()[name], value) <= TOLERANCE, (result.name, name)


@pytest.mark.parametrize("name", WAYS)
def test_a_value_that_a_callback_changes_takes_effect(name: str) -> None:
    way, put = WAYS[name]()
    pack = jobs(way)
    expected = [plain_loop(job, put) for job in pack]
    put(annealed(0))
    tiers: set[str] = set()

    def callback(view: shoal.MemberView) -> None:
        tiers.add(view.tier)
        put(annealed(view.epoch))

    assert_equal(shoal.train(pack, device="cpu", callbacks=[callback]), expected)
    assert tiers == {"stacked"}
    put(0.0)


class Tempered(Net):
    """Divides its outputs by a temperature, in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x) / (1.0 + CONFIG["beta"])


def test_validation_reads_the_value_of_its_epoch() -> None:
    pack = jobs({"model": Tempered, "loss": F.mse_loss}, val=(X, Y))
    results = shoal.train(pack, device="cpu", callbacks=[lambda view: CONFIG.update(beta=annealed(view.epoch))])
    assert {result.tier for result in results} == {"stacked"}
    for result in results:
        alone = shoal.solo(result.job).history  # at a temperature of 1
        for epoch, row in enumerate(result.history):
            model = plain_loop(result.job, lambda _: None, until=epoch + 1).eval()
            CONFIG["beta"] = annealed(epoch)
            expected = F.mse_loss(model(X), Y).detach()
            assert abs(row["val_loss"] - float(expected)) < 1e-9 and row["loss"] == pytest.approx(alone[epoch]["loss"])
    CONFIG["beta"] = 0.0


def joins(pack: list[shoal.Job], **settings: Any) -> tuple[shoal.Results, list[str]]:
    names: list[str] = []

    def notify(event: Any) -> None:
        if event.kind == "join":
            names.append(event.member.name)

    return shoal.train(pack, device="cpu", events=notify, **settings), names


def test_only_members_that_read_it_are_moved() -> None:
    values = [{"beta": 0.0}, {"beta": 0.0}]
    pack = jobs({}, count=1, step=penalised(lambda: values[0]["beta"]), name="a") + jobs(
        {}, count=1, step=penalised(lambda: values[1]["beta"]), name="b"
    )
    expected = [
        plain_loop(pack[0], lambda value: values[0].update(beta=value)),
        plain_loop(pack[1], lambda _: None),
    ]
    values[0]["beta"] = 0.0
    results, names = joins(pack, callbacks=[lambda view: values[0].update(beta=annealed(view.epoch))])
    assert_equal(results, expected)
    assert names.count("b") == 1 and names.count("a") > 1


class Trainer:
    """A step that is a method, of an object that also counts what the step does not depend on."""

    def __init__(self) -> None:
        self.epochs, self.best, self.beta = 0, [9.0], 0.25

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        return penalised(lambda: self.beta)(model, batch)

    def after(self, view: shoal.MemberView) -> None:
        self.epochs = view.epoch
        self.best.append(view.metrics["loss"])


def test_a_change_that_makes_no_difference_moves_nobody() -> None:
    trainer = Trainer()
    pack = jobs({"step": trainer.step})
    results, names = joins(pack, callbacks=[trainer.after])
    assert len(names) == len(pack) and {result.tier for result in results} == {"stacked"}
    assert_equal(results, [plain_loop(job, lambda _: None) for job in pack])


def test_a_value_that_changes_too_often_costs_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_CHANGES", 2)
    way, put = in_a_closure()
    pack = jobs(way, epochs=9, batch_size=24)
    expected = []
    for job in pack:
        put(0.0)
        expected.append(plain_loop(job, lambda value: put(0.1 * value)))
    put(0.0)
    results = shoal.train(pack, device="cpu", callbacks=[lambda view: put(0.1 * annealed(view.epoch))])
    assert_equal(results, expected)
    assert {result.tier for result in results} == {"serial"}


def test_parameters_that_a_callback_unfreezes() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        net = Net()
        net.a.requires_grad_(False)
        made.append(net)
        return net

    def unfreeze(value: float) -> None:
        for net in made:
            net.a.requires_grad_(value > 0.0)

    pack = jobs({"model": build, "loss": F.mse_loss}, optimizer=torch.optim.SGD)
    expected = [plain_loop(job, unfreeze) for job in pack]
    made.clear()
    results = shoal.train(pack, device="cpu", callbacks=[lambda view: unfreeze(annealed(view.epoch))])
    assert_equal(results, expected)


def scheduled(every: int) -> Callable[[int], float]:
    def schedule(step: int) -> float:
        CONFIG["beta"] = 0.1 * (step // every)
        return 1.0 / (1 + step)

    return schedule


@pytest.mark.parametrize("every", [1, 9])
def test_a_schedule_that_changes_what_the_step_reads_keeps_it_from_being_stacked(every: int) -> None:
    pack = jobs({"step": penalised(lambda: CONFIG["beta"])}, count=1, schedule=scheduled(every))
    (alone,) = [shoal.solo(job) for job in pack]
    CONFIG["beta"] = 0.0
    (part,) = shoal.explain(pack, device="cpu", measure=False).plan.parts
    assert part.tier == "serial" and "its schedule changes what its step reads (CONFIG['beta']" in part.reason
    assert CONFIG["beta"] == 0.0
    assert_equal(shoal.train(pack, device="cpu"), [alone.model])
    CONFIG["beta"] = 0.0


def test_a_schedule_by_the_epoch_may_change_what_the_step_reads() -> None:
    how = {"schedule": scheduled(1), "schedule_every": "epoch"}
    pack = jobs({"step": penalised(lambda: CONFIG["beta"])}, count=1, **how)
    alone = shoal.solo(pack[0])
    CONFIG["beta"] = 0.0
    results = shoal.train(pack, device="cpu")
    assert results[0].tier == "stacked"
    assert_equal(results, [alone.model])
    CONFIG["beta"] = 0.0


def test_a_schedule_that_reads_the_same_settings_does_not() -> None:
    pack = jobs({"step": penalised(lambda: CONFIG["beta"])}, schedule=lambda step: 1.0 / (1 + step + CONFIG["beta"]))
    assert {part.tier for part in shoal.explain(pack, device="cpu", measure=False).plan.parts} == {"stacked"}


def test_what_changes_within_an_epoch_is_warned_of_and_runs_unstacked_from_there() -> None:
    def change(event: shoal.Event) -> None:
        CONFIG["beta"] += 0.1 * (event.kind == "turn")

    pack = jobs({"step": penalised(lambda: CONFIG["beta"])}, count=1, val=(X, Y), val_every_steps=1)
    with pytest.warns(shoal.ShoalWarning, match=r"CONFIG\['beta'\] of module .* changed during an epoch"):
        results = shoal.train(pack, device="cpu", events=change)
    assert results[0].tier == "serial"
    CONFIG["beta"] = 0.0


class Reading(torch.utils.data.Dataset[Any]):
    """Changes what the step reads, at every row."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        CONFIG["beta"] = 0.1 * index
        return X[index], Y[index]


def test_a_dataset_that_changes_what_the_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_BYTES", 0)
    pack = jobs({"data": Reading(), "step": penalised(lambda: CONFIG["beta"])}, count=1)
    (part,) = shoal.explain(pack, device="cpu", measure=False).plan.parts
    assert part.tier == "serial" and "reading its data changes what its step reads" in part.reason
    CONFIG["beta"] = 0.0


def test_captured_units_are_made_anew() -> None:
    way, put = in_a_closure()
    pack = jobs(way)
    plain = [{**way, "model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()} for _ in pack]
    pack = [job for own in plain for job in jobs(own, count=1)]
    expected = [plain_loop(replace(job, model=lambda job=job: copy.deepcopy(job.model)), put) for job in pack]
    put(0.0)
    members = prepare(pack, torch.device("cpu"))
    run = Run(members, Seats(members), callbacks=Callbacks([lambda view: put(annealed(view.epoch))]))
    run.go()
    assert_equal(collect(members, {}), expected)


def test_a_plain_network_costs_a_look_at_its_attributes_and_nothing_where_it_is_a_copy() -> None:
    watch = Watch()
    watch.add(0, {"loss": F.cross_entropy}, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert len(watch) <= 3 * 4
    copies = Watch()
    copies.add(0, {"loss": F.cross_entropy}, nn.Sequential(nn.Linear(4, 4), nn.ReLU()), private=True)
    assert len(copies) == 0


def test_members_share_what_is_looked_at() -> None:
    watch = Watch()
    for index in range(10):
        watch.add(index, {"step": penalised(lambda: BETA)}, Net(), private=True)
    shared = len(watch)
    assert len(watch.changes()) == 0
    set_global(1.0)
    assert watch.changes().keys() == set(range(10))
    watch.drop(range(9))
    assert watch.changes().keys() == {9} and len(watch) < shared
    set_global(0.0)


def test_what_was_recorded_is_not_taken_for_another_job_once_a_global_has_changed() -> None:
    first, second = prepare(jobs({"step": penalised(lambda: BETA)}, count=2), torch.device("cpu"))
    trace_cache = TraceCache()
    before = trace_cache.step(first, 8)
    assert trace_cache.step(second, 8) is before
    set_global(1.0)
    try:
        after = trace_cache.step(second, 8)
        assert after is not before and trace_cache.step(first, 8) is after
    finally:
        set_global(0.0)


def test_outputs_are_of_the_value_that_there_is_now() -> None:
    CONFIG["beta"] = 0.0
    results = shoal.train(jobs({"model": Tempered, "loss": F.mse_loss}, epochs=1), device="cpu")
    before = results.predict(X)
    CONFIG["beta"] = 1.0
    assert torch.allclose(results.predict(X), before / 2)
    CONFIG["beta"] = 0.0


def test_runs_in_two_threads_each_with_a_value_of_its_own() -> None:
    ways = [in_a_closure(), in_a_closure()]

    def train(factor: float, way: Way) -> shoal.Results:
        put = way[1]
        return shoal.train(jobs(way[0]), device="cpu", callbacks=[lambda view: put(factor * annealed(view.epoch))])

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(train, (1.0, 2.0), ways))
    for factor, (_, put), results in zip((1.0, 2.0), ways, runs, strict=True):
        scaled = functools.partial(_scaled, put, factor)
        assert_equal(results, [plain_loop(result.job, scaled) for result in results])


def _scaled(put: Callable[[float], object], factor: float, value: float) -> None:
    put(factor * value)


def a_config() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config["section"] = {"beta": "0.0"}
    return config


def a_thread_local() -> threading.local:
    local = threading.local()
    local.beta = 0.0
    return local


def a_view() -> tuple[Any, Callable[[str, float], None]]:
    values = {"beta": 0.0}
    return values.values(), values.__setitem__


UNSEARCHED: dict[str, tuple[Any, Callable[[Any], float], Callable[[Any], Any]]] = {
    "environ": (None, lambda _: float(os.environ.get("BETA", "0")), lambda _: os.environ.update(BETA="1")),
    "getenv": (None, lambda _: float(os.getenv("BETA", "0")), lambda _: os.environ.update(BETA="1")),
    "configparser": (
        a_config(), lambda c: c.getfloat("section", "beta"), lambda c: c["section"].__setitem__("beta", "1.0")
    ),
    "thread local": (a_thread_local(), lambda c: c.beta, lambda c: setattr(c, "beta", 1.0)),
    "event": (threading.Event(), lambda c: float(c.is_set()), lambda c: c.set()),
    "shared value": (multiprocessing.Value("d", 0.0), lambda c: c.value, lambda c: setattr(c, "value", 1.0)),
    "ctypes": (ctypes.c_double(0.0), lambda c: c.value, lambda c: setattr(c, "value", 1.0)),
    "array": (array.array("d", [0.0]), lambda c: c[0], lambda c: c.__setitem__(0, 1.0)),
    "bytearray": (bytearray(b"\0"), lambda c: float(c[0]), lambda c: c.__setitem__(0, 1)),
    "text": (io.StringIO("0"), lambda c: float(c.getvalue()), lambda c: (c.seek(0), c.write("1"))),
    "template": (string.Template("0"), lambda c: float(c.template), lambda c: setattr(c, "template", "1")),
    "series": (pandas.Series({"beta": 0.0}), lambda c: c["beta"], lambda c: c.__setitem__("beta", 1.0)),
    "frame": (pandas.DataFrame({"beta": [0.0]}), lambda c: c.loc[0, "beta"], lambda c: c.__setitem__("beta", [1.0])),
    "queue": (queue.Queue(), lambda c: float(sum(c.queue)), lambda c: c.put(1.0)),
    "simple queue": (queue.SimpleQueue(), lambda c: float(c.qsize()), lambda c: c.put(1.0)),
    "view of a dict": (a_view(), lambda c: sum(c[0]), lambda c: c[1]("beta", 1.0)),
    "module": (types.ModuleType("settings"), lambda c: getattr(c, "beta", 0.0), lambda c: setattr(c, "beta", 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSEARCHED)
def test_content_that_is_not_in_attributes_is_watched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BETA", "0")
    held, read, change = UNSEARCHED[kind]
    held = copy.deepcopy(held) if kind in ("ctypes", "array", "bytearray") else held
    nets = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(2)]
    expected = copy.deepcopy(nets)
    pack = shoal.Pack(nets, optimizer=torch.optim.SGD, hparams={"lr": 0.1}, step=penalised(lambda: read(held)))
    step = penalised(lambda: read(held))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in expected]
    for turn in range(4):
        if turn == 2:
            change(held)
        pack.step(X, Y)
        for net, optimizer in zip(expected, optimizers, strict=True):
            optimizer.zero_grad()
            step(net, (X, Y)).backward()
            optimizer.step()
    for index, net in enumerate(expected):
        weights = pack.member(index).state_dict()
        assert all(distance(weights[name], value) <= TOLERANCE for name, value in net.state_dict().items())
