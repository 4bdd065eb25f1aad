"""A function of a job that reads a loop's variable sees its last value; Shoal warns of it."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

X, Y = torch.randn(16, 4), torch.randint(2, (16,))
SIZE = 0
"""A global that a loop of a test changes, as a loop at the top of a script does."""


def job(name: str, **fields: Any) -> shoal.Job:
    return shoal.Job(
        **{"model": nn.Linear(4, 2), "data": (X, Y), "loss": F.cross_entropy, "epochs": 1, **fields}, name=name
    )


def network(width: int, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 2))


def test_a_model_that_reads_the_loops_variable() -> None:
    jobs = [job(f"{width}", model=lambda: network(width)) for width in (4, 8, 16)]  # noqa: B023
    with pytest.warns(shoal.ShoalWarning) as caught:
        results = shoal.train([replace(each, epochs=2) for each in jobs], device="cpu")
    assert [result.model[0].out_features for result in results] == [16, 16, 16], "as in a plain loop"
    (line,) = [str(warning.message) for warning in caught]
    assert line.startswith(
        "job '4': its model reads the variable 'width', which was 4 when the job was made and is 16 now"
    )
    assert "lambda width=width:" in line


def test_a_global_in_a_nested_function_a_class_and_a_metric() -> None:
    global SIZE
    jobs = []
    for SIZE, act in ((4, nn.ReLU), (8, nn.Tanh)):

        def metric(outputs: Tensor, targets: Tensor) -> float:
            return sum(float(outputs[0, 0]) for _ in range(SIZE))  # noqa: B023

        jobs.append(job(f"{SIZE}", model=lambda: network(4, act), val=(X, Y), metrics={"m": metric}))  # noqa: B023
    with pytest.warns(shoal.ShoalWarning) as caught:
        shoal.explain(jobs, device="cpu", measure=False)
    text = "\n".join(str(warning.message) for warning in caught)
    assert "its model reads the variable 'act', which was ReLU" in text
    assert "its metric 'm' reads the variable 'SIZE', which was 4" in text


def made_by_a_function(width: int) -> shoal.Job:
    return job(f"{width}", model=lambda: network(width))


def counting() -> list[shoal.Job]:
    count = 0

    def build() -> Callable[[], nn.Module]:
        def model() -> nn.Module:
            nonlocal count
            count += 1
            return network(4)

        return model

    jobs = []
    for name in ("a", "b"):
        jobs.append(job(name, model=build()))
        count += 1
    return jobs


@pytest.mark.parametrize(
    "jobs",
    [
        [job(f"{width}", model=lambda width=width: network(width)) for width in (4, 8)],
        [job(f"{width}", model=partial(network, width)) for width in (4, 8)],
        [made_by_a_function(width) for width in (4, 8)],
        [job(f"{lr}", model=lambda: network(4), hparams={"lr": lr}) for lr in (0.1, 0.2)],
        counting(),
    ],
    ids=["default", "partial", "function", "same", "counter"],
)
def test_jobs_that_have_their_own_values(jobs: list[shoal.Job]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.train(jobs, device="cpu")
