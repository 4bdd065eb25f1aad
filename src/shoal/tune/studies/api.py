"""`shoal.tune`: a search over jobs, as one run."""

from __future__ import annotations

import inspect
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.engine.planning.policy import Policy
from shoal.errors import TuneError, warn
from shoal.jobs.job import Job
from shoal.reporting.callbacks import Callback
from shoal.reporting.events import Event, Listener, Listeners
from shoal.reporting.progress import progress_for
from shoal.results import Results
from shoal.settings import Settings, make_settings
from shoal.training import carry_out
from shoal.tune.brackets import table
from shoal.tune.objectives import Objectives, check_rank, make_objectives
from shoal.tune.population import PBT
from shoal.tune.samplers import Sampler, make_sampler
from shoal.tune.schedulers import ASHA, Goal, Hyperband, Mode, NoScheduler, Scheduler, SuccessiveHalving
from shoal.tune.space import Space, parse
from shoal.tune.studies.jobs import Jobs, check_metric
from shoal.tune.studies.journal import Journal
from shoal.tune.studies.progress import StudyView
from shoal.tune.studies.search import TrialSearch
from shoal.tune.studies.study import Study
from shoal.utils.numpy_values import plain_int
from shoal.utils.tables import say

SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "hyperband": Hyperband,
    "successive-halving": SuccessiveHalving,
    "asha": ASHA,
    "pbt": PBT,
    "none": NoScheduler,
}
WITHOUT_ETA = ("pbt", "none")
"""The schedulers that do not use `eta`."""


def tune(
    make_job: Callable[[Any], Job],
    space: Mapping[str, Any] | Space | None = None,
    *,
    metric: str | Sequence[str] = "val_loss",
    mode: Mode | Sequence[Mode] | None = None,
    max_epochs: int,
    eta: int | None = None,
    scheduler: str | Scheduler = "hyperband",
    sampler: Any = "random",
    num_trials: int | None = None,
    seed: int = 0,
    storage: Any = None,
    study_name: str = "shoal",
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    memory: int | str | None = None,
    threads: int | None = None,
    compile: bool | Literal["auto"] = "auto",
    checkpoint_every: float | str = "60s",
    deterministic: bool = False,
    policy: str | Policy = "fifo",
    callbacks: Sequence[Callback] | None = None,
    events: Listener | None = None,
) -> Study:
    """Search for the best settings, with all trials of the search in one run on one device.

    Args:
        make_job: Returns the shoal.Job of a trial's settings, a dict, without epochs. If it raises, only that trial
            fails. Without `space` it gets a trial and suggests its settings itself: `trial.suggest_float(...)`.
        space: Names, and the distributions of their values: `{"lr": ("log", 1e-5, 1e-1), "width": [64, 128]}`.
        metric: The metric to compare: "loss", "val_loss", a name in the jobs' `metrics` or in a step's logs. Several of
            them, as a list, with scheduler="none": the study then has `best_trials`.
        mode: Whether to minimise or maximise, "min" or "max", for each metric; None: derived from the metric's name.
        max_epochs: The longest that a trial trains, in epochs.
        eta: A rung keeps one in eta; 3 by default. A scheduler that is given as an object has its own.
        scheduler: Decides which trials continue: "hyperband", "successive-halving", "asha", "pbt", "none", or an object
            such as shoal.tune.ASHA(parallel=64).
        sampler: Provides the settings: "random", "grid", a name or an object of Optuna's samplers.
        num_trials: How many settings are tried; Hyperband's number follows from max_epochs and eta.
        seed: The seed of the sampler and the scheduler; jobs have their own seeds.
        storage: An Optuna storage to write the study to, such as "sqlite:///study.db".
        study_name: The study's name in the storage.

    `device`, `out`, `progress`, `memory`, `threads`, `compile`, `checkpoint_every`, `deterministic`, `policy`,
    `callbacks` and `events` are those of `shoal.train`. With `out`, the same call again resumes a study that was
    killed.

    Examples:
        >>> study = shoal.tune(make_job, {"lr": ("log", 1e-4, 1e-1)}, metric="accuracy", max_epochs=81)
        >>> study.best_params, study.best_model
    """
    start = time.perf_counter()
    if events is not None and not callable(events):
        raise ValueError(f"events is {events!r}; pass a function that is given each shoal.Event")
    if storage is None and study_name != "shoal":
        raise TuneError(
            f"study_name is {study_name!r}, and there is no storage; set storage='sqlite:///study.db', or leave it out"
        )
    plain_seed = plain_int(seed)
    if isinstance(plain_seed, bool) or not isinstance(plain_seed, int):
        raise TuneError(f"seed is {seed!r}; use a whole number")
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    spec = _make_spec(
        make_job, None if space is None else parse(space), metric, mode, max_epochs, make_scheduler(scheduler, eta),
        sampler, num_trials, plain_seed,
    )  # fmt: skip
    if out is not None and spec.space is not None:
        spec.space.check_storable()
    with closing(Journal(None if out is None else Path(out))) as journal:
        trials, written = journal.open(_described(spec, sampler))
        mirror = _mirror(storage, study_name, spec, None if out is None else written["run"])
        search = TrialSearch(
            spec.jobs, spec.goal, spec.scheduler, spec.sampler, spec.objectives.names, journal, mirror, trials
        )
        if mirror is not None:
            for previous in mirror.previous():
                spec.sampler.tell(previous)
            mirror.attach(trials)
        with nullcontext() if mirror is None else closing(mirror):
            results = _run(search, settings, journal.folder, progress, callbacks, events)
    study = Study(
        objectives=spec.objectives, max_epochs=max_epochs, scheduler=spec.scheduler.name,
        trials=search.trials, brackets=spec.scheduler.brackets(spec.goal), results=results,
        seconds=time.perf_counter() - start, name="" if storage is None else study_name, folder=journal.folder,
        space=None if spec.space is None else spec.space.to_json(),
    )  # fmt: skip
    if out is not None:
        study.report(Path(out) / "report.html")
    return study


@dataclass(frozen=True, slots=True)
class _SearchSpec:
    """A search as it was asked for, checked: everything but how it runs and where it is stored."""

    objectives: Objectives
    space: Space | None
    scheduler: Scheduler
    sampler: Sampler
    goal: Goal
    jobs: Jobs


def _make_spec(
    make_job: Callable[[Any], Job],
    space: Space | None,
    metric: Any,
    mode: Any,
    max_epochs: int,
    scheduler: Scheduler,
    sampler: Any,
    num_trials: int | None,
    seed: int,
) -> _SearchSpec:
    """Check what was asked for, and make its parts. Raises a TuneError or JobError if it is not possible."""
    objectives = make_objectives(metric, mode, lambda name: check_metric(make_job, space, name, max_epochs, seed))
    check_rank(objectives, scheduler)
    first = objectives.modes[0]
    made_sampler = make_sampler(sampler, space, mode=objectives.modes if objectives.several else first, seed=seed)
    count = _num_trials(num_trials, made_sampler.limit, scheduler)
    goal = Goal(max_epochs=max_epochs, mode=first, num_trials=count, seed=seed, space=space)
    scheduler.check(goal)
    _warn_of_few_trials(scheduler, goal)
    jobs = Jobs(make_job, space, made_sampler, objectives.names, max_epochs)
    if isinstance(scheduler, PBT):
        goal = _with_changeable(goal, scheduler, jobs)
    return _SearchSpec(objectives, space, scheduler, made_sampler, goal, jobs)


def _warn_of_few_trials(scheduler: Scheduler, goal: Goal) -> None:
    """Warn if there is one trial, or none that trains up to the longest."""
    if isinstance(scheduler, Hyperband) and sum(bracket.size for bracket in scheduler.brackets(goal)) == 1:
        line = f"max_epochs={goal.max_epochs} is less than eta={scheduler.eta}, so that Hyperband has one trial; "
        warn(line + "use more epochs, or scheduler='none' with num_trials")
    if isinstance(scheduler, ASHA) and (goal.num_trials or 0) < scheduler.enough(goal):
        enough = scheduler.enough(goal)
        line = f"num_trials={goal.num_trials} is less than {enough}: with eta={scheduler.eta} too few trials may pass "
        warn(line + f"the rungs for one to reach max_epochs={goal.max_epochs}; use more trials, or a larger min_epochs")


def _described(spec: _SearchSpec, sampler: Any) -> dict[str, Any]:
    """Return what a folder stores of a search: a call that differs in it is another search."""
    goal = spec.goal
    return {
        **spec.objectives.described, "max_epochs": goal.max_epochs, "num_trials": goal.num_trials,
        "seed": goal.seed, "scheduler": repr(spec.scheduler),
        "sampler": sampler if isinstance(sampler, str) else type(sampler).__name__,
        "space": None if spec.space is None else spec.space.to_json(), "run": uuid.uuid4().hex[:12],
    }  # fmt: skip


def _run(
    search: TrialSearch,
    settings: Settings,
    folder: Path | None,
    progress: bool,
    callbacks: Sequence[Callback] | None,
    events: Listener | None,
) -> Results:
    """Train the trials; with `progress`, print the brackets first."""
    brackets = search.scheduler.brackets(search.goal)
    if progress and brackets:
        say(f"{search.scheduler.name}, {sum(bracket.size for bracket in brackets)} trials\n{table(brackets)}")
    view = StudyView(search.trials, brackets, search.metric, search.goal.mode)
    with progress_for([], progress, view) as shown:
        listeners = Listeners([shown, *([events] if events is not None else [])])

        def notify(event: Event) -> None:
            listeners(event)

        out = None if folder is None else folder / "run"
        return carry_out([], settings, out=out, callbacks=callbacks, events=notify, search=search)


def arguments() -> list[str]:
    """Return the names of the keyword arguments of `tune`."""
    return [name for name in inspect.signature(tune).parameters if name not in ("make_job", "space")]


def make_scheduler(scheduler: Any, eta: int | None) -> Scheduler:
    """Return the scheduler of this name, or the given object. `eta` is None if it was not given."""
    if isinstance(scheduler, str):
        if scheduler not in SCHEDULERS:
            raise TuneError(f"scheduler is {scheduler!r}; use one of {', '.join(map(repr, SCHEDULERS))}")
        if eta is not None and scheduler in WITHOUT_ETA:
            raise TuneError(f"eta is {eta!r}, and scheduler {scheduler!r} does not use it; leave it out")
        return SCHEDULERS[scheduler]() if eta is None else SCHEDULERS[scheduler](eta=eta)
    if not callable(getattr(scheduler, "decide", None)) or isinstance(scheduler, type):
        raise TuneError(
            f"scheduler is {scheduler!r}; use one of {', '.join(map(repr, SCHEDULERS))}, or shoal.tune.ASHA()"
        )
    if eta is not None:
        kind = type(scheduler).__name__
        raise TuneError(
            f"eta is {eta!r}, and the scheduler is an object, which has its own; say shoal.tune.{kind}(eta=...)"
        )
    result: Scheduler = scheduler
    return result


def _with_changeable(goal: Goal, scheduler: PBT, jobs: Jobs) -> Goal:
    """Return the goal with the settings that population-based training may change. Raises a TuneError if there is
    none."""
    changeable = jobs.changeable(goal.seed)
    goal = replace(goal, changeable=changeable)
    fixed = [name for name in scheduler.mutate or () if name not in changeable]
    if fixed:
        raise TuneError(
            f"mutate names {fixed[0]!r}, which cannot change while a trial trains: only settings of the optimizer can "
            f"(the job's hparams, clip_norm); use {', '.join(changeable) or 'another scheduler'}"
        )
    if not scheduler.mutated(goal):
        raise TuneError(
            "'pbt' changes settings of the optimizer (the job's hparams, clip_norm) within their ranges, and the space "
            "has none; give one a range, such as 'lr': ('log', 1e-4, 1e-1), or use another scheduler"
        )
    return goal


def _num_trials(requested: int | None, limit: int | None, scheduler: Scheduler) -> int | None:
    if requested is not None and (isinstance(requested, bool) or not isinstance(requested, int) or requested < 1):
        raise TuneError(f"num_trials is {requested!r}; use a whole number, 1 or more")
    if requested is not None and isinstance(scheduler, Hyperband):
        raise TuneError(
            "num_trials is set, but Hyperband's number of trials follows from max_epochs and eta; "
            "leave it out, or use scheduler='asha' or 'successive-halving'"
        )
    if requested is not None and limit is not None and requested > limit:
        raise TuneError(f"num_trials is {requested}, and the sampler has {limit} configurations; use at most {limit}")
    return limit if requested is None else requested


def _mirror(storage: Any, name: str, spec: _SearchSpec, run: str | None) -> Any:
    """Return the Optuna storage to which the study is written; None if there is none."""
    if storage is None:
        return None
    from shoal.tune.optuna_storage import OptunaStorage

    modes, metric = spec.objectives.modes, ", ".join(spec.objectives.names)
    return OptunaStorage(storage, name, mode=modes, metric=metric, space=spec.space, run=run)
