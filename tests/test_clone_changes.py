"""Clones with changes, in the middle of an epoch and between two, against a plain loop in float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.test_live import Branching
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.jobs.averaging import is_due
from shoal.reporting.events import Event

G = torch.Generator().manual_seed(5)
X, Y = torch.randn(50, 6, generator=G, dtype=torch.float64), torch.randint(3, (50,), generator=G)
X2, Y2 = torch.randn(37, 6, generator=G, dtype=torch.float64), torch.randint(3, (37,), generator=G)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def branching() -> nn.Module:
    return Branching().double()


def job(name: str = "a", **changes: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": net, "data": (X, Y), "loss": F.cross_entropy, "hparams": {"lr": 0.01}, "batch_size": 8, "epochs": 5,
    }  # fmt: skip
    return shoal.Job(name=name, **{**given, **changes})


@dataclass
class Loop:
    """A training by hand, which can be changed on the way: what a clone means."""

    job: shoal.Job

    def __post_init__(self) -> None:
        torch.manual_seed(self.job.seed)
        made = self.job.model()  # type: ignore[operator]
        self.model: nn.Module = made
        self.order = torch.Generator().manual_seed(self.job.order_seed)
        self.step = self.epoch = 0
        self.optimizer = self.job.optimizer(self.model.parameters(), **self.job.hparams)
        self.schedule = self._schedule()
        self.rows = torch.empty(0, dtype=torch.long)
        self.weighted: list[tuple[int, float]] = []
        self.history: list[tuple[int, float, float]] = []

    def _schedule(self) -> Any:
        if self.job.schedule is None:
            return None
        try:
            float(self.job.schedule(0))
        except Exception:
            return self.job.schedule(self.optimizer)
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.job.schedule)

    def _begin(self) -> None:
        self.before = self.order.get_state()
        n = len(self.job.data[0])
        self.rows = torch.randperm(n, generator=self.order) if self.job.shuffle else torch.arange(n)
        self.weighted = []

    def take(self, steps: float = math.inf) -> None:
        """So many optimizer steps, or all that are left."""
        while steps > 0 and self.epoch < (self.job.epochs or 0):
            if not self.weighted:
                self._begin()
            k, size = self.job.accumulate, self.job.batch_size
            batches = [b for b in torch.split(self.rows, size) if len(b) == size or not self.job.drop_last]
            group = batches[:k]
            self.rows = self.rows[sum(map(len, group)) :]
            if group:
                self._update(group)
                steps -= 1
            if len(batches) <= k:
                self.epoch += 1
                rows = sum(n for n, _ in self.weighted)
                loss = sum(n * value for n, value in self.weighted) / rows
                self.history.append((self.step, loss, self.rate))
                self.weighted = []
                if self.schedule is not None and self.job.schedule_every == "epoch":
                    self.schedule.step(*([loss] if isinstance(self.schedule, ReduceLROnPlateau) else []))

    def _update(self, group: list[Tensor]) -> None:
        assert self.job.loss is not None
        self.optimizer.zero_grad()
        for rows in group:
            x, y = self.job.data
            loss = self.job.loss(self.model(x[rows]), y[rows])
            (loss / len(group)).backward()  # type: ignore[no-untyped-call]
            self.weighted.append((len(rows), float(loss.detach())))
        self.optimizer.step()
        self.step += 1
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        if self.schedule is not None and self.job.schedule_every == "step":
            self.schedule.step()

    def change(self, **changes: Any) -> None:
        """From here on with another job."""
        before, self.job = self.job, replace(self.job, **changes)
        if "seed" in changes:
            torch.manual_seed(self.job.seed)
        if self.job.order_seed != before.order_seed:
            self.order = torch.Generator().manual_seed(self.job.order_seed)
            self.before = self.order.get_state()
        if {"data", "shuffle", "data_seed", "seed"} & changes.keys() and self.weighted:
            self.order.set_state(self.before)  # the epoch begins again
            self.weighted = []
        if {"optimizer", "schedule", "schedule_every"} & changes.keys():
            old = self.optimizer
            self.optimizer = self.job.optimizer(self.model.parameters(), **self.job.hparams)
            if "optimizer" not in changes:
                self.optimizer.state = old.state
            self.schedule = self._schedule()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            if isinstance(self.schedule, ReduceLROnPlateau):
                for _, loss, _ in self.history:
                    self.schedule.step(loss)
            elif self.schedule is not None:
                for _ in range(self.step if self.job.schedule_every == "step" else self.epoch):
                    self.schedule.step()
        elif "hparams" in changes:
            self.optimizer.param_groups[0].update(changes["hparams"])


class Order:
    """A listener that orders clones when the first job has had so many steps: (source, name, changes) each."""

    def __init__(self, steps: int, clones: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        self.steps, self.clones, self.begun = steps, clones, threading.Event()
        self.run: shoal.LiveRun | None = None

    def __call__(self, event: Event) -> None:
        assert self.begun.wait(60)
        if event.kind != "turn" or self.run is None or self.run._controls.run is None:
            return
        source = self.run._controls.run.all_members[0]
        if source.first_step + -(-source.place // source.job.accumulate) == self.steps and source.place:
            run, self.run = self.run, None
            for name, new_name, changes in self.clones:
                run.clone(name, new_name, **changes)


def cloned(
    source: shoal.Job, steps: int, *clones: tuple[str, str, dict[str, Any]], device: str = "cpu", **more: Any
) -> shoal.Results:
    """What comes of a job, of one beside it, and of clones that are taken when it has had so many steps."""
    source = replace(source, val=(X, Y), val_every_steps=steps)  # the run comes by there
    order = Order(steps, clones)
    run = shoal.start(
        [source, replace(source, name="beside", seed=10)], device, deterministic=device == "cpu", events=order, **more
    )
    order.run = run
    order.begun.set()
    return run.wait(300)


def by_hand(source: shoal.Job, steps: int, *changes: dict[str, Any]) -> Loop:
    with torch.random.fork_rng():
        loop = Loop(source)
        loop.take(steps)
        for change in changes:
            loop.change(**change)
        loop.take()
    return loop


def agree(result: shoal.Result, loop: Loop) -> None:
    assert result.status == "done", result.error
    assert result.steps == loop.step
    for name, value in loop.model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=0, atol=1e-9)
    rows = [(row["step"], row["loss"], row["lr"]) for row in result.history]
    assert len(rows) == len(loop.history)
    for row, expected in zip(rows, loop.history, strict=True):
        assert row == pytest.approx(expected, rel=0, abs=1e-9)


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "smaller": {"batch_size": 5},
    "larger": {"batch_size": 16},
    "all": {"batch_size": 50},
    "drop": {"drop_last": True, "batch_size": 9},
    "none left": {"drop_last": True, "batch_size": 40},
    "accumulate": {"accumulate": 3},
    "both": {"accumulate": 2, "batch_size": 3},
    "rate": {"hparams": {"lr": 0.003}},
    "schedule": {"schedule": lambda step: 0.9**step},
    "torch schedule": {"schedule": lambda o: StepLR(o, 4, 0.5), "batch_size": 6},
    "cosine": {"schedule": lambda o: CosineAnnealingLR(o, 7), "schedule_every": "epoch"},
    "plateau": {"schedule": lambda o: ReduceLROnPlateau(o, patience=0), "schedule_every": "epoch",
                "stop": shoal.EarlyStop("loss", patience=100)},
    "cycle": {"schedule": lambda o: OneCycleLR(o, 0.1, total_steps=100)},
    "schedule and rate": {"schedule": lambda step: 0.9**step, "hparams": {"lr": 0.003}},
    "sgd": {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1, "momentum": 0.9}},
    "sgd, schedule": {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1}, "schedule": lambda step: 1 / (step + 1)},
    "data": {"data": (X2, Y2)},
    "data, size": {"data": (X2, Y2), "batch_size": 7},
    "seed": {"seed": 9},
    "data seed": {"data_seed": 9},
    "shuffle": {"shuffle": False},
}  # fmt: skip


@pytest.mark.parametrize("model", [net, branching])
@pytest.mark.parametrize("steps", [10, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 13, 14))])
def test_clones_with_changes_equal_a_plain_loop(steps: int, model: Callable[[], nn.Module]) -> None:
    """In the first epoch, within the second, before its last batch and after it."""
    source = job(model=model)
    results = cloned(source, steps, *(("a", kind, change) for kind, change in CHANGES.items()))
    for kind, change in CHANGES.items():
        agree(results[kind], by_hand(source, steps, change))
    agree(results["a"], by_hand(source, 0))
    agree(results["beside"], by_hand(replace(source, seed=10), 0))
    for name, value in results["a"].model.state_dict().items():
        assert torch.equal(results["nothing"].model.state_dict()[name], value)


def test_a_clone_of_a_clone() -> None:
    """Three sizes of batches within one epoch, and what the first one changed stays."""
    small, other, more = {"batch_size": 4}, {"batch_size": 11}, {"hparams": {"lr": 0.002}, "accumulate": 2}
    source = job()
    results = cloned(source, 10, ("a", "b", small), ("b", "c", other), ("c", "d", more))
    agree(results["b"], by_hand(source, 10, small))
    agree(results["c"], by_hand(source, 10, small, other))
    agree(results["d"], by_hand(source, 10, small, other, more))


def test_a_clone_in_the_rest_of_an_epoch_is_cloned() -> None:
    """Later, when it has had some of the new batches itself."""
    order, source = [], replace(job(), val=(X, Y), val_every_steps=10)

    def look(event: Event) -> None:
        run = order[0]._controls.run if order and event.kind == "turn" else None
        members = {m.name: (m, m.first_step + m.place) for m in run.all_members} if run is not None else {}
        if members and len(members) == 1 and members["a"][1] == 10:
            order[0].clone("a", "b", batch_size=3, val_every_steps=12)
        if len(members) == 2 and members["b"][1] == 12:
            assert [s.rows for s in members["b"][0].earlier] == [24] and members["b"][0].place == 2
            order[0].clone("b", "c", batch_size=9)

    gate = threading.Event()
    listen = lambda event: gate.wait(60) and look(event)  # noqa: E731
    order.append(shoal.start([source], "cpu", deterministic=True, events=listen))
    gate.set()
    results = order[0].wait(60)
    agree(results["b"], by_hand(job(), 10, {"batch_size": 3}))
    with torch.random.fork_rng():
        loop = Loop(job())
        loop.take(10)
        loop.change(batch_size=3)
        loop.take(2)
        loop.change(batch_size=9)
        loop.take()
    agree(results["c"], loop)


def test_a_finished_job_is_cloned_with_other_batches() -> None:
    run = shoal.start([job(epochs=2)], "cpu", deterministic=True, keep_open=True)
    next(run.as_completed(60))
    run.clone("a", "b", batch_size=20, epochs=5)
    run.clone("a", "c", steps=30, epochs=None, batch_size=3, optimizer=torch.optim.SGD, hparams={"lr": 0.1})
    results = run.wait(60)
    agree(results["b"], by_hand(job(), 14, {"batch_size": 20}))
    with torch.random.fork_rng():
        loop = Loop(job())
        loop.take(14)
        loop.change(batch_size=3, optimizer=torch.optim.SGD, hparams={"lr": 0.1})
        loop.take(16)
    assert results["c"].steps == 30 and results["c"].status == "done"
    for name, value in loop.model.state_dict().items():
        torch.testing.assert_close(results["c"].model.state_dict()[name], value, rtol=0, atol=1e-9)


def test_logs_of_an_epoch_with_two_sizes_of_batches() -> None:
    """Means over all rows; a name that is logged later is unknown before."""
    seen: list[Any] = []

    def plain(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss, {"twice": loss * 2}

    def more(model: nn.Module, batch: Any) -> Any:
        loss, logs = plain(model, batch)
        return loss, {**logs, "new": loss * 3}

    def look(view: shoal.MemberView) -> None:
        if view.name == "b" and view.epoch == 2 and view.status == "running":
            seen.append((view.losses, view.logs))

    source = job(loss=None, step=plain)
    results = cloned(source, 10, ("a", "b", {"batch_size": 13, "step": more}), callbacks=[look])
    losses, logs = seen[0]
    assert (
        len(losses) == 3 + 2
        and len(logs["twice"]) == 5
        and [math.isnan(x) for x in logs["new"]] == [True] * 3 + [False] * 2
    )
    second = results["b"].history[1]
    assert second["twice"] == pytest.approx(2 * second["loss"]) and math.isnan(second["new"])
    assert second["loss"] == pytest.approx(sum(n * x for n, x in zip([8, 8, 8, 13, 13], losses, strict=True)) / 50)
    assert results["b"].history[2]["new"] == pytest.approx(3 * results["b"].history[2]["loss"])


def test_what_a_change_cannot_be() -> None:
    run = shoal.start(
        [job(epochs=1), job("one", schedule=lambda o: OneCycleLR(o, 0.1, total_steps=7), epochs=1)],
        "cpu",
        keep_open=True,
    )
    assert len(list(run.as_completed(60))) == 2
    for changes, words in [
        ({"model": net}, "clone: model cannot be changed in a clone; it takes hparams, .*add"),
        (
            {"optimizer": torch.optim.SGD},
            r"clone: optimizer changes, and hparams \{'lr': 0.01\} are those of the one before",
        ),
        ({"optimizer": torch.optim.SGD, "hparams": {"betas": (0, 1)}}, "betas"),
        ({"schedule": lambda o: OneCycleLR(o, 0.1, total_steps=3)}, "clone: schedule raised .* put at step 7, epoch 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 60, "drop_last": True}, "leaves no batch"),
        ({"data": (X[:, :3], Y)}, "job 'b'"),
        ({"seed": "x"}, "seed is 'x'"),
    ]:
        with pytest.raises(shoal.JobError, match=words) as caught:
            run.clone("a", "b", epochs=3, **changes)
        assert "\n" not in str(caught.value)
    with pytest.raises(shoal.JobError, match=r"max_lr.*change schedule= too"):
        run.clone("one", "b", epochs=3, hparams={"lr": 0.5})
    run.clone("one", "b", epochs=3, hparams={"lr": 0.5}, schedule=None)
    b = run.wait(60)["b"]
    assert [row["lr"] for row in b.history[1:]] == [0.5, 0.5] and "max_lr" not in b.optimizer_state["param_groups"][0]


SWITCHES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "amsgrad": (torch.optim.Adam, {"amsgrad": False}, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.0}, {"momentum": 0.9}),
    "centered": (torch.optim.RMSprop, {"momentum": 0.0, "centered": False}, {"momentum": 0.9, "centered": True}),
}


@pytest.mark.parametrize("model", [net, branching])
@pytest.mark.parametrize("turned_on", [True, False])
@pytest.mark.parametrize("kind", SWITCHES)
def test_settings_that_need_other_state(kind: str, turned_on: bool, model: Callable[[], nn.Module]) -> None:
    """State that they add begins as before the first step, and state that they do not use is dropped."""
    optimizer, off, on = SWITCHES[kind]
    before, after = (off, on) if turned_on else (on, off)
    source = job(model=model, optimizer=optimizer, hparams={"lr": 0.01, **before})
    results = cloned(source, 10, ("a", "b", {"hparams": after}), ("b", "back", {"hparams": before}))
    for name, changes in {"b": [after], "back": [after, before]}.items():
        with torch.random.fork_rng():
            loop = Loop(source)
            loop.take(10)
            for settings in changes:
                loop.optimizer.param_groups[0].update(settings)
                used = set(_state_names(optimizer, settings))
                for param, state in loop.optimizer.state.items():
                    for key in state.keys() - used:
                        del state[key]
                    for key in used - state.keys() if optimizer is not torch.optim.SGD else ():
                        state[key] = torch.zeros_like(param)
            loop.take()
        agree(results[name], loop)
    agree(results["a"], by_hand(source, 0))


def _state_names(optimizer: Any, settings: dict[str, Any]) -> list[str]:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    made = optimizer([param], lr=0.1, **settings)
    made.step()
    return list(made.state[param])


def test_a_schedule_that_sets_the_rates_takes_no_lr() -> None:
    run = shoal.start([job(schedule=lambda o: CyclicLR(o, 0.001, 0.01), epochs=2)], "cpu", keep_open=True)
    next(run.as_completed(60))
    with pytest.raises(shoal.JobError, match="its schedule sets the rates by itself"):
        run.clone("a", "b", hparams={"lr": 0.1}, epochs=4)
    run.wait(60)


def test_a_value_that_is_as_before_is_no_change() -> None:
    source = job(schedule=lambda step: 0.9**step)
    same = {"batch_size": 8, "schedule": source.schedule, "optimizer": source.optimizer, "data": source.data, "seed": 0}
    results = cloned(source, 10, ("a", "b", same))
    for name, value in results["a"].model.state_dict().items():
        assert torch.equal(results["b"].model.state_dict()[name], value)


def test_a_clone_reads_a_loader_in_place_of_tensors() -> None:
    """What the job said about its rows is the loader's to say from then on; only what is given beside it is refused."""
    source = job(shuffle=False, drop_last=True, epochs=3)
    loader = DataLoader(TensorDataset(X2, Y2), batch_size=7)  # in order, as the job with shuffle=False reads it
    run = shoal.start([replace(source, epochs=1)], "cpu", keep_open=True)
    next(run.as_completed(60))
    with pytest.raises(shoal.JobError, match="batch_size=5 would do nothing"):
        run.clone("a", "c", epochs=3, data=loader, batch_size=5)
    run.clone("a", "b", epochs=3, data=loader)
    agree(run.wait(60)["b"], by_hand(source, 6, {"data": (X2, Y2), "batch_size": 7, "drop_last": False}))


def test_a_loader_that_is_as_before_is_no_change_within_an_epoch() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    source = shoal.Job(name="a", model=net, data=loader, loss=F.cross_entropy, hparams={"lr": 0.01}, epochs=3)
    results = cloned(source, 10, ("a", "b", {"data": source.data, "accumulate": 1}))
    for name, value in results["a"].model.state_dict().items():
        assert torch.equal(results["b"].model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, shoal.EMA(0.7)),
        (shoal.EMA(0.7), shoal.EMA(0.9, every=2)),
        (shoal.EMA(0.7), shoal.SWA(2)),
        (shoal.SWA(), None),
    ],
)
def test_another_average_begins_at_the_clone(before: Any, after: Any) -> None:
    """Training is unchanged: the average is that of the weights after each later step, which a plain run has too."""
    source = job(average=before, val=(X, Y), keep="best")
    results = cloned(source, 10, ("a", "b", {"average": after, "keep": "last"}))
    rule = after or shoal.EMA(0.0)
    loop, held, count = Loop(job(average=None)), list[Tensor](), 0
    loop.take(10)
    while loop.step < 35:
        loop.take(1)
        if is_due(rule, loop.step, 7):
            now = [p.detach().clone() for p in loop.model.parameters()]
            weight = rule.weight(count)
            held = [a.lerp(b, weight) for a, b in zip(held, now, strict=True)] if count else now
            count += 1
    for value, average in zip(results["b"].model.parameters(), held, strict=True):
        assert torch.allclose(value, average, rtol=0, atol=1e-9)
    for name, value in (results["a"].training_weights or {}).items():
        assert torch.allclose(value, loop.model.state_dict()[name], rtol=0, atol=1e-9)


def test_an_average_that_counts_epochs_needs_epochs_of_one_length() -> None:
    swa = shoal.SWA(1)
    with pytest.warns(shoal.ShoalWarning, match="counts epochs of 4 steps, and earlier epochs had other numbers"):
        cloned(job(), 14, ("a", "b", {"average": swa, "batch_size": 16}))
    same_average = cloned(job(average=swa), 14, ("a", "b", {"average": shoal.SWA(1)}))
    for value, other in zip(same_average["a"].model.parameters(), same_average["b"].model.parameters(), strict=True):
        assert torch.equal(value, other)  # a field that is given as it was is no change


def test_an_epoch_of_an_average_that_counts_epochs_cannot_begin_again() -> None:
    """Another seed orders the rows anew; with a data_seed it does not, and the epoch goes on."""
    average = shoal.EMA(decay=0.5, every="epoch")
    with pytest.warns(shoal.ShoalWarning, match="'a' cannot continue .its average counts epochs"):
        results = cloned(job(average=average), 10, ("a", "b", {"seed": 9}))
    assert "b" not in [result.name for result in results]
    results = cloned(job(average=average, data_seed=3), 10, ("a", "b", {"seed": 9}))
    assert results["b"].steps == 35
