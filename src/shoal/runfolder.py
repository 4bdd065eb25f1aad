"""The run folder, `out=`: what was trained, and what came of it.

    jobs.json                 what the jobs were: names, settings, shapes, data fingerprints
    results.json              how each ended, and the environment
    history/0003.jsonl        one row an epoch
    weights/0003.safetensors  the model's state_dict (.pt where it holds more than plain tensors)

Every file is written beside its place and moved there, so that a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import OutError
from shoal.pack.members import Member
from shoal.results import Result, Results, finite

VERSION = 1
"""Of the folder's format."""


class RunFolder:
    """A folder that holds the results of one list of jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if importlib.util.find_spec("safetensors") is None:
            raise ImportError("out= writes weights with safetensors: pip install safetensors")
        if path.exists() and not path.is_dir():
            raise OutError(f"out is {str(path)!r}, which is a file; name a folder")

    def claim(self, members: list[Member]) -> None:
        """Write down the jobs; OutError where the folder holds others, or files that are not a run's."""
        jobs = json.loads(json.dumps([describe_member(member) for member in members]))
        known = self.path / "jobs.json"
        if known.exists():
            try:
                held = json.loads(known.read_text())["jobs"]
            except (ValueError, KeyError, TypeError):
                raise OutError(
                    f"out={str(self.path)!r}: its jobs.json cannot be read; use another folder, or remove this one"
                ) from None
            lines = differences(held, jobs)
            if lines:
                more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
                raise OutError(
                    f"out={str(self.path)!r} holds other jobs: {'; '.join(lines[:5])}{more}; "
                    "use another folder, or remove this one"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise OutError(
                f"out={str(self.path)!r} has files in it that are no run of Shoal's; use a new or empty folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(known, json.dumps({"version": VERSION, "jobs": jobs}, indent=1))

    def write(self, results: Results) -> None:
        """Write down what came of the jobs."""
        for folder in ("history", "weights"):
            (self.path / folder).mkdir(exist_ok=True)
        for index, result in enumerate(results):
            lines = [json.dumps(finite(row)) for row in result.history]
            write_text(self.path / "history" / f"{index:04d}.jsonl", "".join(line + "\n" for line in lines))
            self._weights(index, result)
        table = [
            {k: v for k, v in finite(result.to_dict()).items() if k not in ("history", "environment")}
            for result in results
        ]
        stamp = results[0].environment
        write_text(
            self.path / "results.json",
            json.dumps({"version": VERSION, "environment": stamp, "results": table}, indent=1),
        )

    def _weights(self, index: int, result: Result) -> None:
        from safetensors.torch import save

        state = result.model.state_dict()
        stem = self.path / "weights" / f"{index:04d}"
        if all(isinstance(value, Tensor) and value.layout == torch.strided for value in state.values()):
            # A clone each: tied weights are then written once for each of their names, and load with strict=True.
            data = save({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
            write_bytes(stem.with_suffix(".safetensors"), lambda file: file.write(data))
        else:
            write_bytes(stem.with_suffix(".pt"), lambda file: torch.save(state, file))


def describe_member(member: Member) -> dict[str, Any]:
    """What makes a job the same job, as plain data. Code is not compared, beyond names."""
    job = member.job
    shapes = {name: [list(t.shape), str(t.dtype)] for name, t in _tensors(member.model).items()}
    plain = (
        "batch_size",
        "epochs",
        "steps",
        "seed",
        "data_seed",
        "shuffle",
        "drop_last",
        "accumulate",
        "clip_norm",
        "precision",
    )
    more = ("schedule_every", "val_every", "keep")
    return {
        "name": member.name,
        "model": type(member.model).__qualname__,
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "data": member.data.fingerprint(),
        "val": member.val.fingerprint() if member.val is not None else None,
        "optimizer": _name(job.optimizer),
        "hparams": {name: _plain(value) for name, value in sorted(job.hparams.items())},
        **{name: _name(getattr(job, name)) for name in ("loss", "step", "collate", "params", "schedule")},
        **{name: getattr(job, name) for name in (*plain, *more)},
        "metrics": sorted(job.metrics),
        "stop": repr(job.stop) if job.stop is not None else None,
    }


def differences(held: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[str]:
    """What differs between the jobs in a folder and these, in words."""
    there, here = {job["name"]: job for job in held}, {job["name"]: job for job in jobs}
    lines = [f"job {name!r} is not in it" for name in here if name not in there]
    lines += [f"it has job {name!r}" for name in there if name not in here]
    for name in (name for name in here if name in there):
        for field in here[name]:
            old, new = there[name].get(field), here[name][field]
            if old != new:
                lines.append(f"job {name!r} has {field} {old!r} there and {new!r} here")
    if not lines and [job["name"] for job in held] != [job["name"] for job in jobs]:
        lines.append("the same jobs are in it in another order")
    return lines


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move."""
    write_bytes(path, lambda file: file.write(text.encode()))


def write_bytes(path: Path, fill: Callable[[Any], Any]) -> None:
    """Replace a file in one move."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    lazy = torch.nn.parameter.is_lazy
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor) and not lazy(t)}


def _name(value: Any) -> str | None:
    if value is None:
        return None
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
