"""What is shown and compared are the values at the weights that a result has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, numbers
from torch import Tensor, nn

import shoal
from shoal.jobs.metric_direction import direction
from shoal.reference import solo
from shoal.results import Result, Results

X, Y = numbers(1, 24, 4), torch.arange(24) % 2


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2).double(), "data": (X, Y), "val": (X, Y), "loss": F.cross_entropy,
        "batch_size": 8, "epochs": 4, "name": "a",
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


def result(rows: list[tuple[float, float]], **changes: Any) -> Result:
    """Of a job with these values of val_loss and acc, epoch by epoch."""
    history = [{"epoch": i, "val_loss": loss, "acc": acc} for i, (loss, acc) in enumerate(rows, 1)]
    own = job(**changes)
    return Result(name=own.name, job=own, model=nn.Linear(1, 1), history=history, status="done", tier="serial")


EARLY = [(0.5, 0.7), (0.3, 0.8), (0.4, 0.95), (0.6, 0.6)]
"""The smallest loss is in the second epoch, the largest accuracy in the third."""


@pytest.mark.parametrize(
    ("changes", "loss", "acc"),
    [
        ({}, 0.6, 0.6),
        ({"keep": "best"}, 0.3, 0.8),
        ({"keep": "best", "stop": shoal.EarlyStop("acc")}, 0.4, 0.95),
        ({"keep": "best", "stop": shoal.EarlyStop("acc", mode="min")}, 0.6, 0.6),
        ({"keep": "best", "stop": shoal.EarlyStop("val_loss", min_delta=0.25)}, 0.5, 0.7),
    ],
)
def test_values_of_the_weights_that_were_kept(changes: dict[str, Any], loss: float, acc: float) -> None:
    changes = changes | ({"metrics": {"acc": lambda out, target: 0.0}} if "stop" in changes else {})
    one = result(EARLY, **changes)
    assert (one.value("val_loss"), one.value("acc"), one.value("other")) == (loss, acc, None)
    head, _, row = Results([one]).table().splitlines()
    shown = dict(zip(head.split(), row.split(), strict=True))
    assert (shown["val_loss"], shown["acc"]) == (f"{loss:g}", f"{acc:g}")


def test_the_kept_row_is_that_of_the_weights() -> None:
    """As a training finds it, whatever ended it."""
    losses = {"keep": "best", "hparams": {"lr": 3.0}, "optimizer": torch.optim.SGD, "epochs": 6}
    kinds: list[dict[str, Any]] = [{}, {"schedule": [1.0, 1.0].__getitem__, "schedule_every": "epoch"}]
    for own in [job(**losses, **kind, name=f"{i}", seed=i) for i, kind in enumerate(kinds * 2)]:
        (packed,) = shoal.train([own], device="cpu")
        assert_close(packed, solo(own))
        with torch.no_grad():
            loss = float(F.cross_entropy(packed.model(X), Y))
        kept = packed.value("val_loss")
        assert kept is not None and math.isclose(kept, loss, rel_tol=1e-9)


def test_the_best_result_is_the_one_whose_weights_are_best() -> None:
    """The first was at 0.95 in an epoch whose weights it has not kept."""
    first = result(EARLY, keep="best", name="first")
    second = result([(0.2, 0.85)], keep="best", name="second")
    assert Results([first, second]).best("acc", "max") is second
    assert Results([first, second]).best("acc") is second
    assert Results([first, second]).best() is second


NAMES: dict[str, Literal["min", "max"] | None] = {
    "loss": "min", "val_loss": "min", "accuracy": "max", "val_acc": "max", "top5_accuracy": "max", "F1": "max",
    "macroF1": "max", "AUROC": "max", "mean squared error": "min", "RMSE": "min", "wer": "min", "val/mAP": None,
    "accuracy_loss": "min", "error_rate": "min", "lr": None, "seconds": None, "gap": None, "": None, "facc": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_which_way_is_better_by_name(name: str) -> None:
    if name == "val/mAP":
        assert direction("val/map") == "max"
    else:
        assert direction(name) == NAMES[name]


def test_which_way_is_better_must_be_said_where_a_name_does_not() -> None:
    rows = [result([(0.1, 0.2)], name="a"), result([(0.3, 0.4)], name="b")]
    for one in rows:
        one.history[0] |= {"gap": one.history[0]["acc"]}
    with pytest.raises(ValueError, match=r"the name .gap. does not say which way is better; set mode="):
        Results(rows).best("gap")
    assert Results(rows).best("gap", "max") is rows[1] and Results(rows).best("gap", "min") is rows[0]
    with pytest.raises(shoal.JobError, match=r"EarlyStop: the name 'gap' does not say which way is better"):
        shoal.EarlyStop("gap")
    assert shoal.EarlyStop("accuracy").mode == "max" and shoal.EarlyStop().mode == "min"
    with pytest.raises(ValueError, match="mode is 'best'"):
        Results(rows).best("gap", "best")  # type: ignore[arg-type]


def test_what_the_jobs_watch_says_which_way() -> None:
    settings = {"stop": shoal.EarlyStop("acc", mode="min"), "metrics": {"acc": lambda out, target: 0.0}}
    rows = [result([(0.1, value)], **settings) for value in (0.4, 0.2, 0.3)]
    assert Results(rows).best("acc") is rows[1]


def logged(name: str, after: int = 0) -> Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]:
    calls: list[int] = []

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        calls.append(1)
        out = model(batch[0])
        right = (out.argmax(1) == batch[1]).double().mean()
        return F.cross_entropy(out, batch[1]), {name: right} if len(calls) > after else {}

    return step


@pytest.mark.parametrize("val", [True, False])
def test_a_misspelt_metric_is_noticed_before_training(val: bool) -> None:
    own = job(loss=None, step=logged("acc"), stop=shoal.EarlyStop("accuracy"), val=(X, Y) if val else None)
    known = "acc, loss, val_acc, val_loss" if val else "acc, loss"
    said = f"job 'a': stop watches 'accuracy', which its first step does not give; it gives {known}: use one"
    with pytest.raises(shoal.JobError) as caught:
        shoal.train([own], device="cpu")
    assert said in str(caught.value)
    spelt = job(loss=None, step=logged("acc"), stop=shoal.EarlyStop("val_acc" if val else "acc"), val=own.val)
    assert shoal.train([spelt], device="cpu")[0].status in ("done", "stopped")


def test_one_that_never_comes_ends_the_job_after_its_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step could be tried beforehand."""
    own = job(loss=None, step=logged("acc"), stop=shoal.EarlyStop("accuracy"), val_every=2)
    other = job(name="b")
    monkeypatch.setattr("shoal.preparation.checks.dry_run_noting_rates", lambda *_: (([], set()), False))
    failed, done = shoal.train([own, other], device="cpu")
    assert (failed.status, failed.steps, done.status) == ("failed", 6, "done")
    assert failed.error == "stop watches 'accuracy', which this job does not have; it has loss, acc, val_loss, val_acc"
    alone = solo(own)
    assert (alone.status, alone.error, alone.steps) == (failed.status, failed.error, failed.steps)


def test_an_optimizer_that_is_an_instance() -> None:
    network = nn.Linear(4, 2)
    with pytest.raises(shoal.JobError) as caught:
        job(optimizer=torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    said = "optimizer is an instance of SGD; pass the class SGD, and its settings as hparams={...}"
    assert str(caught.value) == f"job 'a': {said}"
    with pytest.raises(shoal.JobError, match=r"stop is Sequential\( \(0\): Linear\(in_features=4, out_features=2, "):
        job(stop=nn.Sequential(network))
