"""Parts as a pack against parts one after another; and what a pack needs for it: new weights in place."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.split.networks import distance, make_job, mlp, rows
from torch import nn

import shoal
from shoal.engine.recipes.program import Program
from shoal.errors import ShoalWarning, SplitError
from shoal.split.executors.packed import Packed
from shoal.split.methods.averaging import LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.trainer import train_split

TOLERANCE = 1e-9


def bare(*widths: int, dropout: float = 0.0) -> nn.Module:
    """Without biases before batch norm: their exact gradient is zero, so that Adam follows rounding."""
    model = mlp(*widths, dropout=dropout)
    for layer in list(model)[:-1]:  # type: ignore[call-overload]
        if isinstance(layer, nn.Linear):
            layer.bias = None  # type: ignore[assignment]
    return model


SETTINGS: list[dict[str, Any]] = [
    {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}},
    {"hparams": {"lr": 0.1, "momentum": 0.9}, "clip_norm": 0.5, "schedule": lambda step: 0.95**step},
    {"optimizer": torch.optim.Adafactor, "hparams": {"lr": 0.01}},  # no rule: each member's own object
]


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        (SETTINGS[0], "ist"),
        (SETTINGS[1], "local_sgd"),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in product(SETTINGS[1:], ["ist"])),
        pytest.param(SETTINGS[2], "local_sgd", marks=pytest.mark.slow),
    ],
    ids=["adam-ist", "momentum-local", "momentum-ist", "adafactor-ist", "adafactor-local"],
)
def test_a_pack_of_parts_gives_what_parts_one_after_another_give(settings: dict[str, Any], method: str) -> None:
    """Shards of 31, 30 and 30 rows: last batches of different size; the last round is shorter than the others."""
    job = make_job(lambda: bare(6, 13, 11, 3, dropout=0.2), data=rows(91), epochs=4, **settings)
    run = getattr(shoal.split, method)
    apart, together = (run(job, 3, 5, tier=tier) for tier in ("serial", "packed"))
    assert together.tier == "packed" and apart.tier == "serial"
    assert distance(together.model, apart.model) < TOLERANCE
    assert together.split.bytes_measured == apart.split.bytes_measured
    assert together.split.peak_measured["0"] > 0


def test_the_pack_is_kept_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = Program.__init__

    def counting(self: Program, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Program, "__init__", counting)
    counts = []
    for steps in (8, 40):
        job = make_job(lambda: bare(6, 12, 12, 3), data=rows(96), steps=steps)
        method = IST(job, 3, 4, recovery=0)
        executor = Packed(job, method, 3)
        made.clear()
        train_split(job, method, executor)
        counts.append(len(made))
        assert len(executor._packs) == 1
    assert counts[0] == counts[1] > 0


def test_widths_that_do_not_divide_ride_in_groups_of_equal_shape() -> None:
    job = make_job(lambda: bare(6, 10, 3), steps=8)
    method = IST(job, 3, 4, recovery=0)  # 4, 3 and 3 units
    executor = Packed(job, method, 3)
    result = train_split(job, method, executor)
    assert [len(runner.networks) for runner in executor._packs.values()] == [2]
    assert distance(result.model, shoal.split.ist(job, 3, 4, recovery=0, tier="serial").model) < TOLERANCE


def test_a_part_that_diverges_in_a_pack_is_left_out_and_rides_again() -> None:
    x, y = rows(60)
    bad = set(shoal.split.core.reading.Reading(make_job(data=(x, y)), 60, (1, 3)).order(0)[:8].tolist())
    weight = torch.ones(60, dtype=torch.float64)
    weight[list(bad)] = float("inf")

    def own(model: nn.Module, batch: Any) -> Any:
        a, b, w = batch
        return (F.cross_entropy(model(a), b, reduction="none") * w).mean()

    job = make_job(lambda: bare(6, 8, 3), data=(x, y, weight), loss=None, step=own, steps=6)
    apart, together = (shoal.split.local_sgd(job, 3, 2, tier=tier) for tier in ("serial", "packed"))
    assert apart.split.lost == together.split.lost >= 1
    assert apart.status == together.status == "done"
    assert distance(together.model, apart.model) < TOLERANCE


def test_a_step_with_logs_and_gradients_go_one_after_another() -> None:
    def own(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss, {"twice": 2 * loss}

    job = make_job(loss=None, step=own, steps=4)
    row = shoal.split.local_sgd(job, 2, 2, tier="packed").history[-1]
    assert row["twice"] == pytest.approx(2 * row["loss"])
    job = make_job(steps=3)
    apart, together = (shoal.split.data_parallel(job, 2, tier=tier) for tier in ("serial", "packed"))
    assert distance(together.model, apart.model) == 0


def test_a_step_that_raises_is_told() -> None:
    calls: list[int] = []

    def own(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        if len(calls) > 12:
            raise RuntimeError("no more")
        return F.cross_entropy(model(batch[0]), batch[1])

    job = make_job(loss=None, step=own, steps=40)
    method = LocalSGD(job, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)
        with pytest.raises((SplitError, RuntimeError), match="no more"):
            train_split(job, method, Packed(job, method, 2))


# --- Pack.load and Pack.step(members=) --------------------------------------------------------------------------------


def plain(
    model: nn.Module, hparams: dict[str, Any], batches: list[Any], factors: list[float], state: Any = None
) -> Any:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), **hparams)
    if state is not None:
        optimizer.load_state_dict(state)
    for (x, y), factor in zip(batches, factors, strict=True):
        optimizer.param_groups[0]["lr"] = hparams["lr"] * factor
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("count", [2, 3])
def test_loading_puts_weights_state_and_schedule_in_place(count: int) -> None:
    x, y = rows(24)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    hparams = {"lr": 0.2, "momentum": 0.9}
    models = [bare(6, 8, 3) for _ in range(count)]
    pack = shoal.Pack(
        models, optimizer=torch.optim.SGD, hparams=hparams, loss=F.cross_entropy, schedule=lambda step: 0.9**step
    )
    for batch in batches:
        pack.step(*batch)
    other, optimizer = plain(bare(6, 8, 3), hparams, batches, [1.0] * 3)
    state = copy.deepcopy(optimizer.state_dict())
    pack.load(1, other.state_dict(), state, step=7)
    for batch in batches:
        pack.step(*batch)
    expected, _ = plain(other, hparams, batches, [0.9**7, 0.9**8, 0.9**9], state)
    assert distance(pack.member(1), expected) < TOLERANCE
    untouched, _ = plain(models[0], hparams, batches * 2, [0.9**step for step in range(6)])
    assert distance(pack.member(0), untouched) < TOLERANCE
    pack.load(1, other.state_dict(), step=0)  # and without state: it starts anew
    pack.step(*batches[0])
    fresh, _ = plain(other, hparams, batches[:1], [1.0])
    assert distance(pack.member(1), fresh) < TOLERANCE


def test_loading_begins_the_random_draws_again() -> None:
    x, y = rows(16)
    models = [bare(6, 8, 3, dropout=0.5) for _ in range(2)]
    pack = shoal.Pack(models, loss=F.cross_entropy, hparams={"lr": 0.01})
    losses = []
    for _ in range(2):
        for id in pack.ids:
            pack.load(id, models[0].state_dict(), seed=11)
        losses.append(pack.step(x, y))
    assert torch.equal(losses[0], losses[1]) and losses[0][0] == losses[0][1]


def test_a_member_that_stopped_runs_again_after_loading() -> None:
    x, y = rows(16)
    models = [bare(6, 8, 3) for _ in range(3)]
    pack = shoal.Pack(models, optimizer=torch.optim.SGD, loss=F.cross_entropy, hparams={"lr": 0.1})
    pack.step(x, y)
    broken = copy.deepcopy(models[1])
    with torch.no_grad():
        broken[0].weight.fill_(float("nan"))  # type: ignore[index]
    pack.load(1, broken.state_dict())
    pack.step(x, y)
    assert pack.status[1] == "diverged"
    pack.load(1, models[1].state_dict())
    assert pack.status[1] == "running"
    pack.step(x, y)
    expected, _ = plain(models[1], {"lr": 0.1}, [(x, y)], [1.0])
    assert distance(pack.member(1), expected) < TOLERANCE


def test_some_members_step_while_the_others_wait() -> None:
    x, y = rows(24)
    models = [bare(6, 8, 3) for _ in range(3)]
    hparams = {"lr": 0.2, "momentum": 0.9}
    pack = shoal.Pack(
        models, optimizer=torch.optim.SGD, hparams=hparams, loss=F.cross_entropy, schedule=lambda step: 0.8**step
    )
    pack.step(x[:8], y[:8])
    losses = pack.step(x[:5], y[:5], members=[2, 0])
    pack.step(x[8:16], y[8:16])
    first, rest, last = (x[:8], y[:8]), (x[:5], y[:5]), (x[8:16], y[8:16])
    some, _ = plain(models[2], hparams, [first, rest, last], [1.0, 0.8, 0.64])
    waited, _ = plain(models[1], hparams, [first, last], [1.0, 0.8])
    assert distance(pack.member(2), some) < TOLERANCE and distance(pack.member(1), waited) < TOLERANCE
    before, _ = plain(models[2], hparams, [first], [1.0])
    assert losses[0].item() == pytest.approx(F.cross_entropy(before(x[:5]), y[:5]).item())


def test_loading_what_does_not_fit() -> None:
    pack = shoal.Pack([bare(6, 8, 3)] * 2, loss=F.cross_entropy, hparams={"lr": 0.1})
    with pytest.raises(KeyError, match="no member 5 in this pack"):
        pack.load(5, {})
    with pytest.raises(RuntimeError, match="size mismatch"):
        pack.load(0, bare(6, 9, 3).state_dict())
    scheduled = shoal.Pack(
        [bare(6, 8, 3)] * 2,
        loss=F.cross_entropy,
        hparams={"lr": 0.1},
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )
    scheduled.step(*rows(8))
    with pytest.raises(ValueError, match="only a schedule step -> factor can jump"):
        scheduled.load(0, bare(6, 8, 3).state_dict(), step=3)
