"""Parse YAML with the line of every key, with plain values as in YAML 1.2.

PyYAML follows YAML 1.1, where `1e-3` is text, `no` is false and `1:30` is ninety, which are traps in a file of learning
rates. So its nodes, which carry lines, are taken as text and converted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shoal.jobfile._tree import Node, Problems

MERGE = "tag:yaml.org,2002:merge"
MOST_NODES = 200_000
"""The largest number of values in a file once its aliases are expanded."""
DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)+")
SCALARS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"|~|null|Null|NULL", lambda text: None),
    (r"true|True|TRUE", lambda text: True),
    (r"false|False|FALSE", lambda text: False),
    (r"[-+]?[0-9]+", int),
    (r"0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0)),
    (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", lambda text: float(text.lower().replace(".", ""))),
)
"""Patterns of plain values that are not text, with the function that converts each."""


def read(text: str, problems: Problems) -> Node:
    """Return the file as a tree, or raise a JobError if it is not YAML."""
    try:
        import yaml
    except ImportError:
        raise problems.one(1, "YAML files need PyYAML: pip install pyyaml; or write the file as TOML") from None
    toml = '; or the file is TOML: end its name in ".toml"' if re.search(r"(?m)^(\[|\w+ *= )", text) else ""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Node({}, 1)
        if root.id == "scalar" and toml:
            raise problems.one(1, f"this is not YAML{toml}")
        return Reader(problems, loader).node(root, root.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = str(error.problem or error.context or "it cannot be read")
        tab = ", indent with spaces" if "\\t" in what else ""
        raise problems.one(mark.line + 1 if mark else 1, f"this is not YAML: {what}{tab}{toml}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise problems.one(
            line, "this is not YAML: it holds a character that text may not have; save it as plain text"
        ) from None
    except RecursionError:
        raise problems.one(1, "lists or tables are nested too deep; write the file flatter, without loops") from None


class Reader:
    """Converts PyYAML's nodes to ours."""

    def __init__(self, problems: Problems, loader: Any) -> None:
        self.problems, self.loader = problems, loader
        self.count = 0

    def node(self, node: Any, line: int) -> Node:
        """Convert one value; `line` is the line of its key."""
        start = node.start_mark.line + 1
        self.count += 1
        if self.count > MOST_NODES:
            raise self.problems.one(line, f"the file has more than {MOST_NODES:,} values once aliases are written out")
        if node.tag not in (*self.loader.yaml_constructors, MERGE):
            raise self.problems.one(
                start, f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')!r} is not allowed; write the plain value"
            )
        if node.id == "mapping":
            return Node(self._table(node), line)
        if node.id == "sequence":
            return Node([self.node(child, child.start_mark.line + 1) for child in node.value], line)
        return Node(self._scalar(node, start), line)

    def _table(self, node: Any) -> dict[str, Node]:
        own_pairs = [pair for pair in node.value if pair[0].tag != MERGE]
        self.loader.flatten_mapping(node)  # puts the pairs that `<<` merges first
        table: dict[str, Node] = {}
        merged = reversed(node.value[: len(node.value) - len(own_pairs)])
        for index, (key, value) in enumerate((*own_pairs, *merged)):
            line = key.start_mark.line + 1
            if key.id != "scalar" or (key.style is None and self._scalar(key, line) is None):
                raise self.problems.one(line, "a key must be text; quote it")
            dotted = key.style is None and DOTTED.fullmatch(key.value)
            path = key.value.split(".") if dotted else [key.value]
            if index < len(own_pairs) or path[0] not in table:
                self._put(table, path, self.node(value, line))
        return table

    def _put(self, table: dict[str, Node], path: list[str], node: Node) -> None:
        """Set a key; `hparams.lr: 1` means `hparams: {lr: 1}`, as in TOML."""
        for part in path[:-1]:
            inner = table.setdefault(part, Node({}, node.line))
            if not inner.is_table:
                raise self.problems.one(node, f"{part!r} has a value already, on line {inner.line}; write one table")
            table = inner.value
        last = path[-1]
        if last in table:
            raise self.problems.one(node, f"key {last!r} is given twice, first on line {table[last].line}; keep one")
        table[last] = node

    def _scalar(self, node: Any, line: int) -> Any:
        if node.style is not None:
            return node.value
        for pattern, make in SCALARS:
            if re.fullmatch(pattern, node.value):
                try:
                    return make(node.value)
                except ValueError:  # Python limits the number of digits
                    raise self.problems.one(line, "a number has thousands of digits; use one of 64 bits") from None
        return node.value
