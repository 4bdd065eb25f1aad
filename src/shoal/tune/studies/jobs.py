"""The jobs of trials: what the user's make_job returns, checked and made as long as the study is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shoal.errors import OutError, TuneError, describe
from shoal.jobs.averaging import EMA, SWA
from shoal.jobs.job import Job, default_epochs
from shoal.tune.distributions import from_optuna
from shoal.tune.samplers import DrawnSuggestions, RandomSampler, Sampler
from shoal.tune.space import Space
from shoal.tune.trial import Trial

TRIES = 5
"""Pairs of configurations in which a setting is compared with another value of it."""


class Jobs:
    """Makes the job of a trial by the user's function, with settings of the sampler."""

    def __init__(
        self,
        make_job: Callable[[Any], Job],
        space: Space | None,
        sampler: Sampler,
        metrics: Sequence[str],
        max_epochs: int,
    ) -> None:
        """`space`: None where make_job is given a trial and suggests its settings itself."""
        if not callable(make_job):
            raise TuneError(f"make_job is {make_job!r}; pass a function of the settings that returns a shoal.Job")
        self._make_job, self._space, self._sampler = make_job, space, sampler
        self._metrics, self._max_epochs = metrics, max_epochs

    def draw(self, trial: Trial) -> Callable[[], Job]:
        """Draw the settings of a new trial; what is returned makes its job, and raises what make_job raises."""
        if self._space is not None:
            trial.params = self._sampler.ask(trial.number)
            return lambda: self.make(trial)
        suggestions = self._sampler.suggest(trial.number)
        return lambda: self._suggest(trial, suggestions)

    def make(self, trial: Trial) -> Job:
        """The job of a trial with the settings that it has; raises what make_job raises."""
        if self._space is not None:
            return self._checked(trial, dict(trial.settings))
        suggestions = DrawnSuggestions(trial.number, fixed=trial.settings)
        job = self._suggest(trial, suggestions)
        _check_ranges(trial, space_of(suggestions))
        return job

    def changeable(self, seed: int) -> tuple[str, ...]:
        """The settings that are the optimizer's alone, so that a network under way can be given another value."""
        assert self._space is not None
        names = []
        for name in self._space:
            for number in range(TRIES):
                params, others = self._space.sample(seed, number), self._space.sample(seed, number + 1)
                if params[name] == others[name]:
                    continue
                with suppress(Exception):  # a configuration that make_job refuses
                    first, second = (self._make(given) for given in (params, {**params, name: others[name]}))
                    if _optimizer_settings(first) != _optimizer_settings(second) and _rest(first) == _rest(second):
                        names.append(name)
                    break
        return tuple(names)

    def _make(self, given: Any) -> Any:
        with default_epochs(self._max_epochs):
            return self._make_job(given)

    def _suggest(self, trial: Trial, suggestions: Any) -> Job:
        try:
            return self._checked(trial, suggestions)
        except (TypeError, AttributeError) as error:
            if type(suggestions).__name__ not in str(error):
                raise
            raise TuneError(
                "no space was given, so make_job is called with a trial (trial.suggest_float ...); pass space= to get "
                f"a dict. make_job raised {describe(error)}"
            ) from error
        finally:
            if not trial.params:
                trial.params = dict(suggestions.params)
                trial.attrs["space"] = space_of(suggestions)

    def _checked(self, trial: Trial, given: Any) -> Job:
        job: Any = self._make(given)
        if not isinstance(job, Job):
            raise TuneError(f"{trial.name}: make_job returned a {type(job).__name__}; return a shoal.Job")
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
        noted = {name: _plain(value) for name, value in params.items() if name not in job.hparams}
        return dataclasses.replace(job, name=trial.name, config={**noted, **job.config})


def _plain(value: Any) -> Any:
    """A setting as a job's `config` takes it."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def known_metrics(job: Job) -> list[str] | None:
    """What a job can be compared by; None where its step's logs decide that."""
    return None if job.step is not None else ["loss", *(["val_loss", *job.metrics] if job.val is not None else [])]


def check_metric(make_job: Any, space: Space | None, metric: str, max_epochs: Any, seed: int) -> None:
    """TuneError where the job of a first trial has no such metric; nothing where that can't be known yet."""
    try:
        jobs = Jobs(make_job, space, RandomSampler(space, seed), (metric,), max_epochs)
        jobs.draw(Trial(0, {}))()
    except TuneError:
        raise
    except Exception:  # the study reports what make_job raises
        return


def _optimizer_settings(job: Job) -> Any:
    return dict(job.hparams), job.clip_norm


def _rest(job: Job) -> dict[str, Any]:
    """A job's other settings that can be compared: numbers and words."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    kinds = int | float | str | type | EMA | SWA | None
    plain = {name: value for name, value in fields.items() if isinstance(value, kinds)}
    return {name: value for name, value in plain.items() if name != "clip_norm"}


def _check_ranges(trial: Trial, now: dict[str, Any]) -> None:
    """OutError where make_job suggests a trial's settings from something else than before: they would be mixed."""
    before = trial.attrs.get("space", {})
    now = json.loads(json.dumps(now))
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            old, new = (json.dumps(space[name]) if name in space else "nothing" for space in (before, now))
            raise OutError(
                f"{trial.name} was begun with {name} suggested from {old}, and now make_job suggests it from {new}; "
                "put that back, or use another folder"
            )


def space_of(suggestions: Any) -> dict[str, Any]:
    """What a make_job suggested, as JSON can hold it."""
    known = suggestions.distributions.items()
    return {name: (each if hasattr(each, "to_json") else from_optuna(each)).to_json() for name, each in known}
