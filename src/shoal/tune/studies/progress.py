"""The progress of a study: a table of brackets and survivors in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shoal.reporting.progress import Tally, View, columns, speeds
from shoal.tune.brackets import Bracket
from shoal.tune.schedulers import TRAINING, Mode, best_first
from shoal.tune.studies.study import best_trial
from shoal.tune.trial import Trial
from shoal.utils.tables import duration

HEAD = ("bracket", "rung", "training", "arrived", "stopped", "best")


class StudyView(View):
    """A view of a study, computed from its trials whenever it is drawn."""

    def __init__(self, trials: Sequence[Trial], brackets: Sequence[Bracket], metric: str, mode: Mode) -> None:
        self.trials, self.metric, self.mode = trials, metric, mode
        self._brackets = {bracket.number: bracket for bracket in brackets}

    def best(self) -> str:
        """Describe the best trial so far."""
        best = best_trial(self.trials, self.mode)
        if best is None:
            return f"no {self.metric} yet"
        settings = ", ".join(f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in best.settings.items())
        return f"best {self.metric} {best.value:.4g} of {best.name} after {best.epochs} epochs ({settings})"

    def rows(self) -> list[list[str]]:
        """Return a row for each bracket: the rung that it trains up to, and the states of its trials."""
        cells = []
        for number in dict.fromkeys(trial.bracket for trial in self.trials):
            in_bracket = [trial for trial in self.trials if trial.bracket == number]
            alive = [trial for trial in in_bracket if not trial.ended]
            best = best_first(in_bracket, max((t.epochs for t in in_bracket), default=0), self.mode)
            top = next((t.value for t in best if t.state != "failed" and not math.isnan(t.value)), math.nan)
            cells.append(
                [
                    str(number),
                    self._rung(number, alive),
                    str(sum(trial.state in TRAINING for trial in alive)),
                    str(sum(trial.state == "paused" for trial in alive)),
                    str(sum(trial.state in ("pruned", "failed") for trial in in_bracket)),
                    "-" if math.isnan(top) else f"{top:.4g}",
                ]
            )
        return cells

    def _rung(self, number: int, alive: Sequence[Trial]) -> str:
        if not alive:
            return "ended"
        rung, bracket = min(trial.rung for trial in alive), self._brackets.get(number)
        if bracket is None:
            return str(rung)
        return f"{rung}: {bracket.rungs[rung].trials} to {bracket.rungs[rung].epochs}"

    def line(self, tally: Tally) -> str:
        """Describe the study in one line."""
        ended = sum(trial.ended for trial in self.trials)
        training = sum(trial.state in TRAINING for trial in self.trials)
        return ", ".join(
            [f"{len(self.trials)} trials, {training} training, {ended} ended", *speeds(tally), self.best()]
        )

    def picture(self, tally: Tally) -> Any:
        """Return the view for a terminal: the brackets, the best trial so far, and the speed."""
        from rich.text import Text

        text = Text(f"study, after {duration(tally.clock() - tally.began)}\n", no_wrap=True, overflow="ellipsis")
        head, *lines = columns([list(HEAD), *self.rows()])
        text.append(head + "\n", style="bold").append("".join(f"{line}\n" for line in lines))
        text.append(f"{self.best()}\n", style="green")
        text.append(", ".join([f"{tally.running} networks training", *speeds(tally)]))
        return text
