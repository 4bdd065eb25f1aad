"""`shoal.tune`: a search over jobs, as one run."""

from __future__ import annotations

import inspect
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.engine.planning.policy import Policy
from shoal.errors import TuneError
from shoal.jobs.job import Job
from shoal.jobs.metric_direction import direction
from shoal.reporting.callbacks import Callback
from shoal.reporting.events import Event, Listener, Listeners
from shoal.reporting.progress import progress_for
from shoal.results import Results
from shoal.training import Settings, carry_out, make_settings
from shoal.tune.brackets import table
from shoal.tune.population import PBT
from shoal.tune.samplers import make_sampler
from shoal.tune.schedulers import ASHA, Goal, Hyperband, Mode, NoScheduler, Scheduler, SuccessiveHalving
from shoal.tune.space import Space, parse
from shoal.tune.studies.jobs import Jobs, check_metric
from shoal.tune.studies.journal import Journal
from shoal.tune.studies.progress import StudyView
from shoal.tune.studies.search import TrialSearch
from shoal.tune.studies.study import Study
from shoal.utils.tables import say

SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "hyperband": Hyperband,
    "successive-halving": SuccessiveHalving,
    "asha": ASHA,
    "pbt": PBT,
    "none": NoScheduler,
}
WITHOUT_ETA = ("pbt", "none")
"""Those of them that keep no share of the trials."""


def tune(
    make_job: Callable[[Any], Job],
    space: Mapping[str, Any] | Space | None = None,
    *,
    metric: str = "val_loss",
    mode: Mode | None = None,
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
        make_job: From a trial's settings, a dict, to its shoal.Job, without epochs. One that raises costs that trial
            alone. Without `space` it is given a trial, and suggests its settings itself: `trial.suggest_float(...)`.
        space: Names, and what their values are drawn from: `{"lr": ("log", 1e-5, 1e-1), "width": [64, 128]}`.
        metric: What is compared: "loss", "val_loss", a name in the jobs' `metrics` or in a step's logs.
        mode: Which way is better, "min" or "max"; None: as the metric's name says.
        max_epochs: The longest that a trial trains.
        eta: A rung keeps one in eta; 3 by default. A scheduler that is given as an object has its own.
        scheduler: Which trials continue: "hyperband", "successive-halving", "asha", "pbt", "none", or an object such as
            shoal.tune.ASHA(parallel=64).
        sampler: Where settings come from: "random", "grid", a name or an object of Optuna's samplers.
        num_trials: How many settings are tried; Hyperband's number follows from max_epochs and eta.
        seed: Of the sampler and the scheduler; jobs have their own seeds.
        storage: An Optuna storage to write the study to, such as "sqlite:///study.db".
        study_name: The study's name there.
        device, out, progress, memory, threads, compile, checkpoint_every, deterministic, policy, callbacks, events: As
            in shoal.train. With `out`, the same call again resumes a study that was killed.

    >>> study = shoal.tune(make_job, {"lr": ("log", 1e-4, 1e-1)}, metric="accuracy", max_epochs=81)
    >>> study.best_params, study.best_model
    """
    start = time.perf_counter()
    if events is not None and not callable(events):
        raise ValueError(f"events is {events!r}; pass a function that is given each shoal.Event")
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    known = None if space is None else parse(space)
    chosen = make_scheduler(scheduler, eta)
    towards = _mode(metric, mode, lambda: check_metric(make_job, known, metric, max_epochs, seed))
    source = make_sampler(sampler, known, mode=towards, seed=seed)
    goal = Goal(
        max_epochs=max_epochs,
        mode=towards,
        num_trials=_num_trials(num_trials, source.limit, chosen),
        seed=seed,
        space=known,
    )
    chosen.check(goal)
    jobs = Jobs(make_job, known, source, metric, max_epochs)
    if isinstance(chosen, PBT):
        goal = _with_changeable(goal, chosen, jobs)
    if out is not None and known is not None:
        known.check_storable()
    asked = {
        "metric": metric, "mode": towards, "max_epochs": max_epochs, "num_trials": goal.num_trials, "seed": seed,
        "scheduler": repr(chosen), "sampler": sampler if isinstance(sampler, str) else type(sampler).__name__,
        "space": None if known is None else known.to_json(), "run": uuid.uuid4().hex[:12],
    }  # fmt: skip
    journal = Journal(None if out is None else Path(out))
    trials, written = journal.open(asked)
    try:
        mirror = _mirror(storage, study_name, towards, metric, known, None if out is None else written["run"])
        search = TrialSearch(
            jobs, goal, chosen, source, metric, journal,
            [] if mirror is None else [mirror], trials,
        )  # fmt: skip
        brackets = chosen.brackets(goal)
        if progress and brackets:
            say(f"{chosen.name}, {sum(bracket.size for bracket in brackets)} trials\n{table(brackets)}")
        if mirror is not None:
            for previous in mirror.previous():
                source.tell(previous)
            mirror.attach(trials)
        try:
            view = StudyView(search.trials, brackets, metric, towards)
            results = _run(search, settings, journal.folder, view, progress, callbacks, events)
        finally:
            if mirror is not None:
                mirror.close()
    finally:
        journal.close()
    study = Study(
        metric=metric, mode=towards, max_epochs=max_epochs, scheduler=chosen.name, trials=search.trials,
        brackets=brackets, results=results, seconds=time.perf_counter() - start,
        name="" if storage is None else study_name, folder=journal.folder,
        space=None if known is None else known.to_json(),
    )  # fmt: skip
    if out is not None:
        study.report(Path(out) / "report.html")
    return study


def _run(
    search: TrialSearch,
    settings: Settings,
    folder: Path | None,
    view: StudyView,
    progress: bool,
    callbacks: Sequence[Callback] | None,
    events: Listener | None,
) -> Results:
    with progress_for([], progress, view) as shown:
        listeners = Listeners([shown, *([events] if events is not None else [])])

        def tell(event: Event) -> None:
            listeners(event)

        out = None if folder is None else folder / "run"
        return carry_out([], settings, out=out, callbacks=callbacks, events=tell, search=search)


def arguments() -> list[str]:
    """What `tune` takes by name."""
    return [name for name in inspect.signature(tune).parameters if name not in ("make_job", "space")]


def make_scheduler(scheduler: Any, eta: int | None) -> Scheduler:
    """The scheduler of this name, or the one that was given; `eta`: None where nothing is said of it."""
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
    made: Scheduler = scheduler
    return made


def _with_changeable(goal: Goal, scheduler: PBT, jobs: Jobs) -> Goal:
    """The goal, with the settings that population-based training may change. TuneError where there is none."""
    changeable = jobs.changeable(goal.seed)
    goal = replace(goal, changeable=changeable)
    fixed = [name for name in scheduler.mutate or () if name not in changeable]
    if fixed:
        raise TuneError(
            f"mutate names {fixed[0]!r}, which is no setting of the optimizer alone (the job's hparams, clip_norm): a "
            f"network under way cannot be given another; it can be {', '.join(changeable) or 'nothing'} here"
        )
    if not scheduler.mutated(goal):
        raise TuneError(
            "'pbt' changes settings of the optimizer (the job's hparams, clip_norm) within their ranges, and the space "
            "has none; give one a range, such as 'lr': ('log', 1e-4, 1e-1), or use another scheduler"
        )
    return goal


def _mode(metric: Any, mode: Any, check: Callable[[], None]) -> Mode:
    """Which way is better; `check` raises where the metric is none of a job's, as where its name is misspelt."""
    if not isinstance(metric, str) or not metric:
        raise TuneError(f"metric is {metric!r}; name one: 'val_loss', or one of the jobs' metrics")
    if mode is None:
        mode = direction(metric)
        if mode is None:
            check()
            raise TuneError(
                f"the name {metric!r} does not say which way is better; set mode='min' or mode='max', or check "
                "its spelling"
            )
    if mode not in ("min", "max"):
        raise TuneError(f"mode is {mode!r}; it says which way is better: use 'min' or 'max'")
    chosen: Mode = mode
    return chosen


def _num_trials(asked: int | None, limit: int | None, scheduler: Scheduler) -> int | None:
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise TuneError(f"num_trials is {asked!r}; use a whole number, 1 or more")
    if asked is not None and isinstance(scheduler, Hyperband):
        raise TuneError(
            "num_trials is set, but Hyperband's number of trials follows from max_epochs and eta; "
            "leave it out, or use scheduler='asha' or 'successive-halving'"
        )
    if asked is not None and limit is not None and asked > limit:
        raise TuneError(f"num_trials is {asked}, and the sampler has {limit} configurations; use at most {limit}")
    return limit if asked is None else asked


def _mirror(storage: Any, name: str, mode: Mode, metric: str, space: Space | None, run: str | None) -> Any:
    """The Optuna storage that the study is written to; None where there is none."""
    if storage is None:
        return None
    from shoal.tune.optuna_storage import OptunaStorage

    return OptunaStorage(storage, name, mode=mode, metric=metric, space=space, run=run)
