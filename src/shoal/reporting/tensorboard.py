"""`shoal.TensorBoard`: logs for TensorBoard, a folder for each member, as if each had run alone."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from shoal.errors import OutError, describe
from shoal.reporting.callbacks import MemberView

_NOT_CURVES = ("epoch", "step", "seconds")
_LONGEST = 100


class TensorBoard:
    """A callback that writes each member's history for TensorBoard.

    Every member has a folder of its own, named after it. There its losses, logs, metrics and learning rate lie over its
    optimizer steps, and its hyper-parameters for the HPARAMS page. Files are open only while a row is written, so that
    there may be thousands of members. A resumed run continues in the same folder: rows written after the checkpoint it
    started from are replaced.
    """

    only_watches = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ImportError("TensorBoard needs the tensorboard package: pip install 'shoal[tensorboard]'") from None
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutError(
                f"TensorBoard: folder is {str(folder)!r} and cannot be made ({describe(error)}); use another"
            ) from None
        self._logs: dict[int, _Log] = {}

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def __call__(self, view: MemberView) -> None:
        """After an epoch: its row. At the end: how it ended."""
        log = self._logs.get(view.index)
        if log is None or not log.goes_on(view):
            log = self._logs[view.index] = _Log(self.folder / folder_name(view.name), view)
        log.write(view)


def folder_name(name: str) -> str:
    """A member's name as that of a folder; with a hash of it where it had to be changed, so that no other member has
    the same."""
    safe = re.sub(r"[^\w.=,+@ -]", "_", name)[:_LONGEST].rstrip(". ")
    return safe if safe == name else f"{safe or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class _Log:
    """One member's file."""

    def __init__(self, folder: Path, view: MemberView) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = view.name
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._epoch = 0
        """The last epoch that was written."""
        self._begun = self._over = False

    def goes_on(self, view: MemberView) -> bool:
        """Whether this is the same member, further on; else it is another run, or one that went back."""
        return not self._over and self.name == view.name and view.metrics.get("epoch", 0) >= self._epoch

    def write(self, view: MemberView) -> None:
        row = view.metrics
        new = bool(row) and row["epoch"] > self._epoch
        records = [] if self._begun else _opening(view, row if new else {})
        self._begun = True
        if new:
            self._epoch = int(row["epoch"])
            curves = {name: value for name, value in row.items() if name not in _NOT_CURVES}
            records.append(_scalars({**curves, "epoch": row["epoch"]}, int(row["step"])))
        if view.status != "running":
            self._over = True
            records.append(_ending(view.status))
        _append(self._path, records)


def _append(path: Path, records: list[Any]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    if records:
        with path.open("ab") as file:
            writer = RecordWriter(file)
            for record in records:
                writer.write(record.SerializeToString())


def _event(**content: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), **content)


def _opening(view: MemberView, row: dict[str, float]) -> list[Any]:
    """The head of a file: whatever lies in older files from this row's step on is void. Then the hyper-parameters."""
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from torch.utils.tensorboard.summary import hparams

    first = int(row["step"]) if row and row["epoch"] > 1 else 0
    void = SessionLog(status=SessionLog.SessionStatus.Value("START"))
    settings = {name: _setting(value) for name, value in {**view.settings, **view.hparams}.items()}
    job = view._member.job
    curves = [name for name in row if name not in _NOT_CURVES]
    measured = ["val_loss", *job.metrics] if job.val is not None else []
    experiment, session, _ = hparams(settings, dict.fromkeys([*curves, *measured], 0.0))  # type: ignore[no-untyped-call]
    return [
        _event(file_version="brain.Event:2"),
        _event(step=first, session_log=void),
        _event(summary=experiment),
        _event(summary=session),
    ]


def _setting(value: Any) -> Any:
    """What TensorBoard can hold as a hyper-parameter."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


def _scalars(values: dict[str, float], step: int) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _event(step=step, summary=summary)


def _ending(status: str) -> Any:
    """How the member ended, for the HPARAMS page."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=Status.Value("STATUS_SUCCESS" if status in ("done", "stopped") else "STATUS_FAILURE"))
    content = HParamsPluginData(session_end_info=end, version=PLUGIN_DATA_VERSION).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content)
    value = Summary.Value(tag=SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin))
    return _event(summary=Summary(value=[value]))
