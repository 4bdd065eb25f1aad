"""The three example files do what docs/jobfiles.md says, and the page names everything that files may hold."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.jobfile import load
from shoal.jobfile._blocks import TOP
from shoal.jobfile._datafiles import BUILT_IN, READERS
from shoal.jobfile._known import LOSSES, METRICS, OVERS
from shoal.jobfile._values import run_settings
from shoal.models import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "jobfiles.md").read_text()
EXAMPLES = dict(re.findall(r"^\| `(\w+\.(?:toml|yaml))` \|.* (\d+) jobs \|$", PAGE, flags=re.MULTILINE))


def test_the_page_lists_every_example() -> None:
    files = {p.name for p in (ROOT / "examples").iterdir() if p.suffix in (".toml", ".yaml")}
    assert set(EXAMPLES) == files and len(files) == 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_the_jobs_that_the_page_says(name: str) -> None:
    assert len(load(ROOT / "examples" / name).jobs) == int(EXAMPLES[name])


@pytest.mark.docs
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train(name: str, tmp_path: Path) -> None:
    """As a user runs them, from another folder."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", str(ROOT / "examples" / name), "--device", "cpu", "--json"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["kind"] == "results" and len(last["results"]) == int(EXAMPLES[name])
    statuses = {result["status"] for result in last["results"]}
    assert statuses == ({"stopped"} if name == "folds.yaml" else {"done"})
    best = max(row["accuracy"] for result in last["results"] for row in result["history"])
    assert best > 0.85


def test_every_key_and_name_is_on_the_page() -> None:
    plain = {"batch_size", "epochs", "steps", "seed", "data_seed", "shuffle", "drop_last", "accumulate", "clip_norm"}
    plain |= {"clip_value", "precision", "val_every", "val_every_steps", "keep", "owner", "priority", "schedule_every"}
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE))
    assert set(TOP) - plain - rows == set()
    assert set(inspect.signature(run_settings).parameters) - rows == set() and set(MODELS) - rows == set()
    words = set(re.findall(r"`([\w.]+)`", PAGE))
    assert {*LOSSES, *METRICS, *OVERS, *BUILT_IN} - words == set()
    assert all(f"NAME{suffix}" in PAGE for suffix in READERS)


def test_the_arguments_of_every_model_are_on_the_page() -> None:
    for name, kind in MODELS.items():
        (row,) = re.findall(rf"^\| `{name}` \| (`.*) \|$", PAGE, flags=re.MULTILINE)
        told = dict(re.findall(r"`(\w+)` ([\d.]+)", row))
        assert {k: float(v) for k, v in told.items()} == {
            p.name: float(p.default) for p in inspect.signature(kind).parameters.values()
        }


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("place", "count"), [(0, 12), (1, 9)])
def test_the_files_on_the_page_are_read(tmp_path: Path, place: int, count: int) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(blocks("toml")[place])
    assert len(load(file).jobs) == count


def test_the_mistakes_on_the_page_are_told_so(tmp_path: Path) -> None:
    text = blocks("toml")[0].replace('"AdamW"', '"adamm"').replace("seeds = 4", "seeds = 4\nepoch = 8")
    (tmp_path / "sweep.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "sweep.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not done.stdout
    assert f"```\n$ shoal train sweep.toml\n{done.stderr}```" in PAGE
