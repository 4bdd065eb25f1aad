"""Optuna's samplers, used by ask and tell on a study in memory.

Nothing is stored here: `shoal.tune.optuna_storage` does that.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import JobError
from shoal.tune._optuna import OptunaMissing, frozen, load_optuna, results_of, silent_log, state_of
from shoal.tune.space import Space
from shoal.tune.trial import Trial

NAMES = ("tpe", "cma", "gp", "nsga2")
"""Optuna's samplers that can be given by name."""


class OptunaSampler:
    """A sampler of Optuna's: by name ("tpe"), as an object, or that of a study.

    A named one is created again for each trial, with a seed made from `seed` and the trial's number, so that a killed
    study continues with the same configurations. An object has its own seed; after a restart it is reseeded, since it
    would otherwise repeat its first configurations.
    """

    def __init__(self, sampler: Any, space: Space | None, *, mode: str | Sequence[str] = "min", seed: int = 0) -> None:
        if isinstance(sampler, str) and sampler not in NAMES:
            raise JobError(f"sampler is {sampler!r}; use one of {_names()}, an Optuna sampler or an Optuna study")
        optuna = load_optuna(f"sampler={sampler!r}")
        if sampler == "cma" and not isinstance(mode, str):
            raise JobError(f"sampler is 'cma', which has one metric, and there are {len(mode)}; use 'nsga2' or 'tpe'")
        self.space, self.seed = space, seed
        self._make: Callable[[int], Any] | None = None
        self._restarted = False
        directions = [f"{direction}imize" for direction in ([mode] if isinstance(mode, str) else mode)]
        previous: list[Any] = []
        if isinstance(sampler, optuna.Study):
            _check_directions(sampler, directions)
            previous, sampler = sampler.get_trials(), sampler.sampler
        elif isinstance(sampler, str):
            self._make = _named(sampler)
            sampler = self._make(seed)
        elif not isinstance(sampler, optuna.samplers.BaseSampler):
            raise JobError(f"sampler is {sampler!r}; use one of {_names()}, an Optuna sampler or an Optuna study")
        self._limit = getattr(sampler, "_n_min_trials", None)
        with silent_log():
            self._study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner(), directions=directions)
        self._trials: dict[int, int] = {}  # trial number -> its number in the study in memory
        for each in previous:
            if each.state.is_finished():
                self._study.add_trial(each)

    @property
    def limit(self) -> int | None:
        """The number of different configurations; only known for Optuna's grid."""
        return None if self._limit is None else int(self._limit)

    def ask(self, number: int) -> dict[str, Any]:
        """Return the configuration of trial `number`."""
        if self.space is None:
            raise JobError("there is no search space to ask for; pass one, or a make_job that suggests its settings")
        return dict(self._ask(number, self.space.to_optuna()).params)

    def suggest(self, number: int) -> Any:
        """Return an Optuna trial, for a make_job that suggests its settings itself."""
        return self._ask(number, None)

    def _ask(self, number: int, distributions: dict[str, Any] | None) -> Any:
        if self._make is not None:
            self._study.sampler = self._make(random.Random(f"{self.seed}/{number}").getrandbits(32))
        elif self._restarted:
            self._restarted = False
            self._study.sampler.reseed_rng()
        trial = self._study.ask(distributions)
        self._trials[number] = trial.number
        return trial

    def tell(self, trial: Trial) -> None:
        """Learn from a trial that has ended.

        A trial that was not asked for here is added as it is: one from before a restart, or of an existing study.
        Trials that have not ended are added too, so that the sampler avoids what others are trying.
        """
        study_number = self._trials.get(trial.number)
        if study_number is None:
            self._restarted = self._restarted or trial.number >= 0  # negative numbers belong to an existing study
            self._study.add_trial(frozen(trial, self.space, system_attrs=trial.attrs.get("sampler")))
            self._trials[trial.number] = len(self._study.get_trials(deepcopy=False)) - 1
            return
        state, stored = state_of(trial), self._study.get_trials(deepcopy=False)[study_number]
        if not state.is_finished() or stored.state.is_finished():
            return
        for epoch, value in trial.values.items():
            self._study._storage.set_trial_intermediate_value(stored._trial_id, epoch, value)
        try:
            values = results_of(trial) if state.name == "COMPLETE" else None
            self._study.tell(study_number, values, state)
        except RuntimeError as error:  # an exhausted grid stops Study.optimize, which is not used here
            if "stop" not in str(error):
                raise
        if stored.system_attrs:
            trial.attrs["sampler"] = dict(self._study.get_trials(deepcopy=False)[study_number].system_attrs)


def _check_directions(study: Any, directions: Sequence[str]) -> None:
    """Raise a JobError if the study has another direction than the search, since its sampler would mislead it."""
    of_study = [direction.name.lower() for direction in study.directions]
    if len(of_study) > len(directions):
        raise JobError(
            f"the Optuna study {study.study_name!r} has {len(of_study)} objectives, and trials are compared by one "
            "metric; use shoal.tune.optimize(study, objective)"
        )
    if of_study != list(directions):
        raise JobError(
            f"the Optuna study {study.study_name!r} is to {' and '.join(of_study)}, this search to "
            f"{' and '.join(directions)}; make a study of the same direction, or set mode"
        )


def _names() -> str:
    return ", ".join(repr(name) for name in ("random", "grid", *NAMES))


def _named(name: str) -> Callable[[int], Any]:
    """Return a function that creates the sampler of this name with a seed."""
    from optuna import samplers

    if name == "cma":
        try:
            import cmaes  # noqa: F401
        except ImportError:
            raise OptunaMissing("the sampler 'cma' needs cmaes: pip install cmaes") from None
    makers: dict[str, Callable[[int], Any]] = {
        "tpe": lambda seed: samplers.TPESampler(seed=seed, constant_liar=True),  # for parallel trials
        "cma": lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        "gp": lambda seed: samplers.GPSampler(seed=seed),
        "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed),
    }

    def make(seed: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before Optuna 5 some are called experimental
            return makers[name](seed)

    return make
