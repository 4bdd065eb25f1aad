"""Run the same search with Optuna's HyperbandPruner and with Ray Tune's schedulers, for comparison with Shoal.

Both get the settings that Shoal draws, in the same order, and the same budget of epochs; both train with the plain loop
that `start` begins. They stop trials by their own rules, so the epochs of a trial differ.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any, Protocol

from shoal.errors import TuneError
from shoal.tune.brackets import hyperband
from shoal.tune.space import Space, parse


class Training(Protocol):
    """A training run that advances one epoch at a time."""

    model: Any
    optimizer: Any
    order: Callable[[], Any]
    """Draws the order of the next epoch's rows."""

    def epoch(self) -> float:
        """Train one more epoch and return the score after it, which should be large."""
        ...


Start = Callable[[dict[str, Any]], Training]
"""A function from settings to a training run that has not begun."""


def budget(max_epochs: int, eta: int) -> tuple[int, int]:
    """Return the trials and epochs of the paper's Hyperband, which every way may use."""
    brackets = hyperband(max_epochs, eta)
    return sum(bracket.size for bracket in brackets), sum(bracket.epochs for bracket in brackets)


def optuna_search(
    start: Start, space: Space | Mapping[str, Any], *, max_epochs: int, eta: int, seed: int = 0
) -> dict[str, Any]:
    """Search with Optuna's HyperbandPruner, one trial after another, until the budget is used; return plain data."""
    try:
        import optuna
    except ImportError:
        raise TuneError("the comparison needs Optuna: pip install 'shoal[tune]'") from None
    known = parse(space)
    _, epochs = budget(max_epochs, eta)
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            study_name=f"hyperband {seed}",  # Optuna draws brackets from the name
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=seed),
            pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=max_epochs, reduction_factor=eta),
        )
        used = 0
        while used < epochs:
            study.enqueue_trial(known.sample(seed, len(study.trials)))
            trial = study.ask(known.to_optuna())
            used += _train_until_pruned(study, trial, start(dict(trial.params)), min(max_epochs, epochs - used))
    finally:
        optuna.logging.set_verbosity(level)
    best = max(study.trials, key=lambda one: _last(one.intermediate_values))
    pruned = sum(one.state.name == "PRUNED" for one in study.trials)
    return {
        "best": _last(best.intermediate_values),
        "params": dict(best.params),
        "epochs": used,
        "trials": len(study.trials),
        "note": f"Optuna {optuna.__version__}, {pruned} pruned",
    }


def _train_until_pruned(study: Any, trial: Any, training: Training, most: int) -> int:
    """Train a trial to its end, or until the pruner or the budget ends it, and return its epochs."""
    from optuna.trial import TrialState

    score = math.nan
    for epoch in range(1, most + 1):
        score = training.epoch()
        trial.report(score, epoch)
        if epoch < most and trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return epoch
    study.tell(trial, score)
    return most


def _last(values: Mapping[int, float]) -> float:
    return values[max(values)] if values else -math.inf


def ray_search(
    start: Start,
    space: Space | Mapping[str, Any],
    *,
    max_epochs: int,
    eta: int,
    seed: int = 0,
    scheduler: str = "asha",
    processes: int | None = None,
) -> dict[str, Any]:
    """Search with Ray Tune's "hyperband" or "asha" on a local Ray with a trial per process, until the budget is
    used."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens only on loopback
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import tune
    except ImportError:
        raise TuneError("the comparison needs Ray: pip install 'shoal[ray]'") from None
    known = parse(space)
    trials, epochs = budget(max_epochs, eta)
    chosen = _ray_scheduler(scheduler, max_epochs, eta)
    began = time.perf_counter()
    ray.init(
        num_cpus=processes or os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="error",
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    starting = time.perf_counter() - began
    used: dict[str, int] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-ray-") as folder, redirect_stdout(io.StringIO()):
            results = tune.Tuner(
                _trainable(start),
                param_space={"params": tune.grid_search([known.sample(seed, number) for number in range(trials)])},
                tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=chosen, reuse_actors=True),
                run_config=tune.RunConfig(storage_path=folder, stop=_stopper(used, max_epochs, epochs), verbose=0),
            ).fit()
            scored = [one for one in results if one.metrics and "score" in one.metrics]
            best = max(scored, key=lambda one: float(one.metrics["score"]))
            return {
                "best": float(best.metrics["score"]),
                "params": dict(best.config["params"]),
                "epochs": sum(used.values()),
                "trials": len(used),
                "note": f"Ray {ray.__version__}, {scheduler}; {starting:.1f} s of it to start Ray",
            }
    finally:
        ray.shutdown()


def _ray_scheduler(name: str, max_epochs: int, eta: int) -> Any:
    from ray.tune import schedulers

    settings = {"time_attr": "training_iteration", "max_t": max_epochs, "reduction_factor": eta}
    if name == "asha":
        return schedulers.AsyncHyperBandScheduler(**settings, grace_period=1)
    if name == "hyperband":
        return schedulers.HyperBandScheduler(**settings)
    raise TuneError(f"scheduler is {name!r}; use 'asha' or 'hyperband'")


def _stopper(used: dict[str, int], max_epochs: int, epochs: int) -> Any:
    """Return a stopper that ends everything when the budget is used; `used` gets the epochs of each trial."""
    from ray import tune

    class Budget(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            used[trial_id] = max(used.get(trial_id, 0), int(result["training_iteration"]))
            return used[trial_id] >= max_epochs

        def stop_all(self) -> bool:
            return sum(used.values()) >= epochs

    return Budget()


def _trainable(start: Start) -> Any:
    """Return a Ray trial that trains an epoch at a time and can be paused, with its weights and its order of rows."""
    import torch
    from ray import tune

    class Trial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            torch.set_num_threads(1)
            self._training, self._epochs = start(dict(config["params"])), 0

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Start another trial in the same process, which saves Ray the time to start one."""
            self.setup(new_config)
            return True

        def step(self) -> dict[str, float]:
            self._epochs += 1
            return {"score": self._training.epoch()}

        def save_checkpoint(self, folder: str) -> None:
            training = self._training
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save({**state, "epochs": self._epochs}, os.path.join(folder, "state.pt"))

        def load_checkpoint(self, folder: str) -> None:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
            self._training.model.load_state_dict(state["model"])
            self._training.optimizer.load_state_dict(state["optimizer"])
            while self._epochs < state["epochs"]:
                self._training.order()
                self._epochs += 1

    return Trial
