"""Tables of plain values in a job file: `stop`, `folds`, `hparams`, and `run`, the arguments of `shoal.train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.engine.optim.schedules import needs_metric
from shoal.errors import JobError, describe
from shoal.jobfile import _known
from shoal.jobfile._references import check_arguments
from shoal.jobfile._tree import Mistake, Node, Problems
from shoal.jobs.job import EarlyStop, Job
from shoal.preparation.folds import folds

FOLDERS = ("out", "tensorboard")


def run_settings(
    *,
    device: str = "auto",
    out: str | None = None,
    memory: str | int | None = None,
    policy: str = "fifo",
    checkpoint_every: str | float = "60s",
    threads: int | None = None,
    compile: bool | str = "auto",
    deterministic: bool = False,
    progress: bool = True,
    tensorboard: str | None = None,
) -> None:
    """Check the values of the run table; ValueError that begins with the name of a setting where one is wrong."""
    from shoal.training import make_settings

    compiled = compile if isinstance(compile, str) else "auto"  # whether a device can is seen when it is known
    make_settings(device, memory, threads, compiled, checkpoint_every, deterministic, policy)


def settings(root: Node, folder: Path, problems: Problems) -> dict[str, Any]:
    """The settings as plain values; folders are taken from the file's own."""
    run = root.value.get("run") if root.is_table else None
    if run is None:
        return {}
    try:
        if not run.is_table:
            raise Mistake(run, f"run is {run.kind}; use a table of settings, such as device and out")
        table: dict[str, Node] = {key: node for key, node in run.value.items() if node.value is not None}
        check_arguments("run", run, run_settings, table, typed=True)
        chosen = {key: node.value for key, node in table.items()}
        for key in [key for key in FOLDERS if key in chosen]:
            name = chosen[key]
            if not name.strip() or "\0" in name or (folder / name).is_file():
                what = "is a file" if name.strip() and "\0" not in name else "names nothing"
                raise Mistake(table[key], f"run.{key} {name!r} {what}; use the name of a folder")
            chosen[key] = str(folder / name)
        try:
            run_settings(**chosen)
        except ValueError as error:
            raise Mistake(table.get(str(error).partition(" ")[0], run), f"run.{error}") from None
        return chosen
    except Mistake as mistake:
        problems.note(mistake)
        return {}


def make_folds(node: Node, job: Job) -> list[Job]:
    """folds = 5, or a table of the arguments of `shoal.folds`."""
    table: dict[str, Node] = node.value if node.is_table else {"k": node}
    check_arguments("folds", Node(table, node.line), folds, table, 1, typed=True)
    if "k" not in table:
        raise Mistake(node, "folds has no k; say into how many parts: folds = 5")
    if job.val is not None:
        raise Mistake(node, "there are both folds and val; folds validate on their own parts: remove one of them")
    try:
        return folds(job, **{key: child.value for key, child in table.items()})
    except JobError as error:
        raise Mistake(node, error.lines[0].partition(": ")[2].replace("k is", "folds is")) from None


def make_stop(node: Node) -> EarlyStop:
    check_arguments("stop", node, EarlyStop, node.value, typed=True)
    try:
        return EarlyStop(**node.plain())
    except JobError as error:
        text = error.lines[0].removeprefix("EarlyStop: ")
        raise Mistake(node.value.get(text.partition(" ")[0], node), f"stop.{text}") from None


def make_hparams(node: Node) -> dict[str, Any]:
    return {key: tuples(child.plain()) for key, child in node.value.items()}


def tuples(value: Any) -> Any:
    """Lists as tuples, as optimizers have them (betas)."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def check_optimizer(job: Job, schedule: Any, hparams: Node, schedule_line: int) -> tuple[Any, Any]:
    """Whether the optimizer takes its settings, and a scheduler of torch's its own: tried on a dummy parameter.

    Gives both back.
    """
    name = getattr(job.optimizer, "__name__", "the optimizer")
    use = Node(name, hparams.line)
    check_arguments("hparams", use, job.optimizer, hparams.value, 1, typed=True)
    try:
        optimizer = job.optimizer([nn.Parameter(torch.zeros(1, 1))], **job.hparams)
    except (TypeError, ValueError, LookupError) as error:
        text = describe(error)
        guilty = next((node for key, node in hparams.value.items() if key.replace("_", " ") in text), hparams)
        raise Mistake(guilty, f"{name} refuses these hparams: {text}; change them") from None
    except Exception:
        return job.optimizer, schedule  # it may want a real model: building the members decides
    if getattr(schedule, "func", schedule) not in _known.SCHEDULERS.values():
        return job.optimizer, schedule
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step of the optimizer comes first here
            made = schedule(optimizer)
            made.step(0.0) if needs_metric(made) else made.step()
    except Exception as error:
        raise Mistake(schedule_line, f"schedule raised {describe(error)}; change its arguments") from None
    return job.optimizer, schedule
