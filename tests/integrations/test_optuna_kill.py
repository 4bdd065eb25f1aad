"""Studies that are killed while they write to SQLite, to a journal file and to PostgreSQL.

What trains here is a program of a few lines with a file of its own for what it has done, as `shoal.tune` has its
folder: each run is killed at a random moment and started again, until one reaches the end.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow

TRIALS, EPOCHS, KILLS = 60, 9, 10
PROGRAM = """
import json, os, sys, time
from shoal.tune.optuna_storage import OptunaStorage
from shoal.tune.space import parse
from shoal.tune.trial import Trial

url, path, trials, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
space = parse({"lr": ("log", 1e-5, 1e-1), "width": [64, 128]})

def save(known):
    rows = [[t.number, t.params, t.state, list(t.values.items())] for t in known]
    with open(path + ".new", "w") as file:
        json.dump(rows, file)
    os.replace(path + ".new", path)

known = []
if os.path.exists(path):
    known = [Trial(n, p, s, {int(e): v for e, v in values}) for n, p, s, values in json.load(open(path))]
storage = OptunaStorage(url, "killed", mode="max", space=space, run="r1", every=0.05)
storage.attach(known)
print("ready", flush=True)
for first in range(0, trials, 10):
    for number in range(first, first + 10):
        if number >= len(known):
            known.append(Trial(number, space.sample(0, number), "running"))
            save(known)
            storage.begin(known[number])
    for epoch in range(1, epochs + 1):
        for trial in known[first:first + 10]:
            if trial.state == "running" and epoch not in trial.values:
                trial.values[epoch] = trial.number + epoch / 100
                storage.report(trial, epoch, trial.values[epoch])
                if epoch == 3 and trial.number % 3:
                    trial.state = "pruned"
                elif epoch == epochs:
                    trial.state = "complete"
                save(known)
                if trial.state != "running":
                    storage.finish(trial)
                time.sleep(0.003)
storage.close()
"""


def start(url: str, tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, url, str(tmp_path / "known.json"), str(TRIALS), str(EPOCHS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_killed_at_random_moments(url: str, tmp_path: Path) -> None:
    moments, killed = random.Random(5), 0
    for _ in range(KILLS):
        process = start(url, tmp_path)
        try:
            process.wait(moments.uniform(0.0, 0.35))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        finally:
            assert process.stdout is not None
            process.stdout.close()
    assert killed >= 3, "the program ended too soon to be killed"
    last = start(url, tmp_path)
    assert last.wait(300) == 0
    assert last.stdout is not None
    last.stdout.close()
    check(url, json.loads((tmp_path / "known.json").read_text()))


def check(url: str, known: list[Any]) -> None:
    """The storage has what the program knows: each trial once, with all of its values, and none is running."""
    from shoal.tune._optuna import close_storage, open_storage

    study = optuna.load_study(study_name="killed", storage=open_storage(url))
    stored = {each.user_attrs["shoal:trial"]: each for each in study.trials}
    assert len(study.trials) == len(stored) == len(known) == TRIALS
    for number, params, state, values in known:
        each = stored[f"r1/{number}"]
        assert (each.params, each.state.name) == (params, state.upper())
        assert each.intermediate_values == {int(epoch): value for epoch, value in values}
        assert each.value == values[-1][1]
    close_storage(study._storage)
