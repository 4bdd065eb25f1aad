"""`shoal explain FILE`: mistakes with their lines, and the file's own settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.app import main

FILE = """\
model = {{ use = "mlp", features = {features}, hidden = 32 }}
data = "digits"
loss = "cross_entropy"
epochs = 2
seeds = 3

[run]
device = "{device}"
memory = "600kB"
"""


def written(folder: Path, features: int = 64, device: str = "cpu") -> str:
    path = folder / "sweep.toml"
    path.write_text(FILE.format(features=features, device=device))
    return str(path)


def test_a_mistake_in_the_jobs_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", written(tmp_path, features=63), "--no-measure"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "sweep.toml:1: forward raised" in line


def test_the_settings_of_the_file_count_and_options_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*options: str) -> dict[str, object]:
        assert main(["explain", written(tmp_path), "--no-measure", "--json", *options]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    tight, wide = plan(), plan("--memory", "1GB")
    assert tight["device"] == "cpu" and tight["waiting"] and not wide["waiting"]
    assert main(["explain", written(tmp_path, device="tpu"), "--no-measure"]) == 1
    assert "sweep.toml:8: run.device is 'tpu'" in capsys.readouterr().err
