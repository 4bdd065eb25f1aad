"""`shoal tune`: a search in a file, what the command line says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.cli.app import main
from shoal.cli.tune import load_search

FILE = """
import torch, shoal
x = torch.linspace(-1, 1, 64).unsqueeze(1)
space = {"lr": ("log", 1e-3, 1.0)}
settings = {"metric": "val_loss", "max_epochs": 9, "device": "cpu", "deterministic": True}

def make_job(params):
    return shoal.Job(model=lambda: torch.nn.Linear(1, 1), data=(x, 3 * x), val=(x, 3 * x),
                     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, hparams=params, batch_size=8)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "search.py"
    path.write_text(FILE)
    return path


def test_the_table_comes_before_and_the_best_after(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(file)]) == 0
    said = capsys.readouterr()
    assert "9 to 1" in said.err and "17 trials: 5 complete, 12 pruned" in said.out


def test_it_says_where_the_report_and_the_weights_are(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(FILE.replace("return", "if params['lr'] < 0.002: raise OSError\n    return"))
    out = tmp_path / "out"
    assert main(["tune", str(file), "--no-progress", "--seed", "5", "--out", str(out)]) == 0
    *_, report, weights = capsys.readouterr().out.splitlines()
    assert report == f"report: {out / 'report.html'}" and (out / "report.html").exists()
    path = Path(weights.removeprefix("best weights: "))
    make_job, space, settings = load_search(str(file))
    study = shoal.tune(make_job, space, **settings, seed=5, out=out)
    assert study.weights_file(study.best) == path and any("no_job" in t.attrs for t in study.trials)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, study.best_model.state_dict()[name])


def test_the_command_line_wins(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", str(file), "--max-epochs", "4", "--scheduler", "asha", "--trials", "5", "--eta", "2", "--json"]
    assert main(command) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    study = lines[-1]
    assert study["kind"] == "study" and study["max_epochs"] == 4 and len(study["trials"]) == 5
    assert {line["kind"] for line in lines} >= {"start", "epoch", "leave", "end"}


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("space = {}", [], "has no make_job; define make_job(params)"),
        (FILE.replace('"max_epochs": 9, ', ""), [], "max_epochs is not set; add --max-epochs 81"),
        (
            FILE.replace('"max_epochs": 9, ', '"max_epoch": 9, '),
            [],
            "settings has 'max_epoch', which shoal.tune does not",
        ),
        (FILE.replace('("log", 1e-3, 1.0)', "[]"), [], "lr: "),
        (FILE.replace("settings = {", "settings = 3 #"), [], "settings that are a int"),
        (
            "import shoal\nint('x')",
            [],
            "search.py' raised ValueError: invalid literal for int() with base 10: 'x' (search.py:2)",
        ),
        ("shoal.Job(", [], "search.py' raised SyntaxError: "),
        (FILE, ["--scheduler", "bandit"], "scheduler is 'bandit'"),
    ],
)
def test_mistakes(file: Path, capsys: pytest.CaptureFixture[str], text: str, flags: list[str], words: str) -> None:
    file.write_text(text)
    assert main(["tune", str(file), "--no-progress", *flags]) == 1
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and error.startswith("shoal: ")


def test_another_kind_of_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "jobs.toml"]) == 1
    assert "is not a Python file" in capsys.readouterr().err


def test_no_trial_has_a_value(file: Path) -> None:
    file.write_text(FILE.replace("hparams=params", "hparams={'lr': 1e30}"))
    assert main(["tune", str(file), "--no-progress", "--max-epochs", "3"]) == 1


def test_ctrl_c_says_how_to_resume(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "tune", str(file), "--out", str(tmp_path / "out")]
    command += ["--scheduler", "none", "--trials", "4", "--max-epochs", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    journal = tmp_path / "out" / "trials.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 5):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "to resume: shoal tune" in error
