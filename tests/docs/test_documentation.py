"""Documentation that cannot go stale: its code runs, and nothing public is without a line in it."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.app import COMMANDS, load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "ray_packs.py"]
"""That of Ray takes a minute, and is in tests/integrations."""


OF_MLFLOW = "ignore:The ``noload`` loader strategy"
"""A warning that MLflow gives when it opens a database."""


def python_of(page: Path) -> str:
    """The page's Python blocks as one script; everything else is blank, so that line numbers are the page's own."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    assert not inside, f"{page.name}: a block is not closed"
    return "\n".join(lines) + "\n"


def run(script: Path, folder: Path) -> str:
    """Run a script as a user would, in a folder of its own, with warnings as errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", OF_MLFLOW, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.docs
@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p).strip()], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}_md.py"
    script.write_text(python_of(page))
    run(script, tmp_path)


@pytest.mark.docs
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    assert run(example, tmp_path).strip()


def rows_of(page: str) -> set[str]:
    """First cells of the page's tables."""
    return set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE))


def test_every_field_of_a_job_is_documented() -> None:
    kinds = (shoal.Job, shoal.EarlyStop, shoal.EMA, shoal.SWA)
    fields = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    assert rows_of("jobs.md") == fields | set(inspect.signature(shoal.folds).parameters) - {"job"}


def test_every_argument_of_train_is_documented() -> None:
    assert set(inspect.signature(shoal.train).parameters) - rows_of("training.md") == set()


def test_every_argument_of_tune_is_documented() -> None:
    page = (ROOT / "docs" / "tune.md").read_text()
    settings = page[page.index("## Settings") : page.index("## The study")]
    assert [name for name in inspect.signature(shoal.tune).parameters if f"`{name}`" not in settings] == []


def test_every_public_name_is_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in shoal.__all__ if not re.search(rf"\bshoal\.{name}\b", text)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert f"`shoal {name}" in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "reproduce"])
def test_every_option_is_documented(name: str) -> None:
    (section,) = re.findall(rf"^## shoal {name}$(.*?)(?=^## |\Z)", (ROOT / "docs" / "cli.md").read_text(), re.M | re.S)
    options = [
        o for p in load(name).params for o in (*p.opts, *p.secondary_opts) if o.startswith("--") and o != "--help"
    ]
    assert options
    assert [option for option in options if f"`{option}" not in section] == []


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    path_of_a_call = page[page.index("\n    training.py") : page.index("Where to look for a change")]
    named = set(re.findall(r"^ +([\w/]+\.py)", path_of_a_call, re.M))
    assert 10 <= len(named) <= 15, f"the path of one call crosses {len(named)} files"
    named |= {name.removeprefix("src/shoal/") for name in re.findall(r"`(src/shoal/[\w/]+\.py)`", page)}
    assert not {name for name in named if not (ROOT / "src" / "shoal" / name).is_file()}


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page[page.index("    src/shoal/") : page.index("The core (")]
    packages = {path.parent.name for path in (ROOT / "src" / "shoal").rglob("__init__.py")} - {"shoal"}
    assert not {name for name in packages if f"{name}/" not in tree}


PRIVATE_WORDS = re.compile(
    r"\b(rides?|riding|rode|ridden|told|kitchen|crew|crewman|knocks?|porter|newcomers?|handout|goes on|who ends)\b",
    re.I,
)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"], ids=lambda p: p.name)
def test_the_words_are_plain(page: Path) -> None:
    assert not sorted({word.lower() for word in PRIVATE_WORDS.findall(page.read_text())})


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda p: p.name)
def test_lists_begin_after_a_blank_line(page: Path) -> None:
    """GitHub shows a list without one; the site makes it part of the paragraph."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r"^(?![-*#|\s]|\d+\. ).+\n(?:[-*]|\d+\.) .*", text, re.M) == []


def navigation() -> list[str]:
    """The pages in the navigation of the site."""
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"^ +- .*: (\S+\.md)$", text[text.index("\nnav:") :], re.M)


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    made = {"changelog.md", *(f"notebooks/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb"))}
    assert sorted(navigation()) == sorted({str(page.relative_to(docs)) for page in docs.rglob("*.md")} | made)


PUBLIC = [
    f"{module.__name__}.{name}" for module in (shoal, shoal.split, shoal.tune, shoal.place) for name in module.__all__
]


def test_every_example_is_on_its_page() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    made_for_others = {"kinds.py", "flowers.csv"}  # read by job files
    names = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} - made_for_others
    assert [name for name in sorted(names) if f"(../examples/{name})" not in page] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert re.search(rf"^(::: |    options: {{heading: ){re.escape(name)}}}?$", reference, re.M)


OF_INTERFACES = {"check", "brackets", "until", "decide", "run", "workers_of_round"}
"""Methods of schedulers and executors, which their interfaces describe."""


@pytest.mark.parametrize("name", PUBLIC)
def test_what_the_reference_shows_has_a_docstring(name: str) -> None:
    package, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(package), attribute)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        public = {key: part for key, part in vars(value).items() if not key.startswith("_")}
        described = {key: getattr(part, "__func__", part) for key, part in public.items()}
        shown = [key for key, part in described.items() if inspect.isfunction(part) or isinstance(part, property)]
        assert [key for key in shown if not inspect.getdoc(getattr(value, key)) and key not in OF_INTERFACES] == []


def test_the_evidence_has_the_numbers_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    speed = readme[readme.index("## How fast it is") : readme.index("## What it promises")]
    rows = [line for line in speed.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    assert [row for row in rows if row not in (ROOT / "docs" / "evidence.md").read_text()] == []
