"""Which version this is, installed or run from its source tree."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """The installed version; of a source tree that was never installed what its pyproject.toml says, or "0"."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return _of_source(Path(__file__).parents[2] / "pyproject.toml")


def _of_source(file: Path) -> str:
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == "shoal" else "0"
    except (OSError, KeyError, ValueError):
        return "0"
