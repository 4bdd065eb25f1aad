"""What no checkpoint can hold is said once, before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import stateful
from tests.engine.stateful import KINDS, Changes, loss_of
from tests.storage.run_folders import warnings_of
from torch import Tensor, nn

import shoal


def job(changes: Changes, name: str = "a") -> shoal.Job:
    given: Changes = {"model": stateful.linear, "data": (stateful.X, stateful.Y), "hparams": {"lr": 0.02},
                      "batch_size": 8, "epochs": 2, "name": name}  # fmt: skip
    return shoal.Job(**(given | changes))


def numbers() -> Iterator[float]:
    value = 0.0
    while True:
        value += 0.01
        yield value


def generator() -> Changes:
    source = numbers()
    return {"step": lambda model, batch: loss_of(model, batch) * (1 + next(source))}


def made_function() -> Changes:
    held: list[Callable[[Tensor], Tensor]] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        factor = 1 + 0.01 * len(held)
        held.append(lambda loss: loss * factor)
        return held[-1](loss_of(model, batch))

    return {"step": step}


def loader() -> Changes:
    rows = torch.utils.data.DataLoader(torch.arange(100.0).double(), batch_size=2)  # type: ignore[arg-type]
    batches = iter(rows)
    return {"step": lambda model, batch: loss_of(model, batch) * (1 + 0.01 * next(batches).mean())}


LOST: dict[str, tuple[Callable[[], Changes], str]] = {
    "a generator": (generator, r"job 'a': its training changes source in the closure of step.*\(a generator\)"),
    "a function": (made_function, r"held.* in the closure of step.*\(a function that was made on the way\)"),
    "a loader's place": (loader, r"batches.* in the closure of step"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_cannot_be_saved_is_said_once_before_the_start(what: str, tmp_path: Path) -> None:
    make, words = LOST[what]
    events: list[str] = []
    with pytest.warns(shoal.ShoalWarning, match=words) as caught:
        shoal.train(
            [job(make())], device="cpu", out=tmp_path, checkpoint_every=0.0001,
            events=lambda event: events.append(f"{event.kind} {len(caught)}"),
        )  # fmt: skip
    assert len(caught) == 1 and "a resumed run finds it as it is at the beginning" in str(caught[0].message)
    assert events[0] == "start 1"
    assert not warnings_of(lambda: shoal.train([job(make())], device="cpu")), "without a folder nothing is lost"


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_saved_is_not_warned_of_and_looking_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Warnings are errors here."""
    (kept,) = shoal.train([stateful.job(kind, epochs=1)], device="cpu", out=tmp_path, checkpoint_every=0.0001)
    (plain,) = shoal.train([stateful.job(kind, epochs=1)], device="cpu")
    assert kept.history[0]["loss"] == plain.history[0]["loss"]
    for a, b in zip(kept.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_state_that_jobs_share_is_not_saved_and_is_said(tmp_path: Path) -> None:
    def shared() -> list[shoal.Job]:
        changes = stateful.dict_in_closure()
        return [job(changes, "a"), job(changes, "b"), job(stateful.dict_in_closure(), "c")]

    with pytest.warns(shoal.ShoalWarning) as caught:
        shoal.train(shared(), device="cpu", out=tmp_path, checkpoint_every=0.0001)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "job 'a', and 1 more jobs: its training changes state in the closure of step" in text
    assert "other jobs can change it too" in text and "give each job objects of its own" in text


def test_an_optimizer_class_that_jobs_share_is_no_state(tmp_path: Path) -> None:
    """Torch wraps the step of the class when the first of them is made. Warnings are errors here."""

    class New(stateful.Signs):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    jobs = [job({"loss": nn.functional.mse_loss, "optimizer": New}, name) for name in "ab"]
    shoal.train(jobs, device="cpu", out=tmp_path)


@pytest.mark.parametrize("kind", ["global counter", "class attribute"])
def test_what_a_process_has_once_can_be_saved_for_one_job_alone(kind: str, tmp_path: Path) -> None:
    shoal.train([stateful.job(kind)], device="cpu", out=tmp_path / "one")
    two = [stateful.job(kind, name=name) for name in "ab"]
    with pytest.warns(shoal.ShoalWarning, match="other jobs can change it too"):
        shoal.train(two, device="cpu", out=tmp_path / "two")


def test_what_comes_later_is_said_then(tmp_path: Path) -> None:
    def late() -> Changes:
        held: dict[str, Any] = {"n": 0}

        def step(model: nn.Module, batch: Any) -> Tensor:
            held["n"] += 1
            if held["n"] > 7:
                held["f"] = lambda x: 2 * x
            return loss_of(model, batch)

        return {"step": step}

    with pytest.warns(shoal.ShoalWarning, match=r"held\['f'\] in the closure of step") as caught:
        shoal.train([job(late())], device="cpu", out=tmp_path, checkpoint_every=0.0001)
    assert len(caught) == 1


def test_stacked_jobs_have_no_state_to_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a stacked job's Python state is not looked at")

    monkeypatch.setattr("shoal.engine.python_state.saved_state.Keeper", refuse)
    jobs = [
        job({"loss": nn.functional.mse_loss, "schedule": lambda step: 0.9**step, "seed": i}, str(i)) for i in range(3)
    ]
    assert {r.tier for r in shoal.train(jobs, device="cpu", out=tmp_path, checkpoint_every=0.0001)} == {"stacked"}
