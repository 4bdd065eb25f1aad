"""What a person sees of a study while it runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.tune.studies.problems import tune

from shoal.reporting._tally import Tally
from shoal.tune.brackets import hyperband
from shoal.tune.studies.progress import HEAD, StudyView
from shoal.tune.trial import Trial


def view() -> StudyView:
    trials = [Trial(n, {"lr": 0.1 * n}, "running", {1: 0.1 * n, 2: 0.2}, bracket=2, rung=1) for n in range(3)]
    trials += [Trial(n, {"lr": 0.1}, "pruned", {1: 0.05}, bracket=2) for n in range(3, 9)]
    trials += [Trial(9, {"lr": 0.5}, "paused", {3: 0.9}, bracket=1), Trial(10, {"lr": 0.5}, bracket=1)]
    return StudyView(trials, hyperband(9, 3), "accuracy", "max")


def test_rows_are_brackets_and_their_survivors() -> None:
    rows = [dict(zip(HEAD, row, strict=True)) for row in view().rows()]
    assert rows[0] == {
        "bracket": "2", "rung": "1: 3 to 3", "training": "3", "arrived": "0", "stopped": "6", "best": "0.2",
    }  # fmt: skip
    assert rows[1] == {
        "bracket": "1", "rung": "0: 5 to 3", "training": "1", "arrived": "1", "stopped": "0", "best": "0.9",
    }  # fmt: skip


def test_line_and_picture_name_the_best() -> None:
    shown, tally = view(), Tally([])
    assert "11 trials, 4 training, 6 ended" in shown.line(tally)
    assert "best accuracy 0.9 of trial 9 after 3 epochs (lr=0.5)" in shown.line(tally)
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(shown.picture(tally))
    text = console.export_text()
    assert "best accuracy 0.9" in text and all(name in text for name in HEAD)


def test_nothing_yet() -> None:
    shown = StudyView([Trial(0, {})], [], "accuracy", "max")
    assert shown.best() == "no accuracy yet" and shown.rows() == [["0", "0", "1", "0", "0", "-"]]


def test_the_brackets_are_printed_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def follow(event: object) -> None:
        order.append(capsys.readouterr().err)

    tune(max_epochs=3, progress=True, events=follow)
    assert "hyperband, 5 trials" in order[0] and "3 to 1" in order[0]


def test_the_last_line_is_the_study_as_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second call only reads the folder
        study = tune(max_epochs=3, progress=True, out=tmp_path / "out")
        *_, before, last = capsys.readouterr().err.splitlines()
        assert f"5 trials, 0 training, 5 ended, best accuracy {study.best_value:.4g} of {study.best.name}" in last
        assert not before.startswith("shoal: 5 trials"), "a short study has one line"
