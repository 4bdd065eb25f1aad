"""SVG charts for a page that needs no network: points and lines over two axes, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, HEIGHT, WIDE = 480, 300, 960
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40

STYLE = """
svg.chart{width:100%;height:auto;display:block;font:13px system-ui,sans-serif}
svg.chart text{fill:var(--text);paint-order:stroke;stroke:var(--card);stroke-width:3px}
svg.chart .axis{stroke:var(--line);stroke-width:1}
svg.chart .grid{stroke:var(--line);stroke-width:.5;opacity:.6}
svg.chart polyline{fill:none;stroke-width:1.5;stroke-linejoin:round}
"""
"""CSS that a page with charts needs, beside the colours --text, --line, --card and --accent."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to positions along an axis of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value; values beyond an end of the axis are drawn at that end."""
        low, high = self._transform(self.low), self._transform(self.high)
        share = (self._transform(min(max(value, self.low), self.high)) - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)

    def _transform(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self, most: int = 5) -> list[float]:
        """Return round numbers along the axis, or its ends if there are fewer than two between them."""
        if self.high <= self.low:
            return [self.low]
        ticks = self._round_numbers(most)
        return ticks if len(ticks) > 1 else [self.low, self.high]

    def _round_numbers(self, most: int) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                return [10.0**power for power in range(first, last + 1, 1 + (last - first) // most)]
            candidates = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
            return [tick for tick in candidates if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(slots=True)
class Series:
    """Points that belong together."""

    points: Sequence[tuple[float, float]]
    label: str = ""
    """The text that is shown under the mouse pointer."""
    color: str = "var(--accent)"
    line: bool = True
    """Whether the points are joined by a line; if False, each has a mark."""
    hollow: bool = False
    opacity: float = 1.0
    labels: Sequence[str] = field(default_factory=list)
    """The text of each mark."""


def spread(values: Sequence[float], keep: Sequence[float] = ()) -> tuple[float, float]:
    """Return the range to draw, without extreme outliers but always with the values in `keep`."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0, 1.0
    lower, upper = finite[len(finite) // 4], finite[(3 * len(finite) - 1) // 4]
    room = 3 * (upper - lower)
    inside = [value for value in finite if lower - room <= value <= upper + room] if room else finite
    inside += [value for value in keep if math.isfinite(value)]
    return min(inside), max(inside)


def spread_of_lines(values: Sequence[float], keep: Sequence[float] = (), share: float = 0.95) -> tuple[float, float]:
    """Return the range to draw for curves, without the few values furthest out, since first values are far from the
    last."""
    finite = sorted(value for value in values if math.isfinite(value))
    cut = int(len(finite) * (1 - share))
    low, high = finite[cut], finite[-1 - cut]
    room = 0.5 * (high - low)
    ends = [max(finite[0], low - room), min(finite[-1], high + room), *(v for v in keep if math.isfinite(v))]
    return min(ends), max(ends)


def is_log(values: Sequence[float]) -> bool:
    """Return whether positive values lie so far apart that a logarithmic axis shows them better."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 50


def chart(
    series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False, keep: Sequence[float] = ()
) -> str:
    """Draw points and lines over two axes. The y axis covers the marks, and always the values in `keep`.

    A mark beyond the end of the axis is drawn there as a triangle.
    """
    points = [(x, y) for each in series for x, y in each.points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return '<p class="note">There is nothing to draw.</p>'
    x = Scale(min(p[0] for p in points), max(p[0] for p in points), LEFT + 8, WIDTH - RIGHT - 8, log_x)
    marks = [value for each in series if not each.line for _, value in each.points if math.isfinite(value)]
    ends = spread(marks, keep) if marks else spread_of_lines([p[1] for p in points], keep)
    y = Scale(*ends, HEIGHT - BOTTOM - 8, TOP + 8)
    parts = [_axes(x, y, x_label, y_label)]
    for each in series:
        positions = [(x(a), y(b)) for a, b in each.points if math.isfinite(a) and math.isfinite(b)]
        if each.line and len(positions) > 1:
            coordinates = " ".join(f"{a:g},{b:g}" for a, b in positions)
            style = f'stroke="{each.color}" opacity="{each.opacity:g}"'
            parts.append(f'<polyline points="{coordinates}" {style}>{_title(each.label)}</polyline>')
        else:
            labels = each.labels or [each.label] * len(each.points)
            parts += [
                _mark(each, x(a), y(b), label, beyond=(b > y.high) - (b < y.low))
                for (a, b), label in zip(each.points, labels, strict=False)
                if math.isfinite(a) and math.isfinite(b)
            ]
    return _svg(WIDTH, HEIGHT, f"{y_label} over {x_label}", parts)


def _mark(series: Series, a: float, b: float, label: str, *, beyond: int) -> str:
    """Draw a circle, or a triangle if the value is beyond an end of the axis (`beyond` is 1 above it, -1 below it)."""
    fill = "none" if series.hollow else series.color
    style = f'fill="{fill}" stroke="{series.color}" opacity="{series.opacity:g}"'
    if not beyond:
        return f'<circle cx="{a:g}" cy="{b:g}" r="3" {style}>{_title(label)}</circle>'
    return f'<path class="beyond" d="M{a - 4:g} {b:g}h8l-4 {-7 * beyond}z" {style}>{_title(label)}</path>'


MISSING: Any = object()
"""In `parallel`: a value that a row does not have."""


def parallel(
    names: Sequence[str],
    rows: Sequence[tuple[Sequence[Any], str, str]],
    *,
    log: Mapping[str, bool] | None = None,
    keep: Mapping[str, float] | None = None,
) -> str:
    """Draw parallel coordinates: an axis for each name, and a line for each row of values with its colour and label.

    Numeric axes named in `log` are logarithmic or linear as given and show all values. Other numeric axes choose by
    their values, and always include their value in `keep`. Other values are sorted as text. A value that is MISSING is
    drawn below the others.
    """
    log, keep = log or {}, keep or {}
    if not rows:
        return '<p class="note">There is nothing to draw.</p>'
    step = (WIDE - 2 * 60) / max(1, len(names) - 1)
    parts, columns = [], []
    for index, name in enumerate(names):
        at = round(60 + index * step, 1)
        column = [values[index] for values, _, _ in rows]
        heights, ticks = _column(column, log.get(name), [keep[name]] if name in keep else [])
        columns.append(heights)
        parts.append(f'<line class="axis" x1="{at:g}" x2="{at:g}" y1="{TOP + 18}" y2="{HEIGHT - 22}"/>')
        parts.append(f'<text x="{at:g}" y="{TOP + 4}" text-anchor="middle" font-weight="600">{escape(name)}</text>')
        parts += [
            f'<text x="{at + 5:g}" y="{height + 4:g}" font-size="12">{escape(text)}</text>' for text, height in ticks
        ]
    lines = []
    for row, (_, color, label) in enumerate(rows):
        points = " ".join(f"{60 + index * step:.1f},{heights[row]:g}" for index, heights in enumerate(columns))
        lines.append(f'<polyline points="{points}" stroke="{color}" opacity=".7">{_title(label)}</polyline>')
    return _svg(WIDE, HEIGHT, f"parallel coordinates of {', '.join(names)}", [*lines, *parts])


def _column(
    values: Sequence[Any], log: bool | None, keep: Sequence[float]
) -> tuple[list[float], list[tuple[str, float]]]:
    """Return the position of each value on its axis, and the texts along the axis."""
    bottom, top = HEIGHT - 26.0, TOP + 22.0
    present = [value for value in values if value is not MISSING]
    if present and len(present) < len(values):
        heights, ticks = _column_from(present, log, keep, bottom - 20, top)
        drawn = iter(heights)
        return [bottom if value is MISSING else next(drawn) for value in values], [*ticks, ("-", bottom)]
    return _column_from(values, log, keep, bottom, top)


def _column_from(
    values: Sequence[Any], log: bool | None, keep: Sequence[float], bottom: float, top: float
) -> tuple[list[float], list[tuple[str, float]]]:
    """Return the same, for an axis between these heights."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(numbers) == len(values):
        low, high = spread(numbers, keep) if log is None else (min(numbers), max(numbers))
        scale = Scale(low, high, bottom, top, is_log(numbers) if log is None else log and low > 0)
        distinct = sorted(set(numbers))
        ticks = distinct if len(distinct) <= 5 else scale.ticks(4)
        return [scale(number) for number in numbers], [(f"{tick:.4g}", scale(tick)) for tick in ticks]
    categories = sorted({str(value) for value in values})
    scale = Scale(0, max(1, len(categories) - 1), bottom, top)
    return [scale(categories.index(str(value))) for value in values], [
        (category[:16], scale(i)) for i, category in enumerate(categories)
    ]


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Draw both axes with their ticks and labels."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:g}" y2="{at:g}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:g}" text-anchor="end">{tick:.4g}</text>')
    for tick in x.ticks():
        parts.append(f'<text x="{x(tick):g}" y="{bottom + 16}" text-anchor="middle">{tick:.4g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    position = f'x="12" y="{(TOP + bottom) / 2:g}" transform="rotate(-90 12 {(TOP + bottom) / 2:g})"'
    parts.append(f'<text {position} text-anchor="middle">{escape(y_label)}</text>')
    return "".join(parts)


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _title(label: str) -> str:
    return f"<title>{escape(label)}</title>" if label else ""
