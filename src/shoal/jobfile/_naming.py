"""Names of jobs: a short text of what varies, or the file's own pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shoal.jobfile._tree import Node, Problems, did_you_mean, text_of

LONGEST = 80
QUIET = ("name", "grid", "seeds", "folds", "owner", "priority")
"""Keys of an entry that do not tell which job it is."""
PATTERN = re.compile(r"\{([^{}]*)\}")


def short_name(use: str) -> str:
    """Return a name without its location: "nets.py:Net" is "Net"."""
    return use.rpartition(":")[2].rpartition("/")[2]


def value_text(node: Node) -> str:
    """Return a value as it is written in a name."""
    if node.is_table:
        parts = dict(node.value)
        use = parts.pop("use", None)
        inside = ",".join(f"{key}={value_text(child)}" for key, child in parts.items())
        if use is None:
            return inside
        return short_name(text_of(use.value)) + (f"({inside})" if inside else "")
    if isinstance(node.value, list):
        return ",".join(value_text(child) for child in node.value)
    return short_name(node.value) if isinstance(node.value, str) else text_of(node.value)


def varied_label(paths: Sequence[tuple[str, ...]], values: Sequence[Node]) -> str:
    """Return a label such as "lr=0.01 seed=3", with the last part of each path, or the full path if two end alike."""
    last_parts = [path[-1] for path in paths]
    parts = []
    for path, value in zip(paths, values, strict=True):
        if path == ("model",):
            parts.append(value_text(value))
        else:
            key = path[-1] if last_parts.count(path[-1]) == 1 else ".".join(path)
            parts.append(f"{key}={value_text(value)}")
    return " ".join(parts)


def varied_config(paths: Sequence[tuple[str, ...]], values: Sequence[Node]) -> dict[str, Node]:
    """Return what varies inside of models, data and the like, such as a dropout, to be noted in the job's `config`.

    Hyper-parameters and plain fields are not in it: tables have them anyway.
    """
    inner = {path: value for path, value in zip(paths, values, strict=True) if path == ("model",) or _is_inner(path)}
    last_parts = [path[-1] for path in paths]
    return {
        path[-1] if last_parts.count(path[-1]) == 1 else ".".join(path): value
        if isinstance(value.value, bool | int | float)
        else Node(value_text(value), value.line)
        for path, value in inner.items()
    }


def _is_inner(path: tuple[str, ...]) -> bool:
    return len(path) > 1 and path[0] not in ("hparams", "config")


def entry_labels(entries: Sequence[Node], shared: Node | None) -> list[str]:
    """Return labels for the entries of [[jobs]]: their names, their models if these differ, or what they change."""
    prefix = f"{shared.value} " if shared is not None and isinstance(shared.value, str) else ""
    models = [_model(entry) for entry in entries]
    labels = []
    for number, (entry, model) in enumerate(zip(entries, models, strict=True), 1):
        name = entry.value.get("name")
        parts = [part for key, node in entry.value.items() if key not in QUIET for part in _name_parts((key,), node)]
        if name is not None and isinstance(name.value, str):
            labels.append(name.value)
        elif model and models.count(model) == 1:
            labels.append(prefix + model)
        else:
            label = prefix + " ".join(parts)
            labels.append((label if len(label) <= LONGEST else f"{prefix}job {number}").strip())
    return labels


def _model(entry: Node) -> str:
    """Return the short name of the model that an entry chooses, or "" if it chooses none."""
    node = entry.value.get("model")
    use = node.value.get("use") if node is not None and node.is_table else node
    return short_name(use.value) if use is not None and isinstance(use.value, str) else ""


def _name_parts(path: tuple[str, ...], node: Node) -> list[str]:
    if path == ("model",) and (isinstance(node.value, str) or (node.is_table and "use" in node.value)):
        return [value_text(node)]
    if node.is_table and "use" not in node.value:
        return [part for key, child in node.value.items() for part in _name_parts((*path, key), child)]
    return [f"{path[-1]}={value_text(node)}"]


def fill(pattern: Node, fields: Mapping[str, Node], problems: Problems) -> str:
    """Fill the file's own pattern for a job's name, in which {seed}, {hparams.lr} ... are the job's fields."""

    def value(match: re.Match[str]) -> str:
        node: Node | None = None
        table: Mapping[str, Node] = fields
        for part in match[1].split("."):
            node = table.get(part)
            if node is None:
                problems.add(pattern, f"name has {match[0]}, which the job does not have{did_you_mean(part, table)}")
                return ""
            table = node.value if node.is_table else {}
        return value_text(node) if node is not None else ""

    return PATTERN.sub(value, str(pattern.value))
