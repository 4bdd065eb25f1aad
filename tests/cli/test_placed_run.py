"""`shoal place --run`: here, resumed, by torchrun; and errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli import main

CODE = """
import torch, torch.nn.functional as F
from torch import nn
import shoal

def job():
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(48, 20, generator=draw), torch.randint(0, 3, (48,), generator=draw)
    network = lambda: nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 3))
    return shoal.Job(model=network, data=data, val=data, loss=F.cross_entropy, optimizer=torch.optim.Adam,
                     batch_size=16, epochs=2, seed=0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return main(["place", *arguments])


PLAN = ("--workers", "2", "--no-measure", "--link", "100Mbit", "--mode", "placed")


def test_a_job_is_placed_and_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("net.py:job", *PLAN, "--run", "--folder", "run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == "done" and said["split"]["workers"] == 2
    assert run("net.py:job", *PLAN, "--out", "placement.json") == 0
    capsys.readouterr()
    assert run("net.py:job", "--run", "--placement", "placement.json", "--folder", "run", "--json") == 0
    assert "split" not in json.loads(capsys.readouterr().out)  # the folder has the end of it


def test_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("net.py:job", "--folder", "run") == 2
    assert "--folder is for training; give it with --run" in capsys.readouterr().err
    (folder / "other.json").write_text("{}")
    assert run("net.py:job", "--run", "--placement", "other.json") == 1
    error = capsys.readouterr().err
    assert "place again" in error and "Traceback" not in error


@pytest.mark.slow
def test_torchrun_starts_a_server_and_workers(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    plan = [argument for argument in PLAN if argument not in ("--workers", "2")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "shoal", "place", "net.py:job",
         *plan, "--json"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["status"] == "done" and said["split"]["workers"] == 2
    (reference,) = shoal.train([shoal.Job(**fields())])
    assert said["history"][-1]["loss"] == pytest.approx(reference.history[-1]["loss"], rel=1e-4)


def fields() -> dict[str, object]:
    scope: dict[str, object] = {}
    exec(CODE, scope)
    job = scope["job"]()  # type: ignore[operator]
    return {
        name: getattr(job, name)
        for name in ("model", "data", "val", "loss", "optimizer", "batch_size", "epochs", "seed")
    }
