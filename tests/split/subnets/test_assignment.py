"""The assignment: random, complete, fair, and a function of the seed and the round alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SplitError
from shoal.split.subnets.assignment import assign_units, counts
from shoal.split.subnets.units import Group, Units


def units_of(**sizes: int) -> Units:
    return Units(groups={name: Group(name, size, "neuron", ()) for name, size in sizes.items()}, whole={}, spans={})


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 200))
def test_counts_follow_the_shares(shares: list[float], more: int) -> None:
    size = len(shares) + more
    found = counts(size, shares)
    assert sum(found) == size and min(found) >= 1
    exact = [size * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(a - b) < 1 + 1e-9 for a, b in zip(found, exact, strict=True))


@given(st.integers(1, 60), st.integers(1, 8), st.floats(0, 1), st.integers(0, 2**40), st.integers(0, 1000))
def test_units_are_assigned_once_and_those_in_common_to_all(
    size: int, workers: int, overlap: float, seed: int, number: int
) -> None:
    common = int(overlap * size + 0.5)
    if size < workers and not common:
        return
    hands = [
        hand["a"] for hand in assign_units(units_of(a=size), [1.0] * workers, seed=seed, round=number, overlap=overlap)
    ]
    times = torch.zeros(size, dtype=torch.long)
    for hand in hands:
        assert len(hand) and bool((hand.diff() > 0).all())
        times[hand] += 1
    assert int((times == workers).sum()) == (size if workers == 1 else common)
    assert set(times.tolist()) <= {1, workers}


def test_the_same_on_every_machine() -> None:
    hands = assign_units(units_of(a=7, b=5), [2.0, 1.0], seed=3, round=4)
    assert [{name: kept.tolist() for name, kept in hand.items()} for hand in hands] == GOLDEN


GOLDEN = [{"a": [0, 1, 2, 3, 6], "b": [1, 2, 4]}, {"a": [4, 5], "b": [0, 3]}]


def test_shards_rounds_seeds_and_layers_are_not_alike() -> None:
    """The released code began with identical shards."""
    units = units_of(a=64, b=64)
    first = assign_units(units, [1.0, 1.0], seed=0, round=0)
    assert not torch.equal(first[0]["a"], first[1]["a"])
    assert not torch.equal(first[0]["a"], first[0]["b"])
    assert not torch.equal(first[0]["a"], assign_units(units, [1.0, 1.0], seed=0, round=1)[0]["a"])
    assert not torch.equal(first[0]["a"], assign_units(units, [1.0, 1.0], seed=1, round=0)[0]["a"])
    assert torch.equal(first[0]["a"], assign_units(units, [1.0, 1.0], seed=0, round=0)[0]["a"])


def test_every_weight_is_trained_sooner_or_later() -> None:
    """The released code never trained three quarters of one layer's rows; and it needed widths that divide."""
    workers, rounds = 4, 120
    units = units_of(a=10, b=13)
    within, between = torch.zeros(10, 10), torch.zeros(13, 10)
    for number in range(rounds):
        trained = torch.zeros(13)
        for hand in assign_units(units, [1.0] * workers, seed=5, round=number):
            within[hand["a"][:, None], hand["a"]] += 1
            between[hand["b"][:, None], hand["a"]] += 1
            trained[hand["b"]] += 1
        assert bool((trained == 1).all())
    assert bool((within > 0).all()) and bool((between > 0).all())
    # Each pair meets about as often as any other: once in four rounds or so.
    assert float(between.min()) / rounds > 0.1 and float(between.max()) / rounds < 0.45


@pytest.mark.parametrize(
    ("shares", "overlap", "line"),
    [
        ([1.0] * 5, 0.0, "5 workers, but layer 'a' has 4 units .neurons.: each worker needs one; use at most 4"),
    ],
)
def test_mistakes(shares: list[float], overlap: float, line: str) -> None:
    with pytest.raises(SplitError, match=line) as raised:
        assign_units(units_of(a=4), shares, seed=0, round=0, overlap=overlap)
    assert "\n" not in str(raised.value)


def test_unequal_workers_get_unequal_shares() -> None:
    hands = assign_units(units_of(a=100), [3.0, 1.0], seed=0, round=0)
    assert [len(hand["a"]) for hand in hands] == [75, 25]
    assert list(itertools.chain.from_iterable(sorted(hand["a"].tolist()) for hand in hands)) != list(range(100))
