"""Code as two hashes that are the same in another process and on another machine: its bytecode and its source.

Comments, blank lines and line numbers are in neither. The bytecode is what runs, and always there; but another version
of Python makes other bytecode from the same source, and so do `python -O` and tools that rewrite asserts. The source
does not depend on that; but it may be missing, or may have been edited since it was loaded, so it counts only where
compiling it gives exactly the code that is loaded. Code is the same where either hash is.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import linecache
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

MAGIC = importlib.util.MAGIC_NUMBER.hex()
"""Of the bytecode that this Python makes: hashes of bytecode with another one say nothing."""
_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
"""Of a code object: takes *args, takes **kwargs, is a generator, a coroutine or both."""
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_params", "annotation", "returns"})
"""Fields of a syntax tree that change nothing about what runs, or that not every version of Python has."""


def digest(text: str | bytes) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


@lru_cache(maxsize=4096)
def bytecode_hash(code: types.CodeType) -> str:
    """Of what runs: instructions, constants, names, and the functions inside it."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [_constant(value) for value in _without_docstring(code)]
    return digest(repr((code.co_code.hex(), code.co_exceptiontable.hex(), counts, names, constants)))


def _without_docstring(code: types.CodeType) -> tuple[Any, ...]:
    """The constants of a function; its docstring is the first of them."""
    first = next(iter(code.co_consts), None)
    return (None, *code.co_consts[1:]) if isinstance(first, str) and code.co_name != "<lambda>" else code.co_consts


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return bytecode_hash(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order is another one in each process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def source_hash(function: types.FunctionType) -> str:
    """Of a function's source, as a syntax tree; "" where there is none that surely belongs to it."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not text:
        return ""
    return _source_hash(code, _Source.of(code.co_filename, text))


@lru_cache(maxsize=4096)
def _source_hash(code: types.CodeType, source: _Source | None) -> str:
    node = None if source is None or not source.holds(code) else source.find(code)
    return "" if node is None else digest(_dump_function(node))


class _Source:
    """A file of source code, parsed and compiled."""

    def __init__(self, tree: ast.Module, module: types.CodeType) -> None:
        self.functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
        self.codes: dict[tuple[str, int], list[types.CodeType]] = {}
        for code in _inside(module):
            self.codes.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)

    @staticmethod
    @lru_cache(maxsize=256)
    def of(file: str, text: str) -> _Source | None:
        try:
            tree = ast.parse(text)
            return _Source(tree, compile(text, file, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def holds(self, code: types.CodeType) -> bool:
        """Whether this is the source that the code was made from: it may have been edited since."""
        same = self.codes.get((code.co_qualname, code.co_firstlineno), [])
        wanted = bytecode_hash(code), list(code.co_positions())
        return any((bytecode_hash(other), list(other.co_positions())) == wanted for other in same)

    def find(self, code: types.CodeType) -> ast.AST | None:
        """The function in the tree; None where others on its line look the same."""
        if code.co_name == "<lambda>":
            return _innermost([node for node in self.functions if isinstance(node, ast.Lambda)], code)
        named = [node for node in self.functions if getattr(node, "name", None) == code.co_name]
        there = [node for node in named if _first_line(node) == code.co_firstlineno]
        return there[0] if len(there) == 1 else None


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _inside(value)


def _first_line(node: Any) -> int:
    return min(int(part.lineno) for part in (node, *node.decorator_list))


def _innermost(nodes: list[ast.Lambda], code: types.CodeType) -> ast.Lambda | None:
    """The smallest lambda that all instructions are in."""
    spans = [
        ((first, start), (last, end))
        for first, last, start, end in code.co_positions()
        if first is not None and last is not None and start is not None and end is not None
        if (first, start) < (last, end)  # the others belong to no text
    ]
    if not spans:
        return None
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    around = [node for node in nodes if _begin(node.body) <= begin and end <= _end(node.body)]
    return max(around, key=lambda node: _begin(node), default=None)


def _begin(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _dump_function(node: Any) -> str:
    """Its arguments' names and its body: defaults, decorators and annotations are no part of its code."""
    arguments = node.args
    names = [[a.arg for a in group] for group in (arguments.posonlyargs, arguments.args, arguments.kwonlyargs)]
    more = [a.arg if a is not None else None for a in (arguments.vararg, arguments.kwarg)]
    return f"{names} {more} {_dump(node.body if isinstance(node.body, ast.AST) else _body(node))}"


def _dump(value: Any) -> str:
    """A syntax tree as text. `ast.dump` gives another text in another version of Python."""
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]"
    if not isinstance(value, ast.AST):
        return f"{type(value).__name__} {value!r}"
    fields = {name: item for name, item in ast.iter_fields(value) if name not in _LEFT_OUT}
    if isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        fields["body"] = _body(value)
    held = (f"{name}={_dump(item)}" for name, item in sorted(fields.items()) if item is not None and item != [])
    return f"{type(value).__name__}({', '.join(held)})"


def _body(node: Any) -> list[ast.AST]:
    """The statements, without the docstring."""
    body: list[Any] = node.body
    first = body[0]
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if said else body
