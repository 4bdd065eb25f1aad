"""Searches by Optuna and Ray Tune, for comparison, on a score that needs no training."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from shoal.errors import TuneError
from shoal.evidence.reproduce.other_searches import budget, optuna_search, ray_search
from shoal.tune.space import parse

SPACE = parse({"x": ("uniform", 0, 1)})


class Curve:
    """A score that rises with every epoch, towards `x`."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.goal, self.epochs = params["x"], 0
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def order(self) -> Any:
        self.epochs += 1

    def epoch(self) -> float:
        self.order()
        return float(self.goal * (1 - 0.5**self.epochs))


def test_the_budget_is_the_papers() -> None:
    assert budget(81, 3) == (143, 1581) and budget(9, 3) == (17, 69)


def test_optunas_pruner_uses_the_budget_and_the_same_settings() -> None:
    pytest.importorskip("optuna")
    trials: list[Curve] = []
    outcome = optuna_search(lambda p: trials.append(Curve(p)) or trials[-1], SPACE, max_epochs=9, eta=3, seed=4)  # type: ignore[func-returns-value]
    assert [trial.goal for trial in trials] == [SPACE.sample(4, number)["x"] for number in range(len(trials))]
    assert outcome["epochs"] == sum(trial.epochs for trial in trials) == 69
    assert outcome["trials"] == len(trials) > 9 and "pruned" in outcome["note"]
    assert outcome["best"] == max(trial.goal * (1 - 0.5**trial.epochs) for trial in trials)
    assert optuna_search(Curve, SPACE, max_epochs=9, eta=3, seed=4) == outcome


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
def test_rays_schedulers(scheduler: str) -> None:
    """In a process of its own: Ray leaves files open."""
    pytest.importorskip("ray")
    program = f"""
import json, runpy
from shoal.evidence.reproduce.other_searches import ray_search
names = runpy.run_path({__file__!r})
outcome = ray_search(names["Curve"], names["SPACE"], max_epochs=4, eta=2, seed=4, scheduler={scheduler!r}, processes=2)
print("outcome", json.dumps(outcome))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("outcome ")] or [done.stderr]
    outcome = json.loads(line.removeprefix("outcome "))
    trials, epochs = budget(4, 2)
    assert 2 <= outcome["trials"] <= trials and 0.2 < outcome["best"] <= 1
    assert outcome["epochs"] <= epochs + 4, "trials that are under way end their epoch"


def test_a_scheduler_that_is_none() -> None:
    pytest.importorskip("ray")
    with pytest.raises(TuneError, match="scheduler is 'median'; use 'asha' or 'hyperband'"):
        ray_search(Curve, SPACE, max_epochs=9, eta=3, scheduler="median")
