"""The report of a study, as one HTML file."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.results import Results
from shoal.tune.brackets import hyperband
from shoal.tune.objectives import Objectives
from shoal.tune.report import ranked, study_report
from shoal.tune.space import parse
from shoal.tune.studies.study import Study
from shoal.tune.trial import Trial

SPACE = parse({"lr": ("log", 1e-5, 1e-1), "width": [64, 128], "optimizer": ["sgd", "<b>&"]})


def make_trials() -> list[Trial]:
    generator, trials = random.Random(1), []
    for bracket in hyperband(27, 3):
        for place in range(bracket.size):
            number, reached = len(trials), [rung for rung in bracket.rungs if place < rung.trials]
            values = {
                epoch: 0.9 - generator.random() / epoch
                for rung in reached
                for epoch in range(1, rung.epochs + 1, max(1, rung.epochs // 9))
            }
            values[reached[-1].epochs] = 0.5 + 0.4 * generator.random()
            state = "complete" if len(reached) == len(bracket.rungs) else "pruned"
            trials.append(
                Trial(
                    number,
                    SPACE.sample(1, number),
                    state,
                    dict(sorted(values.items())),
                    bracket.number,
                    len(reached) - 1,
                )
            )
    trials[3].values = {1: math.nan}
    trials[4] = Trial(4, trials[4].params, "failed", {}, 3, error="it raised")
    trials[5].values = {1: 1e30}
    return trials


class Balanced(HTMLParser):
    """Fails where an element is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag != "circle":
            assert self.open.pop() == tag


def test_one_page_without_a_network() -> None:
    page = study_report(
        make_trials(), hyperband(27, 3), "accuracy", "max", title="Digits <1>", notes=["3 s, 9x sooner"]
    )
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"https?:|//|<script|<link|@import|url\(|src=", page.replace("<!doctype html>", ""))
    assert "Digits &lt;1&gt;" in page and "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert 'content="width=device-width,initial-scale=1"' in page and "3 s, 9x sooner" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in re.sub("<title>.*?</title>", "", drawing)
    assert drawings[2].count("<polyline") == len(make_trials()) - 2  # each but the failed one and the one that is NaN


def test_the_best_comes_first() -> None:
    trials = [
        Trial(0, {"lr": 1.0}, "complete", {1: 0.1, 9: 0.7}),
        Trial(1, {"lr": 2.0}, "pruned", {1: 0.75}),
        Trial(2, {"lr": 3.0}, "complete", {9: 0.8}, attrs={"params": {"lr": 5.0}}),
        Trial(3, {"lr": 4.0}, "complete", {9: math.nan}),
        Trial(4, {"lr": 4.0}, "failed", {9: 0.9}),
        Trial(5, {"lr": 4.0}, "pruned", {3: 0.8}),
    ]
    assert [trial.number for trial in ranked(trials, "max")] == [2, 5, 1, 0, 4]
    assert [trial.number for trial in ranked(trials, "min")] == [0, 1, 2, 5, 4]
    page = study_report(trials, [], "accuracy", "max")
    assert '<span class="big">0.8</span> accuracy, trial 2 after 9 epochs' in page and "Brackets" not in page
    assert "<td>lr</td><td>5</td>" in page, "as population-based training left it"


def test_a_study_writes_its_report(tmp_path: Path) -> None:
    study = Study(
        objectives=Objectives(("accuracy",), ("max",)), max_epochs=27, scheduler="hyperband", trials=make_trials(),
        brackets=hyperband(27, 3), results=Results([]), seconds=3.5, folder=Path("runs/digits"), space=SPACE.to_json(),
    )  # fmt: skip
    page = study.report(tmp_path / "new" / "report.html").read_text()
    assert "hyperband, 3.5 s" in page and f"trial {study.best.number} after" in page
    assert "<title>Search runs/digits</title>" in page and re.search(r"written \d{4}-\d\d-\d\d \d\d:\d\d", page)
    assert f"<code>{escape(repr(study.best_params))}</code>" in page, "to copy, with all digits"
    settings = study.trials[4].settings
    assert f"<td>it raised</td><td>lr={settings['lr']:.4g}, width={settings['width']}" in page
    assert "<th>state</th><th>bracket</th>" in page


def test_the_table_says_what_it_leaves_out() -> None:
    trials = [Trial(n, {"lr": 0.5}, "complete", {1: 1.0 * n}) for n in range(12)]
    trials += [Trial(n, {"lr": 1.0 * n}, "failed", error="no lr") for n in range(12, 17)]
    study = Study(
        objectives=Objectives(("loss",), ("min",)),
        max_epochs=1,
        scheduler="none",
        trials=trials,
        brackets=[],
        results=Results([]),
    )
    lines = study.table().splitlines()
    assert lines[-6:] == [
        "and 2 more: study.trials",
        "17 trials: 12 complete, 5 failed",
        "trial 12: no lr (lr=12)",
        "trial 13: no lr (lr=13)",
        "trial 14: no lr (lr=14)",
        "and 2 more failed: trial.error of study.trials",
    ]
    assert "more" not in study.table(most=12).split("\n17 trials")[0]


def test_axes_follow_the_space_and_one_value_does_not_flatten_the_others() -> None:
    trials = [Trial(n, {"drop": 0.001 + 0.1 * n}, "complete", {1: 2.0 + 0.01 * n}) for n in range(8)]
    trials[3].values = {1: 1e6}
    trials[5].values = {1: 0.5}
    study = Study(
        objectives=Objectives(("loss",), ("min",)), max_epochs=1, scheduler="none", trials=trials, brackets=[],
        results=Results([]), space=parse({"drop": ("uniform", 0.0, 1.0)}).to_json(),
    )  # fmt: skip
    drawings = re.findall(r"<svg.*?</svg>", study_report(trials, [], "loss", "min", log=study._logarithmic()), re.S)
    assert drawings[0].count('class="beyond"') == 1, "the best is never beyond the edge"
    assert ">0.6</text>" in drawings[2] and ">0.01</text>" not in drawings[2]


def test_settings_that_only_some_trials_have() -> None:
    """Momentum of SGD alone: its axis is one of numbers, with the others below them."""
    some: list[dict[str, float]] = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.3}, {"lr": 0.1, "momentum": 0.9}]
    trials = [Trial(n, params, "complete", {1: 1.0 * n}) for n, params in enumerate(some)]
    study = Study(
        objectives=Objectives(("loss",), ("min",)), max_epochs=1, scheduler="none", trials=trials, brackets=[],
        results=Results([]),
    )  # fmt: skip
    assert study.table().splitlines()[2].split() == ["0", "complete", "0", "1", "0", "0.1", "-"]
    drawing = re.findall(r"<svg.*?</svg>", study_report(trials, [], "loss", "min"), re.S)[2]
    heights = {
        text: float(y) for y, text in re.findall(r'<text x="\S+" y="(\S+)" font-size="12">(0.3|0.9|-)</text>', drawing)
    }
    assert heights["0.9"] < heights["0.3"] < heights["-"], "down the page"


def test_studies_without_values() -> None:
    for trials in ([], [Trial(0, {"lr": 1.0}, "failed", error="no")]):
        page = study_report(trials, [], "loss", "min")
        assert "No trial has a value." in page and "There is nothing to draw." in page


@pytest.mark.parametrize("count", [1, 2])
def test_studies_of_one_or_two_trials(count: int) -> None:
    trials = [Trial(n, {"lr": 0.1}, "complete", {1: 0.5}) for n in range(count)]
    assert study_report(trials, [], "loss", "min").count("<svg") == 3


def test_many_trials_stay_small() -> None:
    trials = [Trial(n, {"lr": 0.1 + n}, "complete", {e: 1.0 / e for e in range(1, 30)}) for n in range(1000)]
    page = study_report(trials, [], "loss", "min")
    assert page.count("<polyline") <= 801 and len(page) < 1_000_000
    assert "980 more" in page
