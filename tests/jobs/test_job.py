"""What a job refuses by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal


class Metric:
    """As torchmetrics has them: an object is meant, not the class."""

    def compute(self) -> float:
        return 0.0


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(2, 2), "data": (torch.zeros(4, 2), torch.zeros(4).long())}
    return shoal.Job(**(settings | {"loss": F.cross_entropy, "epochs": 1, "name": "a"} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": None}, "neither epochs nor steps"),
        ({"steps": 3}, "both epochs and steps"),
        ({"epochs": -1}, "epochs is -1"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"val_every": 0}, "val_every is 0"),
        ({"loss": None}, "neither loss nor step"),
        ({"step": lambda m, b: m(b)}, "both loss and step"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"keep": "first"}, "keep is 'first'"),
        ({"schedule_every": "minute"}, "schedule_every is 'minute'"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"clip_value": 0.0}, "clip_value is 0.0"),
        ({"val_every_steps": 0}, "val_every_steps is 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "both clip_norm and clip_value"),
        ({"stop": 3}, "stop is 3"),
        ({"model": 3}, "model is 3"),
        ({"data": None}, "data is None"),
        ({"optimizer": None}, "optimizer is None"),
        ({"hparams": 0.1}, "hparams is 0.1"),
        ({"metrics": [F.mse_loss]}, 'pass a dict, such as {"accuracy": accuracy}'),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; pass an instance, CrossEntropyLoss()"),
        ({"metrics": {"m": Metric}}, "metric 'm' is the class Metric; pass an object of it, with its arguments: Met"),
        ({"metrics": {"loss": F.cross_entropy}}, "name of a history column"),
        ({"metrics": {"accuracy": 1}}, "metric 'accuracy' is 1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"shuffle": "no"}, "shuffle is 'no'"),
        ({"name": 3}, "name is 3"),
        ({"priority": 0.5}, "priority is 0.5"),
    ],
)
def test_a_bad_field_is_one_line_that_names_it(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(shoal.JobError) as caught:
        job(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if changes.get("name") is None:
        assert "job 'a'" in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        job(batch_size=0, keep="x")
    assert len(str(caught.value).splitlines()) == 2


def test_defaults_are_those_of_the_contract() -> None:
    plain = job()
    assert (plain.data_seed, plain.shuffle, plain.drop_last, plain.accumulate) == (None, True, False, 1)
    assert (plain.clip_norm, plain.precision, plain.val_every, plain.stop, plain.keep) == (None, None, 1, None, "last")
    assert (plain.owner, plain.priority, plain.schedule_every, plain.params) == ("", 0, "step", None)
    assert job(seed=5).order_seed == 5
    assert job(seed=5, data_seed=7).order_seed == 7


def test_early_stop() -> None:
    stop = shoal.EarlyStop("accuracy", mode="max", patience=3, min_delta=0.1)
    assert stop.better(0.5, None)
    assert not stop.better(float("nan"), None)
    assert not stop.better(0.55, 0.5)
    assert stop.better(0.61, 0.5)
    for wrong in ({"mode": "up"}, {"patience": 0}, {"min_delta": -1.0}):
        with pytest.raises(ValueError):
            shoal.EarlyStop("accuracy", **wrong)


def test_an_average_takes_its_first_value_by_place() -> None:
    assert shoal.EMA(0.9) == shoal.EMA(decay=0.9) and shoal.SWA(3) == shoal.SWA(start_epoch=3)
    with pytest.raises(TypeError, match="positional"):
        shoal.EMA(0.9, 2)  # type: ignore[misc]


def test_a_job_is_shown_without_its_data() -> None:
    shown = repr(shoal.Job(model=nn.Linear(4, 3), data=(torch.zeros(9, 4),), step=lambda m, b: m(*b).sum(), epochs=1))
    assert "tensor(" not in shown and "epochs=1" in shown
