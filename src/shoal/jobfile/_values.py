"""Tables of plain values in a job file: `stop`, `folds`, `hparams`."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from shoal.engine.optim.schedules import needs_metric
from shoal.errors import JobError, describe
from shoal.jobfile import _known
from shoal.jobfile._references import Mistake
from shoal.jobfile._tree import Node, did_you_mean
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
