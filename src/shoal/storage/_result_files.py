"""Write and read the results of a run folder (results.json, histories, weights), and read jobs.json and plan.json."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import DamagedError, OutError, describe
from shoal.results import Result, Results
from shoal.storage import atomic
from shoal.storage._histories import to_text
from shoal.utils.numpy_values import finite

VERSION = 5
"""The version of the folder's format. Folders of other versions are refused."""


def read_file(path: Path, fix: str) -> dict[str, Any] | None:
    """Return the contents of jobs.json or plan.json, or None if the file does not exist.

    Args:
        fix: Advice for the error if the file is damaged.
    """
    if not path.exists():
        return None
    try:
        content = atomic.read_sealed(path)
    except DamagedError as error:
        raise DamagedError(f"{error}; put it back from a copy, {fix}") from None
    if content.get("version") != VERSION:
        writer_version = content.get("made_by", {}).get("shoal", "")
        raise OutError(
            f"{str(path)!r} was written by another version of Shoal ({writer_version and writer_version + ', '}format "
            f"{content.get('version')}; this one reads {VERSION}); use that version, or "
            "another folder"
        )
    return content


def write_results(folder: Path, results: Results) -> None:
    """Write histories and weights, then results.json, so that its presence shows that the other files are complete."""
    files = [(folder / "history" / f"{i:04d}.jsonl", [to_text(r.history)]) for i, r in enumerate(results)]
    files += [_weights(folder / "weights" / f"{i:04d}", result) for i, result in enumerate(results)]
    for error in atomic.write_many(files):
        if error is not None:
            raise error
    table = [
        {k: v for k, v in finite(result.to_dict()).items() if k not in ("history", "environment")} for result in results
    ]
    content = {"version": VERSION, "environment": results[0].environment, "results": table}
    atomic.write_text(folder / "results.json", json.dumps(content, indent=1))


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return the contents of results.json, or None if the run has not finished."""
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        names = [result["name"] for result in content["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{str(path)!r} is damaged ({describe(error)}); remove this file: the checkpoints say the same"
        ) from None
    assert all(isinstance(name, str) for name in names)
    return content


def _weights(stem: Path, result: Result) -> tuple[Path, list[bytes]]:
    """Return the file of a result's weights and its contents."""
    from safetensors.torch import save

    state = result.state_dict()
    if all(isinstance(value, Tensor) and _suits_safetensors(value) for value in state.values()):
        # Cloned, so that tied weights are written under each of their names, and load with strict=True.
        data = save({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
        return stem.with_suffix(".safetensors"), [data]
    file = io.BytesIO()
    torch.save(state, file)
    return stem.with_suffix(".pt"), [file.getvalue()]


def _suits_safetensors(value: Tensor) -> bool:
    return value.layout == torch.strided and _has_dtype(value.dtype)


@cache
def _has_dtype(dtype: torch.dtype) -> bool:
    """Return whether this version of safetensors writes and reads tensors of a dtype; none supports complex128 yet."""
    from safetensors.torch import load, save

    try:
        return load(save({"x": torch.empty(0, dtype=dtype)}))["x"].dtype == dtype
    except Exception:
        return False


def read_weights(stem: Path) -> dict[str, Any]:
    """Return the weights that `write_results` wrote, or raise an OutError if they cannot be read."""
    tensors, pickled = stem.with_suffix(".safetensors"), stem.with_suffix(".pt")
    try:
        if tensors.exists():
            from safetensors.torch import load_file

            state: dict[str, Any] = load_file(tensors)
            return state
        return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except Exception as error:
        raise OutError(
            f"the weights {str(stem)!r} cannot be read ({describe(error)}); put them back from a copy"
        ) from None
