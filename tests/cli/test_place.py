"""`shoal place`: from the command line to a file, and errors of one line."""

import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.place import Placement

CODE = """
import torch, torch.nn.functional as F
from torch import nn
import shoal

def network():
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 300)), torch.zeros(4, 20)

def job():
    data = torch.randn(64, 20), torch.randint(0, 300, (64,))
    return shoal.Job(model=lambda: network()[0], data=data, loss=F.cross_entropy, optimizer=torch.optim.Adam,
                     batch_size=32, steps=1, seed=0)

class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x

def looks():
    return Looks(), torch.zeros(2, 4)

def number():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_table_file_and_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--link", "100Mbit", "--no-measure", "--out", "placement.json", "--picture", "placement.svg"]
    assert main(["place", "net.py:network", *options]) == 0
    out = capsys.readouterr().out
    placement = Placement.load(folder / "placement.json")
    assert placement.explanation in out and "parameter server" in out
    assert (folder / "placement.svg").read_text().lstrip().startswith("<?xml")


def test_json_of_a_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "net.py:job", "--workers", "2", "--no-measure", "--cut", "1", "--json"]) == 0
    placement = Placement.from_dict(json.loads(capsys.readouterr().out))
    assert placement.rows == (16, 16)  # the job's batch is shared
    assert placement.cut_name == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net.py:looks"], "the network cannot be traced"),
        (["net.py:network", "--link", "fast"], "link is 'fast'"),
        (["net.py:network", "--memory", "1kB", "--server-memory", "1kB"], "no placement fits"),
        (["net.py:network", "--workers", "many"], "--workers is 'many'"),
        (["net.py:network", "--workers", "0"], "workers is 0"),
        (["net.py:network", "--picture", "placement.txt"], "not a kind of picture"),
        (["net.py:missing"], "has no 'missing'"),
        (["net.py:number"], "return a shoal.Job, or a network and a sample"),
        (["net.py:job", "--run", "--workers", "0"], "workers is 0"),
        (["net.py:job", "--run", "--patience", "-1"], "--patience is -1"),
    ],
)
def test_errors_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["place", *arguments, "--no-measure"]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err


def test_an_option_for_planning_with_run_is_a_wrong_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "net.py:job", "--run", "--out", "placement.json"]) == 2
    assert "--out is for planning; leave it out with --run" in capsys.readouterr().err
