"""Random and grid search, and settings that a make_job suggests itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.errors import JobError
from shoal.tune.samplers import DrawnSuggestions, GridSampler, RandomSampler
from shoal.tune.space import parse

SPACE = parse({"lr": ("log", 1e-5, 1e-1), "width": [64, 128], "layers": ("int", 1, 3)})


def test_random_search_is_a_function_of_seed_and_number() -> None:
    first, again = RandomSampler(SPACE, 5), RandomSampler(SPACE, 5)
    drawn = [first.ask(number) for number in range(9)]
    assert [again.ask(number) for number in reversed(range(9))] == drawn[::-1]
    assert RandomSampler(SPACE, 6).ask(0) != drawn[0] and first.limit is None


def test_a_grid_holds_every_combination_once() -> None:
    sampler = GridSampler(parse({"width": [64, 128], "p": ("uniform", 0, 0.2, 0.1), "one": ("uniform", 1, 1)}))
    assert sampler.limit == 6
    params = [sampler.ask(number) for number in range(6)]
    assert params[:2] == [{"width": 64, "p": 0.0, "one": 1.0}, {"width": 64, "p": 0.1, "one": 1.0}]
    assert len({tuple(each.items()) for each in params}) == 6
    with pytest.raises(JobError, match="trial 6 is beyond the grid, which has 6 combinations"):
        sampler.ask(6)


def test_a_grid_needs_values() -> None:
    with pytest.raises(JobError, match="lr: grid search needs its values") as caught:
        GridSampler(parse({"lr": ("log", 1e-5, 1e-1), "p": ("uniform", 0, 1), "n": ("int", 1, 3)}))
    assert len(caught.value.lines) == 2
    with pytest.raises(JobError, match="no search space"):
        GridSampler(None)


def test_suggestions_are_those_of_the_space() -> None:
    """Defined as it runs or before: the same seed gives the same configuration."""
    trial = RandomSampler(None, 5).suggest(3)
    layers = trial.suggest_int("layers", 1, 3)
    assert trial.suggest_float("lr", 1e-5, 1e-1, log=True) == trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.suggest_categorical("width", [64, 128])
    assert trial.params == RandomSampler(SPACE, 5).ask(3) and trial.params["layers"] == layers
    with pytest.raises(JobError, match="no search space to draw from"):
        RandomSampler(None, 5).ask(0)


def test_suggestions_of_a_trial_that_is_made_again() -> None:
    trial = DrawnSuggestions(3, 5, fixed={"width": 128, "lr": 0.5})
    assert trial.suggest_categorical("width", [64, 128]) == 128
    assert trial.suggest_float("lr", 1e-5, 1e-1, log=True) <= 1e-1, "make_job has changed: 0.5 is no longer in it"


def test_mistakes_in_suggestions() -> None:
    trial = DrawnSuggestions(0)
    with pytest.raises(JobError, match="lr: low is 0, which has no logarithm"):
        trial.suggest_float("lr", 0, 1, log=True)
    with pytest.raises(JobError, match="c: the list of choices is empty"):
        trial.suggest_categorical("c", [])
    with pytest.raises(JobError, match="a setting has the name 3"):
        trial.suggest_int(3, 1, 2)  # type: ignore[arg-type]
    trial.suggest_int("n", 1, 2)
    with pytest.raises(JobError, match="n is suggested twice, from different values"):
        trial.suggest_int("n", 1, 3)


def test_random_and_grid_search_do_not_load_optuna() -> None:
    script = (
        "import sys; from shoal.tune.space import parse; from shoal.tune.samplers import RandomSampler, GridSampler\n"
        "space = parse({'a': [1, 2]}); RandomSampler(space, 0).ask(0); GridSampler(space).ask(0)\n"
        "assert 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
