"""Optuna, loaded when it is used, and the few things that are said in its terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shoal.errors import ShoalError
from shoal.tune.distributions import to_optuna
from shoal.tune.space import Space, parse
from shoal.tune.trial import Trial


class OptunaMissing(ShoalError, ImportError):
    """Optuna, or a package that it needs for this, is not installed."""


def load_optuna(need: str) -> ModuleType:
    """Optuna itself; `need` says what for."""
    try:
        import optuna
    except ImportError:
        raise OptunaMissing(f"{need} needs Optuna: pip install 'shoal[tune]'") from None
    return optuna


@contextmanager
def silent_log() -> Iterator[None]:
    """Without Optuna's lines on studies that are made, which say nothing about the search."""
    from optuna import logging

    level = logging.get_verbosity()
    logging.set_verbosity(max(level, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(level)


def state_of(trial: Trial) -> Any:
    """The trial's state in Optuna's words. A trial that ended without a number failed, as Optuna has it too."""
    from optuna.trial import TrialState

    if trial.state == "complete":
        return TrialState.FAIL if math.isnan(trial.value_at(trial.epochs)) else TrialState.COMPLETE
    return {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}.get(trial.state, TrialState.RUNNING)


def results_of(trial: Trial) -> list[float] | None:
    """The values that Optuna compares trials by: the last one, or `objectives` of its attrs; None: it has none."""
    from optuna.trial import TrialState

    if state_of(trial) not in (TrialState.COMPLETE, TrialState.PRUNED):
        return None
    values = [float(each) for each in trial.attrs.get("objectives", [trial.value_at(trial.epochs)])]
    return None if any(map(math.isnan, values)) else values


def distributions_of(trial: Trial, space: Space | None) -> dict[str, Any]:
    """Optuna's distributions of the trial's settings: those of the space, or those that were suggested for it."""
    chosen = space if space is not None else parse(trial.attrs["space"]) if trial.attrs.get("space") else {}
    return {name: to_optuna(each) for name, each in chosen.items() if name in trial.params}


def frozen(trial: Trial, space: Space | None, **more: Any) -> Any:
    """The trial as one of Optuna's, to be added to a study; `more`: what else it has there."""
    from optuna.trial import create_trial

    distributions = distributions_of(trial, space)
    return create_trial(
        state=state_of(trial),
        values=results_of(trial),
        params={name: trial.params[name] for name in distributions},
        distributions=distributions,
        intermediate_values=dict(trial.values),
        **more,
    )
