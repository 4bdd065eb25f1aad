"""`shoal.explain`: the plan before any training, with reasons, memory and what to expect; and nothing is disturbed."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.engine.planning import perf_cache
from shoal.engine.planning.memory import step_bytes
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.units import trials
from shoal.utils.tables import duration, size

X, Y = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


class Branch(nn.Module):
    """Goes by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if float(out.detach().sum()) > 0 else -out


def job(name: str, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(6, 3), "data": (X, Y), "loss": F.cross_entropy, "epochs": 2}
    return shoal.Job(**(settings | {"hparams": {"lr": 0.1}, "batch_size": 16, "name": name} | changes))


def jobs() -> list[shoal.Job]:
    sgd = {"optimizer": torch.optim.SGD, "batch_size": 8}
    return [
        *(job(f"a{i}", seed=i, hparams={"lr": 0.1 + i}) for i in range(4)),
        *(job(f"branch{i}", model=Branch) for i in range(2)),
        *(job(f"sgd{i}", **sgd, seed=i) for i in range(2)),
    ]


def test_what_rides_together_and_why() -> None:
    told = shoal.explain(jobs(), device="cpu", measure=False)
    parts = told.plan.parts
    assert [(part.tier, part.members) for part in parts] == [
        ("stacked", [0, 1, 2, 3]),
        ("serial", [4]),
        ("serial", [5]),
        ("stacked", [6, 7]),
    ]
    assert parts[0].reason == "one computation; apart from others: batch_size is 16 against 8"
    assert "depends on the data" in parts[1].reason
    text = str(told)
    assert "a0, a1 ... a3" in text and "branch0, branch1" in text and "not timed" in text
    assert len([line for line in text.splitlines() if line.startswith(("1", "2", "3"))]) == 6, text
    assert json.loads(told.to_json())["parts"][3]["names"] == ["sgd0", "sgd1"]
    assert all("step_seconds" not in part.predicted for part in parts)


def test_unlike_networks_are_told_as_such() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    pair = [job("shallow"), job("deep", model=deep)]
    first, second = shoal.explain(pair, device="cpu", measure=False).plan.parts
    assert "parameters have other names" in first.reason and "parameters have other names" in second.reason
    wide = [job("narrow"), job("wide", model=lambda: nn.Linear(6, 5))]
    (first, _) = shoal.explain(wide, device="cpu", measure=False).plan.parts
    assert "other shapes or dtypes at weight ([3, 6] float32 against [5, 6] float32)" in first.reason
    flags = [job("plain"), job("amsgrad", hparams={"lr": 0.1, "amsgrad": True}), job("sgd", optimizer=torch.optim.SGD)]
    (part,) = shoal.explain(flags, device="cpu", measure=False).plan.parts
    assert part.reason == "one computation"


def test_data_that_is_not_held_has_no_size() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    reading = shoal.Job(model=lambda: nn.Linear(6, 3), data=loader, loss=F.cross_entropy, epochs=2)
    told = shoal.explain([reading], device="cpu", measure=False)
    assert "data: read as it is needed; total memory" in str(told)


def test_memory_is_counted() -> None:
    told = shoal.explain(jobs(), device="cpu", measure=False)
    adam, sgd = told.plan.parts[0].predicted, told.plan.parts[3].predicted
    assert adam["weights_bytes"] == 4 * 21 * 4 and sgd["weights_bytes"] == 2 * 21 * 4
    assert adam["gradients_bytes"] == adam["weights_bytes"]
    assert 2 * adam["weights_bytes"] <= adam["optimizer_bytes"] < 2.6 * adam["weights_bytes"]
    assert sgd["optimizer_bytes"] < 0.5 * sgd["weights_bytes"], "plain SGD keeps nothing but a count"
    assert adam["activations_bytes"] >= 4 * 16 * 3 * 4
    assert told.data_bytes == X.numel() * 4 + Y.numel() * 8, "once for all jobs"
    assert told.memory_bytes > told.data_bytes
    both = [job("adam"), job("sgd", optimizer=torch.optim.SGD), job("other", optimizer=torch.optim.SGD)]
    (one,) = shoal.explain(both, device="cpu", measure=False).plan.parts
    assert one.predicted["optimizer_bytes"] == pytest.approx(adam["optimizer_bytes"] / 4 + sgd["optimizer_bytes"])


def test_steps_are_timed_on_copies_and_nothing_is_disturbed() -> None:
    module, x = nn.Linear(6, 3).double(), X.double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    calls: list[int] = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        calls.append(len(outputs))
        return 0.0

    changes: dict[str, Any] = {"model": module, "data": (x, Y), "val": (x, Y), "metrics": {"m": metric}}
    these = [job(f"m{i}", **changes, hparams={"lr": 0.1 + i}) for i in range(6)]
    state, data = torch.get_rng_state(), x.clone()
    told = shoal.explain(these, device="cpu")
    (part,) = told.plan.parts
    assert part.predicted["alone_seconds"] > 0 and part.predicted["step_seconds"] > 0
    assert part.predicted["gain"] == part.predicted["alone_seconds"] / part.predicted["step_seconds"]
    assert "training: about" in str(told) and f"{part.predicted['gain']:.1f}x" in str(told)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(x, data)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    first = shoal.train(these, device="cpu")[0].history[-1]["loss"]
    assert first == pytest.approx(shoal.solo(these[0]).history[-1]["loss"], rel=1e-9)


def test_where_stacking_loses_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = trials.TrialResult(stacked=2e-3, solo=1e-3, ratio=0.5)
    monkeypatch.setattr(trials, "trial", lambda *_: lost)
    monkeypatch.setattr(trials, "_trial_results", {})
    long = [job(f"l{i}", epochs=200, seed=i) for i in range(3)]
    told = shoal.explain(long, device="cpu")
    assert [part.tier for part in told.plan.parts] == ["serial"] * 3
    assert "do not pack: a stacked step runs at 0.50 times the speed of solo steps" in str(told)
    short = shoal.explain([job(f"s{i}", seed=i) for i in range(3)], device="cpu")
    assert [part.tier for part in short.plan.parts] == ["stacked"]
    assert "stacking loses here (0.50x): do not pack" in str(short)


def test_a_budget_sizes_packs_and_says_who_waits() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 3))

    these = [job(f"w{i}", model=wide, seed=i) for i in range(12)]
    whole = shoal.explain(these, device="cpu", measure=False, memory="1GB")
    assert not whole.plan.waiting and whole.plan.budget == 10**9
    third = int(whole.memory_bytes / 3)
    told = shoal.explain(these, device="cpu", measure=False, memory=third)
    (part,) = told.plan.parts
    assert 2 <= len(part.members) <= 5 and part.members == list(range(len(part.members)))
    assert told.memory_bytes <= third
    assert [w.index for w in told.plan.waiting] == list(range(len(part.members), 12))
    assert f"{12 - len(part.members)} wait" in str(told) and "waits for" in str(told) and "more" in str(told)
    assert len(json.loads(told.to_json())["waiting"]) == 12 - len(part.members)
    none = shoal.explain(these, device="cpu", measure=False, memory=1000)
    assert not none.plan.parts and all(w.never and "1 kB may be used" in w.reason for w in none.plan.waiting)
    with pytest.raises(ValueError, match="memory is 'much'"):
        shoal.explain(these, device="cpu", memory="much")


def test_what_is_explained_is_what_happens() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 3))

    these = [job(f"w{i}", model=wide, seed=i) for i in range(6)]
    these += [job(f"b{i}", model=Branch, seed=i) for i in range(2)]
    most = int(shoal.explain(these, device="cpu", measure=False).memory_bytes / 2)
    said = shoal.explain(these, device="cpu", measure=False, memory=most).plan
    assert said.waiting and len(said.parts) > 1
    events: list[shoal.Event] = []
    shoal.train(these, device="cpu", memory=most, threads=1, deterministic=True, events=events.append)
    start = next(event for event in events if event.kind == "start").data["plan"]
    assert [(p["tier"], p["members"]) for p in start["parts"]] == [(p.tier, p.members) for p in said.parts]
    assert [w["index"] for w in start["waiting"]] == [w.index for w in said.waiting]
    first = list(itertools.takewhile(lambda event: event.kind != "turn", events))
    joined: dict[int, tuple[str, list[int]]] = {}
    for event in first:
        if event.kind == "join" and event.member is not None:
            joined.setdefault(event.data["unit"], (event.data["tier"], []))[1].append(event.member.index)
    assert sorted(joined.values()) == sorted((part.tier, part.members) for part in said.parts)


@pytest.mark.usefixtures("one_thread")  # steps are planned, and looked up, with one thread
def test_when_compiling_pays_is_told() -> None:
    these = [job(f"c{i}", seed=i) for i in range(4)]
    (member, *_) = shoal.preparation.checks.prepare(these, torch.device("cpu"))
    key = perf_cache.digest(TraceCache().recipe(member))
    perf_cache.note(key, tier="stacked", rows=4, seconds=3e-3)
    perf_cache.note(key, tier="stacked compiled", rows=4, seconds=1e-3, compile_seconds=10.0)
    told = shoal.explain(these, device="cpu", measure=False)
    assert told.plan.parts[0].predicted["compile_pays_after_steps"] == 5000
    assert "compiling takes about 10 s and pays off after 5000 steps; these jobs have 6" in str(told)


def test_mistakes_are_those_of_train() -> None:
    with pytest.raises(shoal.JobError, match="jobs is empty"):
        shoal.explain([])
    with pytest.raises(shoal.JobError, match="lr is -1"):
        shoal.explain([job("a", hparams={"lr": -1})], device="cpu")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        shoal.explain([job("a")], device="tpu")


def test_memory_of_an_optimizer_without_a_rule_and_of_what_is_frozen() -> None:
    class Own(torch.optim.SGD):
        pass

    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        return model

    (member,) = shoal.preparation.checks.prepare([job("a", optimizer=Own, model=half_frozen)], torch.device("cpu"))
    made = step_bytes(member, TraceCache().recipe(member))
    assert (made.weights, made.gradients, made.optimizer) == (63 * 4, 21 * 4, 2 * 21 * 4)
    assert step_bytes(member, None).activations == 0


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 7e12)] == ["0 B", "999 B", "1 kB", "2.5 MB", "7 TB"]
    assert [duration(s) for s in (5e-6, 0.5, 12, 600)] == ["5 µs", "500 ms", "12 s", "10 min"]


def test_what_other_programs_take_of_the_cores_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a millisecond of this thread's time, and a minute of the wall's, since the machine is busy."""
    thread, wall = itertools.count(), itertools.count()
    monkeypatch.setattr(trials, "thread_time", lambda: 1e-3 * next(thread))
    monkeypatch.setattr(trials, "perf_counter", lambda: 60.0 * next(wall))
    told = shoal.explain([job(f"{i}", seed=i) for i in range(4)], device="cpu")
    (part,) = told.plan.parts
    assert part.predicted["step_seconds"] == pytest.approx(1e-3)
    assert part.predicted["alone_seconds"] == pytest.approx(4e-3 / 8)
    assert str(told).splitlines()[-1].startswith("training: about 6 ms packed, 3 ms one after another")


def test_jobs_that_run_one_after_another_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_PACK")  # short jobs are not packed then
    told = shoal.explain([job(f"{i}", seed=i, epochs=1) for i in range(3)], device="cpu")
    assert {part.tier for part in told.plan.parts} == {"serial"}
    assert all(part.predicted["alone_seconds"] > 0 for part in told.plan.parts)
    lines = str(told).splitlines()
    assert lines[2].split()[-2:] == ["-", "-"] and lines[2].split()[-4] != "-"
    assert re.match(r"training: about [\d.]+ .s one after another \(", lines[-1])
