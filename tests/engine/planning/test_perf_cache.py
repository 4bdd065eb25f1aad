"""What is learned: kept on disk, whole or not at all, and never worth a crash."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from shoal.engine.planning import perf_cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def test_it_comes_back() -> None:
    perf_cache.note("a", tier="stacked", rows=8, seconds=0.5, bytes=100)
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.25, bytes=60)
    perf_cache.note("a", tier="stacked", rows=8, seconds=0.4, bytes=90)
    perf_cache.note("a", tier="serial", rows=1, seconds=0.1)
    perf_cache.remember("a", {"ratio": 1.5})
    found = perf_cache.lookup("a")
    assert found.seconds == {"stacked": {8: 0.4, 2: 0.25}, "serial": {1: 0.1}}, "the latest time"
    assert found.bytes == {"stacked": {8: 100, 2: 60}}, "the highest mark"
    assert found.verdict == {"ratio": 1.5}
    curve = found.curve("seconds", "stacked")
    assert curve is not None and curve.points == ((2, 0.25), (8, 0.4))
    assert found.curve("bytes", "serial") is None and perf_cache.lookup("b") == perf_cache.Entry()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1, "entries": {"a": {}}}', '{"format": 3, "entries": []}', "\0" * 50],
)
def test_a_damaged_file_is_nothing_learned(text: str) -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.5)
    perf_cache.cache_file().write_text(text)
    assert perf_cache.lookup("a") == perf_cache.Entry()
    perf_cache.note("a", tier="stacked", rows=4, seconds=0.5)
    assert perf_cache.lookup("a").seconds == {"stacked": {4: 0.5}}


def test_a_damaged_part_is_left_out() -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.5, bytes=7)
    table = json.loads(perf_cache.cache_file().read_text())
    table["entries"]["a"]["seconds"]["stacked"] |= {"x": 1.0, "3": "much", "4": float("nan"), "5": -1.0}
    table["entries"]["a"]["verdict"] = 5
    table["entries"]["b"] = "nonsense"
    perf_cache.cache_file().write_text(json.dumps(table))
    found = perf_cache.lookup("a")
    assert found.seconds == {"stacked": {2: 0.5}} and found.bytes == {"stacked": {2: 7}} and found.verdict is None
    assert perf_cache.lookup("b") == perf_cache.Entry()


def test_what_is_no_number_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=float("nan"), bytes=0)
    assert perf_cache.lookup("a") == perf_cache.Entry()
    monkeypatch.setattr(perf_cache, "MOST_ENTRIES", 3)
    for name in "abcde":
        perf_cache.note(name, tier="stacked", rows=2, seconds=1.0)
    assert list(perf_cache._read()) == ["c", "d", "e"], "the oldest go"


def test_a_folder_that_cannot_be_written_to_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    perf_cache.note("a", tier="stacked", rows=2, seconds=1.0)
    assert perf_cache.lookup("a") == perf_cache.Entry()


def _learn(number: int) -> None:
    for rows in range(10):
        perf_cache.note(f"k{number}", tier="stacked", rows=rows + 1, seconds=1.0)


def test_processes_that_learn_at_the_same_time_keep_it_all() -> None:
    context = multiprocessing.get_context("fork")
    crew = [context.Process(target=_learn, args=(n,)) for n in range(3)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(60)
    assert [len(perf_cache.lookup(f"k{n}").seconds["stacked"]) for n in range(3)] == [10, 10, 10]
