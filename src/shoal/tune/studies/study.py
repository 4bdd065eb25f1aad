"""What comes out of a search: the trials, and the best one with its network."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.errors import TuneError
from shoal.results import Result, Results
from shoal.tune.brackets import Bracket
from shoal.tune.objectives import Objectives, pareto_front, values_of
from shoal.tune.schedulers import Mode
from shoal.tune.trial import Trial
from shoal.utils.numpy_values import finite
from shoal.utils.tables import render

SHOWN_ERRORS = 3
"""Failed trials that a table lists."""
RANGES = ("uniform", "log", "int", "log-int")
"""Short forms of numbers in a range."""


def best_trial(trials: Sequence[Trial], mode: Mode) -> Trial | None:
    """The trial whose weights have the best value (see `Trial.value`); of equals, the one that trained longer."""
    known = [trial for trial in trials if trial.state != "failed" and not math.isnan(trial.value)]
    sign = -1 if mode == "max" else 1
    return min(known, key=lambda t: (sign * t.value, -t.epochs, t.number), default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class Study:
    """A search that has ended."""

    objectives: Objectives
    """The metrics, and which way each is better."""
    max_epochs: int
    scheduler: str
    trials: list[Trial]
    brackets: list[Bracket]
    """What was planned; empty where the scheduler has no plan beforehand."""
    results: Results
    """Of the trials that a job could be made for, in their order."""
    seconds: float = 0.0
    """From the call to the end; of a resumed study, since it was resumed."""
    name: str = ""
    """In its storage."""
    folder: Path | None = None
    """Where it was written to."""
    space: Mapping[str, Any] | None = None
    """What settings were drawn from, in the short form; None where make_job suggests them."""

    @property
    def metric(self) -> str:
        """What is compared; of several metrics, the first."""
        return self.objectives.names[0]

    @property
    def mode(self) -> Mode:
        """Which way the metric is better."""
        return self.objectives.modes[0]

    @property
    def best_trials(self) -> list[Trial]:
        """The trials to which no other is better in one metric and as good in the others; of one metric, the best."""
        if self.objectives.several:
            return pareto_front(self.trials, self.objectives.modes)
        best = best_trial(self.trials, self.mode)
        return [] if best is None else [best]

    @property
    def best(self) -> Trial:
        """The trial whose weights have the best value, whether it was stopped at a rung or trained to the end."""
        if self.objectives.several:
            names = ", ".join(self.objectives.names)
            raise TuneError(f"the study has several metrics ({names}), so that no trial is the best; use best_trials")
        best = best_trial(self.trials, self.mode)
        if best is None:
            reason = "all values are NaN" if any(trial.values for trial in self.trials) else "no trial ended an epoch"
            failed = next((trial.error for trial in self.trials if trial.error), reason)
            raise TuneError(f"no trial has a value of {self.metric!r}: {failed}")
        return best

    @property
    def best_params(self) -> dict[str, Any]:
        """The settings of the best trial."""
        return dict(self.best.settings)

    @property
    def best_value(self) -> float:
        """The metric of the best trial's weights: at its last epoch, or at its best one where jobs have keep="best"."""
        return self.best.value

    @property
    def best_result(self) -> Result:
        """The best trial's result: network, history, optimizer state."""
        return self.result(self.best)

    @property
    def best_model(self) -> nn.Module:
        """The best trial's network, of the user's own class."""
        return self.best_result.model

    @property
    def epochs(self) -> int:
        """Epochs that all trials trained together."""
        return sum(len(result.history) for result in self.results)

    def result(self, trial: Trial) -> Result:
        """What came of a trial's job."""
        for result in self.results:
            if result.name == trial.name:
                return result
        raise TuneError(f"{trial.name} has no result: {trial.error}")

    def weights_file(self, trial: Trial) -> Path | None:
        """The file with a trial's weights, its model's `state_dict()`; None where there is none, as without `out`."""
        places = [place for place, result in enumerate(self.results) if result.name == trial.name]
        if self.folder is None or not places:
            return None
        return next((self.folder / "run" / "weights").glob(f"{places[0]:04d}.*"), None)

    def to_dict(self) -> dict[str, Any]:
        """All but the weights, as plain data."""
        best = self.best_trials
        return {
            **self.objectives.described,
            "max_epochs": self.max_epochs,
            "scheduler": self.scheduler,
            "seconds": self.seconds,
            "epochs": self.epochs,
            "best": None if not best or self.objectives.several else best[0].number,
            "best_trials": [trial.number for trial in best],
            "brackets": [
                {"number": b.number, "rungs": [{"trials": r.trials, "epochs": r.epochs} for r in b.rungs]}
                for b in self.brackets
            ],
            "trials": [trial_to_dict(trial) for trial in self.trials],
        }

    def to_dataframe(self) -> Any:
        """The trials as a pandas DataFrame, a row each; settings are columns named `params_...`."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(
            [
                {
                    "number": t.number,
                    "value": t.value,
                    "state": t.state,
                    "epochs": t.epochs,
                    "bracket": t.bracket,
                    "rung": t.rung,
                    **{f"params_{name}": value for name, value in t.settings.items()},
                }
                for t in self.trials
            ]
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the best settings, charts, brackets and all trials to one HTML file, which opens without a network."""
        from shoal.tune.report import study_report

        notes = [
            f"{self.scheduler}, {self.seconds:.1f} s, {self.epochs} epochs of {len(self.results)} networks, "
            f"written {time.strftime('%Y-%m-%d %H:%M')}"
        ]
        if self.objectives.several:
            front = ", ".join(trial.name for trial in self.best_trials) or "none"
            notes.append(
                f"Of several metrics ({', '.join(self.objectives.names)}), ranks and charts are by the first. Trials "
                f"that no other beats in all of them: {front}"
            )
        name = self.name or ("" if self.folder is None else str(self.folder))
        page = study_report(
            self.trials, self.brackets, self.metric, self.mode, title=f"Search {name}".strip(), notes=notes,
            log=self._logarithmic(),
        )  # fmt: skip
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)

    def _logarithmic(self) -> dict[str, bool]:
        """For each setting that is a number in a range: whether the range is logarithmic."""
        spaces = [trial.attrs.get("space", {}) for trial in self.trials] if self.space is None else [self.space]
        words = {
            name: next(iter(form), "") for space in spaces for name, form in space.items() if isinstance(form, dict)
        }
        return {name: word.startswith("log") for name, word in words.items() if word in RANGES}

    def table(self, most: int = 10) -> str:
        """The best trials as text, the best ones first, how many ended how, and why some failed."""
        sign = -1 if self.mode == "max" else 1
        known = [trial for trial in self.trials if not math.isnan(trial.value)]
        front = {trial.number for trial in self.best_trials}
        known.sort(key=lambda t: (t.state == "failed", t.number not in front, sign * t.value, -t.epochs, t.number))
        names = list(dict.fromkeys(name for trial in known for name in trial.settings))
        head = ["trial", "state", "bracket", "epochs", *self.objectives.names, *names]
        rows = [
            [str(t.number), t.state, str(t.bracket), str(t.epochs), *(f"{value:.4g}" for value in values_of(t))]
            + [_short(t.settings.get(name)) for name in names]
            for t in known[:most]
        ]
        counts = Counter(trial.state for trial in self.trials)
        said = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        lines = [render(head, rows, left=(0, 1))]
        if len(known) > most:
            lines.append(f"and {len(known) - most} more: study.trials")
        lines.append(f"{len(self.trials)} trials: {said}")
        failed = [trial for trial in self.trials if trial.error]
        lines += [f"{t.name}: {t.error} ({_listed(t.settings)})" for t in failed[:SHOWN_ERRORS]]
        if len(failed) > SHOWN_ERRORS:
            lines.append(f"and {len(failed) - SHOWN_ERRORS} more failed: trial.error of study.trials")
        return "\n".join(lines)

    def __repr__(self) -> str:
        best = self.best_trials
        said = f", best {self.metric} {best[0].value:.4g} of {best[0].name}" if best else ""
        said = f", {len(best)} that no other beats" if self.objectives.several else said
        return f"Study({len(self.trials)} trials{said})"


def trial_to_dict(trial: Trial) -> dict[str, Any]:
    """A trial as plain data for JSON."""
    return {
        "number": trial.number,
        "params": finite(trial.settings),
        "state": trial.state,
        "bracket": trial.bracket,
        "rung": trial.rung,
        "epochs": trial.epochs,
        "value": finite(trial.value),
        "values": {str(epoch): finite(value) for epoch, value in trial.values.items()},
        "error": trial.error,
        **({"objectives": finite(trial.attrs["objectives"])} if "objectives" in trial.attrs else {}),
        **({"mutations": finite(trial.attrs["mutations"])} if "mutations" in trial.attrs else {}),
    }


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in settings.items()) or "no settings"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
