"""The run loop and the serial tier, against the reference loop; and units of several members, against single ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.loop import run
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import shoal
from shoal.engine.members.member import Member
from shoal.engine.members.row_order import assign_rows
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.unit import Unit
from shoal.errors import MemberError
from shoal.preparation.checks import prepare
from shoal.training import collect

N, D, C = 37, 6, 3
X = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(2))
CPU = torch.device("cpu")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, C)).double()


def job(**changes: Any) -> shoal.Job:
    """A job whose update is the plain one of torch, which alone has the reference's very bits."""
    settings: dict[str, Any] = {"model": net, "data": (X, Y), "loss": F.cross_entropy, "hparams": {"lr": 0.01}}
    settings |= {"batch_size": 8, "epochs": 2, "seed": 3} | changes
    if "optimizer" not in changes:
        settings["hparams"] = settings["hparams"] | {"fused": False}
    return shoal.Job(**settings)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def own_step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    outputs = model(batch["x"])
    return F.cross_entropy(outputs, batch["y"]), {"size": outputs.square().mean()}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, nn.Sequential)
    return [{"params": model[0].parameters(), "lr": 0.001}, {"params": model[4].parameters()}]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "groups": {"params": groups, "clip_norm": 0.1},
    "clip_value": {"clip_value": 0.01},
    "accumulate": {"accumulate": 3},
    "steps": {"epochs": None, "steps": 7, "accumulate": 2},
    "drop_last": {"drop_last": True},
    "in order": {"shuffle": False},
    "data_seed": {"data_seed": 99},
    "schedule": {"schedule": lambda t: 1 / (1 + t)},
    "schedule by epoch": {"schedule": lambda t: 0.5**t, "schedule_every": "epoch", "epochs": 3},
    "scheduler": {"schedule": lambda o: CosineAnnealingLR(o, 10)},
    "plateau": {
        "schedule": lambda o: ReduceLROnPlateau(o, patience=0, threshold=1),
        "schedule_every": "epoch",
        "epochs": 4,
    },
    "validated": {"val": (X[:20], Y[:20]), "metrics": {"accuracy": accuracy}, "val_every": 2, "epochs": 3},
    "validated within epochs": {
        "val": (X[:20], Y[:20]),
        "metrics": {"accuracy": accuracy},
        "val_every_steps": 3,
        "keep": "best",
        "epochs": 3,
        "hparams": {"lr": 0.3},
    },
    "stopped within an epoch": {
        "val": (X[:20], Y[:20]),
        "val_every_steps": 2,
        "accumulate": 2,
        "epochs": 4,
        "stop": shoal.EarlyStop("val_loss", patience=1, min_delta=0.5),
    },
    "best": {"val": (X[:20], Y[:20]), "keep": "best", "epochs": 5, "hparams": {"lr": 0.3}},
    "stopped": {"stop": shoal.EarlyStop("loss", patience=1, min_delta=0.5), "epochs": 6},
    "own step": {"loss": None, "step": own_step, "data": {"x": X, "y": Y}, "val": {"x": X[:9], "y": Y[:9]}},
    "bf16": {"precision": "bf16", "model": lambda: net().float(), "data": (X.float(), Y)},
    "fp16": {"precision": "fp16", "model": lambda: net().float(), "data": (X.float(), Y), "clip_norm": 1.0},
    "lbfgs": {"optimizer": torch.optim.LBFGS, "hparams": {"lr": 0.1}, "model": lambda: nn.Linear(D, C).double()},
    "module": {"model": net()},
    "lazy": {"model": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(C)).double()},
    "nothing to do": {"epochs": 0},
}


def assert_same(a: shoal.Result, b: shoal.Result) -> None:
    assert (a.status, a.steps) == (b.status, b.steps)
    assert a.model.state_dict().keys() == b.model.state_dict().keys()
    for name, value in b.model.state_dict().items():
        assert torch.equal(a.model.state_dict()[name], value), name
    flat_a, flat_b = (
        torch.utils._pytree.tree_leaves(a.optimizer_state),
        torch.utils._pytree.tree_leaves(b.optimizer_state),
    )
    for x, y in zip(flat_a, flat_b, strict=True):
        assert torch.equal(x, y) if isinstance(y, Tensor) else x == y
    assert len(a.validations) == len(b.validations)
    for within_a, within_b in zip(a.validations, b.validations, strict=True):
        assert within_a == pytest.approx(within_b)
    assert len(a.history) == len(b.history)
    for row_a, row_b in zip(a.history, b.history, strict=True):
        assert {k: v for k, v in row_a.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in row_b.items() if k != "seconds"}
        )


def serial(jobs: list[shoal.Job]) -> shoal.Results:
    """What `shoal.train` does, with every job on the serial tier: it alone is held to the reference's very bits."""
    members = prepare(jobs, CPU)
    run([SerialUnit(member) for member in members])
    return collect(members, {})


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_as_in_the_reference_loop_bit_for_bit(name: str) -> None:
    jobs = [job(seed=1, name="other", epochs=1), job(name="this", **SETTINGS[name]), job(seed=2, name="third")]
    assert_same(serial(jobs)[1], shoal.solo(jobs[1]))


def test_a_stack_that_validates_within_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")
    settings: dict[str, Any] = {"val": (X[:20], Y[:20]), "metrics": {"accuracy": accuracy}, "epochs": 3}
    settings |= {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.5}}
    stop = shoal.EarlyStop("accuracy", patience=2)
    jobs = [
        job(name="often", val_every_steps=2, **settings),
        job(name="best", seed=1, val_every_steps=3, keep="best", **settings),
        job(name="stop", seed=2, val_every_steps=1, stop=stop, **settings),
        job(name="epochs", seed=3, **settings),
    ]
    results = shoal.train(jobs, "cpu", tmp_path, deterministic=True)
    for result, each in zip(results, jobs, strict=True):
        alone = shoal.solo(each)
        assert result.tier == "stacked" and result.status == alone.status and result.steps == alone.steps
        assert len(result.validations) == len(alone.validations) and result.best_epoch == alone.best_epoch
        for row, other in zip([*result.validations, result.values], [*alone.validations, alone.values], strict=True):
            assert {k: v for k, v in row.items() if k != "seconds"} == pytest.approx(
                {k: v for k, v in other.items() if k != "seconds"}, rel=1e-6
            )
        for a, b in zip(result.model.state_dict().values(), alone.model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        loaded = shoal.load(tmp_path)[each.name]
        assert loaded.validations == result.validations and loaded.values == result.values
    assert results["stop"].status == "stopped" and results["often"].validations and not results["epochs"].validations


def test_a_stack_of_members_that_clip_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD  # others divide by gradients, and a bias before a batch norm has none
    monkeypatch.setenv("SHOAL_PACK", "always")
    clips: list[dict[str, Any]] = [{"clip_value": 0.01}, {"clip_norm": 0.1}, {}, {"clip_value": 0.003}]
    jobs = [job(seed=i, name=f"{i}", optimizer=optimizer, hparams={"lr": 0.05}, **clip) for i, clip in enumerate(clips)]
    results = shoal.train(jobs, device="cpu", deterministic=True)
    for result, each in zip(results, jobs, strict=True):
        assert result.tier == "stacked"
        for a, b in zip(result.model.state_dict().values(), shoal.solo(each).model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    loose = shoal.solo(job(seed=0, optimizer=optimizer, hparams={"lr": 0.05})).model.state_dict()
    assert not torch.equal(loose["0.weight"], results[0].model.state_dict()["0.weight"])


def test_the_processs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    shoal.train([job()], device="cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_a_nan_and_an_exception_end_their_own_member_alone() -> None:
    def nan_at(step: int) -> Any:
        calls = 0

        def own(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == step:  # the dry step before training leaves no trace in the closure
                return F.cross_entropy(model(batch[0]), batch[1]) * float("nan")
            if calls == step + 1:
                raise RuntimeError("a step after the end")
            return F.cross_entropy(model(batch[0]), batch[1])

        return own

    def bad(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 5:
            raise RuntimeError("five rows")
        return F.cross_entropy(model(batch[0]), batch[1])

    jobs = [job(name="good"), job(name="nan", loss=None, step=nan_at(4)), job(name="bad", loss=None, step=bad)]
    good, nan, failed = serial(jobs)
    assert_same(good, shoal.solo(jobs[0]))
    assert (nan.status, nan.steps) == ("diverged", 3)
    assert nan.error is not None and "nan in epoch 1 after step 3" in nan.error
    assert_state(nan.model, shoal.solo(job(epochs=None, steps=3)).model)
    assert (failed.status, failed.steps) == ("failed", 4)
    assert failed.error is not None and failed.error.startswith("RuntimeError: five rows (test_run.py:")
    assert_state(failed.model, shoal.solo(job(epochs=None, steps=4)).model)


def assert_state(a: nn.Module, b: nn.Module) -> None:
    for name, value in b.state_dict().items():
        assert torch.equal(a.state_dict()[name], value), name


def test_a_metric_that_raises_ends_its_member() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("nothing to divide")

    bad, good = shoal.train([job(val=(X, Y), metrics={"m": metric}, name="bad"), job(name="good")], device="cpu")
    assert bad.status == "failed"
    assert bad.error is not None and bad.error.startswith(
        "ZeroDivisionError: nothing to divide (metric 'm') (test_run.py:"
    )
    assert good.status == "done"


class Lockstep(Unit):
    """Several members in lockstep, each trained by a serial unit: what a pack tier looks like to the run loop."""

    tier = "lockstep"

    def __init__(self, parts: list[SerialUnit]) -> None:
        self.parts = parts
        self.members = [part.member for part in parts]

    def run(self, batches: int) -> None:
        for _ in range(batches):
            caught = None
            for slot, part in enumerate(self.parts):
                try:
                    part.run(1)
                except MemberError as error:
                    caught = MemberError(slot, error.cause)
            if caught is not None:
                raise caught

    def rates(self) -> list[float]:
        return [part.rates()[0] for part in self.parts]

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        for slot, value in values.items():
            self.parts[slot].end_epoch({0: value})

    def write_back(self, slots: list[int] | None = None) -> None:
        for part in self.parts:
            part.write_back()

    def keep(self, slots: list[int]) -> Unit:
        return Lockstep([self.parts[slot] for slot in slots])


def train_lockstep(jobs: list[shoal.Job]) -> list[Member]:
    members = prepare(jobs, CPU)
    run([Lockstep([SerialUnit(member) for member in members])])
    return members


def test_members_of_one_unit_leave_at_their_own_ends() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 5:
            raise RuntimeError("five rows")
        return F.cross_entropy(model(batch[0]), batch[1])

    jobs = [
        job(name="a", epochs=3),
        job(name="b", epochs=None, steps=7, seed=4),
        job(name="c", epochs=1, val=(X, Y), metrics={"accuracy": accuracy}, seed=5),
        job(name="d", loss=None, step=fails, seed=6),
        job(name="e", epochs=None, steps=12, val=(X[:9], Y[:9]), keep="best"),
        job(name="f", stop=shoal.EarlyStop("loss", patience=1, min_delta=9.0), epochs=4),
    ]
    for member, this in zip(train_lockstep(jobs), jobs, strict=True):
        alone = shoal.solo(this)
        assert (member.status, member.step, member.error) == (alone.status, alone.steps, alone.error), this.name
        assert_state(member.model, alone.model)
        assert [row["loss"] for row in member.history] == pytest.approx([row["loss"] for row in alone.history])


def test_orders_that_agree_are_kept_once() -> None:
    members = prepare([job(seed=s, data_seed=7, name=str(s)) for s in range(3)], CPU)
    assign_rows(members)
    first = members[0].order
    assert first is not None and all(member.order is first for member in members)
    expected = torch.Generator().manual_seed(7)
    assert torch.equal(first, torch.randperm(N, generator=expected))
    for member in members:
        member.close_epoch()
    assign_rows(members)
    assert members[1].order is not None and torch.equal(members[1].order, torch.randperm(N, generator=expected))
    apart = prepare([job(seed=s, name=str(s)) for s in range(3)], CPU)
    assign_rows(apart)
    assert apart[0].order is not None and apart[1].order is not None
    assert not torch.equal(apart[0].order, apart[1].order)


def test_ctrl_c_cancels_and_is_passed_on() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 5:
            raise KeyboardInterrupt
        return F.cross_entropy(model(batch[0]), batch[1])

    members = prepare([job(loss=None, step=step)], CPU)
    with pytest.raises(KeyboardInterrupt):
        run([SerialUnit(member) for member in members])
    assert members[0].status == "cancelled"
    assert members[0].optimizer_state["state"]


def test_tied_weights_frozen_layers_and_hooks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(D, D).double()
            self.b = nn.Linear(D, D).double()
            self.b.weight = self.a.weight
            self.frozen = nn.Linear(D, C).double().requires_grad_(False)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            out: Tensor = self.frozen(self.b(self.a(x).relu()))
            return out

    this = job(model=Tied)
    result = serial([this])[0]
    assert_same(result, shoal.solo(this))
    model = result.model
    assert isinstance(model, Tied)
    assert model.a.weight is model.b.weight
    assert float(model.seen) == 10
    Tied().load_state_dict(model.state_dict(), strict=True)


def test_a_module_is_never_trained_in_place() -> None:
    module = net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    shoal.train([job(model=module, name="a"), job(model=module, name="b")], device="cpu")
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
