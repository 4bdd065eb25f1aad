"""What makes a job the same job, as plain data, so that a run folder knows its own."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from torch import Tensor

from shoal.pack.members import Member

PLAIN = (
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
    "schedule_every",
    "val_every",
    "keep",
)
NAMED = ("loss", "step", "collate", "params", "schedule")


def describe_member(member: Member) -> dict[str, Any]:
    """What makes a job the same job, as plain data. Code is not compared, beyond names."""
    job = member.job
    shapes = {name: [list(t.shape), str(t.dtype)] for name, t in _tensors(member.model).items()}
    described = {
        "name": member.name,
        "model": type(member.model).__qualname__,
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "data": member.data.fingerprint(),
        "val": member.val.fingerprint() if member.val is not None else None,
        "optimizer": _name(job.optimizer),
        "hparams": {name: _plain(value) for name, value in sorted(job.hparams.items())},
        **{name: _name(getattr(job, name)) for name in NAMED},
        **{name: getattr(job, name) for name in PLAIN},
        "metrics": sorted(job.metrics),
        "stop": repr(job.stop) if job.stop is not None else None,
    }
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain


def job_key(described: dict[str, Any]) -> str:
    """A short name for what a job is."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def differences(held: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[str]:
    """What differs between the jobs in a folder and these, in words."""
    there, here = {job["name"]: job for job in held}, {job["name"]: job for job in jobs}
    lines = [f"job {name!r} is not in it" for name in here if name not in there]
    lines += [f"it has job {name!r}" for name in there if name not in here]
    for name in (name for name in here if name in there):
        for field in {**here[name], **there[name]}:
            old, new = there[name].get(field), here[name].get(field)
            if json.dumps(old) != json.dumps(new):  # as text: NaN is not itself otherwise
                if isinstance(old, dict) and isinstance(new, dict):
                    old, new = _apart(old, new), _apart(new, old)
                lines.append(f"job {name!r} has {field} {old!r} there and {new!r} here")
    if not lines and [job["name"] for job in held] != [job["name"] for job in jobs]:
        lines.append("the same jobs are in it in another order")
    return lines


def _apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What is not the same in another table."""
    return {key: value for key, value in one.items() if key not in other or json.dumps(value) != json.dumps(other[key])}


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
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address is another one in the next process
