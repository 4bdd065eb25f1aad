"""A function of a job that reads a loop's variable sees its last value; Shoal warns of it."""

import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.jobs import loop_variables

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


@dataclass
class Config:
    width: int


def reads_a_global() -> nn.Module:
    return network(SIZE)


def with_a_shared_function() -> list[shoal.Job]:
    global SIZE
    jobs = []
    for SIZE in (4, 8):
        jobs.append(job(f"{SIZE}", model=reads_a_global))
    return jobs


WRONG = {
    "dict": ("c", [job(f"{n}", model=lambda: network(**c)) for n, c in enumerate([{"width": 4}, {"width": 8}])]),  # noqa: B023
    "tuple": ("sizes", [job(f"{n}", model=lambda: network(*sizes)) for n, sizes in enumerate([(4,), (8,)])]),  # noqa: B023
    "dataclass": ("c", [job(f"{n}", model=lambda: network(c.width)) for n, c in enumerate([Config(4), Config(8)])]),  # noqa: B023
    "one function": ("SIZE", with_a_shared_function()),
}  # fmt: skip


@pytest.mark.parametrize(("variable", "jobs"), WRONG.values(), ids=WRONG)
def test_values_of_other_kinds(variable: str, jobs: list[shoal.Job]) -> None:
    with pytest.warns(shoal.ShoalWarning, match=f"its model reads the variable '{variable}', which was"):
        shoal.explain(jobs, device="cpu", measure=False)


def with_helpers_defined_in_the_loop() -> list[shoal.Job]:
    jobs = []
    for seed in (0, 1):
        config, options = {"width": 8}, Namespace(width=8)

        class Net(nn.Linear):
            pass

        def weights(module: nn.Module) -> None:
            pass

        def model() -> nn.Module:
            return Net(4, config["width"] - options.width + 2).apply(weights)  # noqa: B023

        jobs.append(job(f"{seed}", model=model, seed=seed))
    return jobs


def with_a_registry() -> list[shoal.Job]:
    rows: dict[str, list[float]] = {}
    jobs = []
    for name in ("a", "b"):
        rows[name] = []
        jobs.append(job(name, model=lambda name=name: network(4 + len(rows[name]))))
    return jobs


def made_again_with_another_value() -> list[shoal.Job]:
    """As when a cell of a notebook is run again."""
    global SIZE
    made: list[list[shoal.Job]] = []
    for SIZE in (4, 8):  # noqa: B007
        made.append([job(name, model=reads_a_global) for name in ("a", "b")])
    return made[-1]


def test_a_long_text_is_not_written_out_for_each_job() -> None:
    class Text(str):
        def __repr__(self) -> str:
            raise AssertionError("the whole text")

    text = Text("ab" * 10_000)
    jobs = [job(f"{n}", model=lambda: network(len(text) - 19_996)) for n in range(2)]
    shoal.explain(jobs, device="cpu", measure=False)
    values = {value[1] for job_ in jobs for value in loop_variables._then[job_.model].values()}
    assert max(map(len, values)) <= 40 and any(value.startswith("'abab") for value in values)


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
        with_helpers_defined_in_the_loop(),
        with_a_registry(),
        made_again_with_another_value(),
    ],
    ids=["default", "partial", "function", "same", "counter", "helpers", "registry", "notebook"],
)
def test_jobs_that_have_their_own_values(jobs: list[shoal.Job]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.train(jobs, device="cpu")
