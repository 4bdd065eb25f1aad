"""A study's own files in its folder.

    study.json      what was asked for: another study in the same folder is refused
    trials.jsonl    what happened to the trials, a line for each time that something did
    lock            which process uses the folder
    run/            the run folder: checkpoints, histories and weights of all trials

A line of the journal is written whole or, after a kill, not at all: one that was cut short is dropped. Each line holds
what has changed of some trials since the line before, so that a decision about many trials is one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from shoal.errors import DamagedError, OutError
from shoal.storage import atomic
from shoal.storage.lock import Lock
from shoal.tune.trial import Trial
from shoal.utils.numpy_values import finite

VERSION = 1
"""The version of the format."""
PLAIN = ("params", "state", "bracket", "rung", "error", "attrs", "kept_epoch")


class Journal:
    """The record of a study's trials; without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._written: dict[int, dict[str, Any]] = {}

    def open(self, settings: Mapping[str, Any]) -> tuple[list[Trial], dict[str, Any]]:
        """Return the trials that the folder contains, and the settings as they were first written.

        Raises an OutError if it contains another study or other files, or if another process uses it.
        """
        if self.folder is None:
            return [], dict(settings)
        self._lock = Lock(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            entries = {entry.name for entry in self.folder.iterdir()}
            if not entries <= {"lock", ".study.json.tmp"} and "study.json" not in entries:
                raise OutError(
                    f"out={str(self.folder)!r} has files that are not those of a study; use a new or empty folder"
                )
            self._lock.acquire()
            stored_settings = self._settings(settings)
            trials = self._read()
            self._file = (self.folder / "trials.jsonl").open("ab", buffering=0)
        except OSError as error:
            self._lock.release()
            raise OutError(
                f"out={str(self.folder)!r} cannot be written ({error.strerror}); free some space or use another folder"
            ) from None
        except BaseException:
            self._lock.release()
            raise
        return trials, stored_settings

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored settings, or store these if the folder is new."""
        assert self.folder is not None
        path = self.folder / "study.json"
        requested: dict[str, Any] = json.loads(json.dumps(finite(dict(settings))))
        if not path.exists():
            atomic.write_sealed(path, {"version": VERSION, "settings": requested})
            return requested
        content = atomic.read_sealed(path)
        stored: dict[str, Any] = content["settings"]
        for name in requested:
            if name != "run" and stored.get(name) != requested[name]:
                raise OutError(
                    f"out={str(self.folder)!r} holds another study: {name} was {stored.get(name)!r} and is "
                    f"{requested[name]!r}; use another folder, or remove this one"
                )
        return stored

    def _read(self) -> list[Trial]:
        """Read the trials, in order of their numbers; an incomplete last line is removed."""
        assert self.folder is not None
        path = self.folder / "trials.jsonl"
        data = path.read_bytes() if path.exists() else b""
        complete_bytes = data.rfind(b"\n") + 1
        if complete_bytes < len(data):
            with path.open("r+b") as file:
                file.truncate(complete_bytes)
        trials: dict[int, Trial] = {}
        for number, line in enumerate(data[:complete_bytes].splitlines(), 1):
            try:
                for change in json.loads(line):
                    _change(trials, change)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DamagedError(
                    f"{str(path)!r} is damaged in line {number}; put it back from a copy, or use another folder"
                ) from None
        self._written = {trial.number: _content(trial) for trial in trials.values()}
        return [trials[number] for number in sorted(trials)]

    def write(self, trials: Iterable[Trial]) -> None:
        """Append a line with what is new of these trials. It is on disk when this returns, even if the process is
        killed."""
        if self._file is None:
            return
        changes, durable = [], False
        for trial in trials:
            content, previous = _content(trial), self._written.get(trial.number, {})
            change = {name: value for name, value in content.items() if previous.get(name, None) != value}
            values = {epoch: v for epoch, v in content["values"].items() if epoch not in previous.get("values", {})}
            change.pop("values", None)
            if change or values:
                durable = durable or bool(change)
                changes.append({"number": trial.number, **change, **({"values": values} if values else {})})
                self._written[trial.number] = content
        if not changes:
            return
        try:
            line = json.dumps(changes).encode() + b"\n"
            while line:
                line = line[self._file.write(line) :]
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise OutError(
                f"out={str(self.folder)!r}: trials.jsonl cannot be written ({error.strerror}); free some space, and "
                "call the same again to resume"
            ) from None

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._file = None
                self._lock.release()


def _content(trial: Trial) -> dict[str, Any]:
    """Return a trial as the journal stores it; infinities and NaN as Python's JSON writes and reads them."""
    plain = {name: json.loads(json.dumps(getattr(trial, name), default=finite)) for name in PLAIN}
    return {**plain, "values": {str(epoch): finite(value) for epoch, value in trial.values.items()}}


def _change(trials: dict[int, Trial], change: dict[str, Any]) -> None:
    """Apply a change of the journal to the trials."""
    number = int(change["number"])
    trial = trials.setdefault(number, Trial(number, {}))
    for name in PLAIN:
        if name in change:
            setattr(trial, name, change[name])
    trial.values |= {int(epoch): float(value) for epoch, value in change.get("values", {}).items()}
