"""The packages: how large they are, which may import which, and which files are private."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
MOST_FILES, MOST_LINES = 15, 400
LAYERS = (
    "errors", "callable_package", "environment", "models", "utils", "graphs", "jobs", "data", "engine.python_state",
    "engine.optim", "engine.kernels", "engine.tracing", "engine.members", "engine.rules", "engine.recipes",
    "engine.tiers", "preparation", "engine.stack", "engine.planning", "engine.proof", "engine.tiers.stacked",
    "evaluation", "results", "storage", "engine.tiers.captured.fusion",
    "engine.tiers.captured", "engine.units", "settings", "reporting", "engine.runtime", "engine.processes",
    "testing", "reference", "replaying", "training", "live", "explanation", "user_loop",
    "tune", "tune.studies", "tune.bridges", "jobfile", "net", "split.core", "split.subnets", "split.methods",
    "split.executors", "split", "split.net", "place", "place.training", "evidence.bench", "evidence.demo",
    "evidence.reproduce",
    "evidence", "cli", "__main__",
)  # fmt: skip
"""Packages, and modules beside them: each may import those to its left, in any part of its code."""


@cache
def modules() -> dict[str, Path]:
    """All modules by their names below `shoal`; a package by its own."""
    names: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def package(name: str) -> str:
    """The package that a module is in; of a module beside the packages its own name."""
    is_package = modules()[name].name == "__init__.py"
    return name if is_package or "." not in name else name.rpartition(".")[0]


def statements(body: list[ast.stmt], *, run_time: bool) -> Iterator[ast.stmt]:
    """All statements; `run_time`: those that importing the module executes."""
    for statement in body:
        if run_time and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if run_time and isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, part, []), run_time=run_time)
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body, run_time=run_time)


@cache
def imports(*, run_time: bool) -> dict[str, set[str]]:
    """For each module those of ours that it imports."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        imported: set[str] = set()
        for statement in statements(ast.parse(path.read_text()).body, run_time=run_time):
            if isinstance(statement, ast.Import):
                imported |= {alias.name for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                assert statement.level == 0, f"{path}:{statement.lineno} is a relative import; write the whole name"
                imported |= {f"{statement.module}.{alias.name}" for alias in statement.names}
        ours = {full.removeprefix("shoal").removeprefix(".") for full in imported if full.partition(".")[0] == "shoal"}
        known = {full if full in modules() else full.rpartition(".")[0] for full in ours}
        graph[name] = known - {name, ""}
    return graph


def test_packages_are_small() -> None:
    sizes = {path.parent: len(list(path.parent.glob("*.py"))) for path in modules().values()}
    assert not {str(folder): count for folder, count in sizes.items() if count > MOST_FILES}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_every_package_has_its_place() -> None:
    assert {package(name) for name in modules()} - {"", "engine"} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_packages_import_only_those_below(layer: str) -> None:
    below = LAYERS[: LAYERS.index(layer) + 1]
    wrong = {
        f"{name} imports {other}"
        for name, others in imports(run_time=False).items()
        if package(name) == layer
        for other in others
        if package(other) not in below and other != "engine"
    }
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        tuple(TopologicalSorter(imports(run_time=True)).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_private_files_are_imported_by_their_own_package_alone() -> None:
    wrong = {
        f"{name} imports {other}"
        for name, others in imports(run_time=False).items()
        for other in others
        if other.rpartition(".")[2].startswith("_") and package(other) not in (package(name), "__main__")
    }
    assert not wrong


PRIVATE_WORDS = {
    "blame", "board", "borrow", "borrower", "crew", "culprit", "culprits", "door", "found", "hall", "handout", "kept",
    "kitchen", "knock", "lend", "lending", "lent", "newcomer", "newcomers", "porter", "ride", "rides", "riding",
    "settle", "settled", "told",
}  # fmt: skip
"""Words that say nothing about what a name holds, or that only the authors would understand."""


def test_names_are_plain() -> None:
    wrong = {
        f"{name}: {token.string}"
        for name, path in modules().items()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME and token.string.lower() in PRIVATE_WORDS
    }
    assert not wrong
