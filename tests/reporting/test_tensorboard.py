"""TensorBoard: what lies in the files is each member's own history, after a resume and a second run too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.preparation.checks import prepare
from shoal.reporting.callbacks import Callbacks
from shoal.reporting.events import Listeners, new_event
from shoal.reporting.loggers import folder_name

X, Y = torch.zeros(30, 2), torch.zeros(30, 1)


def job(name: str = "a", **changes: Any) -> shoal.Job:
    base: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "data": (X, Y), "loss": nn.functional.mse_loss}
    return shoal.Job(**(base | {"hparams": {"lr": 0.1, "betas": (0.9, 0.99)}, "epochs": 5, "name": name} | changes))


def member(*args: Any, **changes: Any) -> Member:
    return prepare([job(*args, **changes)], torch.device("cpu"))[0]


def epoch(listeners: Listeners, it: Member, **more: float) -> None:
    it.epoch += 1
    it.step += 4
    it.history.append({"epoch": it.epoch, "step": it.step, "loss": 1.0 / it.epoch, "lr": 0.1, "seconds": 1.0, **more})
    listeners(new_event("epoch", it, **it.history[-1]))


def leave(listeners: Listeners, it: Member, status: str = "done") -> None:
    it.status = status
    listeners(new_event("leave", it, status=status))


def listening(folder: Path) -> Listeners:
    return Listeners(Callbacks([shoal.TensorBoard(folder)]).listeners())


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value)) for point in read(folder).Scalars(tag)]


def session(folder: Path) -> tuple[dict[str, Any], list[str], int | None]:
    """Hyper-parameters, metrics, and the status at the end."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = read(folder).summary_metadata
    data = {tag: HParamsPluginData.FromString(content[tag].plugin_data.content) for tag in content if "hparams" in tag}
    start = data["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: start[name].number_value or start[name].string_value for name in start}
    metrics = [info.name.tag for info in data["_hparams_/experiment"].experiment.metric_infos]
    end = data.get("_hparams_/session_end_info")
    return values, metrics, None if end is None else end.session_end_info.status


def test_a_folder_for_each_member_with_its_own_curves(tmp_path: Path) -> None:
    listeners = listening(tmp_path / "logs")
    a, b = member("a", seed=3, val=(X, Y), metrics={"mae": nn.functional.l1_loss}), member("lr=0.1 b")
    b.index = 1
    epoch(listeners, a)
    epoch(listeners, b, extra=3.0)
    epoch(listeners, a, val_loss=0.25, mae=0.5)
    leave(listeners, a)
    leave(listeners, b, "diverged")
    assert sorted(os.listdir(tmp_path / "logs")) == ["a", "lr=0.1 b"]
    assert curve(tmp_path / "logs/a", "loss") == [(4, 1.0), (8, 0.5)]
    assert curve(tmp_path / "logs/a", "val_loss") == [(8, 0.25)]
    assert curve(tmp_path / "logs/lr=0.1 b", "extra") == [(4, 3.0)]
    assert read(tmp_path / "logs/a").Tags()["scalars"] == ["loss", "lr", "epoch", "val_loss", "mae"]
    settings, metrics, status = session(tmp_path / "logs/a")
    assert settings == {"lr": 0.1, "betas": "(0.9, 0.99)", "optimizer": "AdamW", "batch_size": 64.0, "seed": 3.0}
    assert metrics == ["loss", "lr", "val_loss", "mae"] and status == 1
    assert session(tmp_path / "logs/lr=0.1 b")[2] == 2


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    killed, it = listening(tmp_path), member()
    for _ in range(4):
        epoch(killed, it)
    resumed, it = listening(tmp_path), member()
    it.epoch, it.step = 2, 8
    it.history = [{"epoch": 1, "step": 4, "loss": 1.0}, {"epoch": 2, "step": 8, "loss": 0.5}]
    for _ in range(3):
        epoch(resumed, it)
    leave(resumed, it)
    assert curve(tmp_path / "a", "loss") == [(4, 1.0), (8, 0.5), (12, 1 / 3), (16, 0.25), (20, 0.2)]
    assert len(os.listdir(tmp_path / "a")) == 2


def test_a_member_that_goes_back_and_a_second_run_in_the_same_folder(tmp_path: Path) -> None:
    listeners, it = listening(tmp_path), member()
    for _ in range(3):
        epoch(listeners, it)
    it.epoch, it.step = 1, 4  # its worker was lost; it continues from its checkpoint
    del it.history[1:]
    epoch(listeners, it)
    assert curve(tmp_path / "a", "loss") == [(4, 1.0), (8, 0.5)]
    leave(listeners, it)
    again = member()
    epoch(listeners, again)
    leave(listeners, again)
    assert curve(tmp_path / "a", "loss") == [(4, 1.0)], "the same callback in another run starts anew"
    third = member()
    epoch(listeners, third, val_loss=0.125)
    assert curve(tmp_path / "a", "val_loss") == [(4, 0.125)], "also where the last one was as short"


def test_what_was_measured_within_an_epoch(tmp_path: Path) -> None:
    jobs = [job(batch_size=8, epochs=2, val=(X, Y), val_every_steps=2)]
    (result,) = shoal.train(jobs, device="cpu", callbacks=[shoal.TensorBoard(tmp_path, every_step=2)])
    assert [step for step, _ in curve(tmp_path / "a", "step_loss")] == [2, 4, 6, 8]
    rows = sorted([*result.validations, *result.history], key=lambda row: row["step"])
    assert len(rows) > len(result.history)
    assert curve(tmp_path / "a", "val_loss") == [(int(row["step"]), row["val_loss"]) for row in rows]


def test_a_member_that_fails_before_its_first_row(tmp_path: Path) -> None:
    listeners, it = listening(tmp_path), member()
    leave(listeners, it, "failed")
    assert read(tmp_path / "a").Tags()["scalars"] == [] and session(tmp_path / "a")[2] == 2


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("lr=1e-3 seed=2", "lr=1e-3 seed=2"),
        ("a/b", "a_b-c14cddc0"),
        ("..", "job-5ec1f7e7"),
        ("x" * 300, "x" * 100 + "-0d4e2ca9"),
        ("é", "é"),
    ],
)
def test_names_of_folders(name: str, folder: str, tmp_path: Path) -> None:
    assert folder_name(name) == folder
    assert (tmp_path / folder).resolve().parent == tmp_path.resolve()


def test_many_members_keep_no_file_open(tmp_path: Path) -> None:
    listeners, it = listening(tmp_path), member()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    start = time.process_time()
    for index in range(300):
        it.index, it.name, it.epoch, it.step, it.history = index, f"m{index}", 0, 0, []
        epoch(listeners, it)
    assert time.process_time() - start < 5
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir(tmp_path)) == 300


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"TensorBoard: folder is '.*file' and cannot be made"):
        shoal.TensorBoard(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'shoal\[tensorboard\]'"):
        shoal.TensorBoard(tmp_path)


def test_a_folder_that_goes_away_does_not_stop_the_training(tmp_path: Path) -> None:
    listeners, it = listening(tmp_path / "logs"), member()
    epoch(listeners, it)
    for file in (tmp_path / "logs/a").iterdir():
        file.unlink()
    (tmp_path / "logs/a").rmdir()
    with pytest.warns(shoal.ShoalWarning, match="TensorBoard raised FileNotFoundError"):
        epoch(listeners, it)
    assert not listeners


def test_no_warnings_and_nothing_loaded_before_it_is_used(tmp_path: Path) -> None:
    code = (
        "import sys, shoal; shoal.TensorBoard; assert 'tensorboard' not in sys.modules;"
        "import torch.utils.tensorboard.summary, tensorboard.plugins.hparams.plugin_data_pb2"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run(tmp_path: Path, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKERS", workers)
    jobs = [job(f"seed {s}", seed=s, batch_size=8, epochs=2 + s) for s in range(4)]
    results = shoal.train(jobs, device="cpu", callbacks=[shoal.TensorBoard(tmp_path)])
    for result in results:
        rows = [(int(row["step"]), row["loss"]) for row in result.history]
        assert curve(tmp_path / result.name, "loss") == rows and len(rows) == 2 + result.job.seed
        assert session(tmp_path / result.name)[2] == 1
