"""The demonstration's arithmetic, and that its two ways train the same networks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.equality import TOLERANCE, distance

import shoal
from shoal.cli.app import main
from shoal.evidence.demo import task, worker
from shoal.evidence.demo.compare import Comparison, compare, draw, largest_difference


def ways(trained: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two workers' results for four networks, of which so many were trained alone."""
    weights = {f"{i}/w": np.full(3, i + 1.0) for i in range(4)}
    histories = [[{"accuracy": 0.1 * i, "val_loss": 1.0}] for i in (1, 3, 3, 2)]
    histories[2][0]["val_loss"] = 0.5
    common = {"before": 1, "peak": 2}
    some = {f"{i}/w": weights[f"{i}/w"] for i in range(trained)}
    alone = {**common, "seconds": 10.0, "trained": trained, "histories": histories[:trained], "weights": some}
    packed = {**common, "seconds": 2.0, "trained": 4, "histories": histories, "tiers": ["stacked"], "weights": weights}
    return alone, packed


CHECKED = {"difference": 3e-15, "trained": 3, "steps": 90}


def compared(trained: int) -> Comparison:
    return compare(*ways(trained), CHECKED, list("abcd"))


def test_all_trained_alone_is_measured() -> None:
    found = compared(4)
    assert (found.gain, found.alone_seconds_estimated) == (5.0, None)
    assert (found.best_name, found.same_accuracy, found.largest_difference) == ("c", 4, 0.0)
    assert found.speedup_text == "5.0 times faster"


def test_a_part_trained_alone_is_estimated() -> None:
    found = compared(1)
    assert (found.gain, found.alone_seconds_estimated, found.alone_total) == (20.0, 40.0, 40.0)


def test_no_gain_is_said_too() -> None:
    assert dataclasses.replace(compared(4), gain=0.5).speedup_text == "2.0 times slower"


def test_a_difference_is_found() -> None:
    alone, packed = {"1/w": np.array([2.0, 2.0, 2.5])}, {"1/w": np.full(3, 2.0), "3/w": np.zeros(3)}
    assert largest_difference(alone, packed) == pytest.approx(0.5 / 2.5)


@pytest.mark.parametrize(("float32", "float64", "status"), [(1.5e-2, 3e-15, 0), (1e-6, 2e-9, 1)])
def test_equality_is_judged_in_float64(
    float32: float,
    float64: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A ReLU that rounding flips in float32 is reported; only float64 makes the demo fail."""

    def run(way: str, longest: float, progress: object) -> dict[str, Any]:
        alone, packed = ways(4)
        alone["weights"] = {f"{i}/w": np.full(3, (i + 1.0) / (1 + float32)) for i in range(4)}
        packed |= {"names": list("abcd"), "rates": [0.1, 0.1, 0.2, 0.3]}
        return {"alone": alone, "packed": packed, "checked": CHECKED | {"difference": float64}}[way]

    monkeypatch.setattr("shoal.cli.demo._run", run)
    assert main(["demo", "--json", "--picture", str(tmp_path / "demo.png")]) == status
    captured = capsys.readouterr()
    reported = json.loads(captured.out)
    assert reported["largest_difference"] == pytest.approx(float32) and reported["float64_difference"] == float64
    assert ("in float64 a packed network differs" in captured.err) == (status == 1)


def test_check_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker compares weights of packed networks with those of a plain loop, and agrees."""
    jobs = task.jobs
    monkeypatch.setattr(task, "jobs", lambda *args: [jobs(*args)[i] for i in (0, 21, 63)])
    monkeypatch.setattr(task, "CHECKED_EPOCHS", 1)
    reported = worker.checked(lambda progress: None, longest=60.0)
    assert reported["difference"] <= 1e-9 and (reported["trained"], reported["steps"]) == (3, 45)


def test_a_part_of_the_check_covers_the_sweep() -> None:
    assert sorted(worker.spread(64)) == list(range(64)) and sorted(worker.spread(3)) == [0, 1, 2]
    jobs = task.jobs()
    first = [dict(cell.split("=") for cell in jobs[i].name.split()) for i in worker.spread(64)[:16]]
    assert {float(names["lr"]) for names in first} == set(task.LEARNING_RATES)
    assert {float(names["dropout"]) for names in first} == set(task.DROPOUTS)


def test_picture(tmp_path: Path) -> None:
    alone, packed = ways(1)
    found = compare(alone, packed, CHECKED, list("abcd"))
    draw(tmp_path / "demo.png", found, packed["histories"], [0.1, 0.1, 0.2, 0.3])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_is_64_different_networks() -> None:
    assert len({job.name for job in task.jobs()}) == 64


def test_packed_is_the_same_training_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "EPOCHS", 1)
    jobs = [task.jobs(torch.float64)[i] for i in (0, 21, 63)]
    results = shoal.train(jobs, device="cpu", threads=1)
    for job, result in zip(jobs, results, strict=True):
        model, history = task.train_alone(job)
        for a, b in zip(result.model.state_dict().values(), model.state_dict().values(), strict=True):
            assert distance(a, b) <= TOLERANCE
        assert result.history[-1]["val_loss"] == pytest.approx(history[-1]["val_loss"], rel=TOLERANCE)


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--longest", "1", "--picture", str(tmp_path / "demo.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["networks"] == 64
    assert found["float64_difference"] <= 1e-9 and found["float64_networks"] >= 1
    assert found["packed_peak_bytes"] > found["import_bytes"] > 0
    assert (tmp_path / "demo.png").exists()
