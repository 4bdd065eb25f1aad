"""The notebooks of examples/ run from top to bottom, and what they show is fit to be read."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
LARGEST = 120_000
"""Bytes of a notebook with its pictures."""


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    stored = [output["output_type"] for output in outputs(notebook)]
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    kinds = [output["output_type"] for output in outputs(notebook) if output.get("name") != "stderr"]
    assert kinds == stored, "run it again and store what it shows"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < LARGEST
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not re.search(r"/(home|tmp|root|usr|work)/|Warning", path.read_text())
