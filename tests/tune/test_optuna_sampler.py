"""Optuna's samplers by ask and tell."""

from __future__ import annotations

import copy
import json
import math
import sys
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from shoal.errors import JobError  # noqa: E402
from shoal.tune._optuna_sampler import OptunaSampler  # noqa: E402
from shoal.tune.optuna_storage import OptunaStorage  # noqa: E402
from shoal.tune.samplers import DrawnSuggestions, GridSampler, RandomSampler, make_sampler  # noqa: E402
from shoal.tune.space import parse  # noqa: E402
from shoal.tune.studies.jobs import space_of  # noqa: E402
from shoal.tune.trial import Trial  # noqa: E402

SPACE = parse({"x": ("uniform", -4, 4), "y": ("log", 1e-3, 1e3), "kind": ["a", "b"]})
NUMBERS = parse({"x": ("uniform", -4, 4), "y": ("log", 1e-3, 1e3)})


def score(params: dict[str, Any]) -> float:
    return (params["x"] - 1) ** 2 + math.log10(params["y"]) ** 2 + (params.get("kind") == "b")


def ended(number: int, params: dict[str, Any]) -> Trial:
    """Every third is pruned after its first epoch, every eleventh fails."""
    value = score(params)
    if number % 11 == 10:
        return Trial(number, params, state="failed", error="it raised")
    if number % 3 == 2:
        return Trial(number, params, state="pruned", values={1: value + 1})
    return Trial(number, params, state="complete", values={1: value + 1, 3: value})


def run(sampler: Any, numbers: range, width: int = 4) -> list[Trial]:
    """Trials in rounds: `width` are asked for before their results are reported."""
    trials: list[Trial] = []
    for first in range(numbers.start, numbers.stop, width):
        batch = [ended(n, sampler.ask(n)) for n in range(first, min(first + width, numbers.stop))]
        for trial in batch:
            sampler.tell(trial)
        trials += batch
    return trials


@pytest.mark.parametrize("name", ["tpe", "cma", "gp", "nsga2"])
def test_a_restart_continues_with_the_same_configurations(name: str) -> None:
    if name == "cma":
        pytest.importorskip("cmaes")
    space = NUMBERS if name == "cma" else SPACE
    whole = run(OptunaSampler(name, space, seed=3), range(24))
    assert len({trial.params["x"] for trial in whole}) > 18 and all(space.check(t.params) for t in whole)
    stored = [Trial(**json.loads(json.dumps(written(trial)))) for trial in whole[:16]]
    for trial in stored:
        trial.values = {int(epoch): value for epoch, value in trial.values.items()}
    again = OptunaSampler(name, space, seed=3)
    for trial in stored:
        again.tell(trial)
    assert [trial.params for trial in run(again, range(16, 24))] == [trial.params for trial in whole[16:]]
    assert run(OptunaSampler(name, space, seed=4), range(2))[0].params != whole[0].params


def written(trial: Trial) -> dict[str, Any]:
    return {name: copy.deepcopy(getattr(trial, name)) for name in Trial.__slots__}


def test_tpe_learns_from_what_it_is_given() -> None:
    trials = run(OptunaSampler("tpe", SPACE, seed=1), range(60))
    first, last = ([score(t.params) for t in part] for part in (trials[:20], trials[-20:]))
    assert sum(last) < 0.5 * sum(first)
    wrong_way = run(OptunaSampler("tpe", SPACE, mode="max", seed=1), range(60))
    assert sum(score(t.params) for t in wrong_way[-20:]) > sum(first)


def test_trials_under_way_count_after_a_restart() -> None:
    """Constant liar: trials that run elsewhere keep the sampler away from where they are."""
    known = run(OptunaSampler("tpe", SPACE, seed=1), range(20))
    asked: list[dict[str, Any]] = []
    for count in (0, 8):
        sampler = OptunaSampler("tpe", SPACE, seed=1)
        for trial in [*known, *(Trial(20 + i, asked[0], state="running", values={1: 5.0}) for i in range(count))]:
            sampler.tell(trial)
        asked.append(sampler.ask(30))
    assert asked[0] != asked[1]


def test_a_study_continues_with_what_it_has() -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(lambda trial: -((trial.suggest_float("x", -4, 4) - 1) ** 2), n_trials=30)
    space = parse({"x": ("uniform", -4, 4)})
    sampler = OptunaSampler(study, space, mode="max")
    assert abs(sampler.ask(30)["x"] - 1) < 1.5, "thirty trials say where to look"
    assert len(study.trials) == 30, "the user's study is not written to by its sampler"


def test_optunas_grid_and_its_end() -> None:
    grid = {"x": [1, 2], "y": [3, 4]}
    space = parse({"x": [1, 2], "y": [3, 4]})
    sampler = make_sampler(optuna.samplers.GridSampler(grid), space)
    assert sampler.limit == 4
    trials = []
    for number in range(4):
        trials.append(Trial(number, sampler.ask(number), state="complete", values={1: 1.0}))
        sampler.tell(trials[-1])
    assert len({tuple(trial.params.items()) for trial in trials}) == 4


def test_several_objectives() -> None:
    sampler = OptunaSampler("nsga2", NUMBERS, mode=["min", "max"], seed=1)
    for number in range(60):
        params = sampler.ask(number)
        values = [params["x"] ** 2, params["x"]]
        sampler.tell(Trial(number, params, state="complete", values={1: values[0]}, attrs={"objectives": values}))
    best = sampler._study.best_trials
    assert best and all(trial.values[1] >= -0.5 for trial in best)


def test_make_job_that_suggests() -> None:
    sampler = OptunaSampler("tpe", None, seed=1)
    trial = sampler.suggest(0)
    trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    if trial.suggest_categorical("kind", ["a", "b"]):
        trial.suggest_int("n", 1, 9, step=2)
    space = space_of(trial)
    assert space == {"lr": {"log": [1e-5, 1e-1]}, "kind": ["a", "b"], "n": {"int": [1, 9, 2]}}
    sampler.tell(Trial(0, trial.params, state="complete", values={1: 1.0}, attrs={"space": space}))
    again = OptunaSampler("tpe", None, seed=1)
    again.tell(Trial(0, trial.params, state="complete", values={1: 1.0}, attrs={"space": space}))
    assert again._study.trials[0].distributions == sampler._study.trials[0].distributions
    own = DrawnSuggestions(0)
    own.suggest_float("lr", 1e-5, 1e-1, log=True)
    assert space_of(own) == {"lr": {"log": [1e-5, 1e-1]}}


def test_studies_with_another_aim() -> None:
    study = optuna.create_study(study_name="one")
    with pytest.raises(JobError, match="study 'one' is to minimize, this search to maximize; make a study of the same"):
        OptunaSampler(study, SPACE, mode="max")
    two = optuna.create_study(study_name="two", directions=["minimize", "minimize"])
    with pytest.raises(JobError, match="'two' has 2 objectives, and trials are compared by one metric; use"):
        OptunaSampler(two, SPACE, mode="min")
    assert OptunaSampler(two, SPACE, mode=["min", "min"]).ask(0)


def test_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"sampler='tpe' needs Optuna: pip install 'shoal\[tune\]'"):
        make_sampler("tpe", SPACE)
    with pytest.raises(ImportError, match=r"a storage needs Optuna: pip install 'shoal\[tune\]'"):
        OptunaStorage("sqlite:///x.db", space=SPACE)
    with pytest.raises(JobError, match="sampler is 'bayes'"):
        make_sampler("bayes", SPACE)


def test_names_and_mistakes(capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_sampler("random", SPACE), RandomSampler)
    assert isinstance(make_sampler("grid", parse({"x": [1]})), GridSampler)
    mine = RandomSampler(SPACE)
    assert make_sampler(mine, SPACE) is mine
    with pytest.raises(JobError, match="sampler is 'bayes'; use one of 'random', 'grid', 'tpe', 'cma', 'gp', 'nsga2'"):
        make_sampler("bayes", SPACE)
    with pytest.raises(JobError, match="sampler is 3; use one of"):
        make_sampler(3, SPACE)
    with pytest.raises(JobError, match="no search space to ask for"):
        make_sampler("tpe", None).ask(0)
    sampler = make_sampler("tpe", SPACE)
    sampler.tell(Trial(0, sampler.ask(0), state="complete", values={1: math.nan}))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["RandomSampler", "TPESampler"])
def test_an_object_with_a_seed_does_not_repeat_itself_after_a_restart(kind: str) -> None:
    def sampler() -> OptunaSampler:
        return OptunaSampler(getattr(optuna.samplers, kind)(seed=3), SPACE)

    first = sampler()
    trials = [Trial(number, first.ask(number), state="complete", values={1: 0.5}) for number in range(4)]
    again = sampler()
    for trial in trials:
        again.tell(trial)
    new = [again.ask(number) for number in range(4, 8)]
    assert not any(params in [trial.params for trial in trials] for params in new)
    others = sampler()
    others.tell(Trial(-1, trials[0].params, state="complete", values={1: 0.5}))  # of a study that continues
    if kind == "RandomSampler":
        assert others.ask(0) == trials[0].params
