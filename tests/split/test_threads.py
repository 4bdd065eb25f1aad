"""Small parts are trained with one thread: on a busy machine several wait for each other at every operator."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
import shoal.split
from shoal.engine.processes import sharing
from shoal.split import trainer

X, Y = torch.randn(64, 6), torch.randint(3, (64,))


def split(seen: set[int], out: Path | None = None) -> shoal.Result:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.add(torch.get_num_threads())
        return F.cross_entropy(model(batch[0]), batch[1])

    job = shoal.Job(model=lambda: nn.Linear(6, 3), data=(X, Y), step=step, epochs=4, batch_size=8)
    return shoal.split.local_sgd(job, workers=2, local_steps=4, device="cpu", out=out)


@pytest.fixture(autouse=True)
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_parts_use_one_thread_and_give_the_others_back() -> None:
    seen = set[int]()
    assert split(seen).status == "done"
    assert 1 in seen and seen <= {1, 2}, "the job is checked with torch's own number"
    assert torch.get_num_threads() == 2
    seen.clear()
    torch.set_num_threads(1)
    split(seen)
    assert seen == {1}


def test_a_resumed_run_uses_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[int] = []

    def choose(*args: object) -> int:
        choices.append(2)
        return 2

    monkeypatch.setattr(trainer, "threads_of_step", choose)
    rounds = trainer._Run._round

    def one_round(run: trainer._Run) -> None:
        if run.round == 1:
            raise KeyboardInterrupt
        rounds(run)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trainer._Run, "_round", one_round)
        split(set(), tmp_path / "run")
    seen = set[int]()
    monkeypatch.setattr(trainer, "threads_of_step", sharing.threads_of_step)  # would choose one
    assert split(seen, tmp_path / "run").status == "done"
    assert choices == [2] and seen == {2}
