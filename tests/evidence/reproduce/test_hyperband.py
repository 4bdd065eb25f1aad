"""`shoal reproduce hyperband`: the ways do the same search; the table says what was measured."""

import json
from pathlib import Path

import pytest
import torch

from shoal.cli.app import main
from shoal.evidence.reproduce import hyperband as paper
from shoal.evidence.reproduce.plain_training import PlainTraining
from shoal.tune.brackets import hyperband as brackets

SCENE = paper.Scene(max_epochs=4, eta=2)


def test_every_way_has_a_title() -> None:
    assert paper.WAYS.keys() == paper.TITLES.keys()


@pytest.mark.parametrize("space", paper.SPACES)
def test_the_ways_do_the_same_search(space: str) -> None:
    scene = paper.Scene(space=space, max_epochs=4, eta=2)
    make_job = paper.make_job_for(scene)
    packed, one = paper.shoal_way(scene, make_job), paper.one_at_a_time(scene, make_job)
    planned = brackets(4, 2)
    for outcome in (packed, one):
        assert outcome["trials"] == sum(bracket.size for bracket in planned)
        assert outcome["epochs"] == sum(bracket.epochs for bracket in planned)
    assert abs(packed["best"] - one["best"]) < 0.02 and packed["params"] == one["params"]


def test_optuna_has_the_same_budget() -> None:
    pytest.importorskip("optuna")
    outcome = paper.WAYS["optuna"](SCENE, paper.make_job_for(SCENE))
    assert outcome["epochs"] == sum(bracket.epochs for bracket in brackets(4, 2)) and outcome["best"] > 0.3


def test_the_plain_loop_is_the_job() -> None:
    import shoal

    job = paper.make_job_for(SCENE)({"lr": 0.01, "weight_decay": 1e-3})
    plain = PlainTraining(job, "cpu")
    values = [plain.epoch() for _ in range(4)]
    solo = shoal.solo(job)
    assert values == pytest.approx([row["accuracy"] for row in solo.history], abs=0.005)
    for x, y in zip(plain.model.parameters(), solo.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_cnn_has_batch_norm_and_dropout_and_is_stacked() -> None:
    scene = paper.Scene(network="cnn", max_epochs=2, eta=2)
    model = paper.make_job_for(scene)({"lr": 0.01, "weight_decay": 1e-3}).model()
    kinds = {type(part) for part in model}
    assert {torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.Dropout} <= kinds
    outcome = paper.shoal_way(scene, paper.make_job_for(scene))
    assert outcome["epochs"] == sum(bracket.epochs for bracket in brackets(2, 2)) and outcome["best"] > 0.5
    assert outcome["note"] == "tiers: stacked"


def test_without_optuna_its_way_is_left_out_and_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    monkeypatch.setattr(paper, "_measure", lambda way, scene, end: {"seconds": 1.0, "best": 0.9})
    result = paper.hyperband(SCENE, rounds=1, limit=1.0)
    assert [line["way"] for line in result["lines"]] == ["one", "shoal"]
    console = Console(width=200)
    with console.capture() as shown:
        paper.table(result, console)
    assert "not installed: Optuna's Hyperband: pip install 'shoal[tune]'" in shown.get()


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["reproduce", "hyperband", "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [line["way"] for line in result["lines"]] == list(paper.installed_ways(ray=False))
    assert all(line["seconds"] > 0 and not line["error"] for line in result["lines"])
    assert "published gain of pack-aware Hyperband: 2.7x" in capsys.readouterr().out


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "hyperband", "--space", "wide"]) == 1
    assert "space is 'wide'; use plain or shapes" in capsys.readouterr().err
    assert main(["reproduce", "hyperband", "--network", "rnn"]) == 1
    assert "network is 'rnn'; use mlp or cnn" in capsys.readouterr().err
    assert main(["reproduce", "hyperband", "--data", "/nowhere"]) == 1
    assert "mnist.npz is not there" in capsys.readouterr().err
