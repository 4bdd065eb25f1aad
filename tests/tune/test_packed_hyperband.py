"""The paper's packs: the same survivors as Hyperband, never more trials at once than a pack holds."""

from __future__ import annotations

import random

import pytest
from tests.tune.simulation import simulate
from tests.tune.studies import problems

from shoal.errors import TuneError
from shoal.tune.packed_hyperband import GROUPINGS, PackedHyperband, by_batch_size, by_neighbours
from shoal.tune.schedulers import Goal, Hyperband
from shoal.tune.space import parse
from shoal.tune.trial import Trial

SPACE = parse({"lr": ("log", 1e-4, 1e4), "batch_size": [16, 32]})


@pytest.mark.parametrize("grouping", ["random", "batch"])
@pytest.mark.parametrize("seed", range(4))
def test_the_survivors_are_those_of_hyperband(grouping: str, seed: int) -> None:
    scores = [random.Random(f"{seed}/{n}").random() for n in range(206)]
    goal = Goal(max_epochs=27, mode="max", seed=seed)
    packed, plain = (
        simulate(scheduler, goal, lambda t, e: scores[t.number] + 0.001 * e, random.Random(seed), at_once=3)
        for scheduler in (PackedHyperband(grouping=grouping, pack_size=4), Hyperband(together=False))
    )
    assert [(t.bracket, t.state, {e: v for e, v in t.values.items() if e}) for t in packed] == [
        (t.bracket, t.state, t.values) for t in plain
    ]


def test_one_pack_at_a_time_and_nobody_is_left_behind() -> None:
    scheduler, goal = PackedHyperband(grouping="random", pack_size=4), Goal(max_epochs=9, mode="min")
    trials: list[Trial] = []
    most, packs = 0, 0
    while actions := scheduler.decide(goal, trials):
        for action in actions:
            if type(action).__name__ == "Start":
                trials.append(Trial(len(trials), {}, bracket=action.bracket))  # type: ignore[union-attr]
                continue
            trial = trials[action.number]  # type: ignore[union-attr]
            if type(action).__name__ == "Stop":
                trial.state = "pruned"
            else:
                trial.rung, trial.state = trial.rung + 1, "running"
        training = [trial for trial in trials if trial.state == "running"]
        assert not training or not scheduler.decide(goal, trials), "while a pack trains, nothing is decided"
        most, packs = max(most, len(training)), packs + bool(training)
        for trial in training:
            epoch = scheduler.until(goal, trial)
            trial.values[epoch] = float(trial.number)
            trial.state = "complete" if epoch == goal.max_epochs else "paused"
    assert most == 4
    assert packs == (3 + 1 + 1) + (2 + 1) + 1  # 9, 3, 1 trials; 5, 1; 3
    assert all(trial.ended for trial in trials)


def test_packs_by_the_rules() -> None:
    settings = [(1.0, 16), (9.0, 32), (1.1, 16), (8.0, 16), (1.2, 32)]
    trials = [Trial(n, {"lr": lr, "batch_size": size}) for n, (lr, size) in enumerate(settings)]
    goal = Goal(max_epochs=9, mode="min", space=SPACE)

    def numbers(packs: list[list[Trial]]) -> list[list[int]]:
        return [[trial.number for trial in pack] for pack in packs]

    assert numbers(by_batch_size(trials, 2, goal)) == [[0, 2], [3], [1, 4]]
    assert numbers(by_neighbours(trials, 3, goal)) == [[0, 2, 3], [1, 4]], "lr and batch size count alike"
    assert numbers(GROUPINGS["random"](trials, 2, goal)) == numbers(GROUPINGS["random"](trials, 2, goal))


def test_a_study_in_packs_has_the_values_of_one_without() -> None:
    packed = problems.tune(scheduler=PackedHyperband(grouping="nearest", pack_size=4))
    plain = problems.tune()
    assert [t.params for t in packed.trials] == [t.params for t in plain.trials]
    assert [t.values for t in packed.trials] == [t.values for t in plain.trials]
    assert packed.best_params == plain.best_params and packed.epochs == plain.epochs


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        (PackedHyperband(grouping="size"), "grouping is 'size'; use one of 'random', 'batch', 'nearest'"),
        (PackedHyperband(grouping="random", pack_size=0), "pack_size is 0"),
        (PackedHyperband(grouping="nearest"), "needs a search space"),
    ],
)
def test_mistakes(scheduler: PackedHyperband, line: str) -> None:
    with pytest.raises(TuneError, match=line):
        scheduler.check(Goal(max_epochs=9, mode="min"))
