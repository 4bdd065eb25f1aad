"""Search spaces: their forms, their mistakes, and what is drawn from them."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shoal.errors import JobError
from shoal.tune.distributions import Choice, Float, Int
from shoal.tune.space import Space, parse

SHORT = {
    "lr": ("log", 1e-5, 1e-1),
    "dropout": ("uniform", 0, 0.5),
    "momentum": ("uniform", 0, 0.9, 0.3),
    "layers": ("int", 1, 4),
    "width": ("int", 8, 64, 8),
    "units": ("log-int", 16, 1024),
    "optimizer": ["sgd", "adam"],
    "clip": [None, 2.0, "norm"],
}


def test_the_short_form() -> None:
    space = parse(SHORT)
    assert space["lr"] == Float(1e-5, 1e-1, log=True)
    assert space["dropout"] == Float(0.0, 0.5)
    assert space["momentum"] == Float(0.0, 0.9, step=0.3)
    assert space["layers"] == Int(1, 4)
    assert space["width"] == Int(8, 64, step=8)
    assert space["units"] == Int(16, 1024, log=True)
    assert space["optimizer"] == Choice(("sgd", "adam"))
    assert list(space) == list(SHORT) and parse(space) is space


def test_json_and_back() -> None:
    space = parse(SHORT)
    assert parse(json.loads(json.dumps(space.to_json()))) == space


def test_forms_of_files() -> None:
    assert parse({"lr": {"log": [1e-5, 0.1]}, "a": {"choice": ["log", 1]}}) == Space(
        {"lr": Float(1e-5, 0.1, log=True), "a": Choice(("log", 1))}
    )


def test_optuna_both_ways() -> None:
    optuna = pytest.importorskip("optuna")
    kinds = optuna.distributions
    given = {
        "lr": kinds.FloatDistribution(1e-5, 1e-1, log=True),
        "p": kinds.FloatDistribution(0, 0.5, step=0.25),
        "n": kinds.IntDistribution(1, 9, step=2),
        "m": kinds.IntDistribution(1, 9, log=True),
        "c": kinds.CategoricalDistribution([1, "a", None]),
    }
    assert parse(given)["n"] == Int(1, 9, step=2)
    assert parse(given).to_optuna() == given
    assert parse(parse(SHORT).to_optuna()) == parse(SHORT)


MISTAKES = [
    ({"c": []}, "c: the list of choices is empty; give at least one value"),
    ({"lr": ("log", -1, 1)}, "lr: low is -1, which has no logarithm; use a low end above 0"),
    ({"lr": ("log", 0, 1)}, "lr: low is 0, which has no logarithm"),
    ({"n": ("log-int", 0, 4)}, "n: low is 0, which has no logarithm; use a low end 1 or more"),
    ({"lr": ("uniform", 2, 1)}, "lr: low is 2 and high is 1; the low end comes first: swap them"),
    ({"n": ("int", 4, 1)}, "n: low is 4 and high is 1"),
    ({"n": ("int", 1, 4.5)}, "n: high is 4.5; use a whole number"),
    ({"n": ("int", 1, 4, 0)}, "n: step is 0; use a whole number, 1 or more"),
    ({"p": ("uniform", 0, 1, -0.1)}, "p: step is -0.1; use a number above 0"),
    ({"p": ("uniform", 0, math.inf)}, "p: high is inf; use a finite number"),
    ({"p": ("uniform", math.nan, 1)}, "p: low is nan; use a finite number"),
    ({"p": ("uniform", "0", 1)}, "p: low is '0'; use a finite number"),
    ({"p": ("uniform", False, 1)}, "p: low is False; use a finite number"),
    (
        {"p": ("normal", 0, 1)},
        "p: ('normal', 0, 1) starts with 'normal'; use one of 'uniform', 'log', 'int', 'log-int'",
    ),
    ({"p": ("sgd", "adam")}, "or a list for choices"),
    ({"p": (64, 128)}, "p: (64, 128) starts with 64; use one of"),
    ({"p": ("log", 1)}, "p: ('log', 1) has 1 values after 'log'; write low, high"),
    ({"p": ("log", 1, 2, 3)}, "p: ('log', 1, 2, 3) has 3 values after 'log'; write low, high"),
    ({"p": ()}, "p: () is not a distribution; use"),
    ({"p": 0.1}, "p: 0.1 is not a distribution; use"),
    ({"p": {"log": 3}}, "p: {'log': 3} is not a distribution"),
    ({"p": "log"}, "p: 'log' is not a distribution"),
    ({"p": {1, 2}}, "p: {1, 2} is not a distribution"),
    ({"p": [1, "a", True]}, "p: the choice True equals the choice 1; give each value once"),
    ({1: [1]}, "the search space has the name 1; names are strings"),
    ({"": [1]}, "the search space has the name ''; names are strings"),
    ({}, "the search space is empty; name at least one setting"),
    ([("lr", 1)], "the search space is [('lr', 1)]; pass a dict"),
    (None, "the search space is None; pass a dict"),
]


@pytest.mark.parametrize(("space", "line"), MISTAKES, ids=lambda given: str(given)[:30])
def test_mistakes_are_one_line(space: Any, line: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(space)
    assert len(caught.value.lines) == 1 and "\n" not in str(caught.value)
    assert line in str(caught.value)


def test_every_mistake_has_its_line() -> None:
    with pytest.raises(JobError) as caught:
        parse({"a": [], "b": ("log", 0, 1), "c": [1], 2: [1]})
    assert [line.partition(":")[0] for line in caught.value.lines[:2]] == ["a", "b"] and len(caught.value.lines) == 3


def test_numbers_of_numpy_are_plain() -> None:
    space = parse(
        {"a": ("uniform", np.float32(0.5), np.int64(2)), "b": ("int", np.int32(1), np.int64(3)), "c": [np.int64(4)]}
    )
    assert json.dumps(space.to_json()) == '{"a": {"uniform": [0.5, 2.0]}, "b": {"int": [1, 3]}, "c": [4]}'


def test_steps_are_decimal_and_end_where_they_reach() -> None:
    assert Float(0, 0.3, step=0.1).values() == [0.0, 0.1, 0.2, 0.3]
    assert Float(0, 1, step=0.3).high == 0.9 and Int(1, 10, step=4).high == 9
    assert Float(0, 1, step=1e-12).sample(random.Random(1)) <= 1  # without a list of all its values


def test_what_is_drawn_is_in_the_space() -> None:
    space = parse(SHORT)
    drawn = [space.sample(3, number) for number in range(200)]
    assert all(space.check(params) == params for params in drawn)
    assert min(params["lr"] for params in drawn) < 1e-4 < 1e-2 < max(params["lr"] for params in drawn)
    assert set(Counter(params["layers"] for params in drawn)) == {1, 2, 3, 4}
    assert sum(params["units"] < 128 for params in drawn) in range(70, 130)  # half of a logarithmic scale


def test_ends_are_drawn() -> None:
    assert {Int(1, 2, log=True).sample(random.Random(seed)) for seed in range(50)} == {1, 2}
    assert {Float(0, 0.2, step=0.1).sample(random.Random(seed)) for seed in range(50)} == {0.0, 0.1, 0.2}
    assert Float(0.1, 0.1, log=True).sample(random.Random(1)) == 0.1


def test_a_value_depends_on_its_own_name_alone() -> None:
    wide, narrow = parse(SHORT), parse({"lr": SHORT["lr"]})
    assert wide.sample(3, 7)["lr"] == narrow.sample(3, 7)["lr"]
    assert len({narrow.sample(seed, number)["lr"] for seed in range(4) for number in range(4)}) == 16


def test_params_are_checked() -> None:
    space = parse({"lr": ("log", 1e-5, 1e-1), "n": ("int", 1, 9, 2), "c": ["a", "b"]})
    assert list(space.check({"c": "a", "n": np.int64(3), "lr": 1e-3})) == ["lr", "n", "c"]
    with pytest.raises(JobError) as caught:
        space.check({"lr": 1.0, "n": 2, "x": 1})
    assert caught.value.lines == (
        "c is missing; the search space has it",
        "'x' is not in the search space; it has 'lr', 'n', 'c'",
        "lr is 1.0; its distribution is a number from 1e-05 to 0.1",
        "n is 2; its distribution is a whole number from 1 to 9 in steps of 2",
    )


def test_choices_that_no_storage_holds() -> None:
    space = parse({"optimizer": [dict, "sgd"], "n": [1, None]})
    with pytest.raises(JobError, match="optimizer: the choice <class 'dict'> cannot be stored; use None") as caught:
        space.check_storable()
    assert len(caught.value.lines) == 1
