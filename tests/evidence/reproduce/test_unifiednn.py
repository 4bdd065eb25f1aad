"""UnifiedNN's comparison: the two ways train the same networks."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal.cli.app import main
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.digits import accuracy, jobs, load, vanilla
from shoal.evidence.reproduce.unifiednn import PUBLISHED, bars, saved, table


def test_the_vanilla_loop_is_the_reference_loop() -> None:
    from shoal.reference import solo

    x, y, _, _ = load()
    for job in jobs(4, 1, (x[:80], y[:80]), same=False):  # the last batch is short
        model = vanilla(job, torch.device("cpu"))
        for a, b in zip(model.parameters(), solo(job).model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_users_and_data() -> None:
    x, y, xt, yt = load()
    assert {job.name.split()[0] for job in jobs(8, 1, (x, y), same=True)} == {"CNN"}
    names = [job.name.split()[0] for job in jobs(5, 1, (x, y), same=False)]
    assert names == ["CNN", "MLP", "LSTM", "encoder", "CNN"]
    assert x.shape == (1437, 1, 28, 28)
    assert xt.shape == (360, 1, 28, 28)
    assert len(y) + len(yt) == 1797


def test_accuracy_counts_right_rows() -> None:
    class Says(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.eye(3)[x.long()] + self.weight

    assert accuracy(Says(), torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([0, 1, 2, 0])) == 0.75


def test_what_is_saved_is_a_share_of_the_processes() -> None:
    many = {"way": "processes", "error": None, "memory": 400, "seconds": 10.0, "training_seconds": 8.0}
    one = {"way": "shoal", "error": None, "memory": 100, "seconds": 5.0, "training_seconds": 2.0}
    many |= {"train_accuracy": [0.9, 0.8], "test_accuracy": [0.9, 0.7]}
    one |= {"train_accuracy": [0.9, 0.8], "test_accuracy": [0.9, 0.75]}
    line = saved(many, one)
    assert line["memory_saved"] == 0.75
    assert line["time_saved"] == 0.5
    assert line["training_saved"] == 0.75
    assert line["largest_accuracy_change"] == pytest.approx(0.05)
    broken = saved(many, {"way": "shoal", "error": "it died"})
    assert set(broken.values()) == {None}
    ways = [many, {"way": "shoal", "error": "it died"}]
    lines = [{"networks": "good", "ways": [many, one], **line}, {"networks": "bad", "ways": ways, **broken}]
    result = {"stamp": stamp("cpu", 1), "epochs": 1, "published": PUBLISHED, "lines": lines}
    screen = Console(file=StringIO(), width=200)
    table(result, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "75.0 %" in shown
    assert "up to 81.0 %" in shown
    assert "it died" in shown
    assert bars(result)[0] == ("good: memory", 0.75, 0.53)


@pytest.mark.slow
def test_quick_run_saves_memory_and_keeps_accuracy(tmp_path: Path) -> None:
    args = ["--device", "cpu", "--out", str(tmp_path / "u.json"), "--plot", str(tmp_path / "u.png")]
    assert main(["reproduce", "unifiednn", "--quick", *args]) == 0
    result = json.loads((tmp_path / "u.json").read_text())
    assert [line["ways"][1]["error"] for line in result["lines"]] == [None, None]
    for line in result["lines"]:
        assert line["largest_accuracy_change"] < 0.01
        assert line["memory_saved"] > 0.2
    assert (tmp_path / "u.png").exists()
