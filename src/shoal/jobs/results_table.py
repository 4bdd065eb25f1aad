"""The table of a run's results, as text."""

from __future__ import annotations

from typing import Any

from shoal.jobs.differing import SEEDS, differing
from shoal.utils.tables import format_cell, one_line, render

MOST_ERRORS = 10
"""How many errors are shown below a table."""
NOT_VALUES = ("epoch", "step", "seconds")
"""Columns of a history that tell when a row was made, not what was measured."""


def results_table(results: Any) -> str:
    """Return a line for each of these `shoal.Results`, and the errors of jobs that failed or diverged."""
    names = [name for name in results.columns() if name not in NOT_VALUES]
    differ = differing([r.job for r in results], besides=results.columns())
    settings = [{**more, **r.job.hparams, **r.job.config} for r, more in zip(results, differ, strict=True)]
    noted = dict.fromkeys(key for r in results for key in r.job.config)
    others = dict.fromkeys(key for more in differ for key in more if key not in SEEDS)
    others |= dict.fromkeys(key for r in results for key in r.job.hparams if key not in names)
    varied = dict.fromkeys(key for key in others if len({repr(each.get(key)) for each in settings}) > 1)
    setting_names = list(noted | varied)
    epochs = [len(r.history) if r.split is None else None for r in results]  # the rows of a split are rounds
    best = [r.best_epoch if count is not None else None for r, count in zip(results, epochs, strict=True)]
    best_column = ["best_epoch"] if best != epochs and any(best) else []
    head = ["name", "status", "tier", *setting_names, "epochs", "steps", *names, *best_column, "seconds"]
    rows = [
        [
            r.name, r.status, r.tier, *(format_cell(each.get(key)) for key in setting_names),
            "" if count is None else str(count), str(r.steps), *(format_cell(r.value(n)) for n in names),
            *([format_cell(epoch)] if best_column else []), f"{r.seconds:.2f}",
        ]
        for r, each, count, epoch in zip(results, settings, epochs, best, strict=True)
    ]  # fmt: skip
    errors = [f"{one_line(r.name)}: {r.error}" for r in results if r.error]
    more = [f"... and {len(errors) - MOST_ERRORS} more"] if len(errors) > MOST_ERRORS else []
    return "\n".join([render(head, rows), *([""] if errors else []), *errors[:MOST_ERRORS], *more])
