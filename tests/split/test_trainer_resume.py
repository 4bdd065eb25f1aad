"""A split that is interrupted resumes bit for bit; another split in its folder is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.split.networks import accuracy, make_job, mlp, rows, same_bits

import shoal
from shoal import Job
from shoal.errors import OutError, ShoalWarning
from shoal.results import Result
from shoal.split.core.method import Method
from shoal.split.core.parts import Outcome, Task
from shoal.split.executors.local import Serial
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.trainer import train_split

ADAM: dict[str, Any] = {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}}


class Killed(Serial):
    """Is interrupted in the middle of a round."""

    at = 3

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        if tasks[0].round == self.at:
            raise KeyboardInterrupt
        return super().run(tasks)


def job_of(**settings: Any) -> Job:
    chosen: dict[str, Any] = {"val": rows(30), "metrics": {"accuracy": accuracy}, "steps": 12, **ADAM}
    return make_job(lambda: mlp(6, 12, 10, 3, dropout=0.2), **(chosen | settings))


METHODS: list[Callable[[Job], Method]] = [
    lambda job: IST(job, 3, 2, recovery=1),
    lambda job: LocalSGD(job, 3, 2),
    lambda job: DataParallel(job, 3),
]


@pytest.mark.parametrize("make", METHODS, ids=["ist", "local_sgd", "data_parallel"])
def test_a_run_that_goes_on_equals_one_that_was_never_interrupted(
    make: Callable[[Job], Method], tmp_path: Path
) -> None:
    def run(executor: type[Serial], out: Path | None, lines: list[str] | None = None) -> Result:
        job = job_of()
        method = make(job)
        log = None if lines is None else lines.append
        return train_split(job, method, executor(job, method, 3), out=out, log=log, val_every=2)

    whole = run(Serial, None)
    with pytest.raises(KeyboardInterrupt):
        run(Killed, tmp_path)
    lines: list[str] = []
    again = run(Serial, tmp_path, lines)
    assert lines[0].startswith("round 3 of") and "resumed" in lines[0]
    assert same_bits(again.model, whole.model)
    untimed = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (whole, again)]
    assert untimed[0] == untimed[1]
    ours, theirs = again.optimizer_state["state"], whole.optimizer_state["state"]
    assert len(ours) == 10 and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[place][name], theirs[place][name]) for place in ours for name in ours[place])
    assert again.split.bytes_measured == whole.split.bytes_measured


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = shoal.split.local_sgd(job_of(), 2, 3, out=tmp_path)
    held = json.loads((tmp_path / "results.json").read_text())
    assert held["results"][0]["status"] == "done"
    assert (tmp_path / "weights" / "0000.safetensors").exists()
    again = shoal.split.local_sgd(job_of(), 2, 3, out=tmp_path)
    assert same_bits(first.model, again.model)
    assert again.history == first.history  # seconds included


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Nothing is saved on the way out here: what is left is what `checkpoint_every` wrote."""

    class Lost(Serial):
        def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
            if tasks[0].round == 3:
                raise RuntimeError("the power went out")
            return super().run(tasks)

    job = job_of()
    method = LocalSGD(job, 2, 2)
    with pytest.raises(RuntimeError, match="power"):
        train_split(
            job, LocalSGD(job, 2, 2), Lost(job, LocalSGD(job, 2, 2), 2), out=tmp_path, checkpoint_every="0.0001s"
        )
    lines: list[str] = []
    method = LocalSGD(job, 2, 2)
    again = train_split(job, method, Serial(job, method, 2), out=tmp_path, log=lines.append)
    assert "round 3 of 6: resumed" in lines
    assert same_bits(again.model, shoal.split.local_sgd(job, 2, 2).model)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    job = job_of()
    method = LocalSGD(job, 2, 2)
    with pytest.raises(KeyboardInterrupt):
        train_split(job, method, Killed(job, method, 2), out=tmp_path, checkpoint_every="0.0001s")
    newest = max(tmp_path.glob("members/0000/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    with pytest.warns(ShoalWarning, match="damaged"):
        again = train_split(job, method, Serial(job, method, 2), out=tmp_path)
    assert same_bits(again.model, shoal.split.local_sgd(job, 2, 2).model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a split in it."""
    folder = tmp_path_factory.mktemp("trained")
    shoal.split.local_sgd(job_of(), 2, 3, out=folder)
    return folder


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (lambda out: shoal.split.local_sgd(job_of(), 2, 4, out=out), "'local_steps': 3"),
        (lambda out: shoal.split.local_sgd(job_of(), 3, 3, out=out), "'workers': 2"),
        (lambda out: shoal.split.data_parallel(job_of(), 2, out=out), "'method': 'local_sgd'"),
        (lambda out: shoal.split.local_sgd(job_of(batch_size=9), 2, 3, out=out), "batch_size 8 there and 9 here"),
        (lambda out: shoal.split.local_sgd(job_of(data=rows(60)), 2, 3, out=out), "has other data than there"),
        (lambda out: shoal.train([job_of()], out=out), "has split"),
    ],
)
def test_another_job_or_other_settings_in_the_folder_are_an_error(
    run: Callable[[Path], Any], line: str, trained: Path
) -> None:
    with pytest.raises(OutError, match="holds other jobs") as error:
        run(trained)
    assert line in str(error.value)
