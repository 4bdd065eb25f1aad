"""Decisions as data: who survives does not depend on the order of reports, and the survivors are the best."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from tests.tune.simulation import simulate

from shoal.errors import TuneError
from shoal.tune.distributions import Choice, Float, Int
from shoal.tune.population import PBT
from shoal.tune.schedulers import ASHA, Exploit, Goal, Hyperband, NoScheduler, Promote, SuccessiveHalving, best_first
from shoal.tune.trial import Trial

SEEDS = range(8)
LR = Float(0.001, 100.0)


def reached(trials: list[Trial]) -> Counter[int]:
    """How many trials have a value at each epoch."""
    return Counter(epoch for trial in trials for epoch in trial.values)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_27_9_3_1_whatever_the_order(seed: int, mode: str) -> None:
    order = random.Random(seed)
    scores = [order.random() for _ in range(27)]
    goal = Goal(max_epochs=27, mode=mode, num_trials=27)  # type: ignore[arg-type]
    trials = simulate(SuccessiveHalving(), goal, lambda t, e: scores[t.number], order, at_once=1 + seed)
    assert reached(trials) == {1: 27, 3: 9, 9: 3, 27: 1}
    ranking = sorted(range(27), key=lambda n: scores[n], reverse=mode == "max")
    for epoch, count in ((3, 9), (9, 3), (27, 1)):
        assert {t.number for t in trials if epoch in t.values} == set(ranking[:count])


@pytest.mark.parametrize("seed", SEEDS)
def test_ties_and_nan_are_ordered_the_same_way(seed: int) -> None:
    def score(trial: Trial, epoch: int) -> float:
        return math.nan if trial.number < 20 else 0.5

    goal = Goal(max_epochs=27, mode="max", num_trials=27)
    trials = simulate(SuccessiveHalving(), goal, score, random.Random(seed))
    assert {t.number for t in trials if 3 in t.values} == {0, 1, *range(20, 27)}  # 7 with a value, then NaN by number
    assert {t.number for t in trials if 27 in t.values} == {20}


def test_infinities_are_values() -> None:
    values = [math.nan, -math.inf, 1.0, math.inf]
    trials = [Trial(n, {}, values={1: value}) for n, value in enumerate(values)]
    assert [t.number for t in best_first(trials, 1, "max")] == [3, 2, 1, 0]
    assert [t.number for t in best_first(trials, 1, "min")] == [1, 2, 3, 0]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_hyperband_trains_its_table(seed: int, together: bool) -> None:
    order = random.Random(seed)
    goal, scheduler = Goal(max_epochs=81, mode="max"), Hyperband(together=together)
    trials = simulate(scheduler, goal, lambda t, e: math.sin(7.0 * t.number), order, at_once=10)
    for bracket in scheduler.brackets(goal):
        mine = [trial for trial in trials if trial.bracket == bracket.number]
        assert reached(mine) == {rung.epochs: rung.trials for rung in bracket.rungs}
        best = sorted(mine, key=lambda t: -math.sin(7.0 * t.number))
        for rung in bracket.rungs:
            assert {t.number for t in mine if rung.epochs in t.values} == {t.number for t in best[: rung.trials]}
    assert sum(trial.epochs for trial in trials) == sum(bracket.epochs for bracket in scheduler.brackets(goal))
    assert all(trial.ended for trial in trials)


def test_brackets_one_after_another() -> None:
    goal, scheduler = Goal(max_epochs=9, mode="max"), Hyperband(together=False)
    assert {action.bracket for action in scheduler.decide(goal, [])} == {2}  # type: ignore[union-attr]


def test_failed_trials_do_not_survive() -> None:
    goal = Goal(max_epochs=9, mode="max", num_trials=9)
    trials = [Trial(n, {}, "failed" if n < 7 else "paused", values={1: 1.0}) for n in range(9)]
    assert SuccessiveHalving().decide(goal, trials) == [Promote(7), Promote(8)]


def test_a_trial_that_ended_by_itself_keeps_its_rank() -> None:
    goal = Goal(max_epochs=9, mode="max", num_trials=9)
    trials = [Trial(n, {}, "complete" if n == 0 else "paused", values={1: 1.0 / (1 + n)}) for n in range(9)]
    actions = SuccessiveHalving().decide(goal, trials)
    assert {action.number for action in actions if isinstance(action, Promote)} == {1, 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", SEEDS)
def test_asha_promotes_the_best_so_far(seed: int) -> None:
    order = random.Random(seed)
    scores = [order.random() for _ in range(60)]
    goal, scheduler = Goal(max_epochs=27, mode="max", num_trials=60), ASHA(parallel=5)
    trials = simulate(scheduler, goal, lambda t, e: scores[t.number], order)
    counts = reached(trials)
    assert counts[1] == 60 and all(trial.ended for trial in trials)
    assert 60 // 3 <= counts[3] <= 60 // 2 and counts[27] >= 1
    best = max(range(60), key=scores.__getitem__)
    assert 27 in trials[best].values


def test_asha_trains_so_many_at_once() -> None:
    goal, scheduler = Goal(max_epochs=9, mode="max", num_trials=20), ASHA(parallel=4)
    assert len(scheduler.decide(goal, [])) == 4
    trials = [Trial(n, {}, "running") for n in range(3)] + [Trial(3, {}, "paused", {1: 0.1})]
    assert len(scheduler.decide(goal, trials)) == 1


def test_pbt_copies_from_the_best_to_the_worst() -> None:
    goal, scheduler = Goal(max_epochs=20, mode="max", num_trials=8, space={"lr": LR}), PBT(interval=5)
    trials = [Trial(n, {"lr": 0.1 * (1 + n)}, "paused", values={5: float(n)}) for n in range(8)]
    actions = scheduler.decide(goal, trials)
    assert actions == scheduler.decide(goal, trials)  # the same every time
    exploits = [action for action in actions if not isinstance(action, Promote)]
    assert {action.number for action in exploits} == {0, 1}  # type: ignore[union-attr]
    assert {action.source for action in exploits} <= {6, 7}  # type: ignore[union-attr]
    for action in exploits:
        lr, was = action.params["lr"], trials[action.source].params["lr"]  # type: ignore[union-attr]
        assert any(math.isclose(lr, was * f) for f in (0.8, 1.2)) or lr in [t.params["lr"] for t in trials]


def test_pbt_trains_everybody_to_the_end() -> None:
    goal = Goal(max_epochs=20, mode="min", num_trials=6, space={"lr": LR})
    trials = simulate(PBT(interval=6), goal, lambda t, e: t.settings["lr"], random.Random(0))
    assert reached(trials) == {6: 6, 12: 6, 18: 6, 20: 6}
    assert any("from" in trial.attrs for trial in trials)


def test_pbt_stays_within_the_space_and_changes_what_may_change() -> None:
    space = {"lr": Float(0.1, 1.0), "size": Int(2, 10, step=4), "kind": Choice((0.5,)), "drop": Float(0.0, 0.5)}
    goal = Goal(max_epochs=20, mode="max", num_trials=8, space=space, changeable=("lr", "size", "kind"))
    scheduler = PBT(interval=5, resample=0.0, factors=(100.0, 0.001))
    params = [{"lr": 0.1 * (1 + n), "size": 6, "kind": 0.5, "drop": 0.01 * n} for n in range(8)]
    trials = [Trial(n, params[n], "paused", values={5: float(n)}) for n in range(8)]
    exploits = [action for action in scheduler.decide(goal, trials) if isinstance(action, Exploit)]
    assert exploits
    for action in exploits:
        assert action.params["lr"] in (0.1, 1.0) and action.params["size"] in (2, 10)
        assert action.params["kind"] == 0.5 and action.params["drop"] == params[action.source]["drop"]


def test_none() -> None:
    trials = simulate(NoScheduler(), Goal(max_epochs=7, mode="min", num_trials=5), lambda t, e: 0.0, random.Random(0))
    assert reached(trials) == {7: 5}


@pytest.mark.parametrize(
    ("scheduler", "goal", "words"),
    [
        (ASHA(), {}, "set num_trials"),
        (NoScheduler(), {}, "set num_trials"),
        (PBT(), {"num_trials": 1}, "use 2 or more"),
        (PBT(share=0.7), {"num_trials": 4}, "at most 0.5"),
        (PBT(), {"num_trials": 4}, "pass space="),
        (PBT(mutate=("rate",)), {"num_trials": 4, "space": {"lr": LR}}, "mutate names 'rate'.* it has lr"),
        (PBT(mutate="lr"), {"num_trials": 4, "space": {"lr": LR}}, "pass a tuple of names"),  # type: ignore[arg-type]
        (PBT(interval=10), {"num_trials": 4}, "use a whole number, 1 to max_epochs=9"),
        (PBT(interval=1.5), {"num_trials": 4}, "interval is 1.5; use a whole number"),  # type: ignore[arg-type]
        (PBT(share="a"), {"num_trials": 4}, "share is 'a'; use a number"),  # type: ignore[arg-type]
        (PBT(factors=()), {"num_trials": 4}, r"factors is \(\); pass a tuple of numbers above 0"),
        (PBT(factors=(-1.0,)), {"num_trials": 4}, "numbers above 0"),
        (PBT(resample=3), {"num_trials": 4}, "resample is 3; it is a probability"),
        (PBT(mutate=5), {"num_trials": 4, "space": {"lr": LR}}, "mutate is 5; pass a tuple"),  # type: ignore[arg-type]
        (ASHA(parallel=2.5), {"num_trials": 4}, "parallel is 2.5; .* a whole number"),  # type: ignore[arg-type]
        (ASHA(min_epochs=10), {"num_trials": 4}, "between 1 and max_epochs=9"),
        (Hyperband(eta=1), {}, "2 or more"),
        (ASHA(parallel=0), {"num_trials": 4}, "use a whole number, 1 or more"),
    ],
)
def test_mistakes(scheduler: Hyperband, goal: dict[str, Any], words: str) -> None:
    with pytest.raises(TuneError, match=words):
        scheduler.check(Goal(max_epochs=9, mode="max", **goal))  # type: ignore[arg-type]
