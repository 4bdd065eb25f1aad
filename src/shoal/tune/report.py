"""The report of a study: one HTML file with its best configuration and charts, which opens without a network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shoal.reporting.charts import MISSING, STYLE, Series, chart, parallel
from shoal.tune.brackets import Bracket
from shoal.tune.objectives import values_of
from shoal.tune.trial import Trial

MOST_LINES = 400
"""The most trials in one chart, the best ones; more could not be distinguished."""
SHOWN = 20
"""Trials in the table before the rest is folded."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root{{--text:#1c2430;--soft:#5b6675;--line:#c9d0d9;--back:#fff;--card:#f6f8fa;--accent:#0b6bcb;--bad:#c2410c}}
@media (prefers-color-scheme:dark){{:root{{--text:#e6eaf0;--soft:#9aa5b4;--line:#3a4350;--back:#12161c;--card:#1a2028;
--accent:#5aa9f5;--bad:#f59e6b}}}}
*{{box-sizing:border-box}} body{{margin:0 auto;max-width:1060px;padding:16px;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif}} h1{{font-size:1.5rem;margin:.2em 0}} h2{{font-size:1.1rem;margin:1.6em 0 .5em}}
p.note,figcaption{{color:var(--soft);font-size:.875rem;margin:.4em 0}}
figure{{margin:0;padding:12px;background:var(--card);border-radius:8px;min-width:0}}
.charts{{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}}
.wide{{grid-column:1/-1}} .scroll{{overflow-x:auto}} .scroll svg{{min-width:620px}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}}
th,td{{padding:4px 12px 4px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}}
summary{{cursor:pointer;color:var(--accent);padding:8px 0}} .big{{font-size:1.8rem;font-weight:600}}
{style}</style></head><body>
{body}
</body></html>
"""


def study_report(
    trials: Sequence[Trial],
    brackets: Sequence[Bracket],
    metric: str,
    mode: str,
    *,
    title: str = "Study",
    notes: Sequence[str] = (),
    log: Mapping[str, bool] | None = None,
    objectives: Sequence[str] = (),
) -> str:
    """Return the study as one HTML page: best configuration, charts, brackets and all trials.

    Args:
        trials: All trials of the study.
        brackets: The planned brackets; empty if there was no plan.
        metric: The name of the values.
        mode: "min" or "max".
        title: The heading.
        notes: Lines under the heading, such as how long it took.
        log: For settings with a range: whether the range is logarithmic.
        objectives: The names of all metrics, if there are several; `metric` is the first of them.
    """
    order = ranked(trials, mode)
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="note">{_counts(trials)}</p>']
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    parts.append(_best(order, metric, f" by {metric}" if len(objectives) > 1 else ""))
    parts.append('<h2>Charts</h2><div class="charts">')
    parts.append(_figure(_history(trials, metric, mode), "Optimisation history", _HISTORY))
    parts.append(_figure(_curves(order, metric), "Learning curves by rung", _CURVES))
    parts.append(_figure(_coordinates(order, metric, log), "Parallel coordinates", _COORDINATES, wide=True))
    parts.append("</div>")
    if brackets:
        parts.append("<h2>Brackets</h2>" + _brackets(brackets, trials))
    parts.append("<h2>Trials</h2>" + _trials(order, objectives or (metric,)))
    missing = [trial for trial in trials if trial.state == "failed" or math.isnan(trial.value)]
    if missing:
        parts.append("<h2>Failed, or without a value</h2>" + _failed(missing))
    return _PAGE.format(title=escape(title), style=STYLE, body="\n".join(part for part in parts if part))


_HISTORY = (
    "Each trial's last value: filled where it ran to its end, hollow where it was stopped early. The line is the best "
    "so far. A triangle at the edge is a value beyond it."
)
_CURVES = (
    "One line a trial; the stronger its colour, the more rungs it passed. Values far outside are drawn at the edge."
)
_COORDINATES = "One line a trial, the better the stronger. Scroll sideways on a small screen."


def ranked(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """Return trials that have a value, the best first and failed ones last. Among equals, the one that trained longer
    is first."""

    def key(trial: Trial) -> tuple[bool, float, int, int]:
        value = -trial.value if mode == "max" else trial.value
        return trial.state == "failed", value, -trial.epochs, trial.number

    return sorted((trial for trial in trials if not math.isnan(trial.value)), key=key)


def _counts(trials: Sequence[Trial]) -> str:
    states = Counter(trial.state for trial in trials)
    counted = ", ".join(f"{states[state]} {state}" for state in states)
    return f"{len(trials)} trials ({counted}), {sum(trial.epochs for trial in trials)} epochs trained"


def _best(order: Sequence[Trial], metric: str, by: str) -> str:
    title = f"<h2>Best configuration{escape(by)}</h2>"
    if not order:
        return title + "<p>No trial has a value.</p>"
    best = order[0]
    rows = [(name, _text(value)) for name, value in best.settings.items()]
    head = f'<p><span class="big">{_text(best.value)}</span> {escape(metric)}, '
    head += f"trial {best.number} after {best.epochs} epochs</p>"
    return title + head + _table(("setting", "value"), rows) + _code(best.settings)


def _code(settings: Mapping[str, Any]) -> str:
    """Return the settings with all digits, to copy."""
    return f'<div class="scroll"><pre><code>{escape(repr(dict(settings)))}</code></pre></div>'


def _history(trials: Sequence[Trial], metric: str, mode: str) -> str:
    better = max if mode == "max" else min
    ended = [trial for trial in trials if not math.isnan(trial.value)]
    series, best, steps = [], math.nan, []
    for trial in sorted(ended, key=lambda trial: trial.number):
        value = trial.value
        if trial.state != "failed":
            best = value if math.isnan(best) else better(best, value)
        if not math.isnan(best):
            steps.append((float(trial.number), best))
    for complete in (False, True):
        chosen = [trial for trial in ended if (trial.state == "complete") == complete]
        series.append(
            Series(
                [(trial.number, trial.value) for trial in chosen],
                line=False,
                hollow=not complete,
                color="var(--accent)" if complete else "var(--soft)",
                labels=[_label(trial, metric) for trial in chosen],
            )
        )
    return chart([*series, Series(steps, "best so far")], "trial", metric, keep=[best])


def _curves(order: Sequence[Trial], metric: str) -> str:
    most = max((trial.rung for trial in order), default=0)
    longest = max((trial.epochs for trial in order), default=1)
    series = [
        Series(
            sorted((float(epoch), value) for epoch, value in trial.values.items()),
            _label(trial, metric),
            color="var(--accent)" if trial.rung == most else "var(--soft)",
            opacity=round(0.25 + 0.75 * (trial.rung / most if most else 1.0), 2),
        )
        for trial in sorted(order[:MOST_LINES], key=lambda trial: trial.rung)
    ]
    return chart(series, "epoch", metric, log_x=longest > 20, keep=[trial.value for trial in order[:1]])


def _coordinates(order: Sequence[Trial], metric: str, log: Mapping[str, bool] | None) -> str:
    names = list(dict.fromkeys(name for trial in order for name in trial.settings))
    rows = []
    shown = order[:MOST_LINES]
    for rank, trial in enumerate(shown):
        share = 1 - rank / max(1, len(shown) - 1)
        color = f"color-mix(in srgb, var(--accent) {round(100 * share**2)}%, var(--line))"
        values = [trial.settings.get(name, MISSING) for name in names] + [trial.value]
        rows.append((values, color, _label(trial, metric)))
    keep = {metric: order[0].value} if order else {}
    return parallel([*names, metric], rows[::-1], log=log, keep=keep)  # draws the best on top


def _brackets(brackets: Sequence[Bracket], trials: Sequence[Trial]) -> str:
    rows = []
    for bracket in brackets:
        members = [trial for trial in trials if trial.bracket == bracket.number]
        plan = ", ".join(f"{rung.trials} to epoch {rung.epochs}" for rung in bracket.rungs)
        states = Counter(trial.state for trial in members)
        rows.append((str(bracket.number), plan, ", ".join(f"{count} {state}" for state, count in states.items())))
    return _table(("bracket", "plan", "trials"), rows)


def _trials(order: Sequence[Trial], metrics: Sequence[str]) -> str:
    names = list(dict.fromkeys(name for trial in order for name in trial.settings))
    rows = [
        (
            str(trial.number),
            trial.state,
            str(trial.bracket),
            str(trial.epochs),
            *map(_text, values_of(trial)),
            *(_text(trial.settings.get(name, "-")) for name in names),
        )
        for trial in order
    ]
    head = ("trial", "state", "bracket", "epochs", *metrics, *names)
    return _folded(head, rows)


def _failed(trials: Sequence[Trial]) -> str:
    rows = [
        (
            str(trial.number),
            trial.state,
            str(trial.epochs),
            trial.error or "no value of the metric",
            ", ".join(f"{name}={_text(value)}" for name, value in trial.settings.items()),
        )
        for trial in trials
    ]
    return _folded(("trial", "state", "epochs", "why", "settings"), rows)


def _folded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in which all but the first rows are folded."""
    folded = ""
    if len(rows) > SHOWN:
        folded = f"<details><summary>{len(rows) - SHOWN} more</summary>{_table(head, rows[SHOWN:])}</details>"
    return _table(head, rows[:SHOWN]) + folded


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figure(drawing: str, title: str, caption: str, *, wide: bool = False) -> str:
    inside = f'<div class="scroll">{drawing}</div>' if wide else drawing
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><strong>{title}</strong>{inside}<figcaption>{caption}</figcaption></figure>"


def _label(trial: Trial, metric: str) -> str:
    settings = ", ".join(f"{name}={_text(value)}" for name, value in trial.settings.items())
    value = _text(trial.value)
    return f"{trial.name}, {trial.state}: {metric} {value} after {trial.epochs} epochs; {settings}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k}={_text(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
