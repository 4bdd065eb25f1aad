"""A study that is killed at any moment resumes: no trial is lost or counted twice, and the outcome is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tune.studies.problems import KINDS, make_job, tune

import shoal
from shoal.errors import OutError

PROGRAM = Path(__file__).with_name("problems.py")


def started(kind: str, out: Path) -> subprocess.Popen[str]:
    """`kind`: one of KINDS, and "shared" after it where it has two processes."""
    name, *more = kind.split()
    command = [sys.executable, "-W", "error", str(PROGRAM), name, str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(kind: str, out: Path) -> dict[str, Any]:
    output, error = (process := started(kind, out)).communicate(timeout=300)
    assert process.returncode == 0, error
    study: dict[str, Any] = json.loads(output)
    return study


def lines(out: Path) -> int:
    path = out / "trials.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process: subprocess.Popen[str], out: Path, count: int, pause: float) -> bool:
    """Kill it a moment after its journal has so many lines; False where it was finished before."""
    while process.poll() is None and lines(out) < count:
        time.sleep(0.002)
    time.sleep(pause)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


def check(kind: str, study: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same trials as without a kill, each once; for ASHA, whose order of arrivals may differ, whole trials."""
    trials = study["trials"]
    assert [trial["number"] for trial in trials] == list(range(len(expected["trials"])))
    assert all(trial["state"] in ("complete", "pruned") for trial in trials)
    assert [trial["params"] for trial in trials] == [trial["params"] for trial in expected["trials"]] or kind == "pbt"
    for trial in trials:
        assert list(trial["values"]) == [str(epoch) for epoch in range(1, trial["epochs"] + 1)]
    if not kind.startswith("asha"):
        assert trials == expected["trials"]


def killed_again_and_again(kind: str, tmp_path: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    expected = json.loads(json.dumps(tune(kind.split()[0], out=tmp_path / "whole").to_dict()))
    total = lines(tmp_path / "whole")
    out, done = tmp_path / "killed", 0
    while done < kills:
        began = lines(out)
        process = started(kind, out)
        if not kill_after(process, out, draw.randrange(began, max(began + 2, total)), draw.uniform(0, 0.1)):
            out = tmp_path / f"killed-{done}"  # it was faster: start another one
        done += 1
    check(kind, finished(kind, out), expected)
    folder = {path.stem for path in (out / "run" / "weights").iterdir()}
    assert folder == {f"{index:04d}" for index in range(len(expected["trials"]))}


@pytest.mark.parametrize(("kind", "kills"), [("hyperband", 2), ("asha", 1), ("pbt", 1), ("hyperband shared", 2)])
def test_killed_and_resumed(kind: str, kills: int, tmp_path: Path) -> None:
    killed_again_and_again(kind, tmp_path, kills, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [*KINDS, "hyperband shared", "asha shared"])
def test_killed_at_30_random_moments(kind: str, seed: int, tmp_path: Path) -> None:
    killed_again_and_again(kind, tmp_path, kills=6, seed=seed)


DIES = """
import os, sys
import torch
torch.set_num_threads(1)
from shoal.tune.studies import search
from tests.tune.studies.problems import make_job, tune
search.TrialSearch._end = lambda self, run, trials: os._exit(9)  # after the decision was written, before it is done
tune("hyperband", out=sys.argv[1], checkpoint_every=1000, make_job=lambda p: make_job(p, **eval(sys.argv[2])))
"""


@pytest.mark.parametrize("changes", [{}, {"val_every": 4, "keep": "best"}])
def test_killed_right_after_a_decision_was_written(changes: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of the trials was saved by then: they train again up to where they were, and are what they were."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DIES, str(tmp_path / "out"), repr(changes)]
    assert subprocess.run(command, env=env, cwd=Path(__file__).parents[3], check=False).returncode == 9

    def job(params: dict[str, Any]) -> shoal.Job:
        return make_job(params, **changes)

    clean = tune("hyperband", make_job=job)
    resumed = tune("hyperband", make_job=job, out=tmp_path / "out")
    assert resumed.epochs == clean.epochs and resumed.best.number == clean.best.number
    for ours, theirs in zip(resumed.trials, clean.trials, strict=True):
        assert (ours.state, ours.values) == (theirs.state, theirs.values)
        weights = zip(resumed.result(ours).model.parameters(), clean.result(theirs).model.parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in weights)
        assert len(resumed.result(ours).history) == len(clean.result(theirs).history)


def test_infinity_is_a_choice(tmp_path: Path) -> None:
    space = {"lr": ("log", 1e-3, 1.0), "momentum": [0.0, 0.9], "clip": [1.0, float("inf")]}

    def job(params: dict[str, Any]) -> shoal.Job:
        assert isinstance(params["clip"], float)
        return make_job(params, clip_norm=params["clip"])

    settings: dict[str, Any] = {"make_job": job, "space": space, "num_trials": 6, "out": tmp_path / "out"}
    first = tune("none", **settings)
    assert {trial.params["clip"] for trial in first.trials} == {1.0, float("inf")}
    assert [trial.params for trial in tune("none", **settings).trials] == [trial.params for trial in first.trials]


def test_a_finished_study_is_read_again(tmp_path: Path) -> None:
    first = tune(out=tmp_path / "s")
    second = tune(out=tmp_path / "s")
    assert [t.values for t in first.trials] == [t.values for t in second.trials]
    assert second.best.number == first.best.number and second.epochs == first.epochs
    assert [r.status for r in second.results] == [r.status for r in first.results]


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    tune("none", out=tmp_path / "s")
    for changes, words in (
        ({"max_epochs": 5}, "max_epochs was 4 and is 5"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"space": {"lr": [0.1], "momentum": [0.1]}}, "space was"),
        ({"num_trials": 5}, "num_trials was 4 and is 5"),
    ):
        with pytest.raises(OutError, match=words):
            tune("none", out=tmp_path / "s", **changes)  # type: ignore[arg-type]


def test_another_make_job_is_refused(tmp_path: Path) -> None:
    from tests.tune.studies.problems import make_job

    tune("none", out=tmp_path / "s")
    with pytest.raises(OutError, match="batch_size 16 there and 8 here"):
        tune("none", out=tmp_path / "s", make_job=lambda params: make_job(params, batch_size=8))


def test_choices_that_no_file_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        tune("none", out=tmp_path / "s", space={"lr": [0.1], "momentum": [object()]})


def test_kinds_are_all_tried() -> None:
    assert set(KINDS) == {"hyperband", "in-turn", "asha", "pbt", "none"}
