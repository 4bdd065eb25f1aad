"""What is learned: kept on disk, whole or not at all, and never worth a crash."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from shoal.pack import learned


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def test_it_comes_back() -> None:
    learned.note("a", tier="stacked", rows=8, seconds=0.5, bytes=100)
    learned.note("a", tier="stacked", rows=2, seconds=0.25, bytes=60)
    learned.note("a", tier="stacked", rows=8, seconds=0.4, bytes=90)
    learned.note("a", tier="serial", rows=1, seconds=0.1)
    learned.remember("a", {"ratio": 1.5})
    found = learned.lookup("a")
    assert found.seconds == {"stacked": {8: 0.4, 2: 0.25}, "serial": {1: 0.1}}, "the latest time"
    assert found.bytes == {"stacked": {8: 100, 2: 60}}, "the highest mark"
    assert found.verdict == {"ratio": 1.5}
    curve = found.curve("seconds", "stacked")
    assert curve is not None and curve.points == ((2, 0.25), (8, 0.4))
    assert found.curve("bytes", "serial") is None and learned.lookup("b") == learned.Entry()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1, "entries": {"a": {}}}', '{"format": 3, "entries": []}', "\0" * 50],
)
def test_a_damaged_file_is_nothing_learned(text: str) -> None:
    learned.note("a", tier="stacked", rows=2, seconds=0.5)
    learned.cache_file().write_text(text)
    assert learned.lookup("a") == learned.Entry()
    learned.note("a", tier="stacked", rows=4, seconds=0.5)
    assert learned.lookup("a").seconds == {"stacked": {4: 0.5}}


def test_a_damaged_part_is_left_out() -> None:
    learned.note("a", tier="stacked", rows=2, seconds=0.5, bytes=7)
    table = json.loads(learned.cache_file().read_text())
    table["entries"]["a"]["seconds"]["stacked"] |= {"x": 1.0, "3": "much", "4": float("nan"), "5": -1.0}
    table["entries"]["a"]["verdict"] = 5
    table["entries"]["b"] = "nonsense"
    learned.cache_file().write_text(json.dumps(table))
    found = learned.lookup("a")
    assert found.seconds == {"stacked": {2: 0.5}} and found.bytes == {"stacked": {2: 7}} and found.verdict is None
    assert learned.lookup("b") == learned.Entry()


def test_what_is_no_number_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    learned.note("a", tier="stacked", rows=2, seconds=float("nan"), bytes=0)
    assert learned.lookup("a") == learned.Entry()
    monkeypatch.setattr(learned, "MOST_ENTRIES", 3)
    for name in "abcde":
        learned.note(name, tier="stacked", rows=2, seconds=1.0)
    assert list(learned._read()) == ["c", "d", "e"], "the oldest go"


def test_a_folder_that_cannot_be_written_to_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    learned.note("a", tier="stacked", rows=2, seconds=1.0)
    assert learned.lookup("a") == learned.Entry()


def _learn(number: int) -> None:
    for rows in range(10):
        learned.note(f"k{number}", tier="stacked", rows=rows + 1, seconds=1.0)


def test_processes_that_learn_at_the_same_time_keep_it_all() -> None:
    context = multiprocessing.get_context("fork")
    crew = [context.Process(target=_learn, args=(n,)) for n in range(3)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(60)
    assert [len(learned.lookup(f"k{n}").seconds["stacked"]) for n in range(3)] == [10, 10, 10]
