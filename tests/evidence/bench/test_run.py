"""The measuring itself: ratios, failures, limits, and the command."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.app import main
from shoal.evidence.bench.child import ignoring_interrupts
from shoal.evidence.bench.report import _plain, peak, size
from shoal.evidence.bench.run import Outcome, Settings, set_ratios


def outcome(way: str, times: list[float]) -> Outcome:
    return Outcome(network="tiny", way=way, members=2, times_ms=times)


def test_on_a_cpu_the_ratio_is_taken_within_rounds() -> None:
    eager, fast = outcome("eager", [10, 100, 10]), outcome("shoal", [5, 50, 1])
    set_ratios([eager, fast], paired=True)
    assert fast.ratio == 2
    assert eager.ratio == 1
    set_ratios([eager, fast], paired=False)
    assert fast.ratio == 2  # 10 / 5: the medians


def test_no_ratio_without_a_baseline_or_a_time() -> None:
    failed, alone = outcome("vmap", []), outcome("shoal", [1])
    set_ratios([failed, alone], paired=True)
    assert failed.ratio is alone.ratio is None


@pytest.mark.parametrize("wrong", [{"ways": ("magic",)}, {"rounds": 0}, {"limit": 0.0}], ids=["way", "rounds", "limit"])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"magic|rounds is 0|limit is 0"):
        Settings(**wrong)


def test_figures_for_people() -> None:
    assert peak({"reserved": None, "growth": 5}) == 5
    assert peak({"reserved": 6, "growth": None}) == 6
    assert size(2e9) == "2 GB" and size(None) == ""
    assert _plain("a [red] b") == "a (red) b"


def test_quick_bench_writes_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of unlike networks, so that one way fails: it leaves its reason, and the other its times."""
    args = [
        "bench",
        "mixed",
        "--members",
        "2",
        "--batch-size",
        "2",
        "--ways",
        "vmap,eager",
        "--quick",
        "--device",
        "cpu",
    ]
    files = ["--out", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main([*args, "--threads", "1", *files]) == 0
    shown = capsys.readouterr().out
    for text in ("sequential, eager", "vmap needs networks of one architecture"):
        assert text in shown
    result = json.loads((tmp_path / "b.json").read_text())
    eager, vmap = result["results"]
    assert (eager["way"], eager["error"], eager["ratio"]) == ("eager", None, 1.0)
    assert len(eager["times_ms"]) == 2
    assert eager["memory"]["growth"] is None or eager["memory"]["growth"] > 0
    assert vmap["ms"] is None
    assert "here are cnn, mlp" in vmap["error"]
    assert {"commit", "source", "processor", "torch"} <= set(result["stamp"])
    assert (tmp_path / "b.png").stat().st_size > 5000


def test_a_process_that_still_imports_does_not_hear_an_interrupt() -> None:
    command = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"]
    before = signal.getsignal(signal.SIGINT)
    with ignoring_interrupts():
        started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout.strip() == "True"
    assert signal.getsignal(signal.SIGINT) is before


def test_json_is_printed_in_place_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["tiny", "--members", "2", "--ways", "eager", "--quick", "--device", "cpu", "--threads", "1"]
    assert main(["bench", *args, "--json"]) == 0
    assert [row["way"] for row in json.loads(capsys.readouterr().out)["results"]] == ["eager"]


@pytest.mark.parametrize(
    ("args", "says", "status"),
    [
        (["vgg"], "no network 'vgg'", 1),
        (["tiny", "--ways", "magic"], "no way 'magic'", 1),
        (["tiny", "--device", "tpu"], "device is 'tpu'", 2),
        (["tiny", "--precision", "fp8"], "precision is 'fp8'", 1),
    ],
)
def test_mistakes_get_one_line(args: list[str], says: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args, "--quick"]) == status
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
