"""SIL's table: what it trains, and how it is shown."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from shoal.cli.app import main
from shoal.evidence.bench.datasets import load
from shoal.evidence.bench.published import mlp
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.sil import EQUAL, LINES, WAYS, apart, bars, job_of, memory, table


def test_the_networks_are_those_of_the_table() -> None:
    left, right, before = LINES[0]
    model = mlp(784, *left, *right, 10)
    widths = [layer.out_features for layer in model if isinstance(layer, torch.nn.Linear)]
    assert widths == [512, 256, 256, 128, 64, 10]
    assert before.keys() == WAYS.keys()


def test_the_cut_is_behind_the_left_layers() -> None:
    data = load(rows=64)
    for way in ("A", "B", "heads"):
        found = apart(job_of(data, (8, 6, 6), 0, 1), way, 1, "cpu")
        assert found["cut_bytes"] == found["cut_bytes_predicted"] == 8 * 4 * (10 if way == "A" else 64)
        assert 0 <= found["accuracy"] <= 1


def test_parts_of_equal_layers_hold_at_most_sixty_percent() -> None:
    found = memory(load(rows=64), 1)
    assert found["network"] == "64-" + "-".join(map(str, EQUAL)) + "-10"
    assert all(way["largest_peak_bytes_share"] <= 0.6 for way in found["ways"].values())


def test_ours_is_shown_beside_what_was_measured_before() -> None:
    costs = {"whole": {"peak_bytes": 100, "operations": 10}, "0": {"peak_bytes": 55, "operations": 6}}
    runs = [{"accuracy": 0.5, "costs": costs, "cut_bytes": 2048}]
    found = {"accuracy": 0.5, "deviation": 0.01, "before": 0.769, "left": 0.4, "runs": runs}
    way = {"costs": costs, "largest_peak_bytes_share": 0.55, "largest_operations_share": 0.6}
    result = {
        "stamp": stamp("cpu", 1), "data": "digits", "rows": 1, "test_rows": 1,
        "settings": {"epochs": 1, "batch": 1, "optimizer": "Adam 1e-3", "seeds": 1},
        "lines": [{"network": "64-32 / 8-10", "ways": {"A": found}}],
        "memory": {"network": "64-512", "ways": {"A": way}},
    }  # fmt: skip
    screen = Console(file=StringIO(), width=200)
    table(result, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in ("50.0 %", "76.9 %", "40.0 %", "55%", "2.05 kB"):
        assert text in shown
    assert bars(result) == [("64-32: labels A", 0.5, 0.769)]


@pytest.mark.slow
def test_quick_run_on_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        f"x_{k}": rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for k, n in (("train", 300), ("test", 50))
    }
    arrays |= {f"y_{k}": np.arange(n) % 10 for k, n in (("train", 300), ("test", 50))}
    np.savez(tmp_path / "mnist.npz", **arrays)
    args = ["--data", str(tmp_path), "--out", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    assert main(["reproduce", "sil", "--quick", *args]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert result["data"] == "MNIST"
    assert list(result["lines"][0]["ways"]) == list(WAYS)
    assert (tmp_path / "s.png").exists()
