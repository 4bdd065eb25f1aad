"""The demonstration's arithmetic, and that its two ways train the same networks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.cli.app import main
from shoal.demo import task
from shoal.demo.compare import Comparison, compare, draw, largest_difference


def ways(tmp_path: Path, trained: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two workers' results for four networks, of which so many were trained alone."""
    weights = {f"{i}/w": np.full(3, i + 1.0) for i in range(4)}
    np.savez(tmp_path / "packed.npz", **weights)
    np.savez(tmp_path / "alone.npz", **{f"{i}/w": weights[f"{i}/w"] for i in range(trained)})
    histories = [[{"accuracy": 0.1 * i, "val_loss": 1.0}] for i in (1, 3, 3, 2)]
    histories[2][0]["val_loss"] = 0.5
    common = {"before": 1, "peak": 2}
    alone = {**common, "seconds": 10.0, "trained": trained, "histories": histories[:trained]}
    return alone, {**common, "seconds": 2.0, "trained": 4, "histories": histories, "tiers": ["stacked"]}


def compared(tmp_path: Path, trained: int) -> Comparison:
    return compare(*ways(tmp_path, trained), list("abcd"), tmp_path)


def test_all_trained_alone_is_measured(tmp_path: Path) -> None:
    found = compared(tmp_path, 4)
    assert (found.gain, found.alone_seconds_estimated) == (5.0, None)
    assert (found.best_name, found.same_accuracy, found.largest_difference) == ("c", 4, 0.0)
    assert found.verdict == "5.0 times faster"


def test_a_part_trained_alone_is_estimated(tmp_path: Path) -> None:
    found = compared(tmp_path, 1)
    assert (found.gain, found.alone_seconds_estimated, found.alone_total) == (20.0, 40.0, 40.0)


def test_no_gain_is_said_too(tmp_path: Path) -> None:
    assert dataclasses.replace(compared(tmp_path, 4), gain=0.5).verdict == "2.0 times slower"


def test_a_difference_is_found(tmp_path: Path) -> None:
    ways(tmp_path, 4)
    np.savez(tmp_path / "alone.npz", **{"1/w": np.array([2.0, 2.0, 2.5]), "3/w": np.zeros(3)})
    assert largest_difference(tmp_path, 2) == pytest.approx(0.5 / 2.5)


def test_picture(tmp_path: Path) -> None:
    alone, packed = ways(tmp_path, 1)
    draw(
        tmp_path / "demo.png", compare(alone, packed, list("abcd"), tmp_path), packed["histories"], [0.1, 0.1, 0.2, 0.3]
    )
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_is_64_different_networks() -> None:
    assert len({setting.name for setting in task.settings()}) == 64


def test_packed_is_the_same_training_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "EPOCHS", 1)
    digits = task.Digits.load()
    picked = [0, 21, 63]
    jobs = task.jobs(digits)
    results = shoal.train([jobs[i] for i in picked], device="cpu", threads=1)
    for i, result in zip(picked, results, strict=True):
        model, history = task.train_alone(task.settings()[i], digits)
        for a, b in zip(result.model.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert result.history[-1]["val_loss"] == pytest.approx(history[-1]["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--longest", "1", "--picture", str(tmp_path / "demo.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["networks"] == 64
    assert found["largest_difference"] < 1e-3
    assert found["packed_peak_bytes"] > found["import_bytes"] > 0
    assert (tmp_path / "demo.png").exists()
