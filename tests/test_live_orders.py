"""Orders from callbacks and listeners, results as jobs end, statuses with values."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.test_live import LONG, Branching, Gate, X, Y, job, live, same, trained

import shoal
from shoal.errors import ShoalError, ShoalWarning
from shoal.reporting.callbacks import ViewError
from shoal.reporting.events import Event

pytestmark = pytest.mark.usefixtures("one_thread")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_has_the_latest_values() -> None:
    more: dict[str, Any] = {"val": (X, Y), "metrics": {"accuracy": accuracy}, "epochs": 3}
    gate = Gate("a", 3)
    jobs = [job("a", **more), job("rare", seed=1, val_every=2, **more), job("none", epochs=2)]
    run = shoal.start(jobs, device="cpu", events=gate, deterministic=True)
    assert gate.reached.wait(60)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.status)
        gate.open.set()
        status = asked.result(60)
    results = {result.name: result for result in run.wait(60)}
    state, epochs, steps = status["a"]
    assert (state, epochs, steps) == ("done", 3, 21) == status["a"], "a tuple of three, as ever"
    for now in (status["a"], run.status()["a"]):
        expected = {k: v for k, v in results["a"].history[-1].items() if k not in ("epoch", "step", "seconds")}
        assert now.values == expected and {"loss", "val_loss", "accuracy", "lr"} == now.values.keys()
    assert set(run.status()["none"].values) == {"loss", "lr"}
    again = pickle.loads(pickle.dumps(status["a"]))
    assert again == status["a"] and again.values == status["a"].values and "val_loss" in repr(again)


def test_status_gives_the_last_validation_there_was() -> None:
    jobs = [
        job("rare", val=(X, Y), val_every=2, epochs=LONG),
        job("within", val=(X, Y), val_every_steps=3, epochs=LONG, seed=1),
    ]
    seen: list[dict[str, shoal.JobStatus]] = []

    def look(view: shoal.MemberView) -> None:
        if view.epoch == 3 and view.status == "running":
            seen.append(view.run.status())
            view.stop()

    run = shoal.start(jobs, device="cpu", callbacks=[look])
    rare, within = run.wait(60)
    row = rare.history
    values = seen[0]["rare"].values
    assert (values["loss"], values["val_loss"]) == (row[2]["loss"], row[1]["val_loss"])
    assert "val_loss" not in row[2] and seen[0]["rare"].status == "running"
    assert within.validations and "val_loss" in seen[-1]["within"].values


# --- as_completed ---------------------------------------------------------------------------------------------------


def test_as_completed_gives_results_as_jobs_end() -> None:
    jobs = [job("long", epochs=40), job("short", seed=1, epochs=2), job("other", model=Branching, epochs=1)]
    run = shoal.start(jobs, device="cpu")
    found = list(run.as_completed(timeout=60))
    assert sorted(r.name for r in found) == ["long", "other", "short"] and found[-1].name == "long"
    assert [r.name for r in run.as_completed()] == ["long", "short", "other"], "after the end: all of them, in order"
    results = run.wait(60)
    for result in found:
        assert same(result, results[result.name]) and not result.model.training
        assert all(same(r, results[r.name]) for r in trained(*jobs))


def test_a_result_that_was_given_is_a_copy() -> None:
    """What its owner does to it reaches neither a clone nor the results of `wait`."""
    run = shoal.start([job("a", epochs=2)], device="cpu", keep_open=True)
    for result in run.as_completed(timeout=60):
        if result.name == "a":
            with torch.no_grad():
                for tensor in result.model.parameters():
                    tensor.zero_()
            for state in result.optimizer_state["state"].values():
                state["exp_avg"].fill_(3.0)
            run.clone("a", "b", epochs=5)
    found = run.wait(60)
    assert all(same(a, b) for a, b in zip(found, trained(job("a", epochs=2), job("b", epochs=5)), strict=True))


def test_as_completed_includes_jobs_that_are_added() -> None:
    run = shoal.start([job("0", epochs=1)], device="cpu", keep_open=True)
    names = []
    for result in run.as_completed(timeout=60):
        names.append(result.name)
        if len(names) < 4:
            run.add(job(str(len(names)), seed=len(names), epochs=1))
    assert names == ["0", "1", "2", "3"] and run.running, "a run that is kept open waits for more"
    run.add(job("later", epochs=1))
    assert [r.name for r in run.wait(60)] == [*names, "later"] and not run.running


def test_as_completed_while_another_thread_adds() -> None:
    count = 12
    run = shoal.start([job("first", epochs=3)], device="cpu", keep_open=True)

    def add(thread: int) -> None:
        for number in range(count // 2):
            run.add(job(f"{thread}-{number}", seed=thread * 10 + number, epochs=1 + number % 2))

    with ThreadPoolExecutor(3) as pool:
        adding = [pool.submit(add, thread) for thread in (1, 2)]
        watching = pool.submit(lambda: [r.name for r in run.as_completed(timeout=120)])
        for one in adding:
            one.result()
        first = watching.result()
    rest = [r.name for r in run.as_completed(timeout=120)]
    assert len(first) == len(set(first)) and set(first) <= set(rest) and len(rest) == count + 1
    assert {r.name for r in run.wait(60)} == set(rest)
    assert all(r.status == "done" for r in run.wait())


def test_as_completed_with_a_timeout() -> None:
    with live(job("a", epochs=LONG), job("b", seed=1, epochs=1)) as run:
        assert next(run.as_completed(timeout=60)).name == "b"
        with pytest.raises(TimeoutError, match=r"^not all jobs have ended after 0\.2 seconds; the run continues$"):
            list(run.as_completed(timeout=0.2))
        assert run.running


def test_as_completed_of_a_run_that_raises() -> None:
    run = shoal.start([job("a"), job("a")], device="cpu", keep_open=True)
    with pytest.raises(shoal.JobError, match="2 jobs have this name"):
        next(run.as_completed(timeout=60))


def test_ctrl_c_in_as_completed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = shoal.start([job("a", epochs=LONG)], device="cpu")

    def ctrl_c(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._controls, "wait_for_an_end", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        next(run.as_completed(timeout=60))
    assert not run.running


def test_a_run_that_is_kept_open_ends_with_the_program() -> None:
    run = shoal.start([job("a", epochs=1)], device="cpu", keep_open=True)
    assert [r.name for r in run.as_completed(timeout=60)] == ["a"] and run.running
    run._interrupt_at_exit()
    assert not run.running and [r.status for r in run.wait(1)] == ["done"]


# --- orders from callbacks ------------------------------------------------------------------------------------------


def test_a_callback_gives_orders() -> None:
    """Done after the step; the job whose callback it is, is then at the end of this very epoch."""
    answers: list[Any] = []

    def order(view: shoal.MemberView) -> None:
        if (view.name, view.epoch, view.status) != ("a", 3, "running"):
            return
        answers.append(view.run.clone("a", "twin", epochs=6))
        answers.append(view.run.clone("twin", "twin of it"))
        answers.append(view.run.clone("a", "slow", hparams={"lr": 0.0001}, epochs=3 + 3))
        answers.append(view.run.add(job("new", seed=4, epochs=2)))
        answers.append(view.run.stop("long"))
        answers.append(view.run.cancel("gone"))
        assert "twin" not in view.run.status() and view.run.status()["a"].epochs == 3

    jobs = [job("a"), job("b", seed=1), job("long", seed=2, epochs=LONG), job("gone", model=Branching, epochs=LONG)]
    run = shoal.start(jobs, device="cpu", callbacks=[order], deterministic=True)
    found = {result.name: result for result in run.wait(60)}
    assert answers == [None] * 6
    assert list(found) == ["a", "b", "long", "gone", "twin", "twin of it", "slow", "new"]
    assert (found["long"].status, found["gone"].status) == ("stopped", "cancelled")
    alone = {r.name: r for r in shoal.train([*jobs[:2], job("new", seed=4, epochs=2)], "cpu", deterministic=True)}
    assert all(same(found[name], result) for name, result in alone.items()), "others are unchanged, bit for bit"
    assert same(found["twin"], alone["a"]) and same(found["twin of it"], alone["a"])
    slow, rates = found["slow"], [0.01] * 3 + [0.0001] * 3
    assert [row["lr"] for row in slow.history] == rates and slow.history[:3] == found["a"].history[:3]


def test_a_listener_gives_orders() -> None:
    runs: list[shoal.LiveRun] = []
    begun = threading.Event()

    def order(event: Event) -> None:
        assert begun.wait(60)
        if event.kind == "epoch" and event.member is not None and event.member.name == "a" and event.member.epoch == 2:
            runs[0].stop("a")
            runs[0].add(job("b", seed=1, epochs=1))

    runs.append(shoal.start([job("a", epochs=LONG)], device="cpu", events=order))
    begun.set()
    a, b = runs[0].wait(60)
    assert (a.status, len(a.history), b.status) == ("stopped", 2, "done")


def test_a_callback_that_stops_its_own_job_in_its_last_epoch() -> None:
    def order(view: shoal.MemberView) -> None:
        if view.epoch == 2:
            view.run.stop(view.name)
            if view.status != "running":
                view.run.clone(view.name, view.name + "*", epochs=4) if view.name == "a" else None

    found = shoal.start([job("a", epochs=2), job("b", seed=1, epochs=2)], device="cpu", callbacks=[order]).wait(60)
    assert {r.name: (r.status, len(r.history)) for r in found} == {
        "a": ("done", 2),
        "b": ("done", 2),
        "a*": ("done", 4),
    }
    assert same(found["a*"], trained(job("a*", epochs=4))[0])


def test_a_mistake_in_a_callbacks_order_is_a_warning() -> None:
    def order(view: shoal.MemberView) -> None:
        if view.epoch == 1 and view.status == "running":
            view.run.clone("a", "b")
            view.run.stop("z")

    with pytest.warns(ShoalWarning) as caught:
        results = shoal.start([job("a"), job("b", seed=1)], device="cpu", callbacks=[order]).wait(60)
    assert [r.status for r in results] == ["done", "done"]
    texts = {str(one.message) for one in caught}
    taken = "clone('a', 'b'), called in a callback or a listener, failed: job 'b': the run has a job of this name"
    assert any(text.startswith(taken) for text in texts)
    assert any(text.startswith("stop('z'), called in") and "no job 'z'" in text for text in texts)


def test_a_callback_that_raises_after_its_orders() -> None:
    def order(view: shoal.MemberView) -> None:
        if view.epoch == 2 and view.status == "running" and view.name == "a":
            view.run.add(job("new", seed=2, epochs=1))
            raise RuntimeError("no")

    found = shoal.start([job("a"), job("b", seed=1)], device="cpu", callbacks=[order]).wait(60)
    assert {r.name: r.status for r in found} == {"a": "failed", "b": "done", "new": "done"}
    assert same(found["b"], trained(job("b", seed=1))[0])


def test_what_a_callback_cannot_ask() -> None:
    def ask(view: shoal.MemberView) -> None:
        for wait in (view.run.wait, view.run.as_completed):
            with pytest.raises(ShoalError, match=r"in a callback or a listener would deadlock"):
                wait()

    assert [r.status for r in shoal.start([job("a", epochs=1)], device="cpu", callbacks=[ask]).wait(60)] == ["done"]

    def order(view: shoal.MemberView) -> None:
        with pytest.raises(ViewError, match=r"cannot be controlled; start it with shoal.start\(jobs, callbacks="):
            view.run  # noqa: B018

    assert [r.status for r in shoal.train([job("a", epochs=1)], device="cpu", callbacks=[order])] == ["done"]


def test_two_threads_give_orders_at_once() -> None:
    run = shoal.start([job("a", epochs=LONG), job("b", seed=1, epochs=LONG)], device="cpu", keep_open=True)

    def work(source: str) -> Iterator[str]:
        for number in range(4):
            run.clone(source, f"{source}{number}")
            yield f"{source}{number}"
            assert run.stop(f"{source}{number}")
        assert run.stop(source)

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda name: list(work(name)), name) for name in ("a", "b")]
        names = [name for one in asked for name in one.result(120)]
    found = run.wait(60)
    assert {r.name for r in found} == {"a", "b", *names} and {r.status for r in found} == {"stopped"}
    for result in found:
        source = found[result.name[0]]
        count = len(result.history)
        drop = [{k: v for k, v in row.items() if k != "seconds"} for row in source.history[:count]]
        assert drop == [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
