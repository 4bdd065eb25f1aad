"""Members of a resumed run on a GPU have the forms again that they were trained in."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.units import test_choose_form as test_choose
from tests.engine.units.test_choose_form import X, Y, mlp
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import as_trained
from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.units.arrange import arrange
from shoal.explanation import rehearse
from shoal.preparation.checks import prepare
from shoal.storage import atomic

tried = test_choose.tried


def jobs(count: int, **changes: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {"model": mlp, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "steps": 10**9}
    return [
        shoal.Job(**(settings | {"hparams": {"lr": 0.1}, "seed": i, "name": f"m{i}"} | changes)) for i in range(count)
    ]


def members(count: int, **changes: Any) -> list[Member]:
    return prepare(jobs(count, **changes), torch.device("cpu"))


def arranged(recorded: dict[int, str], compile: Any = "auto", count: int = 4) -> dict[int, str]:
    """The form that each member gets."""
    trace_cache = TraceCache()
    parts, units = arrange(group(members(count), trace_cache), trace_cache, compile, recorded)
    assert sorted(i for part in parts for i in part.members) == list(range(count))
    forms = {
        m.index: unit.tier + " compiled" * getattr(unit, "compiled", False) for unit in units for m in unit.members
    }
    assert {i: part.tier for part in parts for i in part.members} == {i: f.split()[0] for i, f in forms.items()}
    return forms


def test_without_a_record_the_fastest_is_taken(tried: list[str]) -> None:
    assert set(arranged({}).values()) == {"stacked compiled"}


@pytest.mark.parametrize("form", ["serial", "streams", "stacked", "streams compiled", "stacked compiled"])
def test_members_have_the_form_again_that_they_had(form: str, tried: list[str]) -> None:
    assert set(arranged(dict.fromkeys(range(4), form)).values()) == {form}
    assert set(tried) <= {form}, "nothing else is tried"


def test_members_of_one_kind_with_unlike_records_are_apart(tried: list[str]) -> None:
    recorded = {0: "serial", 1: "streams", 2: "stacked", 3: "stacked"}
    assert arranged(recorded) == recorded


def test_a_member_that_had_no_form_goes_with_the_most(tried: list[str]) -> None:
    assert arranged({0: "streams", 1: "streams", 2: "stacked"}) == {
        0: "streams",
        1: "streams",
        2: "stacked",
        3: "streams",
    }


def test_a_stack_of_which_one_is_left_stays_a_stack(tried: list[str]) -> None:
    assert arranged({0: "stacked"}, count=1) == {0: "stacked"}


def test_the_setting_that_nothing_is_compiled_counts_more(tried: list[str]) -> None:
    assert set(arranged(dict.fromkeys(range(4), "streams compiled"), compile=False).values()) == {"streams"}


def test_a_form_that_fails_here_is_chosen_anew(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = test_choose._choose_form._time_replays

    def timed(unit: Any, form: Any) -> Any:
        if form.name == "streams":
            raise RuntimeError("not on this device")
        return real(unit, form)

    monkeypatch.setattr(test_choose._choose_form, "_time_replays", timed)
    assert set(arranged(dict.fromkeys(range(4), "streams")).values()) == {"stacked compiled"}


def test_a_rehearsal_puts_what_trials_showed_into_the_plan(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = members(3)
    planning = PlanningContext(own, timed=False, thorough=True)
    monkeypatch.setattr(planning, "gpu", True)
    plan = planning.propose(own)
    rehearse(planning, plan, own)
    (part,) = plan.parts
    assert part.tier == "stacked" and part.members == [0, 1, 2]
    assert {"step_seconds", "alone_seconds", "compile_seconds", "memory_bytes"} <= part.predicted.keys()
    assert part.predicted["gain"] == part.predicted["alone_seconds"] / part.predicted["step_seconds"]
    assert plan.memory_bytes > part.predicted["memory_bytes"] > part.predicted["state_bytes"] > 0


def test_the_forms_are_noted_and_gives_them_again(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, as far as a CPU can."""

    def planning(own: list[Member], tiers: dict[int, str]) -> PlanningContext:
        made = PlanningContext(own, timed=False, tiers=tiers, forms_changed=lambda forms: notes.append(dict(forms)))
        monkeypatch.setattr(made, "gpu", True)
        return made

    own, notes = members(3), list[dict[int, str]]()
    first = planning(own, {1: "serial"})
    first.units(own)
    assert notes == [{0: "stacked compiled", 1: "serial", 2: "stacked compiled"}]
    second = planning(members(3), notes[0])
    assert {m.index: unit.tier for unit, _ in second.units(members(3)) for m in unit.members} == {
        0: "stacked", 1: "serial", 2: "stacked",
    }  # fmt: skip


def test_a_checkpoint_knows_better_than_a_plan_that_was_not_taken() -> None:
    own = members(4)
    for member, tier in zip(own, ("streams", "stacked", "serial", ""), strict=True):
        member.tier, member.batches = tier, 3 if tier else 0
    assert as_trained({0: "serial", 1: "stacked compiled", 3: "serial"}, own) == {
        0: "streams", 1: "stacked compiled", 2: "serial",
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["serial", "streams", "stacked"])
def test_on_a_gpu_a_resumed_run_has_its_forms_again(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture's made-up times

    def own(steps: int) -> list[shoal.Job]:
        return jobs(3, steps=steps, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.Linear(8, 3)))

    stopped: list[str] = []

    def stop(view: Any) -> None:
        if view.epoch == 3 and not stopped:
            stopped.append(view.name)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        shoal.train(own(4000), device="cuda", out=tmp_path, compile=False, callbacks=[stop])
    kept = atomic.read_sealed(tmp_path / "plan.json")
    assert set(kept["plan"]["tiers"].values()) <= {"stacked", "streams"}
    atomic.write_sealed(tmp_path / "plan.json", kept | {"plan": {"tiers": {str(i): form for i in range(3)}}})
    for path in (tmp_path / "members").glob("*/*.ckpt"):
        retiered(path, form)
    results = shoal.train(own(4000), device="cuda", out=tmp_path, compile=False)
    assert [result.tier for result in results] == [form] * 3
    assert results.plan is not None and {part.tier for part in results.plan.parts} == {form}


def retiered(path: Path, tier: str) -> None:
    """The same checkpoint, of a member that was trained in this tier."""
    from shoal.storage import _store

    state, notes = _store.read(path)
    _store.save(path, state | {"tier": tier}, notes)
