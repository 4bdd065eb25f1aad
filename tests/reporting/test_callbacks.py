"""Callbacks: a view of one member that reaches nobody else, and what a callback can and cannot do to its member."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.member import Member
from shoal.preparation.checks import prepare
from shoal.reporting.callbacks import Callbacks, Ending, MemberView, ViewError
from shoal.reporting.events import Listeners, new_event

X, Y = torch.randn(30, 4), torch.arange(30) % 3


def job(**changes: Any) -> shoal.Job:
    base: dict[str, Any] = {"model": lambda: nn.Linear(4, 3), "data": (X, Y), "loss": F.cross_entropy}
    return shoal.Job(**(base | {"hparams": {"lr": 0.1}, "epochs": 3, "batch_size": 8} | changes))


def member(**changes: Any) -> Member:
    (made,) = prepare([job(name="a", owner="ann", **changes)], torch.device("cpu"))
    made.tier, made.epoch, made.step = "stacked", 1, 4
    made.history.append({"epoch": 1, "step": 4, "loss": 0.5, "lr": 0.1})
    return made


def test_what_a_view_shows() -> None:
    seen: list[Any] = []

    def look(view: shoal.MemberView) -> None:
        seen.extend([view.name, view.index, view.owner, view.hparams, view.epoch, view.step, view.status, view.tier])
        seen.extend([view.history, view.metrics, view.error, repr(view)])

    assert Callbacks([look]).after(member()) is None
    row = {"epoch": 1, "step": 4, "loss": 0.5, "lr": 0.1}
    assert seen[:8] == ["a", 0, "ann", {"lr": 0.1}, 1, 4, "running", "stacked"]
    assert seen[8:] == [[row], row, None, "MemberView('a', running, epoch 1, step 4)"]


def test_what_is_done_to_a_view_does_not_reach_the_member() -> None:
    it = member(model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    before = {name: value.clone() for name, value in it.model.state_dict().items()}

    def vandal(view: shoal.MemberView) -> None:
        view.history.clear()
        view.metrics.clear()
        view.hparams["lr"] = 9.0
        assert type(view.model) is nn.Sequential and view.model is view.model
        assert not view.model.training
        view.model.train(False)
        with torch.no_grad():
            view.model.get_parameter("0.weight").zero_()

    assert Callbacks([vandal]).after(it) is None
    assert len(it.history) == 1 and len(it.history[0]) == 4 and it.job.hparams["lr"] == 0.1
    assert it.model.training and all(torch.equal(before[name], value) for name, value in it.model.state_dict().items())
    for name in ("name", "status", "model", "step"):
        with pytest.raises(AttributeError):
            setattr(MemberView(it), name, "x")


def test_the_model_is_brought_up_to_date_when_it_is_asked_for_and_once() -> None:
    it = member()
    calls = []

    def write_back() -> None:
        calls.append(1)
        with torch.no_grad():
            it.model.weight.fill_(7.0)  # type: ignore[union-attr, operator]

    Callbacks([lambda view: view.metrics]).after(it, write_back)
    assert calls == []
    seen: list[Tensor] = []
    Callbacks([lambda view: seen.extend([view.model.weight, view.model.weight])]).after(it, write_back)
    assert calls == [1] and bool((seen[0] == 7).all())


def test_a_model_that_cannot_be_copied_is_built_anew() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.lock = threading.Lock()

    it = member(model=Locked)
    with torch.no_grad():
        it.model.get_parameter("weight").fill_(3.0)
    state, seen = torch.get_rng_state(), list[nn.Module]()
    assert Callbacks([lambda view: seen.append(view.model)]).after(it) is None
    assert type(seen[0]) is Locked and seen[0] is not it.model and bool((seen[0].weight == 3).all())
    assert torch.equal(torch.get_rng_state(), state)


def test_stop_and_exceptions() -> None:
    def raising(view: shoal.MemberView) -> None:
        raise KeyError("no such metric")

    line = raising.__code__.co_firstlineno + 1
    failed = Ending(
        "failed",
        "the callback test_stop_and_exceptions.<locals>.raising raised KeyError: 'no such metric' "
        f"(test_callbacks.py:{line})",
    )
    it = member()
    assert Callbacks([lambda view: view.stop("too slow")]).after(it) == Ending("stopped", "too slow")
    assert Callbacks([lambda view: view.stop()]).after(it) == Ending("stopped", None)
    assert Callbacks([raising]).after(it) == failed
    both = [lambda view: view.stop("first"), raising, lambda view: view.stop("last")]
    assert Callbacks(both).after(it) == failed, "an error is not hidden by a stop"
    assert Callbacks(both[::2]).after(it) == Ending("stopped", "first")
    with pytest.raises(KeyboardInterrupt):
        Callbacks([lambda view: (_ for _ in ()).throw(KeyboardInterrupt())]).after(it)


def test_at_a_member_s_end() -> None:
    it = member()
    it.epoch = 3
    assert Callbacks([lambda view: view.stop("late")]).after(it) is None, "it has had its length: done, not stopped"
    it.status = "done"
    assert Callbacks([lambda view: view.stop("late")]).after(it) is None

    def raising(view: shoal.MemberView) -> None:
        raise OSError("disk full")

    ending = Callbacks([raising]).after(it)
    assert ending is not None and ending.status == "failed"
    it.status, it.error = "diverged", "the loss became inf"
    with pytest.warns(shoal.ShoalWarning, match=r"a \(diverged\): the callback .* raised OSError: disk full"):
        assert Callbacks([raising]).after(it) is None, "what ended it stays"


def test_a_callback_that_raised_for_a_member_is_not_called_for_it_again() -> None:
    calls: list[str] = []

    def raising(view: shoal.MemberView) -> None:
        calls.append(view.status)
        raise OSError("disk full")

    it = member()
    callbacks = Callbacks([raising, lambda view: calls.append("other")])
    assert callbacks.after(it) is not None
    it.status = "failed"
    assert callbacks.after(it) is None
    assert calls == ["running", "other", "other"]


def test_a_view_that_was_kept() -> None:
    it, kept = member(), list[shoal.MemberView]()
    Callbacks([kept.append]).after(it, lambda: pytest.fail("a stale unit was asked"))
    with pytest.raises(ViewError, match="model of 'a' was asked for after its callback had returned"):
        _ = kept[0].model
    with pytest.raises(shoal.ShoalError, match=r"stop\(\) of 'a'"):
        kept[0].stop()
    assert kept[0].metrics["loss"] == 0.5


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (print, "callbacks is <built-in function print>; pass a list"),
        ("abc", "callbacks is 'abc'; pass a list"),
        ([print, 3], "a callback is 3; pass a function"),
        ([shoal.TensorBoard], "a callback is the class TensorBoard; pass an object of it"),
    ],
)
def test_what_is_no_callback(given: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Callbacks(given)


def test_async_callbacks_are_refused() -> None:
    async def later(view: shoal.MemberView) -> None: ...

    with pytest.raises(ValueError, match="is async and would never be awaited"):
        Callbacks([later])
    assert not Callbacks(None) and not Callbacks([]) and Callbacks([print])


class Watcher:
    """Only watches."""

    only_watches = True

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, view: shoal.MemberView) -> None:
        self.what(view)


def test_callbacks_that_only_watch_listen() -> None:
    it, seen = member(), list[tuple[str, int]]()
    callbacks = Callbacks([Watcher(lambda view: seen.append((view.status, view.epoch)))])
    assert not callbacks and callbacks.after(it) is None and seen == []
    listeners = Listeners(callbacks.listeners())
    listeners(new_event("start"))
    listeners(new_event("join", it, tier="stacked", unit=1, size=1))
    listeners(new_event("epoch", it, **it.history[-1]))
    it.status = "done"
    listeners(new_event("leave", it, status="done"))
    assert seen == [("running", 1), ("done", 1)]


@pytest.mark.parametrize("what", [lambda view: view.model, lambda view: view.stop("x")])
def test_callbacks_that_only_watch_may_do_no_more(what: Any) -> None:
    listeners = Listeners(Callbacks([Watcher(what)]).listeners())
    with pytest.warns(shoal.ShoalWarning, match="Watcher raised ViewError: Watcher has only_watches set"):
        listeners(new_event("epoch", member()))
    assert not listeners


def opaque(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if loss.item() < -1:  # Python looks at the value: this cannot be stacked
        raise ValueError("negative")
    return loss


def test_a_run_with_callbacks_and_members_that_nobody_touches() -> None:
    """The model is up to date on every tier, a stop and an error cost only their own member, and the others keep
    their bits."""
    jobs = [job(seed=s, name=f"s{s}") for s in range(6)]
    jobs += [job(seed=s, name=f"o{s}", loss=None, step=opaque) for s in range(2)]
    losses: dict[str, list[float]] = {}
    ends: dict[str, str] = {}

    def look(view: shoal.MemberView) -> None:
        if view.status != "running":
            ends[view.name] = view.status
        elif view.name in ("s0", "o0"):
            with torch.no_grad():
                losses.setdefault(view.name, []).append(float(F.cross_entropy(view.model.eval()(X), Y)))
        if view.name == "s1" and view.epoch == 2:
            view.stop("enough")
        if view.name == "s2" and view.epoch == 1:
            raise RuntimeError("no")

    plain = shoal.train(jobs, device="cpu", deterministic=True)
    results = shoal.train(jobs, device="cpu", deterministic=True, callbacks=[look])
    found = {r.name: r for r in results}
    assert {name: r.status for name, r in found.items() if name != "s2"} == ends, "it raised for s2: not called again"
    assert (found["s1"].status, found["s1"].error, len(found["s1"].history)) == ("stopped", "enough", 2)
    assert found["s2"].status == "failed" and "raised RuntimeError: no" in str(found["s2"].error)
    for before, after in zip(plain, results, strict=True):
        if after.status == "done":
            old, new = before.model.state_dict(), after.model.state_dict()
            assert all(torch.equal(old[name], new[name]) for name in old), after.name
    for name in ("s0", "o0"):
        with torch.no_grad():
            last = float(F.cross_entropy(found[name].model(X), Y))
        assert losses[name][-1] == pytest.approx(last) and len(set(losses[name])) == 3


def test_callbacks_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKERS", "2")
    seen: list[str] = []
    shoal.train([job(seed=s) for s in range(4)], device="cpu", callbacks=[lambda view: seen.append(view.name)])
    assert sorted(set(seen)) == ["job-0", "job-1", "job-2", "job-3"] and len(seen) == 4 * (3 + 1)


def test_best_weights_at_the_end() -> None:
    models: dict[str, nn.Module] = {}
    jobs = [job(seed=s, hparams={"lr": 1.0}, keep="best", val=(X, Y)) for s in range(3)]

    def keep(view: shoal.MemberView) -> None:
        if view.status == "done":
            models[view.name] = view.model

    for result in shoal.train(jobs, device="cpu", callbacks=[keep]):
        assert torch.equal(result.model.get_parameter("weight"), models[result.name].get_parameter("weight"))


class Decides:
    """Ends the worse half of the members after their second epoch, all together."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []
        self.reached: dict[int, int] = {}

    def __call__(self, view: shoal.MemberView) -> None:
        if view.status == "running":
            self.reached[view.index] = view.epoch

    def after_round(self) -> dict[int, Ending]:
        reached, self.reached = self.reached, {}
        if reached:
            self.rounds.append(sorted(reached))
        return {i: Ending("stopped", "worse") for i, epoch in reached.items() if epoch == 2 and i >= 2}


def test_a_callback_decides_about_all_members_of_a_round() -> None:
    decides = Decides()
    results = shoal.train([job(seed=seed) for seed in range(4)], "cpu", callbacks=[decides], deterministic=True)
    assert decides.rounds == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert [result.status for result in results] == ["done", "done", "stopped", "stopped"]
    assert [len(result.history) for result in results] == [3, 3, 2, 2] and results[3].error == "worse"
    alone = shoal.train([job(seed=3, epochs=2)], "cpu", deterministic=True)[0]
    for name, value in results[3].model.state_dict().items():
        assert torch.equal(value, alone.model.state_dict()[name])


def test_members_that_end_in_the_same_way_end_together() -> None:
    decides, ended = Decides(), list[tuple[set[int], str, str | None]]()
    decides.reached = {0: 2, 2: 2, 3: 2}
    Callbacks([decides, lambda view: None]).after_round(lambda *given: ended.append(given))
    assert ended == [({2, 3}, "stopped", "worse")]
