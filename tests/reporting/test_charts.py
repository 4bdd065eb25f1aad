"""Charts as SVG."""

from __future__ import annotations

import math

import pytest

from shoal.reporting.charts import Scale, Series, chart, parallel, spread


def test_ticks_are_round_numbers() -> None:
    assert Scale(0, 1, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Scale(1e-5, 1e-1, 0, 100, log=True).ticks() == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    assert Scale(3, 3, 0, 100).ticks() == [3] and Scale(3, 3, 0, 100)(3) == 50
    assert Scale(1.2, 1.9, 0, 100, log=True).ticks() == [1.2, 1.9], "at least two"
    assert Scale(0, 10, 0, 100)(20) == 100 and Scale(1, 100, 0, 100, log=True)(10) == 50


def test_values_far_out_do_not_hide_the_others() -> None:
    low, high = spread([0.1 + n / 100 for n in range(99)] + [1e30])
    assert low == 0.1 and high < 10
    assert spread([1.0, 1.1, 1.2, 1.3, 50.0]) == (1.0, 1.3)
    assert spread([1.0, 1.1, 1.2, 1.3, 50.0], keep=[50.0]) == (1.0, 50.0)
    assert spread([1.0, 2.0, math.nan]) == (1.0, 2.0) and spread([]) == (0.0, 1.0)


def test_text_is_escaped() -> None:
    drawing = chart([Series([(1, 2), (2, 3)], "<a>")], "<x>", "<y>")
    assert "<a>" not in drawing and "&lt;x&gt;" in drawing
    assert "<n>" not in parallel(["<n>"], [(["<v>"], "red", "<t>")])
