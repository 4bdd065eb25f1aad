"""`shoal split`: local workers, a coordinator with workers that join, torchrun, and what goes wrong in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli.app import main

FILE = """
model = {{ use = "net.py:net", width = {width} }}
data = "points.csv"
val = "points.csv"
loss = "cross_entropy"
optimizer = "SGD"
hparams.lr = {lr}
batch_size = 8
epochs = {epochs}
"""
NET = """
from torch import nn

def net(width=16):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

def odd(width=1):
    return nn.Linear(3, 2)
"""


def write(folder: Path, *, width: int = 16, lr: float = 0.1, epochs: int = 4, name: str = "job.toml") -> Path:
    rows = [f"{i % 7 / 7},{i % 5 / 5},{i % 3 / 3},{int(i % 7 > 3)}" for i in range(215)]
    (folder / "points.csv").write_text("a,b,c,y\n" + "\n".join(rows) + "\n")
    (folder / "net.py").write_text(NET)
    (folder / name).write_text(FILE.format(width=width, lr=lr, epochs=epochs))
    return folder / name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def shoal(*args: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "split", *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.parametrize("method", ["ist", pytest.param("data-parallel", marks=pytest.mark.slow)])
def test_local_workers(file: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", str(file), "--method", method, "--workers", "2", "--json", "--link", "1Gbit"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "done" and found["tier"] == "distributed" and found["split"]["workers"] == 2
    report = found["split"]
    assert report["bytes_measured"] == pytest.approx(report["bytes_predicted"], rel=0.02)


def test_explain_says_whether_it_pays_and_trains_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", str(file), "--explain", "--json", "--link", "1kbit 1s"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["method"] for f in found["forecasts"]] == ["ist", "local_sgd", "data_parallel"]
    assert found["sentence"].startswith("Splitting does not pay here")
    assert main(["split", str(file), "--explain", "--link", "1kbit 1s"]) == 0
    assert "Splitting does not pay here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--method", "lstm"], "method is 'lstm'; use one of ist, local-sgd, data-parallel, sil"),
        (
            ["--method", "local-sgd", "--overlap", "0.5"],
            "--overlap has no effect on local-sgd; it is for ist: leave it out",
        ),
        (["--codec", "int4"], "codec is 'int4'; use one of 'exact', 'fp16', 'bf16', 'int8'"),
        (["--link", "fast"], "link is 'fast'; give its speed, such as 100Mbit, 1Gbit or '100Mbit 5ms'"),
        (["--join", "nowhere"], "'nowhere' is not an address; give HOST:PORT, such as 10.0.0.1:29500"),
        (["--join", "a:1", "--coordinator", "b:2"], "this process cannot be the coordinator and join one"),
        (["--shard", "1"], "--shard is for the data of a worker; give it with --join"),
        (["--local", "9", "--workers", "2"], "--local is 9 and there are 2 workers; use at most 2"),
        (["--deadline", "0"], "deadline is 0.0; use seconds above 0"),
        (["--workers", "40"], "40"),
        (["--patience", "-1"], "patience is -1; use seconds above 0"),
        (["--checkpoint-every", "often"], "checkpoint_every is 'often'; use seconds, or a time such as '60s' or '5m'"),
        (["--method", "sil", "--no-scale"], "--scale has no effect on sil; it is for ist: leave it out"),
        (["--method", "sil", "--variant", "C"], "variant is 'C'; use one of heads, A, B"),
        (["--out", "/dev/null/x"], "out='/dev/null/x' cannot be written"),
        (["--shares", "a,b"], "shares is 'a,b'; use 'speed', or a number for each worker"),
        (["--method", "sil", "--cuts", "nothing"], "nothing"),
        (["--join", "127.0.0.1:1", "--patience", "0.1"], "no coordinator at 127.0.0.1:1 for 0.1 s"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(file: Path, options: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = 2 if "--checkpoint-every" in options else 1  # such a value is refused before the jobs are read
    assert main(["split", str(file), "--no-progress", *options]) == status
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("shoal: ") and line in told


def test_a_cut_network_reports_its_parts(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "sil", "--workers", "3", "--link", "1Mbit", "--json", "--progress"]
    assert main(["split", str(file), *options]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)["split"]
    assert report["method"] == "sil heads" and report["cut_at"] and report["joined"]["accuracy"] > 0.5
    assert report["bytes_measured"] == pytest.approx(report["bytes_predicted"], rel=0.02)
    assert "2 parts, 3 workers: 1 in reserve if one is lost" in err


def test_a_file_of_several_jobs_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text() + "seeds = 2\n")
    assert main(["split", str(file)]) == 1
    assert "has 2 jobs; a split takes one" in capsys.readouterr().err


def test_a_network_that_cannot_be_cut_is_told(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("net.py:net", "net.py:odd"))
    assert main(["split", str(file), "--no-progress"]) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_workers_join_a_coordinator_and_one_has_another_job(tmp_path: Path) -> None:
    file, port = write(tmp_path), free_port()
    other = write(tmp_path, lr=0.2, name="other.toml")
    where = f"127.0.0.1:{port}"
    lead = shoal(file, "--coordinator", where, "--workers", 3, "--local-steps", 5, "--json", "--progress")
    first, second, wrong = (shoal(path, "--join", where) for path in (file, file, other))
    code, _, said = ended(wrong)
    assert code == 1 and said.splitlines()[-1].startswith("shoal: worker ")
    assert "hparams (lr) is 0.2 there and 0.1 here" in said and "Traceback" not in said
    code, out, err = ended(lead)
    assert code == 0, err
    assert json.loads(out)["split"]["workers"] == 2 and "has another job than the coordinator" in err
    for worker in (first, second):
        code, _, err = ended(worker)
        assert code == 0 and "has finished; " in err and "Traceback" not in err


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_from_its_checkpoint_and_its_workers_return(tmp_path: Path) -> None:
    file, where = write(tmp_path, epochs=100), f"127.0.0.1:{free_port()}"
    command = (
        file, "--coordinator", where, "--workers", 2, "--local-steps", 5, "--method", "local-sgd",
        "--out", tmp_path / "out", "--checkpoint-every", "0.2s", "--progress", "--json",
    )  # fmt: skip
    lead, workers = shoal(*command), [shoal(file, "--join", where) for _ in range(2)]
    assert lead.stderr is not None
    for line in lead.stderr:
        if line.startswith("shoal: round 4"):
            break
    os.kill(lead.pid, signal.SIGKILL)
    lead.communicate()
    assert all(worker.poll() is None for worker in workers)
    code, out, err = ended(shoal(*command))
    assert code == 0, err
    assert json.loads(out)["status"] == "done"
    (resumed,) = [line for line in err.splitlines() if ": resumed" in line]
    assert int(resumed.split()[2]) > 1
    for worker in workers:
        code, _, err = ended(worker)
        assert code == 0 and "lost the coordinator" in err and "Traceback" not in err


@pytest.mark.slow
def test_workers_of_a_coordinator_that_stays_away_end_with_a_line(tmp_path: Path) -> None:
    file, where = write(tmp_path, epochs=4000), f"127.0.0.1:{free_port()}"
    lead = shoal(file, "--coordinator", where, "--workers", 1, "--method", "local-sgd")
    worker = shoal(file, "--join", where, "--patience", 8)
    assert lead.stderr is not None
    next(line for line in lead.stderr if line.startswith("shoal: round"))
    os.kill(lead.pid, signal.SIGKILL)
    lead.communicate()
    code, _, err = ended(worker)
    assert code == 1 and "did not find it again in 8 s; start it again" in err.splitlines()[-1]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    file, port = write(tmp_path), free_port()
    started = time.monotonic()
    processes = [
        shoal(file, "--json", RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for rank in range(3)
    ]
    results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert json.loads(results[0][1])["split"]["workers"] == 3 and results[1][1] == ""
    assert time.monotonic() - started < 80
