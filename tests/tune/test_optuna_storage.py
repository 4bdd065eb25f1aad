"""A study in Optuna's storages: SQLite and a journal file. PostgreSQL is in tests/integrations."""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from shoal.errors import JobError, ShoalWarning  # noqa: E402
from shoal.tune import _optuna  # noqa: E402
from shoal.tune.optuna_storage import KEY, PROCESS, OptunaStorage  # noqa: E402
from shoal.tune.space import parse  # noqa: E402
from shoal.tune.trial import Trial  # noqa: E402

SPACE = parse({"lr": ("log", 1e-5, 1e-1), "width": [64, 128], "layers": ("int", 1, 4)})
State = optuna.trial.TrialState


@pytest.fixture(params=["sqlite", "journal"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:///{tmp_path}/study.{request.param}"


def read(url: str, name: str = "digits") -> Any:
    """The study as another program sees it."""
    with _optuna.silent_log():
        return optuna.load_study(study_name=name, storage=_optuna.open_storage(url))


def mirror(url: str, **more: Any) -> OptunaStorage:
    return OptunaStorage(url, "digits", **{"mode": "max", "space": SPACE, "run": "r1", "every": 60.0} | more)


def trial(number: int, **more: Any) -> Trial:
    return Trial(number, SPACE.sample(1, number), **{"state": "running", "bracket": 4} | more)


def story(storage: OptunaStorage) -> list[Trial]:
    """One of each fate: complete, pruned, failed, not a number, under way."""
    trials = [trial(number) for number in range(5)]
    for each in trials:
        storage.begin(each)
    storage.flush()
    for epoch in (1, 3):
        for each in trials:
            storage.report(each, epoch, 0.1 * each.number + 0.01 * epoch)
    storage.flush()
    trials[0].state, trials[0].rung = "complete", 2
    trials[1].state = "pruned"
    trials[2].state, trials[2].error = "failed", "ValueError: no"
    trials[3].values[3], trials[3].state = math.nan, "complete"
    for each in trials[:4]:
        storage.finish(each)
    return trials


def test_the_value_of_the_weights_that_a_trial_keeps(url: str) -> None:
    with mirror(url) as storage:
        kept = trial(0, state="complete", values={1: 0.9, 2: 0.4}, kept_epoch=1)
        storage.finish(kept)
    assert read(url).trials[0].value == kept.value == 0.9


def test_what_others_see(url: str) -> None:
    with mirror(url, metric="accuracy") as storage:
        story(storage)
    seen = read(url)
    assert [each.state for each in seen.trials] == [State.COMPLETE, State.PRUNED, State.FAIL, State.FAIL, State.RUNNING]
    assert seen.trials[0].intermediate_values == {1: 0.01, 3: 0.03}
    assert seen.trials[0].value == 0.03 and seen.trials[1].value == pytest.approx(0.13)
    assert seen.trials[0].params == SPACE.sample(1, 0)
    assert seen.trials[0].distributions == SPACE.to_optuna()
    assert seen.trials[0].user_attrs == {KEY: "r1/0", "bracket": 4, "rung": 2}
    assert seen.trials[2].user_attrs["error"] == "ValueError: no"
    assert seen.trials[3].user_attrs["error"] == "its value is nan"
    assert seen.best_trial.number == 0 and seen.user_attrs == {"metric": "accuracy"}
    assert seen.trials[0].duration.total_seconds() > 0


def test_dataframes_importance_and_plots(url: str) -> None:
    pytest.importorskip("pandas")
    with mirror(url) as storage:
        for number in range(30):
            value = -abs(math.log10(trial(number).params["lr"]) + 3)
            done = trial(number, state="complete" if number % 3 else "pruned", values={1: value - 1, 3: value})
            storage.finish(done)
    seen = read(url)
    frame = seen.trials_dataframe()
    assert list(frame.number) == list(range(30)) and set(frame.state) == {"COMPLETE", "PRUNED"}
    assert {"value", "params_lr", "params_width", "user_attrs_bracket"} <= set(frame.columns)
    importance = optuna.importance.get_param_importances(seen)
    assert max(importance, key=importance.get) == "lr"
    pytest.importorskip("plotly")
    for plot in ("optimization_history", "intermediate_values", "parallel_coordinate", "slice"):
        assert getattr(optuna.visualization, f"plot_{plot}")(seen).data, plot


def test_after_a_kill_nothing_is_lost_or_written_twice(url: str) -> None:
    """What a kill may leave: trials that were never written, values without an end, a trial that nobody knows."""
    killed = mirror(url)
    for number in (0, 1, 2, 9):
        killed.report(trial(number), 1, 0.5)
    killed.flush()  # and nothing after it
    known = [trial(number, values={1: 0.5, 3: 0.6}, state="complete") for number in range(3)] + [trial(3)]
    for _ in range(2):  # killed again right after it was started
        again = mirror(url)
        again.attach(known)
    again.report(known[3], 1, 0.25)
    known[3].state = "pruned"
    again.finish(known[3])
    again.close()
    with mirror(url) as once_more:
        once_more.attach(known)
        once_more.finish(trial(9, state="complete", values={1: 0.75}))
    assert [each.value for each in read(url).trials if each.user_attrs[KEY] == "r1/9"] == [None, 0.75]
    seen = {each.user_attrs[KEY]: each for each in read(url).trials[:5]}
    assert len(read(url).trials) == 6 and set(seen) == {f"r1/{number}" for number in (0, 1, 2, 3, 9)}
    assert {key: each.state.name for key, each in seen.items()} == {
        "r1/0": "COMPLETE", "r1/1": "COMPLETE", "r1/2": "COMPLETE", "r1/3": "PRUNED", "r1/9": "FAIL",
    }  # fmt: skip
    assert seen["r1/0"].intermediate_values == {1: 0.5, 3: 0.6} and seen["r1/3"].intermediate_values == {1: 0.25}


def test_an_answer_that_was_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage wrote, and then the connection broke: the next write finds what is there."""
    storage = mirror(url)
    for broken in ("create_new_trial", "set_trial_state_values"):
        work: Callable[..., Any] = getattr(storage._storage, broken)

        def lose(*args: Any, _work: Callable[..., Any] = work, **more: Any) -> None:
            _work(*args, **more)
            raise OSError("connection lost")

        monkeypatch.setattr(storage._storage, broken, lose)
        one = trial(0, values={1: 0.5})
        if broken == "set_trial_state_values":
            one.state = "pruned"
        storage.finish(one)
        with pytest.raises(OSError, match="connection lost"):
            storage.flush()
        monkeypatch.undo()
        storage.flush()
    storage.report(trial(1), 1, 0.1)
    storage.flush()
    storage._stored[1].epochs.clear()  # as if its row had been written and not noticed
    storage.report(trial(1), 1, 0.1)
    storage.close()
    seen = read(url).trials
    assert [each.state for each in seen] == [State.PRUNED, State.RUNNING]
    assert [each.intermediate_values for each in seen] == [{1: 0.5}, {1: 0.1}]


def test_an_existing_study_continues(url: str) -> None:
    with _optuna.silent_log():
        study = optuna.create_study(
            storage=_optuna.open_storage(url), study_name="digits", direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=1),
        )  # fmt: skip

    def objective(one: Any) -> float:
        lr = one.suggest_float("lr", 1e-5, 1e-1, log=True)
        if one.number == 2:
            one.report(lr, 1)
            raise optuna.TrialPruned
        return float(lr)

    study.optimize(objective, n_trials=4)
    storage = mirror(url)
    before = storage.previous()
    assert [each.state for each in before] == ["complete", "complete", "pruned", "complete"]
    assert before[0].values == {1: before[0].params["lr"]} and before[2].values == {1: before[2].params["lr"]}
    storage.finish(trial(4, state="complete", values={1: 0.5}))
    storage.close()
    assert [each.number for each in before] == [-4, -3, -2, -1], "none is taken for a trial of this run"
    assert len(mirror(url).previous()) == 4 and len(mirror(url, run="r2").previous()) == 5


def test_a_study_object_is_used_as_it_is(url: str) -> None:
    with _optuna.silent_log():
        study = optuna.create_study(storage=_optuna.open_storage(url), study_name="mine", direction="minimize")
    with OptunaStorage(study, space=SPACE) as storage:
        storage.finish(trial(0, state="complete", values={1: 0.5}))
    assert [each.value for each in read(url, "mine").trials] == [0.5]


def test_trials_that_a_killed_run_left_running(url: str) -> None:
    """A run without a folder cannot be resumed: the next one on this machine marks its trials as failed."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    for run, process in ((None, ended.pid), (None, os.getpid()), ("resumable", ended.pid)):
        with mirror(url, run=run) as storage:
            if storage._marks:
                storage._marks[PROCESS] = f"{process} {socket.gethostname()}"
            storage.begin(trial(0))
    with mirror(url, run=None) as storage:
        storage._marks[PROCESS] = f"{ended.pid} another-machine"
        storage.begin(trial(0))
    read(url).ask()  # another program's
    mirror(url)
    seen = read(url).trials
    assert [each.state for each in seen] == [State.FAIL, *[State.RUNNING] * 4]
    assert seen[0].user_attrs["error"] == "the run that trained it ended"


def test_reports_are_collected(tmp_path: Path) -> None:
    """A thousand reports are a few transactions."""
    url = f"sqlite:///{tmp_path}/study.db"
    storage = mirror(url)
    trials = [trial(number) for number in range(10)]
    for each in trials:
        storage.begin(each)
    storage.flush()
    commits = 0

    def count(_: Any) -> None:
        nonlocal commits
        commits += 1

    sqlalchemy = pytest.importorskip("sqlalchemy")
    sqlalchemy.event.listen(storage._storage._backend.engine, "commit", count)
    for epoch in range(1, 101):
        for each in trials:
            storage.report(each, epoch, 1 / epoch)
    storage.close()
    assert commits <= 2
    assert all(len(each.intermediate_values) == 100 for each in read(url).trials)


def test_a_trial_that_was_never_seen_running_has_its_duration(url: str) -> None:
    with mirror(url) as storage:
        storage.begin(one := trial(0))
        threading.Event().wait(0.05)
        one.state, one.values = "complete", {1: 0.5}
        storage.finish(one)
    assert read(url).trials[0].duration.total_seconds() >= 0.05


def test_both_ways_to_write_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.5, math.nan, math.inf, -math.inf, 1e-320]
    for name in ("fast", "public"):
        url = f"sqlite:///{tmp_path}/{name}.db"
        storage = mirror(url)
        if name == "public":
            storage._write_values = lambda rows, s=storage._storage: _optuna._one_by_one(s, rows)
        storage.begin(one := trial(0))
        storage.flush()
        for epoch, value in enumerate(values, 1):
            storage.report(one, epoch, value)
        storage.close()
    tables = []
    for name in ("fast", "public"):
        with sqlite3.connect(tmp_path / f"{name}.db") as connection:
            columns = "trial_id, step, intermediate_value, intermediate_value_type"
            tables.append(connection.execute(f"select {columns} from trial_intermediate_values order by 2").fetchall())
        connection.close()
    assert tables[0] == tables[1] and len(tables[0]) == 5


def test_a_thread_writes_now_and_then(url: str) -> None:
    with mirror(url, every=0.01) as storage:
        storage.report(trial(0), 1, 0.5)
        until = time.monotonic() + 20
        while not read(url).trials and time.monotonic() < until:
            threading.Event().wait(0.02)
        assert read(url).trials[0].intermediate_values == {1: 0.5}


def test_a_storage_that_fails_does_not_end_the_training(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = mirror(url, every=0.01)
    broken = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        broken.set()
        raise OSError("disk full")

    monkeypatch.setattr(storage._storage, "create_new_trial", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage.report(trial(0), 1, 0.5)
        assert broken.wait(20)
        until = time.monotonic() + 20
        while not caught and time.monotonic() < until:
            threading.Event().wait(0.02)
        with pytest.raises(OSError, match="disk full"):
            storage.flush()
    with pytest.warns(
        ShoalWarning, match="the storage lacks the last reports of 1 trials: OSError: disk full; with out="
    ):
        storage.close()
    lines = [str(each.message) for each in caught if each.category is ShoalWarning]
    assert lines == ["the storage cannot be written: OSError: disk full; training continues, and it is tried again"]
    monkeypatch.undo()
    storage.close()
    assert read(url).trials[0].intermediate_values == {1: 0.5}


def test_a_locked_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    storage = OptunaStorage(f"sqlite:///{path}?timeout=0.01", "s", mode="max", space=SPACE, every=1000)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    storage.report(Trial(0, SPACE.sample(0, 0), "running"), 1, 0.5)
    with pytest.warns(ShoalWarning, match="OperationalError: database is locked; with out="):
        storage.close()
    other.close()


def test_a_journal_whose_last_line_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    url = f"journal:///{path}"
    with mirror(url) as storage:
        storage.begin(trial(0))
    path.write_bytes(path.read_bytes() + b'{"op_code":8,"worker')
    with mirror(url) as storage:
        storage.attach([trial(0, values={1: 0.5})])
    assert read(url).trials[0].intermediate_values == {1: 0.5}


def test_settings_that_make_job_suggested(url: str) -> None:
    with mirror(url, space=None) as storage:
        storage.finish(Trial(0, {"lr": 0.1}, "complete", {1: 0.5}, attrs={"space": {"lr": {"log": [1e-5, 0.1]}}}))
    assert read(url).trials[0].distributions["lr"] == optuna.distributions.FloatDistribution(1e-5, 0.1, log=True)


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ("study.db", {}, "storage is 'study.db'; use a URL such as sqlite:///study.db"),
    (3, {}, "storage is 3; use a URL"),
    ("sqlite:////no/such/folder/x.db", {}, "cannot be opened: OperationalError"),
    ("nosuch://u:secret@h/x", {}, "storage nosuch://u@h/x cannot be opened"),
    ("journal:////no/such/folder/x.log", {}, "cannot be opened: FileNotFoundError"),
    ("sqlite://", {"space": parse({"o": [dict]})}, "o: the choice <class 'dict'> cannot be stored"),
]


@pytest.mark.parametrize(("given", "more", "line"), MISTAKES)
def test_mistakes(given: Any, more: dict[str, Any], line: str) -> None:
    with pytest.raises(JobError) as caught:
        mirror(given, **more)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_another_study_under_the_same_name(url: str) -> None:
    with mirror(url) as storage:
        storage.begin(trial(0))
    with pytest.raises(JobError, match="the study 'digits' in the storage is to maximize, this one to minimize; use"):
        mirror(url, mode="min")
    with pytest.raises(JobError, match="width: the study 'digits' has it from CategoricalDistribution"):
        mirror(url, space=parse({"width": [64, 256], "lr": ("log", 1e-6, 1)}))
