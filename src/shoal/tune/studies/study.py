"""The result of a search: the trials, and the best one with its network."""

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
"""The most failed trials that a table lists."""
RANGES = ("uniform", "log", "int", "log-int")
"""Short forms of ranges of numbers."""


def best_trial(trials: Sequence[Trial], mode: Mode) -> Trial | None:
    """Return the trial whose weights have the best value (see `Trial.value`); among equals, the one that trained
    longer."""
    valued = [trial for trial in trials if trial.state != "failed" and not math.isnan(trial.value)]
    sign = -1 if mode == "max" else 1
    return min(valued, key=lambda t: (sign * t.value, -t.epochs, t.number), default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class Study:
    """A search that has ended."""

    objectives: Objectives
    """The metrics, and for each whether it is minimised or maximised."""
    max_epochs: int
    scheduler: str
    trials: list[Trial]
    brackets: list[Bracket]
    """The planned brackets; empty if the scheduler has no plan beforehand."""
    results: Results
    """The results of the trials whose job could be made, in their order."""
    seconds: float = 0.0
    """Seconds from the call to the end; for a resumed study, since it was resumed."""
    name: str = ""
    """The study's name in its storage."""
    folder: Path | None = None
    """The folder of the study, if any."""
    space: Mapping[str, Any] | None = None
    """The distributions of the settings, in the short form; None if make_job suggests them."""

    @property
    def metric(self) -> str:
        """The metric by which trials are compared; of several metrics, the first."""
        return self.objectives.names[0]

    @property
    def mode(self) -> Mode:
        """Whether the metric is minimised or maximised."""
        return self.objectives.modes[0]

    @property
    def best_trials(self) -> list[Trial]:
        """The trials that no other trial dominates (better in one metric, and at least as good in the others); with one
        metric, the best."""
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
        """The metric of the best trial's weights: at its last epoch, or at its best one if jobs have keep="best"."""
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
        """Epochs that all trials trained in total."""
        return sum(len(result.history) for result in self.results)

    def result(self, trial: Trial) -> Result:
        """Return the result of a trial's job."""
        for result in self.results:
            if result.name == trial.name:
                return result
        raise TuneError(f"{trial.name} has no result: {trial.error}")

    def weights_file(self, trial: Trial) -> Path | None:
        """Return the file with a trial's weights, its model's `state_dict()`; None if there is none, as without
        `out`."""
        indices = [i for i, result in enumerate(self.results) if result.name == trial.name]
        if self.folder is None or not indices:
            return None
        return next((self.folder / "run" / "weights").glob(f"{indices[0]:04d}.*"), None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights, as plain data."""
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
        """Return the trials as a pandas DataFrame, one row each; settings are columns named `params_...`."""
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
            log=self._logarithmic(), objectives=self.objectives.names,
        )  # fmt: skip
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)

    def _logarithmic(self) -> dict[str, bool]:
        """Return for each setting with a range whether the range is logarithmic."""
        spaces = [trial.attrs.get("space", {}) for trial in self.trials] if self.space is None else [self.space]
        forms = {
            name: next(iter(short_form), "")
            for space in spaces
            for name, short_form in space.items()
            if isinstance(short_form, dict)
        }
        return {name: scale.startswith("log") for name, scale in forms.items() if scale in RANGES}

    def table(self, most: int = 10) -> str:
        """Format the best trials as text, the best first, with how many ended how, and why some failed."""
        sign = -1 if self.mode == "max" else 1
        valued = [trial for trial in self.trials if not math.isnan(trial.value)]
        front = {trial.number for trial in self.best_trials}
        valued.sort(key=lambda t: (t.state == "failed", t.number not in front, sign * t.value, -t.epochs, t.number))
        names = list(dict.fromkeys(name for trial in valued for name in trial.settings))
        head = ["trial", "state", "bracket", "epochs", *self.objectives.names, *names]
        rows = [
            [str(t.number), t.state, str(t.bracket), str(t.epochs), *(f"{value:.4g}" for value in values_of(t))]
            + [_short(t.settings.get(name, "-")) for name in names]
            for t in valued[:most]
        ]
        counts = Counter(trial.state for trial in self.trials)
        state_counts = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        lines = [render(head, rows, left=(0, 1))]
        if len(valued) > most:
            lines.append(f"and {len(valued) - most} more: study.trials")
        lines.append(f"{len(self.trials)} trials: {state_counts}")
        failed = [trial for trial in self.trials if trial.error]
        lines += [f"{t.name}: {t.error} ({_listed(t.settings)})" for t in failed[:SHOWN_ERRORS]]
        if len(failed) > SHOWN_ERRORS:
            lines.append(f"and {len(failed) - SHOWN_ERRORS} more failed: trial.error of study.trials")
        return "\n".join(lines)

    def __repr__(self) -> str:
        best = self.best_trials
        summary = f", best {self.metric} {best[0].value:.4g} of {best[0].name}" if best else ""
        summary = f", {len(best)} that no other beats" if self.objectives.several else summary
        return f"Study({len(self.trials)} trials{summary})"


def trial_to_dict(trial: Trial) -> dict[str, Any]:
    """Return a trial as plain data for JSON."""
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
