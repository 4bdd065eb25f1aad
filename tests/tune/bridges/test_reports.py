"""Reports of a pack to Optuna: those of a round together, with the decisions that Optuna's pruners take."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal

optuna = pytest.importorskip("optuna")

from shoal.tune import _optuna  # noqa: E402
from shoal.tune.bridges import optimize as optimize_module  # noqa: E402
from shoal.tune.bridges import reports as module  # noqa: E402
from shoal.tune.bridges.optimize import optimize, train_trial  # noqa: E402
from shoal.tune.bridges.reports import Reports, Request, TrainingFailed  # noqa: E402

State = optuna.trial.TrialState
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])
TRIALS, EPOCHS = 8, 4


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return optuna.storages.InMemoryStorage()
    return _optuna.open_storage(f"{request.param}:///{tmp_path}/study.{request.param}")


def job(lr: float, **more: Any) -> shoal.Job:
    common: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1), "data": (X[:32], Y[:32]), "val": (X[32:], Y[32:]), "loss": F.mse_loss,
        "optimizer": torch.optim.SGD, "hparams": {"lr": lr}, "batch_size": 8, "epochs": EPOCHS,
    }  # fmt: skip
    return shoal.Job(**common | more)


def objective(trial: Any) -> float | None:
    return train_trial(trial, job(trial.suggest_float("lr", 1e-3, 0.3, log=True)), "val_loss").value("val_loss")


def make_study(storage: Any = None, **more: Any) -> Any:
    return optuna.create_study(storage=storage, study_name="s", sampler=optuna.samplers.RandomSampler(seed=1), **more)


def run(study: Any, **more: Any) -> None:
    optimize(study, objective, TRIALS, **{"device": "cpu", "deterministic": True} | more)


PRUNERS = {
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=4, reduction_factor=2),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "patient": lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(n_startup_trials=2), patience=0),
    "threshold": lambda: optuna.pruners.ThresholdPruner(upper=3.0),
    "wilcoxon": lambda: optuna.pruners.WilcoxonPruner(n_startup_steps=1, p_threshold=0.5),
}


class Looks(optuna.pruners.BasePruner):
    """Reads all trials each time it is asked, and ends none."""

    def __init__(self) -> None:
        self.asked = 0

    def prune(self, study: Any, trial: Any) -> bool:
        self.asked += 1
        assert len(study.get_trials(deepcopy=False)) == TRIALS
        return False


@contextmanager
def counted(owner: Any, *names: str) -> Iterator[dict[str, int]]:
    """How often these methods are called while jobs are trained."""
    counts, training = dict.fromkeys(names, 0), [False]

    def counting(name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            counts[name] += training[0]
            return real(*args, **more)

        return mock.patch.object(owner, name, call)

    def train(*args: Any, **more: Any) -> Any:
        training[0] = True
        try:
            return shoal.train(*args, **more)
        finally:
            training[0] = False

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(counting(name, getattr(owner, name)))
        stack.enter_context(mock.patch.object(optimize_module, "train", train))
        yield counts


def test_a_database_is_written_once_an_epoch_and_read_once(tmp_path: Path) -> None:
    import sqlalchemy

    study = make_study(f"sqlite:///{tmp_path}/study.db", pruner=Looks())
    inserts: list[bool] = []

    def note(_c: Any, _cursor: Any, statement: str, _values: Any, _context: Any, many: bool) -> None:
        if statement.lower().startswith("insert into trial_intermediate_values"):
            inserts.append(many)

    backend = study._storage._backend
    sqlalchemy.event.listen(backend.engine, "before_cursor_execute", note)
    with counted(backend, "_get_trials", "get_trial") as reads:
        run(study)
    assert inserts == [True] * EPOCHS, "one transaction for each epoch of all trials"
    assert reads == {"_get_trials": EPOCHS, "get_trial": 0} and study.pruner.asked == TRIALS * EPOCHS
    assert all(list(t.intermediate_values) == [1, 2, 3, 4] for t in study.trials)


def test_the_trials_of_any_storage_are_read_once_an_epoch(storage: Any) -> None:
    study = make_study(storage, pruner=Looks())
    with counted(study._storage, "get_all_trials") as reads:
        run(study)
    assert reads == {"get_all_trials": EPOCHS}


def test_a_pruner_that_reads_nothing_costs_no_read(storage: Any) -> None:
    study = make_study(storage, pruner=optuna.pruners.NopPruner())
    with counted(study._storage, "get_all_trials") as reads:
        run(study)
    assert reads == {"get_all_trials": 0}


class Compares(optuna.pruners.BasePruner):
    """Asks another pruner, and compares what it can see of the study with what the storage has."""

    def __init__(self, inner: Any, storage: Any) -> None:
        self.inner, self.storage, self.asked = inner, storage, 0

    def prune(self, study: Any, trial: Any) -> bool:
        self.compare(study, trial)
        decision = self.inner.prune(study, trial)
        self.compare(study, trial)
        return bool(decision)

    def compare(self, study: Any, trial: Any) -> None:
        self.asked += 1
        stored = optuna.load_study(study_name="s", storage=self.storage)
        for given, kept in zip(study.get_trials(), stored.get_trials(), strict=True):
            assert given == kept
        mine = stored.get_trials()[trial.number]
        assert trial.intermediate_values == mine.intermediate_values and trial.last_step == mine.last_step
        assert study.get_trials(states=(State.COMPLETE,)) == stored.get_trials(states=(State.COMPLETE,))
        assert study.direction == stored.direction and study.user_attrs == stored.user_attrs
        assert len(study.trials_dataframe()) == len(stored.trials)


@pytest.mark.parametrize("name", ["halving", "hyperband"])
def test_a_pruner_sees_what_the_storage_has(name: str, storage: Any) -> None:
    pruner = Compares(PRUNERS[name](), storage)
    study = make_study(storage, pruner=pruner)
    run(study)
    assert pruner.asked >= 2 * TRIALS and any(t.system_attrs for t in study.trials)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", PRUNERS)
def test_optunas_pruners_decide_as_without_rounds(name: str, tmp_path: Path) -> None:
    """Compared with trials that report and ask one by one."""
    if name == "wilcoxon":
        pytest.importorskip("scipy")
    together = make_study(f"sqlite:///{tmp_path}/together.db", pruner=PRUNERS[name]())
    single = make_study(f"sqlite:///{tmp_path}/single.db", pruner=PRUNERS[name]())
    run(together, at_once=4)
    with mock.patch.object(module, "_of_one_study", return_value=False):
        run(single, at_once=4)
    for one, other in zip(together.trials, single.trials, strict=True):
        assert one.params == other.params and one.state == other.state
        assert one.intermediate_values == other.intermediate_values and one.system_attrs == other.system_attrs
    if name in ("halving", "median"):
        assert State.PRUNED in [t.state for t in together.trials]


def test_an_exception_of_the_pruner_costs_its_trial_alone(storage: Any) -> None:
    class Raises(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            if trial.number == 3 and trial.last_step == 2:
                raise RuntimeError("no such rung")
            return False

    study = make_study(storage, pruner=Raises())
    run(study, catch=TrainingFailed)
    assert [t.number for t in study.trials if t.state != State.COMPLETE] == [3]
    assert "trial 3: the study's pruner raised RuntimeError: no such rung" in study.trials[3].user_attrs["error"]
    assert list(study.trials[3].intermediate_values) == [1, 2]


def test_a_failed_write_fails_the_trials_that_it_concerns(storage: Any) -> None:
    """Also in the last epoch, after which there is nothing left to stop."""
    study = make_study(storage, pruner=optuna.pruners.NopPruner())
    held, real = study._storage, study._storage.set_trial_intermediate_value
    lost: list[int] = []

    def write(id: int, step: int, value: float) -> None:
        if step == EPOCHS and study._storage.get_trial_number_from_id(id) == 5:
            lost.append(id)
            raise OSError("disk full")
        real(id, step, value)

    with (
        mock.patch("shoal.tune.round_storage.insert_values", return_value=False),
        mock.patch.object(held, "set_trial_intermediate_value", write),
    ):
        run(study, catch=TrainingFailed)
    assert len(lost) == 1 and [t.number for t in study.trials if t.state == State.FAIL] == [5]
    assert "trial 5: its report to Optuna raised OSError: disk full" in study.trials[5].user_attrs["error"]
    assert [len(t.intermediate_values) for t in study.trials] == [4, 4, 4, 4, 4, 3, 4, 4]


def view(number: int, epoch: int, **more: Any) -> Any:
    row = {"epoch": epoch, "val_loss": 1.0 / epoch}
    return SimpleNamespace(**{"name": f"trial {number}", "index": number, "metrics": row, "status": "running"} | more)


def test_an_interrupted_round_is_reported_too(storage: Any) -> None:
    study = make_study(storage, pruner=Looks())
    trials = [study.ask() for _ in range(2)]
    reports = Reports([Request(t, job(0.1, name=f"trial {t.number}"), "val_loss") for t in trials], together=True)
    for number in range(2):
        reports(view(number, 1))
    assert not any(t.intermediate_values for t in study.trials)
    reports.write()
    reports.write()
    assert [t.intermediate_values for t in study.trials] == [{1: 1.0}] * 2 and not study.pruner.asked


def test_without_rounds_each_epoch_is_reported_at_once() -> None:
    """As in a run of `shoal.place`."""
    study = make_study(pruner=optuna.pruners.ThresholdPruner(upper=0.6))
    trial, stopped = study.ask(), list[str]()
    reports = Reports([Request(trial, job(0.1, name="trial 0"), "val_loss")], together=False)
    reports(view(0, 1, stop=stopped.append))
    assert stopped == ["pruned"] and study.trials[0].intermediate_values == {1: 1.0}


PROGRAM = """
import os, signal, sys
import optuna, torch, torch.nn.functional as F
from torch import nn
import shoal
from shoal.tune._optuna import open_storage
from shoal.tune.bridges.optimize import optimize, train_trial

optuna.logging.set_verbosity(optuna.logging.WARNING)
url, kill = sys.argv[1], sys.argv[2] == "kill"
x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))

def objective(trial):
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    job = shoal.Job(model=lambda: nn.Linear(3, 1), data=(x, x.sum(1, keepdim=True)), loss=F.mse_loss, epochs=4,
                    optimizer=torch.optim.SGD, hparams={"lr": lr}, batch_size=8)
    return train_trial(trial, job, "loss").value("loss")

class Kills(optuna.pruners.SuccessiveHalvingPruner):
    def prune(self, study, trial):
        if kill and trial.last_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prune(study, trial)

study = optuna.load_study(study_name="s", storage=open_storage(url), sampler=optuna.samplers.RandomSampler(seed=1),
                          pruner=Kills(min_resource=1, reduction_factor=2))
optimize(study, objective, n_trials=6, device="cpu")
"""


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_what_a_decision_used_is_stored_at_a_kill(kind: str, tmp_path: Path) -> None:
    url = f"{kind}:///{tmp_path}/study"
    study = make_study(_optuna.open_storage(url))
    killed = subprocess.run([sys.executable, "-c", PROGRAM, url, "kill"], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [t for t in study.trials if 2 in t.intermediate_values]
    assert len(left) >= 2 and all(t.state == State.RUNNING and list(t.intermediate_values) == [1, 2] for t in left)
    assert all("completed_rung_0" in t.system_attrs for t in study.trials)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_two_processes_share_a_study(kind: str, tmp_path: Path) -> None:
    url = f"{kind}:///{tmp_path}/study"
    study = make_study(_optuna.open_storage(url))
    command = [sys.executable, "-c", PROGRAM, url, "go"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len(study.trials) == 12 and {t.state for t in study.trials} <= {State.COMPLETE, State.PRUNED}
    for trial in study.trials:
        steps = list(trial.intermediate_values)
        assert steps == list(range(1, len(steps) + 1)) and (trial.state == State.PRUNED or len(steps) == 4)
