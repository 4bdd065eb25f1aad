"""What is learned: kept on disk, whole or not at all, and never worth a crash."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from contextlib import closing
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
    assert found.trial_result == {"ratio": 1.5}
    curve = found.curve("seconds", "stacked")
    assert curve is not None and curve.points == ((2, 0.25), (8, 0.4))
    assert found.curve("bytes", "serial") is None and perf_cache.lookup("b") == perf_cache.Entry()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1, "entries": {"a": {}}}', "\0" * 50, "SQLite format 3\0" * 9]
)
def test_a_damaged_file_is_nothing_learned(text: str) -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.5)
    perf_cache.cache_file().write_text(text)
    assert perf_cache.lookup("a") == perf_cache.Entry()
    perf_cache.note("a", tier="stacked", rows=4, seconds=0.5)
    assert perf_cache.lookup("a").seconds == {"stacked": {4: 0.5}}


def test_a_damaged_part_is_left_out() -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.5, bytes=7)
    bad = [("seconds", 3, "much"), ("seconds", 4, float("nan")), ("seconds", 5, -1.0), ("bytes", 6, 9e999)]
    with closing(sqlite3.connect(perf_cache.cache_file())) as db, db:
        for what, rows, value in [*bad, ("nonsense", 2, 1.0), ("verdict", 0, "a word")]:
            db.execute("insert into facts values ('a', ?, 'stacked', ?, ?, 0)", [what, rows, value])
    found = perf_cache.lookup("a")
    assert found.seconds == {"stacked": {2: 0.5}} and found.bytes == {"stacked": {2: 7}} and not found.trial_result


def test_a_file_with_another_table_or_in_the_middle_of_a_change_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_cache, "WRITE_SECONDS", 0.1)
    perf_cache.note("a", tier="stacked", rows=2, seconds=0.5)
    with closing(sqlite3.connect(perf_cache.cache_file(), isolation_level=None)) as other:
        other.execute("begin exclusive")
        perf_cache.note("a", tier="stacked", rows=4, seconds=0.5)
        assert perf_cache.lookup("a") == perf_cache.Entry()
        other.execute("rollback")
        assert perf_cache.lookup("a").seconds == {"stacked": {2: 0.5}}
        other.execute("drop table facts")
        other.execute("create table facts (key text)")
    perf_cache.note("a", tier="stacked", rows=4, seconds=0.5)
    assert perf_cache.lookup("a") == perf_cache.Entry()


def test_one_lookup_does_not_read_the_whole_file() -> None:
    now = time.time()
    perf_cache.note("first", tier="stacked", rows=1, seconds=1.0)
    rows = [(f"k{i}", "seconds", "stacked", r, 1.0, now) for i in range(4000) for r in range(5)]
    with closing(sqlite3.connect(perf_cache.cache_file())) as db, db:
        db.executemany("insert into facts values (?, ?, ?, ?, ?, ?)", rows)
    seconds = []
    for i in range(20):
        start = time.perf_counter()
        assert perf_cache.lookup(f"k{i * 199}").seconds
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 5e-3, "a tenth of what reading all of it takes"


def test_what_is_no_number_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    perf_cache.note("a", tier="stacked", rows=2, seconds=float("nan"), bytes=0)
    assert perf_cache.lookup("a") == perf_cache.Entry()
    monkeypatch.setattr(perf_cache, "MOST_ENTRIES", 3)
    for name in "abcde":
        perf_cache.note(name, tier="stacked", rows=2, seconds=1.0)
    assert [name for name in "abcde" if perf_cache.lookup(name).seconds] == ["c", "d", "e"], "the oldest go"


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
    processes = [context.Process(target=_learn, args=(n,)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [len(perf_cache.lookup(f"k{n}").seconds["stacked"]) for n in range(3)] == [10, 10, 10]
