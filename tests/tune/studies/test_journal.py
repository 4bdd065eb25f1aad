"""The journal: what was written is read again; what a kill cut short is dropped; another study is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.errors import DamagedError, OutError
from shoal.tune.studies.journal import Journal
from shoal.tune.trial import Trial

SETTINGS = {"metric": "accuracy", "max_epochs": 9}


def reopened(folder: Path) -> list[Trial]:
    journal = Journal(folder)
    trials, _ = journal.open(SETTINGS)
    journal.close()
    return trials


def test_trials_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "study")
    assert journal.open(SETTINGS)[0] == []
    trials = [Trial(0, {"lr": 0.1}, bracket=2), Trial(1, {"lr": 1e-3, "kind": "sgd"})]
    journal.write(trials)
    trials[0].values[1] = 0.5
    trials[1].values |= {1: math.nan, 2: -math.inf}
    trials[1].state, trials[1].error = "failed", "the loss became nan"
    journal.write(trials)
    trials[0].attrs = {"mutations": [{"epoch": 1, "from": 1}]}
    trials[0].rung = 1
    journal.write(trials)
    journal.write(trials)  # nothing new: no line
    journal.close()
    assert len((tmp_path / "study" / "trials.jsonl").read_text().splitlines()) == 3
    assert repr(reopened(tmp_path / "study")) == repr(trials)


def test_every_cut_leaves_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open(SETTINGS)
    for number in range(3):
        journal.write([Trial(number, {"lr": 0.1})])
    journal.close()
    path = tmp_path / "trials.jsonl"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert len(reopened(tmp_path)) == data[:length].count(b"\n")
        journal = Journal(tmp_path)
        trials, _ = journal.open(SETTINGS)
        journal.write([Trial(len(trials), {"lr": 0.2})])
        journal.close()
        assert [trial.number for trial in reopened(tmp_path)] == list(range(len(trials) + 1))


def test_another_study_is_refused(tmp_path: Path) -> None:
    reopened(tmp_path)
    with pytest.raises(OutError, match="max_epochs was 9 and is 27; use another folder"):
        Journal(tmp_path).open({**SETTINGS, "max_epochs": 27})
    assert reopened(tmp_path) == []  # and the lock is free


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutError, match="are not those of a study; use a new or empty folder"):
        Journal(tmp_path).open(SETTINGS)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open(SETTINGS)
    with pytest.raises(OutError, match="in use by another run"):
        Journal(tmp_path).open(SETTINGS)
    journal.close()


def test_damage_is_noticed(tmp_path: Path) -> None:
    reopened(tmp_path)
    (tmp_path / "trials.jsonl").write_text('[{"number": 0}]\n{"rubbish"\n')
    with pytest.raises(DamagedError, match="damaged in line 2"):
        reopened(tmp_path)


def test_without_a_folder_nothing_is_written() -> None:
    journal = Journal(None)
    assert journal.open(SETTINGS) == ([], SETTINGS)
    journal.write([Trial(0, {})])
    journal.close()
