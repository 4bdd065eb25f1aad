"""State that no state_dict has: a training that goes on from a checkpoint ends like one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pack.stateful import KINDS, job
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.checks import prepare
from shoal.durable import store
from shoal.pack.board import Board
from shoal.pack.members import Member
from shoal.pack.run import Run

CPU = torch.device("cpu")


def prepared(kind: str) -> Member:
    (member,) = prepare([job(kind)], CPU)
    member.own.wanted = True
    return member


def trained(member: Member, between: Any = None) -> Member:
    board = Board([member], timed=False)
    run = Run([member], board)
    run._turn_seconds = 1e-9
    if between is not None:
        run.between = lambda: between(run)
    run.go()
    assert member.status == "done", member.error
    return member


def assert_same(a: Member, b: Member) -> None:
    ours, theirs = (pytree.tree_leaves([m.model.state_dict(), m.optimizer_state]) for m in (a, b))
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y or (x != x and y != y)
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in a.history] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in b.history
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_all_that_training_changes(kind: str, tmp_path: Path) -> None:
    alone = trained(prepared(kind))
    files: list[Path] = []

    def save(run: Run) -> None:
        if run.rides and run.rides[0].members and run.rides[0].unit.settled:
            run.rides[0].unit.write_back()
            files.append(tmp_path / str(len(files)))
            store.save(files[-1], run.rides[0].members[0].state())

    assert_same(trained(prepared(kind), save), alone)
    assert len(files) > 5
    for file in (files[1], files[len(files) // 2], files[-2]):
        again = prepared(kind)
        again.load_state(store.load(file))
        assert_same(trained(again), alone)
