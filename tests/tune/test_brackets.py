"""The bracket table is the paper's, in whole numbers."""

from __future__ import annotations

import pytest

from shoal.errors import TuneError
from shoal.tune.brackets import Bracket, hyperband, make_bracket, most_cuts, table


def rungs(bracket: Bracket) -> list[tuple[int, int]]:
    return [(rung.trials, rung.epochs) for rung in bracket.rungs]


PAPER = {
    4: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
    3: [(34, 3), (11, 9), (3, 27), (1, 81)],
    2: [(15, 9), (5, 27), (1, 81)],
    1: [(8, 27), (2, 81)],
    0: [(5, 81)],
}


def test_the_table_of_the_paper() -> None:
    assert {bracket.number: rungs(bracket) for bracket in hyperband(81, 3)} == PAPER


@pytest.mark.parametrize(
    ("max_epochs", "eta", "sizes"),
    [(81, 3, [81, 34, 15, 8, 5]), (27, 3, [27, 12, 6, 4]), (64, 4, [64, 22, 8, 4]), (16, 2, [16, 10, 7, 5, 5])],
)
def test_sizes(max_epochs: int, eta: int, sizes: list[int]) -> None:
    brackets = hyperband(max_epochs, eta)
    assert [bracket.size for bracket in brackets] == sizes
    for bracket in brackets:
        assert bracket.rungs[-1].epochs == max_epochs and len(bracket.rungs) == bracket.number + 1


def test_cuts_are_whole_numbers() -> None:
    """math.log gives 2.9999999999999996 for (125, 5), and 4.999999999999999 for (243, 3)."""
    assert most_cuts(125, 5) == 3 and most_cuts(243, 3) == 5 and most_cuts(242, 3) == 4 and most_cuts(1, 3) == 0


def test_epochs_that_are_no_power_of_eta() -> None:
    assert rungs(hyperband(100, 3)[0]) == [(81, 1), (27, 3), (9, 11), (3, 33), (1, 100)]


def test_epochs_of_a_bracket() -> None:
    epochs = [81 + 4 * 54, 102 + 66 + 2 * 54, 135 + 90 + 54, 216 + 108, 405]
    assert [bracket.epochs for bracket in hyperband(81, 3)] == epochs


def test_fewer_configurations_than_places() -> None:
    assert [bracket.size for bracket in hyperband(81, 3, limit=100)] == [81, 19]
    assert rungs(hyperband(81, 3, limit=4)[0]) == [(4, 1), (1, 3), (1, 9), (1, 27), (1, 81)]
    assert rungs(make_bracket(27, 3, 27, 3)) == [(27, 1), (9, 3), (3, 9), (1, 27)]


def test_the_table_as_text() -> None:
    text = table(hyperband(9, 3))
    assert text.splitlines()[0].split() == ["bracket", "rung", "0", "rung", "1", "rung", "2", "epochs"]
    assert "9 to 1" in text and "3 to 9" in text


@pytest.mark.parametrize(("max_epochs", "eta"), [(0, 3), (81, 1), (8.0, 3), (True, 3), (81, "3")])
def test_mistakes(max_epochs: object, eta: object) -> None:
    with pytest.raises(TuneError, match="use a whole number"):
        hyperband(max_epochs, eta)  # type: ignore[arg-type]
