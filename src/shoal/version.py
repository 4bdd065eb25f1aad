"""The version of this package, installed or in its source tree."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """Return the installed version, or for a source tree that of its pyproject.toml, or "0"."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return _source_version(Path(__file__).parents[2] / "pyproject.toml")


def _source_version(file: Path) -> str:
    """Return the version in a pyproject.toml, or "0" if it is not Shoal's."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == "shoal" else "0"
    except (OSError, KeyError, ValueError):
        return "0"
