"""Turn the file's tree into one table of fields for each job: shared fields, `[[jobs]]`, grid, seeds, folds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from shoal.jobfile._naming import entry_labels, fill, short_name, varied_config, varied_label
from shoal.jobfile._tree import Node, Problems, did_you_mean
from shoal.jobs.job import Job

MOST_JOBS = 100_000
FIELDS = tuple(field.name for field in fields(Job))
REFERENCES = ("model", "data", "val", "collate", "loss", "step", "params", "schedule", "average")
"""Fields that refer to code or data: text, or a table with `use` and its arguments."""
TABLES = (*REFERENCES, "hparams", "config", "metrics", "stop")
EITHER = {"epochs": "steps", "loss": "step", "seed": "seeds", "val": "folds"}
"""Pairs of fields of which a job has one: a `[[jobs]]` entry with one of them drops the other from the shared
fields."""
EITHER |= {b: a for a, b in EITHER.items()}
BLOCK = (*FIELDS, "seeds", "folds", "grid")
TOP = (*BLOCK, "jobs", "run")
AXES = tuple(field for field in FIELDS if field != "name")
"""Fields that a grid may vary."""
OPTIMIZER_WORDS = ("lr", "learning_rate", "weight_decay", "momentum", "betas", "eps", "nesterov", "dampening", "alpha")

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One job before it is built, or k jobs if it has folds."""

    name: str
    fields: dict[str, Node]
    folds: Node | None
    line: int
    """The line where its block begins."""


def cases(root: Node, problems: Problems) -> list[Case]:
    """Return all jobs of the file that can be read; mistakes in keys, grid, seeds and jobs are added to `problems`."""
    if not root.is_table:
        raise problems.one(root, f"the file is {root.kind}; write keys and values, such as model and data")
    _check_keys(root, TOP, problems)
    shared = {key: as_table(key, node) for key, node in root.value.items() if key in BLOCK}
    blocks = list(_blocks(root, shared, problems))
    all_cases = [case for block in blocks for case in block.cases(problems)]
    if not problems:
        _check_unique_names(all_cases, problems)
    return all_cases


def _check_keys(node: Node, known: tuple[str, ...], problems: Problems) -> None:
    """Add a problem for each unknown key."""
    for key, child in node.value.items():
        if key in known:
            continue
        if key in OPTIMIZER_WORDS:
            option = "lr" if key == "learning_rate" else key
            problems.add(
                child, f"key {key!r} is not known here; settings of the optimizer go into hparams: hparams.{option}"
            )
        elif key in TOP:
            problems.add(child, f"key {key!r} belongs to the top of the file, not here; move it there")
        else:
            problems.add(child, f"key {key!r} is not known{did_you_mean(key, known)}")


def as_table(field: str, node: Node) -> Node:
    """Expand short forms: model = "mlp" means {use = "mlp"}, and a list of metrics is a table by name."""
    if field in REFERENCES and isinstance(node.value, str):
        return Node({"use": node}, node.line)
    if field == "metrics" and isinstance(node.value, list) and all(isinstance(n.value, str) for n in node.value):
        return Node({short_name(n.value): Node({"use": n}, n.line) for n in node.value}, node.line)
    return node


def merge(field: str, old: Node | None, new: Node) -> Node:
    """Merge a field into the shared one: a table without `use` extends it, anything else replaces it."""
    new = as_table(field, new)
    if old is None or not old.is_table or not new.is_table or field not in (*TABLES, "grid"):
        return new
    if field in REFERENCES and ("use" in new.value or "share" in new.value):
        return new
    table = dict(old.value)
    for key, node in new.value.items():
        deeper = field == "grid" and key in table and table[key].is_table and node.is_table
        table[key] = Node({**table[key].value, **node.value}, node.line) if deeper else node
    return Node(table, new.line)


@dataclass(slots=True, eq=False)
class Block:
    """Jobs that share all fields but those varied by grid, seeds and folds."""

    fields: dict[str, Node]
    label: str
    line: int

    def axes(self, problems: Problems) -> list[tuple[Keys, list[Node]]]:
        """Return the path and the values of each field that varies, and check them."""
        grid = self.fields.get("grid")
        paths = list(_paths(grid, (), problems)) if grid is not None else []
        seeds = self.fields.get("seeds")
        if seeds is not None:
            if any(path == ("seed",) for path, _ in paths) or "seed" in self.fields:
                problems.add(seeds, "there are both seeds and seed; keep one of them")
            paths.append((("seed",), _seeds(seeds, problems)))
        return sorted(paths, key=lambda axis: axis[0] == ("seed",))

    def cases(self, problems: Problems) -> Iterator[Case]:
        """Yield one case for each combination of values."""
        axes = self.axes(problems)
        total = math.prod(len(values) for _, values in axes)
        if total > MOST_JOBS:
            line = self.fields.get("grid", self.fields.get("seeds", self.line))
            raise problems.one(
                line, f"the grid gives {total:,} jobs or more; the most is {MOST_JOBS:,}: take fewer values"
            )
        paths = [path for path, _ in axes]
        fixed = {key: node for key, node in self.fields.items() if key not in ("grid", "seeds", "folds", "name")}
        name = self.fields.get("name")
        if name is not None and not isinstance(name.value, str):
            problems.add(name, f"name is {name.shown()}; use text")
            return
        for values in itertools.product(*(values for _, values in axes)):
            chosen = dict(fixed)
            for path, value in sorted(zip(paths, values, strict=True), key=lambda pair: len(pair[0])):
                _set(chosen, path, as_table(path[0], value) if len(path) == 1 else value)
            chosen = {key: node for key, node in chosen.items() if node.value is not None}
            _note(chosen, varied_config(paths, values))
            if name is not None and "{" in name.value:
                job_name = fill(name, chosen, problems)
            else:
                job_name = " ".join(part for part in (self.label, varied_label(paths, values)) if part)
            more = {} if name is None else {"name": name}
            yield Case(job_name or Path(problems.path).stem, {**chosen, **more}, self.fields.get("folds"), self.line)


def _blocks(root: Node, shared: dict[str, Node], problems: Problems) -> Iterator[Block]:
    """Yield the blocks of the file: one for each entry of `[[jobs]]`, or one for the whole file."""
    jobs = root.value.get("jobs")
    if jobs is None:
        name = shared.get("name")
        yield Block(_without_null(shared), name.value if name and isinstance(name.value, str) else "", root.line)
        return
    if not isinstance(jobs.value, list) or not jobs.value:
        problems.add(
            jobs, f"jobs is {'an empty list' if jobs.value == [] else jobs.kind}; use a list of tables: [[jobs]]"
        )
        return
    for number, entry in enumerate(jobs.value, 1):
        if not entry.is_table:
            problems.add(entry, f"jobs has {entry.kind} at place {number}; each must be a table of fields")
        else:
            _check_keys(entry, BLOCK, problems)
    entries = [entry for entry in jobs.value if entry.is_table]
    for entry, label in zip(entries, entry_labels(entries, shared.get("name")), strict=True):
        merged = dict(shared)
        for key, node in ((key, node) for key, node in entry.value.items() if key in BLOCK):
            if key in EITHER and EITHER[key] not in entry.value:
                merged.pop(EITHER[key], None)
            merged[key] = merge(key, shared.get(key), node)
        yield Block(_without_null(merged), label, entry.line)


def _without_null(table: dict[str, Node]) -> dict[str, Node]:
    """Return the table without null values, which count as absent."""
    return {key: node for key, node in table.items() if node.value is not None}


def _paths(node: Node, path: Keys, problems: Problems) -> Iterator[tuple[Keys, list[Node]]]:
    """Yield the axes of a grid: nested tables are paths, lists are values."""
    if not node.is_table:
        problems.add(node, f"grid is {node.kind}; use a table of lists, such as hparams.lr = [0.1, 0.01]")
        return
    if not node.value:
        problems.add(node, f"{'.'.join(('grid', *path))} is empty; give it lists of values, or remove it")
    for key, child in node.value.items():
        key_path = (*path, *key.split("."))
        if key_path[0] not in AXES:
            _check_keys(Node({key_path[0]: child}, child.line), AXES, problems)
        elif child.is_table:
            yield from _paths(child, key_path, problems)
        else:
            yield key_path, _axis(".".join(("grid", *key_path)), child, "a list of values", problems)


def _axis(label: str, node: Node, expected: str, problems: Problems) -> list[Node]:
    """Return the values of a list, and report duplicates."""
    if not isinstance(node.value, list):
        problems.add(node, f"{label} is {node.shown()}; use {expected}")
        return []
    if not node.value:
        problems.add(node, f"{label} is an empty list, which gives no jobs; give it values, or remove it")
    by_text = {repr(value.plain()): value for value in reversed(node.value)}
    for value in node.value:
        if by_text[repr(value.plain())] is not value:
            problems.add(value, f"{label} has {value.shown()} twice; give each value once")
    return node.value


def _seeds(node: Node, problems: Problems) -> list[Node]:
    if type(node.value) is int and node.value > 0:
        return [Node(seed, node.line) for seed in range(min(node.value, MOST_JOBS + 1))]
    return _axis("seeds", node, "how many (1 or more), or a list of whole numbers", problems)


def _note(fields: dict[str, Node], varied: dict[str, Node]) -> None:
    """Add what varies to the job's `config`, except keys that the file has there itself."""
    config = fields.get("config")
    if varied and (config is None or config.is_table):
        own = {} if config is None else config.value
        line = next(iter(varied.values())).line if config is None else config.line
        fields["config"] = Node({**varied, **own}, line)


def _set(table: dict[str, Node], path: Keys, value: Node) -> None:
    """Set a value at a path, copying the tables on the way."""
    head, remaining = path[0], path[1:]
    inner = table.get(head)
    if remaining:
        copy = dict(inner.value) if inner is not None and inner.is_table else {}
        _set(copy, remaining, value)
        value = Node(copy, inner.line if inner is not None else value.line)
    table[head] = value


def _check_unique_names(all_cases: list[Case], problems: Problems) -> None:
    """Add a problem for each name that two jobs have."""
    first_of_name: dict[str, Case] = {}
    for case in all_cases:
        first = first_of_name.setdefault(case.name, case)
        if first is not case:
            line = case.fields.get("name", case.line)
            problems.add(
                line,
                f"two jobs have the name {case.name!r}; give each [[jobs]] entry a name, or name = with {{fields}}",
            )
