"""State that no state_dict has: a training that goes on from a checkpoint ends like one that was left alone."""

from __future__ import annotations

import collections
import os
from os import system as run_command
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from tests.engine.stateful import KINDS, job
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member
from shoal.engine.python_state._parts import NotSavable
from shoal.engine.python_state._state_codec import Decoder, Encoder
from shoal.engine.runtime.clones import clone_of
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.errors import OutError, ShoalWarning
from shoal.preparation.checks import prepare
from shoal.storage import _store

CPU = torch.device("cpu")
assert os.system is run_command, "both names are here for a checkpoint to use"


def prepared(kind: str) -> Member:
    (member,) = prepare([job(kind)], CPU)
    member.saved_state.wanted = True
    return member


def trained(member: Member, between: Any = None) -> Member:
    planning = PlanningContext([member], timed=False)
    run = Run([member], planning, between=None if between is None else lambda: between(run))
    run.turn_seconds = 1e-9
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
        if run.runners and run.runners[0].members and run.runners[0].unit.at_step_boundary:
            run.runners[0].unit.write_back()
            files.append(tmp_path / str(len(files)))
            _store.save(files[-1], run.runners[0].members[0].state())

    assert_same(trained(prepared(kind), save), alone)
    assert len(files) > 5
    for file in (files[1], files[len(files) // 2], files[-2]):
        again = prepared(kind)
        again.load_state(_store.load(file))
        assert_same(trained(again), alone)


ONE_IN_A_PROCESS = ("global counter", "class attribute")
LAZY = ("lazy modules", "lazy modules, groups", "lazy modules, optimizer of its own")
"""A clone of such a network has its weights, so it can be traced: it runs in another tier, with other rounding."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*ONE_IN_A_PROCESS, *LAZY)])
def test_a_clone_goes_on_with_state_of_its_own(kind: str) -> None:
    """It ends with the bits of the job that it was taken from, and that one with the bits that it has alone."""
    alone, (member,), clones = trained(prepared(kind)), [prepared(kind)], list[Member]()

    def clone(run: Run) -> None:
        if member.batches >= 7 and not clones:
            clones.append(clone_of(run, member, "clone", {}))
            run.add(clones[0])

    trained(member, clone)
    assert [m.status for m in (member, *clones)] == ["done", "done"]
    assert_same(member, alone)
    assert_same(clones[0], alone)


@pytest.mark.parametrize("kind", ONE_IN_A_PROCESS)
def test_a_clone_that_shares_state_with_its_source_is_warned_of(kind: str) -> None:
    (member,), clones = [prepared(kind)], list[Member]()

    def clone(run: Run) -> None:
        if member.batches >= 7 and not clones:
            with pytest.warns(ShoalWarning, match="which the clone shares") as caught:
                clones.append(clone_of(run, member, "clone", {}))
            assert len(caught) == 1

    trained(member, clone)
    assert clones


def test_a_clone_of_a_clone_and_one_with_another_step() -> None:
    alone, (member,), clones = trained(prepared("dict in a closure")), [prepared("dict in a closure")], list[Member]()

    def clone(run: Run) -> None:
        if member.batches >= 4 and not clones:
            run.add(clone_of(run, member, "one", {}))
            clones.append(run.all_members[-1])
        elif clones and clones[0].batches >= 9 and len(clones) == 1:
            run.add(clone_of(run, clones[0], "two", {}))
            run.add(clone_of(run, clones[0], "three", {"step": job("nonlocal counter").step}))
            clones.extend(run.all_members[-2:])

    trained(member, clone)
    assert [m.status for m in clones] == ["done"] * 3
    assert_same(clones[1], alone)
    assert not torch.equal(next(clones[2].model.parameters()), next(alone.model.parameters()))


def test_state_that_does_not_fit_is_an_error_that_names_it() -> None:
    states: list[dict[str, Any]] = []
    trained(prepared("dict in a closure"), lambda run: states.append(run.all_members[0].state()))
    other = prepared("nonlocal counter")
    other.load_state(states[1])
    with pytest.raises(
        OutError, match="its checkpoint holds state in the closure of step, which this job does not have"
    ):
        trained(other)


class Ran(Exception):
    """Raised by code that must not run."""


class Opened:
    """Says so when its code runs."""

    def __init__(self, *_: Any) -> None:
        raise Ran

    def __setattr__(self, name: str, value: Any) -> None:
        raise Ran

    def __setstate__(self, state: Any) -> None:
        raise Ran


@pytest.mark.parametrize(
    "name", [["posix", "system"], ["os", "system"], ["builtins", "eval"], ["builtins", "getattr"], ["os"],
             ["subprocess", "Popen"], [__name__, "os.system"], [__name__, "run_command"], ["os", "environ"],
             ["shutil", "rmtree"]],
)  # fmt: skip
def test_a_checkpoint_that_names_what_runs_commands_is_refused(name: list[str]) -> None:
    states: list[dict[str, Any]] = []
    trained(prepared("dict in a closure"), lambda run: states.append(run.all_members[0].state()))
    (content,) = states[1]["python"]["job"]["places"].values()
    content[0][1] = ["name", *name]
    again = prepared("dict in a closure")
    again.load_state(states[1])
    with pytest.raises(OutError, match=rf"may not name {'.'.join(name)}"):
        trained(again)


def test_an_object_that_cannot_be_made_again_is_not_saved() -> None:
    """It was saved by its parts, and the run could not be resumed."""
    with pytest.raises(NotSavable, match="a DataFrame with a BlockManager"):
        Encoder({}).value(pandas.DataFrame({"a": [0.0]}))


def test_objects_are_made_without_running_their_code() -> None:
    value = object.__new__(Opened)
    vars(value).update(a=1, b=value)
    encoder = Encoder({})
    plain = encoder.value({"x": value, "y": [value, collections.Counter(a=2), collections.deque([1, 2], maxlen=2)]})
    back = Decoder(encoder.nodes, {}, CPU).value(plain)
    assert type(back["x"]) is Opened and back["x"] is back["x"].b is back["y"][0] and back["x"].a == 1
    assert back["y"][1:] == [collections.Counter(a=2), collections.deque([1, 2])] and back["y"][2].maxlen == 2


@pytest.mark.parametrize("kind", ["object", "iterator", "random numbers", "bound", "no such kind"])
def test_a_checkpoint_cannot_call_a_class(kind: str) -> None:
    nodes = [[kind, [["name", __name__, "Opened"], None, {"bit_generator": "seed"}], [1], {}]]
    with pytest.raises((TypeError, KeyError, AttributeError)):
        Decoder(nodes, {}, CPU).value(["node", 0])
