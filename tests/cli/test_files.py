"""`shoal init` and `shoal export`: what they write, from the command to the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.cli import main
from shoal.jobfile import load as load_file_of_jobs

NET = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    x, y = torch.randn(30, 4), torch.arange(30) % 2

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    jobs = [
        shoal.Job(model=build, data=(x, y), val=(x, y), loss=torch.nn.functional.cross_entropy, epochs=2, seed=seed,
                  name=f"seed={seed}")
        for seed in range(3)
    ]  # fmt: skip
    shoal.train(jobs, "cpu", tmp_path / "run")
    return tmp_path / "run"


def test_the_file_that_init_writes_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "first.toml"
    assert main(["init", str(path)]) == 0 and "shoal train" in capsys.readouterr().out
    file = load_file_of_jobs(str(path))
    assert len(file.jobs) == 18 and file.settings["out"].endswith("runs/first")
    results = shoal.train(file.jobs[:2], "cpu")
    assert all(result.status == "done" and result.values["accuracy"] > 0.5 for result in results)
    assert main(["init", str(path)]) == 1 and "exists" in capsys.readouterr().err
    assert main(["init", str(path), "--force"]) == 0
    assert main(["init", str(tmp_path / "x.json")]) == 2 and "ends in .toml" in capsys.readouterr().err


def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = shoal.load(folder)
    best = results.best("val_loss")
    assert main(["export", str(folder), "best.safetensors", "--best", "val_loss"]) == 0
    assert best.name in capsys.readouterr().out
    assert main(["export", str(folder), "one.pt", "--job", "seed=1"]) == 0
    for path, result in (("best.safetensors", best), ("one.pt", results["seed=1"])):
        written = load_file(path) if path.endswith("s") else torch.load(path)
        for key, tensor in result.state_dict().items():
            assert torch.equal(written[key], tensor)
    (tmp_path / "net.py").write_text(NET)
    assert main(["export", str(folder), "one.pt2", "--job", "seed=1", "--model", "net.py:build", "--shape", "1,4"]) == 0
    code = (
        "import torch, sys; s, x = torch.load('one.pt'), torch.randn(7, 4); m = torch.export.load('one.pt2').module()\n"
        "h = torch.relu(x @ s['0.weight'].T + s['0.bias']) @ s['2.weight'].T + s['2.bias']\n"
        "torch.testing.assert_close(m(x), h); assert 'shoal' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


TOKENS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).double()
"""


def test_export_of_other_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doubles are the inputs of a network of doubles, and tokens are said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(TOKENS)
    tokens, y = torch.randint(9, (20, 3)), torch.arange(20) % 2

    def build() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).double()

    job = shoal.Job(model=build, data=(tokens, y), loss=torch.nn.functional.cross_entropy, epochs=1, name="a")
    (result,) = shoal.train([job], "cpu", "run")
    command = ["export", "run", "a.pt2", "--model", "net.py:build", "--shape", "1,3"]
    assert main([*command, "--dtype", "int64"]) == 0
    torch.testing.assert_close(torch.export.load("a.pt2").module()(tokens), result.model(tokens))
    for more, status, words in (([], 1, "and dtype torch.float64 raised"), (["--dtype", "byte9"], 2, "'byte9'")):
        capsys.readouterr()
        assert main([*command, *more]) == status
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    (tmp_path / "other.py").write_text("import torch\nint('runs')\n")
    capsys.readouterr()
    assert main(["export", "run", "a.pt2", "--model", "other.py:build", "--shape", "1,3"]) == 1
    err = capsys.readouterr().err
    assert "importing 'other.py' raised ValueError" in err and "(other.py:2)" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["w.pt"], 2, "the folder has 3 jobs; say --job NAME, or --best METRIC"),
        (["w.onnx", "--job", "seed=0"], 2, "its name ends in .safetensors, .pt, .pt2"),
        (["w.pt", "--job", "a"], 1, "shoal: no job 'a' in this run; it has 'seed=0'"),
        (["w.pt", "--job", "a", "--best", "b"], 2, "use one of them"),
        (["w.pt2", "--job", "seed=0"], 2, "--model and --shape go with a .pt2 file"),
        (["w.pt", "--job", "seed=0", "--shape", "1,4"], 2, "--model and --shape go with a .pt2 file"),
        (["w.pt", "--job", "seed=0", "--dtype", "int64"], 2, "--dtype goes with a .pt2 file"),
        (["w.pt", "--job", "seed=0", "--mode", "max"], 2, "--mode says which way --best is better"),
        (["w.pt", "--best", "gap"], 1, "no result has a value of 'gap'"),
    ],
)
def test_mistakes(
    folder: Path, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), *arguments]) == status
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
