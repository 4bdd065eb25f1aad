"""The error of a failed job says which line of the user's own code raised."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.errors import describe_with_place, place_of

X, Y = torch.randn(32, 4), torch.randint(2, (32,))


def line_of(text: str) -> str:
    """Return "file:line" of the line that ends with this comment."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_errors.py:{next(n for n, line in enumerate(lines, 1) if line.endswith('# ' + text))}"


def ratio(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(outputs.sum()) / int((targets > 7).sum())  # the metric


def factor(step: int) -> float:
    return 1.0 / (3 - step)  # the schedule


def watch(view: shoal.MemberView) -> None:
    json.loads("{" if view.epoch else "")  # the callback


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if float(loss.detach()) < 100:
        raise KeyError("missing")  # the step
    return loss


def job(**fields: object) -> shoal.Job:
    own = {} if "step" in fields else {"loss": F.cross_entropy}
    return shoal.Job(
        **{"model": lambda: nn.Linear(4, 2), "data": (X, Y), "batch_size": 8, "epochs": 2, **own, **fields}
    )


@pytest.mark.parametrize("num_jobs", [1, 6])
@pytest.mark.parametrize(
    ("fields", "what"),
    [({"val": (X, Y), "metrics": {"ratio": ratio}}, "the metric"), ({"schedule": factor}, "the schedule")],
)
def test_a_failed_job_says_where(
    num_jobs: int, fields: dict[str, object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")
    results = shoal.train([job(**fields, seed=i) for i in range(num_jobs)], device="cpu")
    for result in results:
        assert result.status == "failed"
        assert result.error is not None and result.error.endswith(f"({line_of(what)})")
    assert shoal.solo(job(**fields)).error == results[0].error


def test_the_dry_step_and_a_callback_say_where() -> None:
    with pytest.raises(shoal.JobError, match=line_of("the step")):
        shoal.train([job(step=step)], device="cpu")
    (result,) = shoal.train([job()], device="cpu", callbacks=[watch])
    assert result.error is not None and result.error.endswith(f"({line_of('the callback')})")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "own"])
def test_only_files_outside_of_installed_packages_are_named(folder: str) -> None:
    """Debian installs packages into dist-packages; a folder beside this package may begin with its name."""
    root = Path(shoal.__file__).parent
    file = f"{root}-experiments/net.py" if folder == "own" else f"/usr/lib/python3/{folder}/torch/nn/functional.py"
    space: dict[str, Any] = {}
    exec(compile("def fails():\n    raise RuntimeError('no')", file, "exec"), space)
    with pytest.raises(RuntimeError) as caught:
        space["fails"]()
    named = " (net.py:2)" if folder == "own" else f" ({Path(__file__).name}:{caught.traceback[0].lineno + 1})"
    assert place_of(caught.value) == named


def test_code_of_libraries_is_not_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        F.linear(X, torch.randn(3, 3))
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert describe_with_place(caught.value).startswith("RuntimeError: ")
    assert ".py:" not in describe_with_place(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
            "lambda optimizer: CosineAnnealingLR(optimizer, ...)",
        ),
        ({"hparams": {"learning_rate": 1e-3}}, "change hparams, which takes lr, betas, eps, weight_decay"),
        ({"data": (X, Y[:, None])}, "y[:, 0]"),
        (
            {
                "model": lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
                "loss": F.binary_cross_entropy_with_logits,
            },
            "targets are int64: convert them with y.float()",
        ),
    ],
)
def test_a_mistake_says_what_to_pass(fields: dict[str, object], said: str) -> None:
    with pytest.raises(shoal.JobError) as caught:
        shoal.train([job(**fields)], device="cpu")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("schedule", "cosine", "optimizer -> lr_scheduler"),
        ("schedule", torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(X)], lr=0.1), 3), "step -> factor"),
        ("loss", "cross_entropy", "F.cross_entropy"),
    ],
)
def test_a_value_that_is_no_function_says_what_is_expected(field: str, value: object, said: str) -> None:
    with pytest.raises(shoal.JobError) as caught:
        job(**{field: value})
    assert said in str(caught.value)


def test_a_warning_names_the_users_line() -> None:
    data = torch.full((8, 2), math.nan), torch.zeros(8, 1)
    job = shoal.Job(model=lambda: nn.Linear(2, 1), data=data, loss=F.mse_loss, epochs=1)
    with pytest.warns(shoal.ShoalWarning, match="data has 16 NaN values") as caught:
        shoal.train([job], device="cpu", progress=False)
    assert caught[0].filename == __file__
    with pytest.warns(shoal.ShoalWarning, match="data has 16 NaN values") as caught:
        shoal.explain([job], device="cpu")
    assert caught[0].filename == __file__


class Unprintable(Exception):
    """An error whose own `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_printed_ends_its_own_job_alone() -> None:
    def broken(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if float(loss.detach()) > 0 and seen.append(None) is None and len(seen) > 3:
            raise Unprintable
        return loss

    seen: list[None] = []
    results = shoal.train([job(), job(step=broken, name="broken")], device="cpu")
    assert [result.status for result in results] == ["done", "failed"]
    assert str(results["broken"].error).startswith("Unprintable (")
