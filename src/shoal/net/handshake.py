"""Check that two processes have the same job, before a worker may join."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member
from shoal.environment import version
from shoal.jobs.job import Job
from shoal.net.messages import VERSION
from shoal.storage.jobtable import describe_settings

Plan = dict[str, Any]
PRIVATE = "its own"
"""Stands for the number of rows if these belong to the worker and stay with it."""
NOT_COMPARED = ("name", "data", "val", "metrics", "stop")
"""Entries that only the coordinator needs; of the data, the rows are compared."""


def describe_training(job: Job, member: Member, model: nn.Module, *, private: bool = False) -> Plan:
    """Return what both sides of a training must agree on, as plain data.

    Args:
        private: The rows here are only this worker's, so their number may differ.
    """
    settings = describe_settings(member)
    return plain(
        {
            "shoal": version(),
            "wire format": VERSION,
            "layers": _digest(model),
            **{name: value for name, value in settings.items() if name not in NOT_COMPARED},
            "loss": _digest(job.loss) if isinstance(job.loss, nn.Module) else settings["loss"],
            "data": _rows(job.data, private),
        }
    )


def plain(described: dict[str, Any]) -> Plan:
    """Return a description as it is after it was sent as JSON."""
    sent: Plan = json.loads(json.dumps(described, default=repr))
    return sent


def difference(ours: Plan, theirs: Plan) -> str | None:
    """Return the first difference in words, or None if there is none."""
    if isinstance(theirs.get("data"), dict) and theirs["data"].get("rows") == PRIVATE:
        ours = {**ours, "data": {**ours["data"], "rows": PRIVATE}}
        theirs = {**theirs, "rounds": ours.get("rounds")}  # they follow from the number of rows
    for name, our_value in ours.items():
        their_value = theirs.get(name)
        if json.dumps(our_value) == json.dumps(their_value):  # texts are compared, because NaN != NaN
            continue
        if isinstance(our_value, Mapping) and isinstance(their_value, Mapping):
            key = next(
                k for k in [*our_value, *their_value] if json.dumps(our_value.get(k)) != json.dumps(their_value.get(k))
            )
            return f"{name} ({key}) is {_format(their_value.get(key))} there and {_format(our_value.get(key))} here"
        return f"{name} is {_format(their_value)} there and {_format(our_value)} here"
    return None


def _format(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(network: nn.Module) -> str:
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(network)).encode()).hexdigest()[:16]


def _rows(data: Any, private: bool) -> dict[str, Any]:
    """Return the number of rows, and the shapes and types of one row."""
    row: list[Any]
    leaves = pytree.tree_leaves(data)
    if all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves) and leaves:
        rows, row = len(leaves[0]), [[list(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch.")] for leaf in leaves]
    else:
        rows, row = len(data) if hasattr(data, "__len__") else -1, [type(data).__qualname__]
    return {"rows": PRIVATE if private else rows, "row": row}
