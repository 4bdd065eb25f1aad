"""Optuna, imported when it is used: converting trials, and opening storages by URL."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shoal.errors import JobError, ShoalError, describe
from shoal.tune.distributions import Distribution, to_optuna
from shoal.tune.objectives import values_of
from shoal.tune.space import Space, parse
from shoal.tune.trial import Trial


class OptunaMissing(ShoalError, ImportError):
    """Raised if Optuna, or a package that it needs, is not installed."""


def load_optuna(need: str) -> ModuleType:
    """Import Optuna; `need` says what for, in the error message."""
    try:
        import optuna
    except ImportError:
        raise OptunaMissing(f"{need} needs Optuna: pip install 'shoal[tune]'") from None
    return optuna


@contextmanager
def silent_log() -> Iterator[None]:
    """Suppress Optuna's messages about created studies inside this context."""
    from optuna import logging

    level = logging.get_verbosity()
    logging.set_verbosity(max(level, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(level)


def state_of(trial: Trial) -> Any:
    """Return the trial's state as Optuna's. A trial that ended without a number has failed, as in Optuna."""
    from optuna.trial import TrialState

    if trial.state == "complete":
        return TrialState.FAIL if any(map(math.isnan, values_of(trial))) else TrialState.COMPLETE
    return {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}.get(trial.state, TrialState.RUNNING)


def results_of(trial: Trial) -> list[float] | None:
    """Return the values by which Optuna compares trials, one for each metric; None if it has none."""
    from optuna.trial import TrialState

    if state_of(trial) not in (TrialState.COMPLETE, TrialState.PRUNED):
        return None
    values = values_of(trial)
    return None if any(map(math.isnan, values)) else values


def distributions_of(trial: Trial, space: Space | None) -> dict[str, Any]:
    """Return Optuna's distributions of the trial's settings: those that it was drawn from, or those of the space."""
    chosen: dict[str, Distribution] = {
        **(space or {}),
        **(parse(trial.attrs["space"]) if trial.attrs.get("space") else {}),
    }
    unknown = [name for name in trial.params if name not in chosen]
    if unknown:
        line = f"{trial.name}: what {', '.join(unknown)} was drawn from is not known; its attrs have no 'space'"
        raise JobError(line)
    return {name: to_optuna(chosen[name]) for name in trial.params}


def frozen(trial: Trial, space: Space | None, **more: Any) -> Any:
    """Convert the trial to one of Optuna's that can be added to a study. `more` are further arguments of
    `create_trial`."""
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


Values = Sequence[tuple[int, int, float]]
"""(id of the trial in the storage, epoch, value)."""

_JOURNAL = "journal:///"


def open_storage(storage: Any) -> Any:
    """Return the storage of a URL: SQLAlchemy's, or journal:///file. A storage object is returned as it is.

    Raises:
        JobError: If it is not a URL, or cannot be opened.
    """
    from optuna.storages import BaseStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str) or "://" not in storage:
        raise JobError(
            f"storage is {storage!r}; use a URL such as sqlite:///study.db, journal:///study.log or "
            "postgresql+psycopg://user@host/database"
        )
    try:
        if storage.startswith(_JOURNAL):
            path = storage.removeprefix(_JOURNAL)
            _mend_journal(path)
            return JournalStorage(JournalFileBackend(path))
        return RDBStorage(storage)
    except ImportError as error:
        driver = "psycopg[binary]" if storage.startswith("postgresql+psycopg:") else "its database driver"
        if storage.startswith("postgresql:"):
            driver = "psycopg2-binary"
        raise OptunaMissing(f"storage {_hidden(storage)} needs {driver}: pip install '{driver}'") from error
    except Exception as error:
        raise JobError(f"storage {_hidden(storage)} cannot be opened: {describe(error)}") from error


def close_storage(storage: Any) -> None:
    """Close the connections of a storage; it opens new ones when it is used again."""
    storage.remove_session()
    engine = getattr(getattr(storage, "_backend", storage), "engine", None)
    if engine is not None:
        engine.dispose()


def _mend_journal(path: str) -> None:
    """Remove an incomplete last line that a kill has left, since lines appended to it could not be read."""
    from optuna.storages.journal import JournalFileSymlinkLock

    if not os.path.exists(path):
        return
    lock = JournalFileSymlinkLock(path)
    lock.acquire()
    try:
        with open(path, "rb+") as file:
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
    finally:
        lock.release()


def _hidden(url: str) -> str:
    """Return the URL without its password."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}"


def value_writer(storage: Any) -> Callable[[Values], None]:
    """Return a function that writes intermediate values: in one transaction to a database, one after another
    elsewhere."""
    insert = _inserter(storage)

    def write(values: Values) -> None:
        if insert is not None:
            try:
                return insert(values, False)
            except Exception:  # a value may be stored already, if the database's answer was lost
                pass
        _one_by_one(storage, values)

    return write


def _one_by_one(storage: Any, values: Values) -> None:
    for id, epoch, value in values:
        storage.set_trial_intermediate_value(id, epoch, float(value))


def insert_values(storage: Any, values: Values) -> bool:
    """Insert intermediate values of running trials in one transaction, and return whether that was done.

    It is not if the storage is no database, if one of the trials has ended, or if a value is stored already.
    """
    insert = _inserter(storage)
    if insert is None:
        return False
    try:
        insert(values, True)
    except Exception:
        return False
    return True


def _inserter(storage: Any) -> Callable[[Values, bool], None] | None:
    """Return a function that inserts intermediate values into a database, and may first check that their trials are
    running. None if it is no database, or one of another kind."""
    backend = getattr(storage, "_backend", storage)
    if not hasattr(backend, "engine"):
        return None
    try:
        from optuna.storages._rdb.models import TrialIntermediateValueModel as Model
        from optuna.storages._rdb.models import TrialModel

        columns = set(Model.__table__.columns.keys())
        make = Model.intermediate_value_to_stored_repr
        is_supported = {"trial_id", "step", "intermediate_value", "intermediate_value_type"} <= columns
    except (ImportError, AttributeError):  # unknown internals: use the public method
        is_supported = False
    if not is_supported:
        return None

    def insert(values: Values, check: bool) -> None:
        if not values:
            return
        names = ("trial_id", "step", "intermediate_value", "intermediate_value_type")
        rows = [dict(zip(names, (id, epoch, *make(float(value))), strict=True)) for id, epoch, value in values]
        with backend.engine.begin() as connection:
            if check:
                _check_running(connection, TrialModel, {id for id, _, _ in values})
            connection.execute(Model.__table__.insert(), rows)

    return insert


def _check_running(connection: Any, trials: Any, ids: set[int]) -> None:
    from sqlalchemy import select

    states = connection.execute(select(trials.state).where(trials.trial_id.in_(ids))).scalars().all()
    if len(states) < len(ids) or any(state.is_finished() for state in states):
        raise RuntimeError("a trial has ended")
