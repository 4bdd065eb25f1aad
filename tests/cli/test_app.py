"""The command line's manners: quick help, one-line errors, no traceback."""

import importlib
import json
import os
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import shoal
from shoal import environment
from shoal.cli.app import COMMANDS, main


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *args], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


def test_help_lists_every_command_without_importing_torch() -> None:
    script = (
        "import sys; from shoal.cli import main; status = main(['--help'])\n"
        "loaded = {'torch', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'help imported {sorted(loaded)}' if loaded else status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_of_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "-h"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown and "..." not in shown.partition("Commands:")[2]  # nothing is cut off
    assert "<bool>" not in shown  # a flag takes no value


@pytest.mark.slow
def test_help_takes_less_than_half_a_second() -> None:
    run("--help")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert run("--help").returncode == 0
        times.append(time.perf_counter() - start)
    assert sorted(times)[2] < 0.5, times


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal 0.")


def test_version_of_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert main(["--version"]) == 0
    said = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"shoal {said}\n" and shoal.__version__ == said
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "b" / "environment.py"))
    assert environment.version() == "0"
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\nversion = '3'")
    assert environment.version() == "0"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_line_is_the_commands_own_first_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert COMMANDS[name] in told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_file_of_its_own(name: str) -> None:
    assert hasattr(importlib.import_module(f"shoal.cli.{name}"), name)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["trian"], "Did you mean 'train'?"),
        (["train"], "Missing argument 'target'; see shoal train --help"),
        (["demo", "--nope"], "No such option: --nope; see shoal demo --help"),
        (["train", ".:jobs"], "'.' is not the name of a module"),
        (["demo", "--picture", "."], "not a kind of picture"),
        (["demo", "--picture", "/dev/null/a.png"], "cannot be written"),
        (["bench", "--out", "."], "is a folder"),
        (["bench", "--plot", "bars.xyz"], "not a kind of picture"),
        (["bench", "--json", "bars.json"], "no network 'bars.json'"),
        (["train", "jobs"], "names no function"),
        (["train", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["train", "nowhere.yaml:jobs"], "a function in a job file"),
        (["explain", "nowhere.yml"], "nowhere.yml: there is no such file"),
        (["train", "nowhere.py:jobs"], "the file 'nowhere.py' is not there"),
        (["train", "no_such_module:jobs"], "no module 'no_such_module'"),
        (["train", "json:dump", "--threads", "0"], "--threads"),
        (["train", "a.toml", "--device", "gpu"], "Invalid value for '--device': device is 'gpu'; use 'auto', 'cpu'"),
        (["bench", "mlp", "--device", "gpu"], "Invalid value for '--device'"),
        (["split", "a.toml", "--device", "gpu"], "Invalid value for '--device'"),
        (["place", "a.toml", "--device", "gpu"], "Invalid value for '--device'"),
        (["train", "a.toml", "--memory", "20QB"], "Invalid value for '--memory': memory is '20QB'; use a number"),
        (["explain", "a.toml", "--memory", "20QB"], "Invalid value for '--memory'"),
        (["tune", "a.py", "--checkpoint-every", "never"], "Invalid value for '--checkpoint-every': checkpoint_every"),
        (["train", "a.toml", "--policy", "first"], "Invalid value for '--policy': policy is 'first'; use one of"),
        (["tune", "a.py", "--mode", "up"], "Invalid value for '--mode': mode is 'up'"),
        (["export", "runs", "a.pt", "--best", "f", "--mode", "up"], "Invalid value for '--mode': mode is 'up'"),
        (["explain", "json:dmup"], "did you mean 'dump'?"),
    ],
)
def test_errors_are_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage = ("No such", "Did you mean 'train'", "Missing argument", "--threads", "Invalid value")
    assert main(args) == (2 if says.startswith(usage) else 1)
    told = capsys.readouterr()
    assert told.err.startswith("shoal: ")
    assert says in told.err
    assert told.err.count("\n") == 1
    assert not told.out


def test_a_group_of_commands_without_one_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    told = capsys.readouterr()
    assert "unifiednn" in told.out and not told.err


def broken(tmp_path: Path, body: str) -> str:
    file = tmp_path / "broken_jobs.py"
    file.write_text(f"def jobs():\n    {body}\n")
    return f"{file}:jobs"


def test_an_error_in_the_users_file_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = broken(tmp_path, "return 1 / 0")
    assert main(["explain", target]) == 1
    told = capsys.readouterr().err
    assert told == f"shoal: {target} raised ZeroDivisionError: division by zero (broken_jobs.py:2)\n"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback(tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["explain", broken(tmp_path, "return 1 / 0")]
    args.insert(place, "--debug")
    assert main(args) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return []", "gave no jobs"),
        ("return [3]", "gave int at position 0"),
        ("pass", "gave NoneType;"),
        ("return 3", "gave int;"),
    ],
)
def test_a_function_that_returns_no_jobs(
    tmp_path: Path, body: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", broken(tmp_path, body)]) == 1
    assert says in capsys.readouterr().err


def test_interrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", broken(tmp_path, "raise KeyboardInterrupt")]) == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"


JOBS = """
import torch, torch.nn.functional as F
from shoal import Job

def jobs():
    x = torch.arange(40.0).reshape(20, 2) / 40
    y = x.sum(1, keepdim=True)
    return [
        Job(model=lambda: torch.nn.Linear(2, 1), data=(x, y), loss=F.mse_loss, optimizer=torch.optim.SGD,
            hparams={"lr": lr}, batch_size=5, epochs=2, name=f"lr={lr:g}")
        for lr in (0.01, 0.1)
    ]
"""


def jobs_file(tmp_path: Path) -> Path:
    file = tmp_path / "two_jobs.py"
    file.write_text(JOBS)
    return file


def test_train_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{jobs_file(tmp_path)}:jobs", "--json", "--device", "cpu", "--no-compile"]) == 0
    *events, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last["kind"] == "results" and all(event["kind"] != "results" for event in events)
    rows = last["results"]
    assert [row["name"] for row in rows] == ["lr=0.01", "lr=0.1"]
    assert {row["status"] for row in rows} == {"done"}
    assert all(row["history"][-1]["loss"] > 0 for row in rows)


def test_train_says_it_for_people_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{jobs_file(tmp_path)}:jobs", "--device", "cpu"]) == 0
    assert "lr=0.01" in capsys.readouterr().out


def test_every_mistake_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jobs_file(tmp_path)
    file.write_text(JOBS.replace('{"lr": lr}', '{"lr": -lr}'))
    assert main(["train", f"{file}:jobs", "--device", "cpu"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("shoal: job 'lr=0.01': lr is -0.01;")
    assert second.startswith("shoal: job 'lr=0.1': lr is -0.1;")


def test_a_warning_is_one_line_and_a_diverged_job_says_why(tmp_path: Path) -> None:
    file = jobs_file(tmp_path)
    file.write_text(JOBS.replace("/ 40", "/ 40\n    x[3] = float('nan')"))
    done = run("train", f"{file}:jobs", "--device", "cpu")
    assert done.returncode == 1
    assert "shoal: warning: job 'lr=0.01': data has" in done.stderr
    assert "train.py" not in done.stderr
    assert "lr=0.1: the loss became nan" in done.stdout


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{jobs_file(tmp_path)}:jobs", "--device", "cpu"]) == 0
    assert "stacked" in capsys.readouterr().out


def test_explain_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{jobs_file(tmp_path)}:jobs", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_module_in_the_current_folder(tmp_path: Path) -> None:
    jobs_file(tmp_path)
    done = run("train", "two_jobs:jobs", "--json", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["results"]) == 2


def test_a_closed_pipe_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "shoal", "--help"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train"], ["train", "a.toml", "--nothing"], ["train", "a.toml", "--threads", "x"], ["--no"]],
)
def test_a_wrong_use_has_status_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("shoal: ") and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-h"], ["train", "-h"], ["reproduce", "-h"], ["reproduce", "pack", "-h"]])
def test_the_short_form_of_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_shells_complete_commands_and_options() -> None:
    """What a shell asks for, after `shoal --install-completion`."""
    for words, place, wanted in (("shoal re", "1", "results"), ("shoal results --h", "2", "--history")):
        environment = {**os.environ, "_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        code = "import sys; from shoal.cli import main; sys.argv = ['shoal']; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert wanted in done.stdout.split(), (words, done.stdout, done.stderr)
