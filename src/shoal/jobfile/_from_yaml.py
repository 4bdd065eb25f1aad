"""YAML with the line of every key: PyYAML's nodes carry marks, and plain values are read as YAML 1.2 has them.

PyYAML itself follows YAML 1.1, where `1e-3` is text, `no` is false and `1:30` is ninety. Those are traps in a file of
learning rates, so its nodes are taken as text and read here.
"""

from __future__ import annotations

import re
from typing import Any

from shoal.jobfile._tree import Node, Problems

STANDARD = "tag:yaml.org,2002:"
MOST_NODES = 200_000
"""Values in a file once its aliases are written out."""
DEEPEST = 100
WHOLE = re.compile(r"[-+]?[0-9]+")
OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)+")
WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def read(text: str, problems: Problems) -> Node:
    """The file as a tree; JobError where it is not YAML."""
    try:
        import yaml
    except ImportError:
        raise problems.one(1, "YAML files need PyYAML: pip install pyyaml; or write the file as TOML") from None
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = str(error.problem or error.context or "it cannot be read")
        tab = ", indent with spaces" if "\\t" in what else ""
        hint = _hint(text)
        raise problems.one(mark.line + 1 if mark else 1, f"this is not YAML: {what}{tab}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise problems.one(
            line, "this is not YAML: it holds a character that text may not have; save it as plain text"
        ) from None
    except RecursionError:
        raise problems.one(1, "lists or tables are nested too deep; write the file flatter") from None
    if root is None:
        return Node({}, 1)
    if root.id == "scalar" and _hint(text):
        raise problems.one(1, f"this is not YAML{_hint(text)}")
    return Reader(problems).node(root, root.start_mark.line + 1, 0)


def _hint(text: str) -> str:
    return '; or the file is TOML: end its name in ".toml"' if re.search(r"(?m)^(\[|\w+ *= )", text) else ""


class Reader:
    """From PyYAML's nodes to ours."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.count = 0

    def node(self, node: Any, line: int, depth: int) -> Node:
        """One value; `line` is that of its key."""
        start = node.start_mark.line + 1
        self.count += 1
        if depth > DEEPEST:
            raise self.problems.one(
                start, f"it is nested more than {DEEPEST} deep; write the file flatter, without loops"
            )
        if self.count > MOST_NODES:
            raise self.problems.one(line, f"the file has more than {MOST_NODES:,} values once aliases are written out")
        if node.tag not in {STANDARD + kind for kind in ("str", "seq", "map")}:
            tag = node.tag.replace(STANDARD, "!!")
            raise self.problems.one(start, f"tag {tag!r} is not allowed; write the plain value")
        if node.id == "mapping":
            return Node(self._table(node, depth), line)
        if node.id == "sequence":
            return Node([self.node(child, child.start_mark.line + 1, depth + 1) for child in node.value], line)
        return Node(self._scalar(node, start), line)

    def _table(self, node: Any, depth: int) -> dict[str, Node]:
        table: dict[str, Node] = {}
        merged: list[dict[str, Node]] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar" or (key.style is None and self._scalar(key, line) is None):
                raise self.problems.one(line, "a key must be text; quote it")
            name = str(key.value)
            if name == "<<" and key.style is None:
                merged += self._merged(value, line, depth)
            else:
                dotted = key.style is None and DOTTED.fullmatch(name)
                self._put(table, name.split(".") if dotted else [name], self.node(value, line, depth + 1))
        for other in merged:
            table = {**other, **table}
        return table

    def _put(self, table: dict[str, Node], path: list[str], node: Node) -> None:
        """Set a key; `hparams.lr: 1` is `hparams: {lr: 1}`, as in TOML."""
        for part in path[:-1]:
            inner = table.setdefault(part, Node({}, node.line))
            if not inner.is_table:
                raise self.problems.one(node, f"{part!r} has a value already, on line {inner.line}; write one table")
            table = inner.value
        last = path[-1]
        if last in table:
            raise self.problems.one(node, f"key {last!r} is given twice, first on line {table[last].line}; keep one")
        table[last] = node

    def _merged(self, value: Any, line: int, depth: int) -> list[dict[str, Node]]:
        pairs = []
        for node in value.value if value.id == "sequence" else [value]:
            made = self.node(node, line, depth + 1)
            if not made.is_table:
                raise self.problems.one(line, f"'<<' takes a table, or a list of tables, not {made.kind}")
            pairs.append(made.value)
        return pairs

    def _scalar(self, node: Any, line: int) -> Any:
        text = str(node.value)
        if node.style is not None:
            return text
        if text in WORDS:
            return WORDS[text]
        if len(text) > 4000 and NUMBER.fullmatch(text):
            raise self.problems.one(line, "a number has thousands of digits; use one of 64 bits")
        if WHOLE.fullmatch(text):
            return int(text)
        if OTHER_BASE.fullmatch(text):
            return int(text, 0)
        if INFINITE.fullmatch(text):
            return float(text.lower().replace(".", ""))
        if NUMBER.fullmatch(text):
            return float(text)
        return text
