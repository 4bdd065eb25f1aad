"""States of random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.utils import random_state
from shoal.utils.random_state import NUMPY, get_state, restored, same_state, set_state


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    state = np.random.get_state(legacy=False)
    yield
    np.random.set_state(state)


def draws(generator: Any) -> list[Any]:
    return [generator.rand(), generator.randn(), generator.randint(1000), *generator.permutation(5)]


def test_numpy_s_state_is_read_and_set_as_numpy_does() -> None:
    """Drawing, seeding, keeping the second of two normal numbers, and going back, in any order."""
    order, states = random.Random(0), [np.random.get_state(legacy=False)]
    for _ in range(300):
        what = order.randrange(6)
        if what == 0:
            np.random.seed(order.randrange(9))
        elif what == 1:
            np.random.randn(order.randrange(1, 4))
        elif what == 2:
            np.random.rand(order.randrange(700))
        elif what == 3:
            set_state(NUMPY, order.choice(states))
        elif what == 4:
            np.random.set_state(order.choice(states))
        else:
            states.append(get_state(NUMPY))
        expected = np.random.get_state(legacy=False)
        assert same_state(get_state(NUMPY), expected)
        set_state(NUMPY, expected)
        assert same_state(np.random.get_state(legacy=False), expected)
        other = np.random.RandomState()
        other.set_state(expected)
        with restored([NUMPY]):
            assert draws(np.random) == draws(other)
        assert same_state(np.random.get_state(legacy=False), expected)


def test_a_state_that_has_not_moved_is_not_read_again() -> None:
    """numpy copies its words one by one, which takes as long as a small batch."""
    np.random.seed(3)
    first = get_state(NUMPY)
    assert get_state(NUMPY) is first
    np.random.rand()
    assert get_state(NUMPY) is not first
    set_state(NUMPY, first)
    assert get_state(NUMPY) is first and np.random.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize("known", [True, False])
def test_another_generator_behind_numpy_s_functions(known: bool) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(4) if known else np.random.PCG64(4))
    try:
        state = get_state(NUMPY)
        drawn = np.random.rand(3)
        set_state(NUMPY, state)
        assert np.array_equal(np.random.rand(3), drawn)
        assert (random_state._numpy._bytes is not None) == known
    finally:
        np.random.set_bit_generator(before)
    assert same_state(get_state(NUMPY), np.random.get_state(legacy=False))
