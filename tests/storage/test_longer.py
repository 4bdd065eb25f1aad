"""More epochs, more steps and more jobs in the same folder: the bits of one run of the final length."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import shoal

torch.manual_seed(3)
X, Y = torch.randn(50, 4), torch.arange(50) % 3


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": net, "data": (X, Y), "val": (X, Y), "loss": F.cross_entropy}
    settings |= {"hparams": {"lr": 0.05}, "batch_size": 8, "metrics": {"accuracy": accuracy}}
    return shoal.Job(**(settings | changes))


def same(one: shoal.Result, other: shoal.Result) -> None:
    """Bit for bit, the times aside."""
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (one, other)]
    assert rows[0] == rows[1] and one.validations == other.validations, one.name
    assert (one.status, one.steps, one.best_epoch) == (other.status, other.steps, other.best_epoch), one.name
    states = [
        [*r.model.state_dict().values(), *_tensors(r.optimizer_state), *r.training_weights.values()]
        for r in (one, other)
    ]
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b), one.name


def _tensors(state: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, Tensor)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "best": {"keep": "best"},
    "rare validation": {"val_every": 2},
    "rare validation, best": {"val_every": 2, "keep": "best", "stop": shoal.EarlyStop("accuracy", patience=2)},
    "within": {"val_every_steps": 2, "keep": "best", "val_every": 2},
    "plateau": {"val_every": 2, "schedule": lambda o: ReduceLROnPlateau(o, patience=0), "schedule_every": "epoch"},
    "cosine": {"schedule": lambda o: CosineAnnealingLR(o, 20), "keep": "best"},
    "epoch schedule": {"schedule": lambda epoch: 0.5**epoch, "schedule_every": "epoch"},
    "stops at once": {"stop": shoal.EarlyStop("accuracy", patience=1, min_delta=2.0)},
    "serial": {"model": Branch, "keep": "best", "val_every": 2},
    "accumulate": {"accumulate": 3, "optimizer": torch.optim.SGD, "keep": "best"},
    "EMA": {"average": shoal.EMA(decay=0.8)},
    "SWA, best": {"average": shoal.SWA(every=2), "keep": "best", "val_every": 2},
    "serial EMA": {"average": shoal.EMA(decay=0.8, every=3, use_buffers=True), "model": Branch},
    "no validation": {"val": None, "metrics": {}},
}


FEW = ("plain", "best", "within", "accumulate", "EMA")
"""Kinds for a test that is quick."""


def jobs(epochs: int, steps: int, more: int = 0, *, kinds: Sequence[str] = tuple(KINDS)) -> list[shoal.Job]:
    """Of every kind one of so many epochs, one of so many steps; between them more jobs, if they are asked for."""
    made = []
    for place, name in enumerate(kinds):
        settings = KINDS[name]
        made.append(job(name=name, epochs=epochs, seed=place, **settings))
        if place < more:
            made.append(job(name=f"{name}, new", epochs=epochs, seed=100 + place, **settings))
        made.append(job(name=f"{name}, steps", steps=steps, seed=place, **settings))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(9, 17), (10, 17), (7, 14), (14, 15)])
def test_all_kinds_of_jobs(tmp_path: Path, steps: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    check_extended(tmp_path, steps, capsys, tuple(KINDS))


def test_more_epochs_steps_and_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_extended(tmp_path, (7, 14), capsys, FEW)


@pytest.mark.parametrize("model", [net, Branch])
def test_a_job_that_ended_where_a_validation_within_its_epoch_was_due(tmp_path: Path, model: Any) -> None:
    stop = shoal.EarlyStop("accuracy", patience=6)
    made = [
        [job(name="a", steps=steps, model=model, val_every_steps=1, keep="best", stop=stop)]
        for steps in (9, 10, 13, 30)
    ]
    for one in made:
        extended = shoal.train(one, out=tmp_path, device="cpu", deterministic=True, progress=False)
        same(extended[0], shoal.train(one, device="cpu", deterministic=True, progress=False)[0])


def check_extended(
    tmp_path: Path, steps: tuple[int, int], capsys: pytest.CaptureFixture[str], kinds: Sequence[str]
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "deterministic": True, "progress": False}
    shoal.train(jobs(3, steps[0], kinds=kinds), out=tmp_path, **settings)
    assert capsys.readouterr().err == ""
    extended = shoal.train(jobs(5, steps[1], more=2, kinds=kinds), out=tmp_path, **settings)
    said = capsys.readouterr().err
    assert "2 new jobs (plain, new, best, new); epochs 3 -> 5 for plain, best" in said, said
    whole = shoal.train(jobs(5, steps[1], more=2, kinds=kinds), **settings)
    assert [r.name for r in extended] == [r.name for r in whole]
    for one, other in zip(extended, whole, strict=True):
        same(one, other)
    loaded = shoal.load(tmp_path)
    for result in whole:
        for key, tensor in result.model.state_dict().items():
            assert torch.equal(loaded[result.name].state_dict()[key], tensor)
    again = shoal.train(jobs(5, steps[1], more=2, kinds=kinds), out=tmp_path, **settings)
    assert capsys.readouterr().err == ""
    for one, other in zip(again, whole, strict=True):
        same(one, other)


def test_what_cannot_be_extended_is_said(tmp_path: Path) -> None:
    def both(epochs: int, **changes: Any) -> list[shoal.Job]:
        return [job(name=name, epochs=epochs, **changes) for name in ("a", "b")]

    shoal.train(both(2), "cpu", tmp_path)
    shorter = r"job 'a' has epochs 2 there and 1 here \(and so for 1 more\); use another"
    for wrong, words in (
        (both(1), shorter),
        (both(3)[:1], "it has job 'b'"),
        ([both(3)[0], job(name="c", epochs=2)], "it has job 'b' and the list does not: give all of its jobs"),
        (both(3, hparams={"lr": 1.0}), "job 'a' has hparams"),
        ([job(name=name, steps=100) for name in ("a", "b")], "has epochs 2 there and None here"),
    ):
        with pytest.raises(ValueError, match=words):
            shoal.train(wrong, "cpu", tmp_path)
    turned = shoal.train(both(2)[::-1], "cpu", tmp_path)
    assert [(r.name, r.status, r.steps) for r in turned] == [("b", "done", 14), ("a", "done", 14)]


SCRIPT = """
    import sys, torch, torch.nn.functional as F, shoal
    from torch import nn

    def net():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def main(epochs, count, out):
        x, y = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)), torch.arange(400) % 3
        jobs = [shoal.Job(model=net, data=(x[:300], y[:300]), val=(x[300:], y[300:]), loss=F.cross_entropy, seed=seed,
                          hparams={"lr": 0.01}, batch_size=8, epochs=epochs, val_every=7,
                          keep=("best" if seed % 2 else "last"), name=f"{seed}") for seed in range(count)]
        return shoal.train(jobs, device="cpu", out=out, deterministic=True, checkpoint_every=0.05, progress=False)

    if __name__ == "__main__":
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.slow
def test_extended_twice_and_killed_in_between(tmp_path: Path) -> None:
    """Three lengths of a run, each killed with SIGKILL and started again, end with the bits of the last one alone."""
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(textwrap.dedent(SCRIPT))
    kills = 0
    for epochs, count in ((10, 2), (24, 2), (24, 4), (33, 4)):
        command = [sys.executable, str(script), str(epochs), str(count), str(out)]
        for delay in (0.05, 0.4):
            run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            saved = {path: path.stat().st_mtime_ns for path in out.glob("members/*/*.ckpt")}
            until = time.monotonic() + 120
            while run.poll() is None and time.monotonic() < until:
                now = {path: path.stat().st_mtime_ns for path in out.glob("members/*/*.ckpt") if path.exists()}
                if any(saved.get(path) != when for path, when in now.items()):
                    break
                time.sleep(0.005)
            time.sleep(delay)
            kills += run.poll() is None
            run.send_signal(signal.SIGKILL)
            run.wait()
        if (epochs, count) != (24, 2):  # the second is extended without having come to its end
            assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert kills >= 4
    whole = tmp_path / "whole"
    assert subprocess.run([sys.executable, str(script), "33", "4", str(whole)], check=False).returncode == 0
    one, other = shoal.load(out), shoal.load(whole)
    for a, b in zip(one, other, strict=True):
        assert a.status == b.status == "done" and len(a.history) == 33
        drop = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (a, b)]
        assert drop[0] == drop[1]
        for key, tensor in a.state_dict().items():
            assert torch.equal(tensor, b.state_dict()[key])


def test_a_value_may_be_noted_in_config_later(tmp_path: Path) -> None:
    """Training does not use it. A value that is there already cannot change: it says how the job was trained."""
    shoal.train([job(name="a", epochs=2)], "cpu", out=tmp_path, deterministic=True)
    again = shoal.train([job(name="a", epochs=2, config={"width": 8})], "cpu", out=tmp_path, deterministic=True)
    assert again[0].steps == 14 and shoal.load(tmp_path)[0].job.config == {"width": 8}
    longer = shoal.train([job(name="a", epochs=3, config={"more": 1})], "cpu", out=tmp_path, deterministic=True)
    whole = shoal.train([job(name="a", epochs=3)], "cpu", deterministic=True)
    same(longer[0], whole[0])
    assert shoal.load(tmp_path)[0].job.config == {"width": 8, "more": 1}
    with pytest.raises(shoal.ShoalError, match=r"job 'a' has config \{'width': 8\} there and \{'width': 9\} here"):
        shoal.train([job(name="a", epochs=3, config={"width": 9})], "cpu", out=tmp_path, deterministic=True)
