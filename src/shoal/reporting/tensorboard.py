"""`shoal.TensorBoard`, which writes logs for TensorBoard into a folder for each member, as if each had run alone."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from shoal.reporting.callbacks import MemberView
from shoal.reporting.loggers import Logger, config, folder_name, make_folder

_NOT_CURVES = ("epoch", "step", "seconds")


class TensorBoard(Logger):
    """Writes each member's history for TensorBoard, into a folder named after the member.

    It holds the member's losses, logs, metrics and learning rate by optimizer step, and its hyper-parameters for the
    HPARAMS page. Files are open only while they are written, so there may be thousands of members. A resumed run
    continues in the same folder: rows written after the checkpoint that it started from are replaced.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_step: int | None = None) -> None:
        super().__init__(every_step=every_step)
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ImportError("TensorBoard needs the tensorboard package: pip install 'shoal[tensorboard]'") from None
        self.folder = make_folder(folder, "TensorBoard")
        self._files: dict[str, Path] = {}
        """The current file by member name."""

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def __call__(self, view: MemberView) -> None:
        if view.metrics.get("epoch", 0) < self._epochs.get(view.name, 0):
            del self._epochs[view.name]  # the member's worker was lost, and it resumed from an earlier checkpoint
        super().__call__(view)

    def begin(self, view: MemberView) -> int | None:
        folder = self.folder / folder_name(view.name)
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._files[view.name] = folder / name
        self._write(view, *_opening(view))
        return None

    def log(self, view: MemberView, values: dict[str, float], step: int) -> None:
        epoch = {"epoch": values["epoch"]} if "epoch" in values else {}
        curves = {name: value for name, value in values.items() if name not in _NOT_CURVES}
        self._write(view, _scalars(curves | epoch, step))

    def end(self, view: MemberView) -> None:
        self._write(view, _ending(view.status))

    def _write(self, view: MemberView, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._files[view.name].open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())


def _event(**content: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), **content)


def _opening(view: MemberView) -> list[Any]:
    """Return the first events of a file: one that makes TensorBoard ignore older points after the last epoch's step,
    and the hyper-parameters."""
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from torch.utils.tensorboard.summary import hparams

    first = int(view.history[-2]["step"]) + 1 if len(view.history) > 1 else 0
    void = SessionLog(status=SessionLog.SessionStatus.Value("START"))
    job = view._member.job
    curves = [name for name in view.metrics if name not in _NOT_CURVES]
    measured = ["val_loss", *job.metrics] if job.val is not None else []
    settings = {name: str(value) if value is None else value for name, value in config(view).items()}
    experiment, session, _ = hparams(settings, dict.fromkeys([*curves, *measured], 0.0))  # type: ignore[no-untyped-call]
    return [
        _event(file_version="brain.Event:2"),
        _event(step=first, session_log=void),
        _event(summary=experiment),
        _event(summary=session),
    ]


def _scalars(values: dict[str, float], step: int) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _event(step=step, summary=summary)


def _ending(status: str) -> Any:
    """Return the event from which the HPARAMS page knows how the member ended."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=Status.Value("STATUS_SUCCESS" if status in ("done", "stopped") else "STATUS_FAILURE"))
    content = HParamsPluginData(session_end_info=end, version=PLUGIN_DATA_VERSION).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content)
    value = Summary.Value(tag=SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin))
    return _event(summary=Summary(value=[value]))
