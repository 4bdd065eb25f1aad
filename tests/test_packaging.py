"""The wheel: everything that the source has is in it, and it works in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
from pathlib import Path
import torch, torch.nn.functional as F
import shoal

assert Path(shoal.__file__).is_relative_to(sys.prefix), shoal.__file__
x, y = torch.randn(64, 4), torch.randn(64, 1)
settings = {"model": lambda: torch.nn.Linear(4, 1), "data": (x, y), "val": (x, y), "loss": F.mse_loss}
jobs = [shoal.Job(**settings, hparams={"lr": lr}, epochs=2) for lr in (0.01, 0.1)]
shoal.train(jobs, device="cpu", out="run")
print(shoal.load("run").best("val_loss").status)
make_job = lambda params: shoal.Job(**settings, hparams=params)
study = shoal.tune(make_job, {"lr": ("log", 1e-4, 1e-1)}, max_epochs=3, device="cpu")
study.report("report.html")
"""


def run(*command: object, folder: Path) -> str:
    """What a command prints, without the source tree on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=clean, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_has_every_file(wheel: Path) -> None:
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "shoal").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert packed == expected and "shoal/py.typed" in packed
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert metadata.count("Project-URL: ") == len(urls)
    assert all(f"Project-URL: {name}, {url}" in metadata for name, url in urls.items())
    assert ".example" not in metadata, "an address that does not exist"


@pytest.mark.slow
def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment that sees this one's torch and other libraries, and no source tree."""
    home = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", home, folder=tmp_path)
    python = home / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    )
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, folder=tmp_path)
    # After its own packages, so that an editable install of Shoal there is not the one that is found.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(python, "-c", SCRIPT, folder=tmp_path).strip() == "done"
    assert "<html" in (tmp_path / "report.html").read_text()
    shoal = home / "bin" / "shoal"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version in run(shoal, "--version", folder=tmp_path)
    assert "train" in run(shoal, "--help", folder=tmp_path)
    assert "done" in run(shoal, "results", "run", folder=tmp_path)
