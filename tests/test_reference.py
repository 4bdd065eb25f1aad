"""The reference loop against loops written out here by hand, with none of its helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import shoal

N, D, C = 37, 6, 3
X = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(2))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, C)).double()


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net,
        "data": (X, Y),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD,
        "hparams": {"lr": 0.1, "momentum": 0.9},
        "batch_size": 8,
        "epochs": 3,
        "seed": 11,
    }
    return shoal.Job(**(settings | changes))


def by_hand(each: Callable[[nn.Module, Optimizer, Tensor, int], None], epochs: int = 3, seed: int = 11) -> nn.Module:
    """Seed, build, go through permutations; `each` does the step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        order = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for i, rows in enumerate(torch.randperm(N, generator=order).split(8)):
                each(model, optimizer, rows, i)
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in b.state_dict().items():
        assert torch.equal(a.state_dict()[name], value), name


def test_plain() -> None:
    def each(model: nn.Module, optimizer: Optimizer, rows: Tensor, i: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()

    result = shoal.solo(job())
    assert_same(result.model, by_hand(each))
    assert (result.status, result.steps, len(result.history)) == ("done", 15, 3)


def test_the_processs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    shoal.solo(job())
    assert torch.equal(before, torch.get_rng_state())


def test_accumulation_divides_by_the_group_and_ends_with_the_epoch() -> None:
    def each(model: nn.Module, optimizer: Optimizer, rows: Tensor, i: int) -> None:  # five batches: groups of 3 and 2
        if i in (0, 3):
            optimizer.zero_grad()
        (F.cross_entropy(model(X[rows]), Y[rows]) / (3 if i < 3 else 2)).backward()
        if i in (2, 4):
            optimizer.step()

    result = shoal.solo(job(accumulate=3))
    assert_same(result.model, by_hand(each))
    assert result.steps == 6


def test_clip_and_a_schedule_of_the_step() -> None:
    step = 0

    def each(model: nn.Module, optimizer: Optimizer, rows: Tensor, i: int) -> None:
        nonlocal step
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        optimizer.step()
        step += 1

    result = shoal.solo(job(clip_norm=0.5, schedule=lambda t: 0.9**t))
    for name, value in by_hand(each).state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-10, atol=1e-12)
    assert result.history[-1]["lr"] == pytest.approx(0.1 * 0.9**14)


def test_a_scheduler_of_the_users_every_epoch() -> None:
    result = shoal.solo(job(schedule=lambda o: StepLR(o, 1, gamma=0.5), schedule_every="epoch"))
    assert [row["lr"] for row in result.history] == pytest.approx([0.1, 0.05, 0.025])
    result = shoal.solo(job(schedule=lambda o: OneCycleLR(o, max_lr=1.0, total_steps=15)))
    assert result.history[-1]["lr"] == pytest.approx(1.0 / 25 / 1e4)


def test_reduce_on_plateau_gets_the_watched_value() -> None:
    seen: list[float] = []

    class Recorded(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(float(metrics))
            super().step(metrics)

    plateau = lambda o: Recorded(o, patience=0, threshold=0.9)  # noqa: E731  # nothing improves by that much
    result = shoal.solo(job(schedule=plateau, schedule_every="epoch", val=(X, Y)))
    assert seen == [row["val_loss"] for row in result.history]
    assert [row["lr"] for row in result.history] == pytest.approx([0.1, 0.1, 0.01])


def test_steps_end_in_the_middle_of_an_epoch() -> None:
    result = shoal.solo(job(epochs=None, steps=7))
    assert result.steps == 7
    assert [row["step"] for row in result.history] == [5, 7]


def test_without_shuffling_and_without_the_short_batch() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    shoal.solo(job(loss=None, step=step, shuffle=False, drop_last=True, epochs=1))
    assert torch.equal(torch.cat(seen), X[:32])


def test_validation_takes_nothing_from_the_random_stream() -> None:
    plain, validated = shoal.solo(job()), shoal.solo(job(val=(X, Y), val_every=2))
    assert_same(plain.model, validated.model)
    assert ["val_loss" in row for row in validated.history] == [False, True, True]


def test_val_loss_and_metrics() -> None:
    result = shoal.solo(job(val=(X, Y), metrics={"accuracy": lambda o, t: (o.argmax(1) == t).double().mean()}))
    outputs = result.model.eval()(X)
    assert result.history[-1]["val_loss"] == pytest.approx(float(F.cross_entropy(outputs, Y).detach()), rel=1e-12)
    assert result.history[-1]["accuracy"] == pytest.approx(float((outputs.argmax(1) == Y).double().mean()))


def test_early_stop_and_best_weights() -> None:
    scores = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    snapshots: list[Tensor] = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        snapshots.append(outputs)
        return next(scores)

    stop = shoal.EarlyStop("score", mode="max", patience=2)
    result = shoal.solo(job(val=(X, Y), metrics={"score": metric}, stop=stop, keep="best", epochs=9))
    assert (result.status, len(result.history)) == ("stopped", 4)
    assert torch.allclose(result.model.eval()(X), snapshots[1])


def test_divergence_keeps_what_was_before() -> None:
    calls = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if calls == 8 else loss

    result = shoal.solo(job(loss=None, step=step))
    assert (result.status, result.steps) == ("diverged", 7)
    assert_same(result.model, shoal.solo(job(epochs=None, steps=7)).model)


def test_an_exception_ends_the_job_as_failed() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no such luck\nmore")

    result = shoal.solo(job(loss=None, step=step))
    assert result.status == "failed"
    assert result.error is not None and result.error.startswith("RuntimeError: no such luck (test_reference.py:")


def test_logs_go_into_the_history() -> None:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, float]]:
        return F.cross_entropy(model(batch[0]), batch[1]), {"rows": len(batch[0])}

    row = shoal.solo(job(loss=None, step=step, val=(X, Y), epochs=1)).history[0]
    assert row["rows"] == pytest.approx((4 * 8 * 8 + 5 * 5) / N)
    assert "val_rows" in row


def test_lbfgs_evaluates_the_loss_itself() -> None:
    plain = {"model": lambda: nn.Linear(D, C).double(), "optimizer": torch.optim.LBFGS, "hparams": {"lr": 0.5}}
    result = shoal.solo(job(**plain, batch_size=N, epochs=3))
    assert result.status == "done"
    assert result.history[-1]["loss"] < result.history[0]["loss"] - 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(precision: str) -> None:
    x = X.float()
    result = shoal.solo(job(model=lambda: net().float(), data=(x, Y), precision=precision))
    plain = shoal.solo(job(model=lambda: net().float(), data=(x, Y)))
    assert result.status == "done"
    assert not torch.equal(result.model.state_dict()["0.weight"], plain.model.state_dict()["0.weight"])
    assert result.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=0.2)  # fp16 skips its first steps


def test_replay_shows_a_stretch() -> None:
    whole = shoal.replay(job(accumulate=2))
    part = shoal.replay(job(accumulate=2), from_step=2, steps=3)
    assert len(whole.losses) == 9
    assert part.losses == whole.losses[2:5]
    assert_same(part.model, shoal.solo(job(accumulate=2, epochs=None, steps=5)).model)
    with pytest.raises(ValueError, match="this job has 9 steps"):
        shoal.replay(job(accumulate=2), from_step=9)
