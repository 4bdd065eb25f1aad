"""`shoal.tune` with a folder and a storage, killed at random moments: what the storage has in the end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow

ROOT, KILLS = Path(__file__).parents[2], int(os.environ.get("SHOAL_KILLS", "10"))
PROGRAM = """
import json, sys, torch
from tests.tune.studies.problems import share, tune
torch.set_num_threads(1)
if sys.argv[4] == "2":
    share()
print("ready", flush=True)
study = tune("hyperband", out=sys.argv[1], storage=sys.argv[2], study_name=sys.argv[3], checkpoint_every=0.05)
print(json.dumps(study.to_dict()))
"""


def start(out: Path, url: str, processes: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out), url, out.name, str(processes)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_study_and_its_storage(url: str, processes: int, tmp_path: Path) -> None:
    """Killed until it ends before it is killed, and then another study, until there were enough kills."""
    moments, killed, studies = random.Random(7), 0, 0
    while killed < KILLS:
        out = tmp_path / f"study-{studies}"
        process = start(out, url, processes)
        try:
            output, _ = process.communicate(timeout=moments.uniform(0.0, 2.0) if killed < KILLS - 1 else 300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            continue
        assert process.returncode == 0
        check(url, out.name, json.loads(output))
        studies += 1
        if killed == KILLS - 1:
            break
    assert killed >= KILLS - 1


def check(url: str, name: str, study: dict[str, Any]) -> None:
    """Each trial is there once, with all of its values, and none is running."""
    from shoal.tune._optuna import close_storage, open_storage

    stored = optuna.load_study(study_name=name, storage=open_storage(url))
    by_number = {int(each.user_attrs["shoal:trial"].rpartition("/")[2]): each for each in stored.trials}
    assert len(stored.trials) == len(by_number) == len(study["trials"]) == 17
    for trial in study["trials"]:
        each = by_number[trial["number"]]
        assert (each.params, each.state.name) == (trial["params"], trial["state"].upper())
        assert each.intermediate_values == {int(epoch): value for epoch, value in trial["values"].items()}
        assert each.value == trial["value"]
    close_storage(stored._storage)
