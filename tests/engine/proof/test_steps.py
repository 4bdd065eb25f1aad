"""Steps nobody thought of, drawn from what people write in them: each member as alone, whatever tier it lands in."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.engine.proof.steps.compare import check
from tests.engine.proof.steps.programs import Program, programs

QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
PLAIN_SHARE = 0.7
"""Of steps without anything unusual, at least this share is stacked."""
SHARE = 0.1
"""Of all steps, at least this share is stacked; most hold something that keeps them out."""


def examined(count: int, number: int, source: st.SearchStrategy[Program]) -> Counter[str]:
    """Draw so many programs and check each; how many landed in which tier."""
    tiers: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=count, **QUIET)
    @given(source)
    def each(program: Program) -> None:
        outcome = check(program)
        tiers["refused" if outcome.refused else "+".join(sorted(set(outcome.tiers)))] += 1
        tiers["unstable"] += outcome.unstable

    each()
    total = tiers.total() - tiers["unstable"]
    assert tiers["refused"] + tiers["unstable"] <= 0.03 * total + 2, f"too many say nothing: {dict(tiers)}"
    return tiers


def assert_stacked(tiers: Counter[str], share: float) -> None:
    print(f"\ndrawn steps by tier: {dict(tiers)}")
    total = tiers.total() - tiers["unstable"]
    assert tiers["stacked"] >= share * total, f"of {total} steps {dict(tiers)}: fewer than {share:.0%} are stacked"


@pytest.mark.parametrize("number", range(2))
def test_plain_steps_are_stacked_and_as_alone(number: int) -> None:
    assert_stacked(examined(20, number, programs(plain=True)), PLAIN_SHARE)


@pytest.mark.parametrize("number", range(3))
def test_drawn_steps_are_as_alone(number: int) -> None:
    assert_stacked(examined(20, number, programs()), SHARE)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 104))
def test_many_plain_steps_are_stacked_and_as_alone(number: int) -> None:
    assert_stacked(examined(100, number, programs(plain=True)), PLAIN_SHARE)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 115))
def test_many_drawn_steps_are_as_alone(number: int) -> None:
    assert_stacked(examined(100, number, programs()), SHARE)
