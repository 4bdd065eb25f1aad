"""Read the tables of plain values in a job file: `stop`, `average`, `folds`, `hparams`, and `run` for `shoal.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.errors import JobError
from shoal.jobfile._references import check_arguments, split
from shoal.jobfile._tree import Mistake, Node, Problems
from shoal.jobs.averaging import EMA, SWA
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
    """Check the values of the run table, and raise a ValueError that begins with the name of the wrong setting."""
    from shoal.settings import make_settings

    compiled = compile if isinstance(compile, str) else "auto"  # whether the device can compile is checked later
    make_settings(device, memory, threads, compiled, checkpoint_every, deterministic, policy)


def settings(root: Node, folder: Path, problems: Problems) -> dict[str, Any]:
    """Return the settings as plain values; folders are relative to the file's own."""
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
                problem = "is a file" if name.strip() and "\0" not in name else "names nothing"
                raise Mistake(table[key], f"run.{key} {name!r} {problem}; use the name of a folder")
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
    """Return the folds of a job; the node is their number, or a table of the arguments of `shoal.folds`."""
    table: dict[str, Node] = node.value if node.is_table else {"k": node}
    check_arguments("folds", Node(table, node.line), folds, table, 1, typed=True)
    try:
        return folds(job, **{key: child.plain() for key, child in table.items()})
    except JobError as error:
        raise Mistake(node, error.lines[0].partition(": ")[2].replace("k is", "folds is")) from None


def make_stop(node: Node) -> EarlyStop:
    check_arguments("stop", node, EarlyStop, node.value, typed=True)
    try:
        return EarlyStop(**node.plain())
    except JobError as error:
        text = error.lines[0].removeprefix("EarlyStop: ")
        raise Mistake(node.value.get(text.partition(" ")[0], node), f"stop.{text}") from None


def make_average(node: Node) -> EMA | SWA:
    """Return the average that the node names; arguments are in a table with `use`."""
    use, arguments = split("average", node)
    kind: type[EMA | SWA] | None = {"ema": EMA, "swa": SWA}.get(str(use.value).lower())
    if kind is None:
        raise Mistake(use, f"average {use.value!r} is not known; use 'EMA' or 'SWA'")
    check_arguments("average", use, kind, arguments, typed=True)
    try:
        return kind(**{name: child.plain() for name, child in arguments.items()})
    except JobError as error:
        text = error.lines[0].partition(": ")[2]
        raise Mistake(arguments.get(text.partition(" ")[0], node), f"average.{text}") from None


def make_hparams(node: Node) -> dict[str, Any]:
    return {key: tuples(child.plain()) for key, child in node.value.items()}


def tuples(value: Any) -> Any:
    """Convert lists to tuples, which optimizers expect (betas)."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
