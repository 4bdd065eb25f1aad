"""IST's comparison: settings chosen without the test rows, curves, what is said of them; and over real links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.evidence.bench.datasets import load
from shoal.evidence.reproduce import ist, ist_report, namespaces
from shoal.evidence.reproduce.ist import DATA_PARALLEL, IST, LOCAL_SGD, Scene, Setting

SCENE = Scene(data=load(), width=32, batch=32, steps=8)


def row(method: str, window: int, points: list[tuple[float, float, float]], seed: int = 0) -> dict[str, Any]:
    curve = [{"step": 10.0 * i, "bytes": b, "seconds": s, "accuracy": a} for i, (b, s, a) in enumerate(points)]
    return {"method": method, "window": window, "rate": 0.1, "seed": seed, "curve": curve, "bytes": points[-1][0],
            "seconds": points[-1][1], "steps": 10 * (len(points) - 1)}  # fmt: skip


def test_rows_that_are_held_out_are_no_test_rows() -> None:
    data = load()
    inner = data.held_out()
    assert len(inner.x) + len(inner.x_test) == len(data.x)
    both = torch.cat([inner.x, inner.x_test]).sort(0).values
    assert torch.equal(both, data.x.sort(0).values)


@pytest.mark.parametrize("method", [DATA_PARALLEL, LOCAL_SGD, IST])
def test_one_training(method: str) -> None:
    window = 1 if method == DATA_PARALLEL else 4
    found = ist.trained(SCENE, Setting(method=method, window=window, rate=0.05, steps=8), 0, look_every=4)
    assert found["status"] == "done" and found["bytes"] == found["bytes_predicted"] > 0
    assert [point["step"] for point in found["curve"]] == [4, 8]


def test_what_is_said() -> None:
    rows = [
        row(DATA_PARALLEL, 1, [(0, 0, 0.1), (100, 100, 0.8)]),
        row(LOCAL_SGD, 20, [(0, 0, 0.1), (10, 30, 0.7), (20, 60, 0.8)]),
        row(IST, 50, [(0, 0, 0.1), (1, 5, 0.8), (2, 10, 0.9)]),
        row(IST, 5, [(0, 0, 0.1), (5, 5, 0.5), (9, 10, 0.6)]),
    ]
    lines = ist.summary(rows)
    assert {line["target"] for line in lines} == {0.8}
    assert [line["seconds_to_target"] for line in lines] == [100, 60, 5, None]
    assert ist_report.faster(lines, LOCAL_SGD) == 12 and ist_report.faster(lines, DATA_PARALLEL) == 20


def test_a_file_that_is_no_earlier_run(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    done = CliRunner().invoke(app, ["reproduce", "ist", "--settings", str(wrong), "--quick"])
    assert done.exit_code and "holds no earlier run" in str(done.exception)


@pytest.mark.slow
def test_the_whole_comparison(tmp_path: Path) -> None:
    out, plot = tmp_path / "ist.json", tmp_path / "ist.png"
    link = "none" if namespaces.missing() else "100mbit"
    words = ["reproduce", "ist", "--quick", "--link", link, "--out", str(out), "--plot", str(plot)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert {line["method"] for line in found["summary"]} == {DATA_PARALLEL, LOCAL_SGD, IST}
    assert plot.stat().st_size > 10_000
    if link != "none":
        assert {line["method"] for line in found["links"]["summary"]} >= {DATA_PARALLEL}


@pytest.mark.slow
@pytest.mark.skipif(namespaces.missing() is not None, reason="needs root, ip and tc")
def test_over_links_the_network_is_the_same() -> None:
    from shoal.evidence.reproduce.ist_links import over_links

    setting = Setting(method=IST, window=4, rate=0.05, steps=8)
    here = ist.trained(SCENE, setting, 0, look_every=4)
    with namespaces.shaped(SCENE.workers, "50mbit") as links:
        there = over_links(SCENE, setting, 0, links, look_every=4)
    assert [p["accuracy"] for p in there["curve"]] == [p["accuracy"] for p in here["curve"]]
    assert abs(there["bytes"] / here["bytes"] - 1) < 0.3  # small messages: headers and descriptions count
