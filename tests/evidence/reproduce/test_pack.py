"""Pack's table beside ours."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.cli.app import main
from shoal.evidence.bench.memory import Memory
from shoal.evidence.bench.report import draw_bars
from shoal.evidence.bench.run import Outcome
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.pack import bars, line, scale, table


def found(network: str, ratio: float | None) -> list[dict[str, Any]]:
    memory = Memory(growth=200)
    eager = Outcome(network=network, way="eager", members=4, times_ms=[8.0], memory=Memory(growth=100), ratio=1.0)
    packed = Outcome(network=network, way="shoal", members=4, times_ms=[5.0], memory=memory, ratio=ratio)
    if ratio is None:
        packed = Outcome(network=network, way="shoal", members=4, error="out of [memory]")
    return [eager.to_dict(), packed.to_dict()]


def test_gain_is_the_share_of_sequential_time_saved(tmp_path: Path) -> None:
    good, bad = line(*found("resnet50", 1.6)), line(*found("densenet121", None))
    assert good["gain"] == pytest.approx(0.375)  # (8 - 5) / 8
    assert good["published"] == 0.27
    assert good["ceiling"] == 0.75
    assert good["memory_ratio"] == 2
    assert bad["gain"] is None
    assert bad["published"] is None
    result = {"stamp": stamp("cpu", 1), "precision": "fp32", "scale": scale("cpu", quick=False), "lines": [good, bad]}
    screen = Console(file=StringIO(), width=200)
    table(result, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in ("37.5 %", "27.0 %", "no room", "out of (memory]", "Input 3 x 64 x 64, batch 4"):
        assert text in shown
    draw_bars(tmp_path / "p.png", bars(result), ylabel="gain", title="test")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_gpu_runs_at_the_published_scale() -> None:
    assert scale("cuda", quick=False) == {"side": 224, "batch_size": 32}


def test_quick_run_measures_the_loop(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    args = ["mlp3", "--sizes", "2", "--quick", "--device", "cpu", "--threads", "1", "--out", str(file)]
    assert main(["reproduce", "pack", *args]) == 0
    (row,) = json.loads(file.read_text())["lines"]
    assert row["network"] == "mlp3"
    assert row["packed"] == 2
    assert row["sequential_ms"] > 0


@pytest.mark.parametrize(("args", "says"), [(["vgg"], "no network 'vgg'"), (["--sizes", "2,9"], "sizes is '2,9'")])
def test_mistakes_get_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "pack", *args, "--quick", "--device", "cpu"]) == 1
    assert says in capsys.readouterr().err
