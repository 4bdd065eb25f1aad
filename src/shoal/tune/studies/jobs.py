"""The jobs of trials: what the user's make_job returns, checked and set to the study's length."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shoal.errors import OutError, TuneError, describe_with_place
from shoal.jobs.averaging import EMA, SWA
from shoal.jobs.job import Job, default_epochs
from shoal.tune.distributions import from_optuna
from shoal.tune.samplers import DrawnSuggestions, RandomSampler, Sampler
from shoal.tune.space import Space
from shoal.tune.trial import Trial

TRIES = 5
"""Pairs of configurations in which two values of a setting are compared."""


class Jobs:
    """Makes the job of a trial with the user's function and the sampler's settings."""

    def __init__(
        self,
        make_job: Callable[[Any], Job],
        space: Space | None,
        sampler: Sampler,
        metrics: Sequence[str],
        max_epochs: int,
    ) -> None:
        """Check the arguments. `space` is None if make_job is given a trial and suggests its settings itself."""
        if not callable(make_job):
            raise TuneError(f"make_job is {make_job!r}; pass a function of the settings that returns a shoal.Job")
        self._make_job, self._space, self._sampler = make_job, space, sampler
        self._metrics, self._max_epochs = metrics, max_epochs

    def draw(self, trial: Trial) -> Callable[[], Job]:
        """Draw the settings of a new trial. The returned function makes its job, and raises what make_job raises."""
        if self._space is not None:
            trial.params = self._sampler.ask(trial.number)
            return lambda: self.make(trial)
        suggestions = self._sampler.suggest(trial.number)
        return lambda: self._suggest(trial, suggestions)

    def make(self, trial: Trial) -> Job:
        """Make the job of a trial with its current settings. Raises what make_job raises."""
        if self._space is not None:
            return self._checked(trial, dict(trial.settings))
        suggestions = DrawnSuggestions(trial.number, fixed=trial.settings)
        job = self._suggest(trial, suggestions)
        _check_ranges(trial, space_of(suggestions))
        return job

    def changeable(self, seed: int) -> tuple[str, ...]:
        """Return the settings that only affect the optimizer, so that they can be changed while a network trains."""
        assert self._space is not None
        names = []
        for name in self._space:
            for number in range(TRIES):
                params, others = self._space.sample(seed, number), self._space.sample(seed, number + 1)
                if params[name] == others[name]:
                    continue
                with suppress(Exception):  # make_job may refuse a configuration
                    first, second = (self._make(given) for given in (params, {**params, name: others[name]}))
                    if _optimizer_settings(first) != _optimizer_settings(second) and _other_settings(
                        first
                    ) == _other_settings(second):
                        names.append(name)
                    break
        return tuple(names)

    def _make(self, given: Any) -> Any:
        try:
            with default_epochs(self._max_epochs):
                return self._make_job(given)
        except AttributeError as error:
            if isinstance(given, dict) and "'dict' object has no attribute 'suggest_" in str(error):
                raise TuneError(
                    "a space was given, so make_job is called with a dict of settings; leave space out to get a trial. "
                    f"make_job raised {describe_with_place(error)}"
                ) from error
            raise

    def _suggest(self, trial: Trial, suggestions: Any) -> Job:
        try:
            return self._checked(trial, suggestions)
        except (TypeError, AttributeError) as error:
            if type(suggestions).__name__ not in str(error):
                raise
            raise TuneError(
                "no space was given, so make_job is called with a trial (trial.suggest_float ...); pass space= to get "
                f"a dict. make_job raised {describe_with_place(error)}"
            ) from error
        finally:
            if not trial.params:
                trial.params = dict(suggestions.params)
                trial.attrs["space"] = space_of(suggestions)

    def _checked(self, trial: Trial, given: Any) -> Job:
        job: Any = self._make(given)
        if not isinstance(job, Job):
            what = "None" if job is None else f"a value of type {type(job).__name__}"
            raise TuneError(f"{trial.name}: make_job returned {what}; return a shoal.Job")
        if job.epochs != self._max_epochs:
            length = f"epochs={job.epochs}" if job.steps is None else f"steps={job.steps}"
            raise TuneError(
                f"{trial.name}: its job has {length}, and the study trains up to max_epochs={self._max_epochs}; "
                "leave epochs and steps out of the job"
            )
        known = known_metrics(job)
        missing = [name for name in self._metrics if known is not None and name not in known]
        if known is not None and missing:
            raise TuneError(f"metric is {missing[0]!r}, which {trial.name} does not have; it has {', '.join(known)}")
        params = trial.params or dict(given.params)
        extra_config = {name: _plain(value) for name, value in params.items() if name not in job.hparams}
        return dataclasses.replace(job, name=trial.name, config={**extra_config, **job.config})


def _plain(value: Any) -> Any:
    """Convert a setting to a value that a job's `config` accepts."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def known_metrics(job: Job) -> list[str] | None:
    """Return the metrics by which a job can be compared; None if its step's logs decide that."""
    return None if job.step is not None else ["loss", *(["val_loss", *job.metrics] if job.val is not None else [])]


def check_metric(make_job: Any, space: Space | None, metric: str, max_epochs: Any, seed: int) -> None:
    """Raise a TuneError if the job of a first trial has no such metric. Does nothing if that is not known yet."""
    try:
        jobs = Jobs(make_job, space, RandomSampler(space, seed), (metric,), max_epochs)
        jobs.draw(Trial(0, {}))()
    except TuneError:
        raise
    except Exception:  # the study reports what make_job raises
        return


def _optimizer_settings(job: Job) -> Any:
    return dict(job.hparams), job.clip_norm


def _other_settings(job: Job) -> dict[str, Any]:
    """Return a job's other settings that can be compared: numbers and strings."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    kinds = int | float | str | type | EMA | SWA | None
    plain = {name: value for name, value in fields.items() if isinstance(value, kinds)}
    return {name: value for name, value in plain.items() if name not in ("clip_norm", "model")}


def _check_ranges(trial: Trial, current: dict[str, Any]) -> None:
    """Raise an OutError if make_job suggests a trial's settings from other ranges than before, since both would be
    mixed."""
    previous = trial.attrs.get("space", {})
    current = json.loads(json.dumps(current))
    for name in [*previous, *current]:
        if previous.get(name) != current.get(name):
            old, new = (json.dumps(space[name]) if name in space else "nothing" for space in (previous, current))
            raise OutError(
                f"{trial.name} was begun with {name} suggested from {old}, and now make_job suggests it from {new}; "
                "put that back, or use another folder"
            )


def space_of(suggestions: Any) -> dict[str, Any]:
    """Return what a make_job suggested, in the short form for JSON."""
    suggested = suggestions.distributions.items()
    return {name: (each if hasattr(each, "to_json") else from_optuna(each)).to_json() for name, each in suggested}
