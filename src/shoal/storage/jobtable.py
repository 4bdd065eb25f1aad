"""The job table: what a run folder stores about its jobs, to recognize them when the run is resumed.

A job's entry holds its settings. Descriptions of its code, its network and its initial weights are long and mostly the
same for all jobs, so each is stored once, in `parts`, under the hash of its contents.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from shoal.data.dataset import DatasetSource
from shoal.data.loader import LoaderSource
from shoal.engine.members.member import Member
from shoal.engine.python_state.user_code import PYTHON, version_of
from shoal.storage._describer import BYTECODE, Describer, Texts
from shoal.storage._initial_weights import describe_weights

PLAIN = (
    "batch_size", "epochs", "steps", "seed", "data_seed", "shuffle", "drop_last", "accumulate", "clip_norm",
    "clip_value", "precision", "schedule_every", "val_every", "val_every_steps",
    "keep",
)  # fmt: skip
NAMED = ("loss", "step", "collate", "params", "schedule")
CODE, WEIGHTS = "code", "weights"
"""Fields of an entry that contain the key of a part."""
ADDED = "added"
"""Field of an entry that is set if the job was added to a live run."""
KEY = "key"
"""Field of an entry with the key of its checkpoints, if the entry's settings were changed later (more epochs)."""


@dataclass(slots=True)
class JobTable:
    """The jobs of a run folder."""

    jobs: list[dict[str, Any]]
    parts: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    """The versions that wrote the table: of Shoal, Python, its bytecode, and the libraries that the jobs use."""

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        also: Mapping[str, Any] | None = None,
        *,
        names_only: bool = False,
        passing: bool = False,
    ) -> Self:
        """Return the table of these members.

        Args:
            also: Further entries to compare, such as the settings of a split.
            names_only: Leave out code and weights.
            passing: Leave out data too, for a temporary folder that is never resumed.
        """
        table = cls([describe_settings(member, data=not passing) | dict(also or {}) for member in members])
        libraries = {"shoal", "torch"}
        for member, job in zip(members, table.jobs, strict=True):
            if not (names_only or passing):
                describer = _described(member)
                job[CODE] = table._put({name: table._put(texts) for name, texts in describer.parts.items()})
                job[WEIGHTS] = table._put(describe_weights(member.model))
                libraries |= describer.libraries
        table.made_by = {name: version_of(name) for name in sorted(libraries)}
        table.made_by |= {PYTHON: platform.python_version(), "bytecode": BYTECODE}
        return table

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the table that `to_json` wrote."""
        return cls(content["jobs"], content["parts"], content["made_by"])

    def to_json(self) -> dict[str, Any]:
        return {"made_by": self.made_by, "jobs": self.jobs, "parts": self.parts}

    def extend(self, other: JobTable) -> bool:
        """Add the jobs of another table that this one does not have, and return whether there were any."""
        known_names = {job["name"] for job in self.jobs}
        new = [job for job in other.jobs if job["name"] not in known_names]
        if new:
            self.jobs += new
            self.parts |= other.parts
            self.made_by = other.made_by | self.made_by
        return bool(new)

    def keys(self) -> list[str]:
        """Return a key for each job, which its checkpoints contain."""
        return [job.get(KEY) or _hash(job) for job in self.jobs]

    def update(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Give jobs, by name, more epochs or steps, or another config. Their checkpoints stay valid."""
        for job, key in zip(self.jobs, self.keys(), strict=True):
            if job["name"] in changes:
                job.update(changes[job["name"]], **{KEY: key})

    def code(self, job: Mapping[str, Any]) -> dict[str, Texts]:
        """Return the description of a job's functions and network, by part."""
        return {part: self.parts[key] for part, key in self.parts[job[CODE]].items()}

    def take_functions(self, job: dict[str, Any], stored: JobTable, stored_job: Mapping[str, Any]) -> None:
        """Copy the description of a job's functions from another table, in which `stored_job` is the job's entry."""
        network = {part: texts for part, texts in self.code(job).items() if is_network(part)}
        code = network | without_network(stored.code(stored_job))
        job[CODE] = self._put({part: self._put(texts) for part, texts in code.items()})

    def _put(self, content: dict[str, Any]) -> str:
        key = _hash(content)
        self.parts.setdefault(key, content)
        return key


def describe_settings(member: Member, *, data: bool = True) -> dict[str, Any]:
    """Return a job's settings and the names of its functions; without `data`, nothing of its data."""
    job = member.job
    shapes = {name: [list(t.shape), str(t.dtype)] for name, t in _tensors(member.model).items()}
    described = {
        "name": member.name,
        "model": type(member.model).__qualname__,
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "data": member.data.fingerprint() if data else None,
        "val": member.val.fingerprint() if data and member.val is not None else None,
        "optimizer": _name(job.optimizer),
        "hparams": {name: _plain(value) for name, value in sorted(job.hparams.items())},
        **{name: _name(getattr(job, name)) for name in NAMED},
        **{name: getattr(job, name) for name in PLAIN},
        "metrics": sorted(job.metrics),
        "stop": repr(job.stop) if job.stop is not None else None,
    }
    if job.average is not None:
        described["average"] = repr(job.average)
    if job.config:
        described["config"] = dict(job.config)
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain


def describe_functions(member: Member) -> dict[str, Texts]:
    """Return a description of a member's functions and classes as they are now."""
    return without_network(_described(member).parts)


def _described(member: Member) -> Describer:
    """Describe a member's functions and network."""
    job = member.job
    roots = {name: getattr(job, name) for name in (*NAMED, "optimizer") if getattr(job, name) is not None}
    roots |= {f"metric {name!r}": metric for name, metric in job.metrics.items()}
    for name, view in (("data", member.data), ("val", member.val)):
        if view is not None and isinstance(view.source, DatasetSource):
            roots[name] = type(view.source.dataset)
        elif view is not None and isinstance(view.source, LoaderSource):
            loader = view.source.loader.loader
            roots |= {name: type(loader.dataset), f"{name} collate_fn": loader.collate_fn}
    return Describer(roots, member.model)


def is_network(part: str) -> bool:
    return part == "model" or part.startswith("model.")


def without_network(code: Mapping[str, Texts]) -> dict[str, Texts]:
    """Return the parts that are functions and classes; the network is built again each time."""
    return {part: texts for part, texts in code.items() if not is_network(part)}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


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
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # addresses differ between processes
