"""The file's `run` table: arguments of `shoal.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.jobfile._tree import Node, Problems, did_you_mean

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
