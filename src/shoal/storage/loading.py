"""`shoal.load`, which reads the results of a run folder without the code and the data of the training."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from shoal.engine.members.evaluation_weights import training_weights
from shoal.engine.python_state.module_modes import in_eval_mode
from shoal.errors import OutError, ShoalError, describe
from shoal.jobs.averaging import EMA, SWA
from shoal.jobs.job import EarlyStop, Job
from shoal.results import Result, Results
from shoal.storage._checkpoints import Checkpoints
from shoal.storage._histories import from_text
from shoal.storage._result_files import read_file, read_results, read_weights
from shoal.storage.jobtable import CODE, WEIGHTS, JobTable
from shoal.storage.lock import Lock

Builder = nn.Module | Callable[[], nn.Module]
"""A network to load weights into: a function that builds it, or an nn.Module, which is copied."""


def load(folder: str | os.PathLike[str], model: Builder | Mapping[str, Builder] | None = None) -> Results:
    """Read the results of a run folder, finished or not. Neither the jobs nor their data are needed.

    Args:
        folder: The `out` of `shoal.train`, `shoal.tune` or a split.
        model: A function that builds the network (or a network, which is copied), for `result.model`, `predict` and
            `evaluate`; or a dict of them by job name if the jobs have different networks. Without it, a result has
            everything but its network: `result.state_dict()` gives the weights.
    """
    path = Path(folder)
    if not (path / "jobs.json").exists() and (path / "run" / "jobs.json").exists():
        path = path / "run"  # the folder of a search
    content = read_file(path / "jobs.json", "or train the same jobs in this folder again")
    if content is None:
        raise OutError(f"{str(folder)!r} is not a run folder: it has no jobs.json; name what was given as out=")
    table = JobTable.read(content)
    entries = [{k: v for k, v in job.items() if k not in (CODE, WEIGHTS)} for job in table.jobs]
    _check_models(model, [entry["name"] for entry in entries])
    ended = read_results(path)
    if ended is None:
        return Results(_unfinished(path, table, entries, model))
    by_name = {result["name"]: result for result in ended["results"]}
    return Results(
        [
            _ended(path, index, key, entry, by_name[entry["name"]], ended["environment"], model)
            for index, (entry, key) in enumerate(zip(entries, table.keys(), strict=True))
            if entry["name"] in by_name
        ]
    )


def _ended(
    path: Path, index: int, key: str, entry: dict[str, Any], saved: dict[str, Any], stamp: dict[str, Any], model: Any
) -> Result:
    """Return a result of a finished run.

    Args:
        key: The key of the job in its checkpoints.
        saved: The job's entry in results.json.
    """
    stem = path / "weights" / f"{index:04d}"
    try:
        history = from_text((path / "history" / f"{index:04d}.jsonl").read_bytes())
    except (OSError, ValueError) as error:
        raise OutError(f"the history of {entry['name']!r} cannot be read ({describe(error)})") from None
    trained = partial(_weights_in_training, path, index, key)
    return _result(
        entry, StoredNetwork(entry["name"], partial(read_weights, stem), trained, model), history=history,
        environment=stamp,
        **{name: saved[name] for name in ("status", "tier", "error", "steps", "seconds")}, split=saved.get("split"),
        validations=saved.get("validations", []),
    )  # fmt: skip


def _weights_in_training(path: Path, index: int, key: str) -> dict[str, Tensor]:
    state, _, _ = Checkpoints(path / "members").newest(index, key)
    return training_weights((state or {}).get("trained"))


def _unfinished(path: Path, table: JobTable, entries: list[dict[str, Any]], model: Any) -> list[Result]:
    """Return the results of an unfinished run, from the newest checkpoints."""
    checkpoints = Checkpoints(path / "members")
    not_ended = "running" if Lock(path).in_use() else "unfinished"
    results = []
    for index, (entry, key) in enumerate(zip(entries, table.keys(), strict=True)):
        state, _, _ = checkpoints.newest(index, key)
        state = state or {}
        history = state.get("history") or []
        status = state.get("status", "running")
        best = state.get("best") if entry["keep"] == "best" else None
        weights = state.get("model") if best is None else best
        read = None if weights is None else partial(dict[str, Any], weights)
        trained = partial(dict[str, Tensor], training_weights(state.get("trained")))
        results.append(
            _result(
                entry,
                StoredNetwork(entry["name"], read, trained, model),
                history=from_text(history) if isinstance(history, bytes) else history,
                validations=state.get("validations", []),
                status=not_ended if status == "running" else status,
                tier=state.get("tier", ""),
                error=state.get("error") or None,
                steps=state.get("step", 0),
                seconds=state.get("seconds", 0.0),
            )
        )
    return results


def _result(entry: dict[str, Any], stored: StoredNetwork, **more: Any) -> Result:
    job = cast(Job, StoredJob(entry))
    result = Result(name=entry["name"], job=job, model=nn.Identity(), stored=stored, **more)
    del result.model, result.training_weights  # they are read on first use
    return result


class StoredJob:
    """A job's settings as stored in a run folder: numbers, names and hyper-parameters, without code and data."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = dict(entry)
        self._parsed = {"stop": _parse_repr(entry.get("stop")), "average": _parse_repr(entry.get("average"))}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._parsed:
            return self._parsed[name]
        if name in ("model", "data", "loss", "step", "collate", "params", "schedule", "owner", "priority"):
            raise ShoalError(
                f"job {self._entry['name']!r} was read from a folder, which holds no {name!r}; see .settings"
            )
        if name == "metrics":
            return dict.fromkeys(self._entry["metrics"])
        if name == "config":
            return self._entry.get("config", {})
        try:
            return self._entry[name]
        except KeyError:
            raise AttributeError(f"a job has no {name!r}") from None

    def __repr__(self) -> str:
        return f"StoredJob({self._entry['name']!r})"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the folder stores about the job, by the names of shoal.Job's fields."""
        return dict(self._entry)


def _parse_repr(text: str | None) -> EarlyStop | EMA | SWA | None:
    """Return an EarlyStop, EMA or SWA from its repr."""
    if text is None:
        return None
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    classes: dict[str, type[EarlyStop | EMA | SWA]] = {"EarlyStop": EarlyStop, "EMA": EMA, "SWA": SWA}
    return classes[call.func.id](
        **{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    )


@dataclass(frozen=True, slots=True)
class StoredNetwork:
    """One job's stored weights, and the function that builds its network."""

    name: str
    read: Callable[[], dict[str, Any]] | None
    """Reads the weights; None if the job has not been saved yet."""
    training_weights: Callable[[], dict[str, Tensor]]
    """Reads the weights as training left them, if the result has different ones."""
    builder: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        if self.read is None:
            raise OutError(f"job {self.name!r} has no weights in the folder yet: it had not been saved")
        return self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the builder, which may be a lambda; a pickled result has its network."""
        return StoredNetwork, (self.name, self.read, self.training_weights, None)

    def model(self) -> nn.Module:
        """Return the network with its weights, in eval mode."""
        builder = self.builder.get(self.name) if isinstance(self.builder, Mapping) else self.builder
        if builder is None:
            raise ShoalError(
                f"the folder holds the weights of {self.name!r}, not the code of its network; pass model= to "
                "shoal.load, or give net.load_state_dict what result.state_dict() returns"
            )
        network = copy.deepcopy(builder if isinstance(builder, nn.Module) else builder())
        try:
            network.load_state_dict(self.state_dict())
        except RuntimeError as error:
            why = (str(error).splitlines()[1:] or [str(error)])[0].strip().rstrip(" .")
            raise ShoalError(
                f"the weights of {self.name!r} do not fit a {type(network).__name__} ({why}); pass the network that it "
                "was trained with as model=, or a dict of networks by the jobs' names"
            ) from None
        return in_eval_mode(network)


def _check_models(model: Any, names: list[str]) -> None:
    if isinstance(model, Mapping):
        other = [name for name in model if name not in names]
        if other:
            raise ValueError(f"model names {other[0]!r}, which no job of the folder is called")
    for each in model.values() if isinstance(model, Mapping) else [model]:
        if each is not None and not callable(each):
            raise ValueError(f"model is {each!r}; pass a function that builds the network, an nn.Module, or a dict")
