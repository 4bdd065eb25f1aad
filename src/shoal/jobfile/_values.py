"""Tables of plain values in a job file: `stop`, `folds`, `hparams`, and `run`, the arguments of `shoal.train`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.engine.optim.schedules import needs_metric
from shoal.errors import JobError, describe
from shoal.jobfile import _known
from shoal.jobfile._references import Mistake
from shoal.jobfile._tree import Node, Problems, did_you_mean
from shoal.jobs.job import EarlyStop, Job

STOP_FIELDS = tuple(field.name for field in fields(EarlyStop))
FOLD_FIELDS = {"k": int, "seed": int, "shuffle": bool}
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _typed(label: str, node: Node, kind: type) -> None:
    kinds = (int, float) if kind is float else (kind,)
    if type(node.value) not in kinds:
        raise Mistake(node, f"{label} is {node.shown()} ({node.kind}); use {WORDS[kind]}")


def fold_settings(node: Node) -> dict[str, Any]:
    """folds = 5, or a table of the arguments of `shoal.folds`."""
    table: dict[str, Node] = node.value if node.is_table else {"k": node}
    for key, child in table.items():
        if key not in FOLD_FIELDS:
            raise Mistake(child, f"folds has no {key!r}{did_you_mean(key, FOLD_FIELDS)}")
        _typed("folds" if child is node else f"folds.{key}", child, FOLD_FIELDS[key])
    if "k" not in table:
        raise Mistake(node, "folds has no k; say into how many parts: folds = 5")
    if table["k"].value < 2:
        raise Mistake(table["k"], f"folds is {table['k'].value}; use 2 or more")
    return {key: child.value for key, child in table.items()}


def stop(node: Node) -> EarlyStop:
    for key, child in node.value.items():
        if key not in STOP_FIELDS:
            raise Mistake(child, f"stop has no {key!r}{did_you_mean(key, STOP_FIELDS)}")
        _typed(f"stop.{key}", child, {"metric": str, "mode": str, "patience": int}.get(key, float))
    try:
        return EarlyStop(**{key: child.plain() for key, child in node.value.items()})
    except JobError as error:
        text = error.lines[0].removeprefix("EarlyStop: ")
        raise Mistake(node.value.get(text.partition(" ")[0], node), f"stop.{text}") from None


def check_hparams(optimizer: Any, hparams: Node | None, line: int) -> Any:
    """Whether the optimizer takes these settings, tried on one dummy parameter. Gives back the optimizer."""
    table: dict[str, Node] = hparams.value if hparams is not None else {}
    name = getattr(optimizer, "__name__", "the optimizer")
    try:
        signature = inspect.signature(optimizer)
    except (TypeError, ValueError):
        return optimizer
    free = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [n for n in signature.parameters if n not in ("params", "self")]
    for key, node in table.items():
        if key not in names and not free:
            raise Mistake(node, f"hparams.{key}: {name} has no {key!r}{did_you_mean(key, names)}")
        default = signature.parameters[key].default if key in signature.parameters else None
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if number and (isinstance(node.value, bool) or not isinstance(node.value, (int, float))):
            raise Mistake(node, f"hparams.{key} is {node.shown()} ({node.kind}); use a number")
        if isinstance(default, bool) and not isinstance(node.value, bool):
            raise Mistake(node, f"hparams.{key} is {node.shown()} ({node.kind}); use true or false")
    plain = {key: tuples(node.plain()) for key, node in table.items()}
    try:
        optimizer([nn.Parameter(torch.zeros(1, 1))], **plain)
    except (TypeError, ValueError, LookupError) as error:
        text = describe(error)
        guilty = next((node for key, node in table.items() if _says(text, key)), None)
        raise Mistake(guilty or hparams or line, f"{name} refuses these hparams: {text}; change them") from None
    except Exception:
        return optimizer  # it may want a real model: building the members decides
    return optimizer


def _says(text: str, key: str) -> bool:
    words = {"lr": "learning rate", "betas": "beta parameter", "eps": "epsilon"}
    return key in text or words.get(key, key.replace("_", " ")) in text


def tuples(value: Any) -> Any:
    """Lists as tuples, as optimizers have them (betas)."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def check_schedule(node: Node, job: Job, schedule: Any) -> Any:
    """Whether a scheduler of torch's takes its arguments: one step on a dummy parameter. Gives both back."""
    if getattr(schedule, "func", schedule) not in _known.SCHEDULERS.values():
        return schedule, job.optimizer
    try:
        optimizer = job.optimizer([nn.Parameter(torch.zeros(1, 1))], **job.hparams)
    except Exception:
        return schedule, job.optimizer  # it may want a real model: building the members decides
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step of the optimizer comes first here
            made = schedule(optimizer)
            made.step(0.0) if needs_metric(made) else made.step()
    except Exception as error:
        raise Mistake(node, f"schedule raised {describe(error)}; change its arguments") from None
    return schedule, job.optimizer


KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "device": ((str,), "text such as 'auto', 'cpu' or 'cuda:1'"),
    "out": ((str,), "the name of a folder"),
    "memory": ((str, int), "a size such as '20GB', or bytes"),
    "policy": ((str,), "the name of a policy, such as 'fifo'"),
    "checkpoint_every": ((str, int, float), "a time such as '60s'"),
    "threads": ((int,), "a whole number, 1 or more"),
    "compile": ((bool, str), "true, false or 'auto'"),
    "deterministic": ((bool,), "true or false"),
    "progress": ((bool,), "true or false"),
    "tensorboard": ((str,), "the name of a folder"),
}
"""Key -> the types that it may have, and in words what to use."""
FOLDERS = ("out", "tensorboard")


def settings(root: Node, folder: Path, problems: Problems) -> dict[str, Any]:
    """The settings as plain values; folders are taken from the file's own."""
    run = root.value.get("run") if root.is_table else None
    if run is None:
        return {}
    if not run.is_table:
        problems.add(run, f"run is {run.kind}; use a table of settings, such as device and out")
        return {}
    made: dict[str, Any] = {}
    for key, node in run.value.items():
        if key not in KINDS:
            problems.add(node, f"run has no {key!r}{did_you_mean(key, KINDS)}")
            continue
        kinds, wanted = KINDS[key]
        if node.value is None:
            continue
        if type(node.value) not in kinds:
            problems.add(node, f"run.{key} is {node.shown()} ({node.kind}); use {wanted}")
        elif key in FOLDERS and (not node.value.strip() or "\0" in node.value or (folder / node.value).is_file()):
            what = "is a file" if node.value.strip() and "\0" not in node.value else "names nothing"
            problems.add(node, f"run.{key} {node.shown()} {what}; use {wanted}")
        else:
            made[key] = str(folder / node.value) if key in FOLDERS else node.value
    _check_values(run, made, problems)
    return made


def _check_values(run: Node, made: Mapping[str, Any], problems: Problems) -> None:
    from shoal.engine.planning.policy import policy_for
    from shoal.training import parse_bytes, parse_seconds, pick_device

    checks: dict[str, Callable[[Any], Any]] = {
        "memory": parse_bytes,
        "checkpoint_every": parse_seconds,
        "device": pick_device,
        "policy": policy_for,
    }
    for key, check in checks.items():
        if key in made:
            try:
                check(made[key])
            except ValueError as error:
                problems.add(run.value[key], f"run.{error}")
    if "threads" in made and made["threads"] < 1:
        problems.add(run.value["threads"], f"run.threads is {made['threads']}; use a whole number, 1 or more")
    if "compile" in made and made["compile"] not in (True, False, "auto"):
        problems.add(run.value["compile"], f"run.compile is {made['compile']!r}; use true, false or 'auto'")
