"""`shoal train`: what the file says, what the command line says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.app import main
from shoal.cli.arguments import load_target

FILE = """
model = {{ use = "torch.nn:Linear", in_features = 2, out_features = 1 }}
data = "points.csv"
loss = "mse_loss"
optimizer = "SGD"
hparams.lr = {lr}
epochs = {epochs}
seeds = 2
[run]
device = "cpu"
threads = 1
out = "from_file"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "points.csv").write_text("a,b,c\n" + "".join(f"{i},{i % 3},{i / 7 + 0.5}\n" for i in range(20)))
    path = tmp_path / "jobs.toml"
    path.write_text(FILE.format(lr=0.001, epochs=2))
    return path


def spied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `shoal.train` is called with."""
    seen: dict[str, Any] = {}

    def train(jobs: list[shoal.Job], **settings: Any) -> list[Any]:
        seen.update(settings, jobs=jobs)
        raise ValueError("seen")

    monkeypatch.setattr(shoal, "train", train)
    return seen


def test_the_settings_of_the_file_are_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    assert main(["train", str(file)]) == 1
    assert (seen["device"], seen["threads"], seen["out"]) == ("cpu", 1, str(file.parent.resolve() / "from_file"))
    assert seen["progress"] is True and "memory" not in seen and "policy" not in seen and "callbacks" not in seen


def test_options_win(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = spied(monkeypatch)
    given = ["--device", "auto", "--out", "mine", "--memory", "2GB", "--policy", "fair", "--checkpoint-every", "5m"]
    given += ["--threads", "2", "--no-compile", "--deterministic", "--no-progress"]
    assert main(["train", str(file), *given]) == 1
    del seen["jobs"]
    assert seen == {
        "device": "auto", "out": "mine", "memory": "2GB", "policy": "fair", "checkpoint_every": "5m", "threads": 2,
        "compile": False, "deterministic": True, "progress": False,
    }  # fmt: skip


def test_tensorboard_is_a_callback(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    seen = spied(monkeypatch)
    main(["train", str(file), "--tensorboard", str(tmp_path / "logs")])
    (callback,) = seen["callbacks"]
    assert type(callback).__name__ == "TensorBoard" and "tensorboard" not in seen


def test_jobs_and_settings_of_a_target(file: Path) -> None:
    target = load_target(str(file))
    assert [job.name for job in target.jobs] == ["seed=0", "seed=1"] and target.settings["threads"] == 1


def test_a_file_trains_and_leaves_its_results(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--no-progress"]) == 0
    told = capsys.readouterr()
    assert "seed=0" in told.out and not told.err
    assert (file.parent / "from_file" / "results.json").exists()


def test_the_same_as_the_job_in_python(file: Path) -> None:
    jobs = [
        replace(job, model=lambda job=job: job.model().double(), data=tuple(part.double() for part in job.data))
        for job in load_target(str(file)).jobs
    ]
    (packed, _) = shoal.train(jobs, device="cpu")
    alone = shoal.solo(jobs[0])
    assert packed.history[-1]["loss"] == pytest.approx(alone.history[-1]["loss"], rel=1e-9)


def test_a_diverged_job_is_status_1(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE.format(lr=1e30, epochs=9))
    assert main(["train", str(file), "--json"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {result["status"] for result in last["results"]} == {"diverged"}


@pytest.mark.slow
@pytest.mark.parametrize("out", [True, False])
def test_interrupt_says_how_to_resume(file: Path, out: bool) -> None:
    file.write_text(FILE.format(lr=1e-6, epochs=10_000_000).replace("" if out else 'out = "from_file"\n', ""))
    child = subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", str(file)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stderr is not None
    child.stderr.readline()  # the first line of progress: it trains
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in rest
    *_, how, last = rest.splitlines()
    assert last == "shoal: interrupted"
    assert f"to resume: shoal train {file}" in how if out else "nothing was saved" in how


def test_what_a_function_of_the_users_raises_is_reported_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_sweep.py").write_text("def jobs():\n    numbers = [1]\n    return int('seven')\n")
    assert main(["train", "wrong_sweep.py:jobs"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("shoal: wrong_sweep.py:jobs raised ValueError: invalid literal for int()")
    assert said.endswith("(wrong_sweep.py:3)\n") and len(said.splitlines()) == 1
    assert main(["train", "wrong_sweep.py:other"]) == 1
    assert "has no 'other'" in capsys.readouterr().err
