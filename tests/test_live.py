"""Live runs: commands are carried out between two steps, and the bits of all other jobs are unchanged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, SequentialLR, StepLR
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import shoal
from shoal.engine.runtime.commands import Controls, EndedError
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.reporting.events import Event

pytestmark = pytest.mark.usefixtures("one_thread")
G = torch.Generator().manual_seed(3)
X, Y = torch.randn(50, 6, generator=G), torch.randint(3, (50,), generator=G)
LONG = 10**6


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


class Branching(nn.Module):
    """Python looks at a value: it trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return F.dropout(out if float(out.detach().sum()) > -1e9 else out * 2, 0.2, self.training)


def job(name: str = "a", **changes: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": net, "data": (X, Y), "loss": F.cross_entropy, "hparams": {"lr": 0.01}, "batch_size": 8, "epochs": 6,
    }  # fmt: skip
    return shoal.Job(name=name, **{**given, **changes})


@contextmanager
def live(*jobs: shoal.Job, **settings: Any) -> Iterator[shoal.LiveRun]:
    """A run that is over afterwards."""
    run = shoal.start(list(jobs), device="cpu", **settings)
    try:
        yield run
    finally:
        if run.running:
            for name in run.status():
                run.cancel(name)
        run._thread.join(30)
        assert not run.running


class Gate:
    """Holds the run at one epoch of a job, until somebody's order is in the line."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        member = event.member
        if event.kind == "epoch" and member is not None and (member.name, member.epoch) == (self.name, self.epoch):
            self.reached.set()
            assert self.open.wait(600)


def ordered(
    jobs: list[shoal.Job], epoch: int, *orders: Callable[[shoal.LiveRun], Any], **settings: Any
) -> tuple[list[Any], dict[str, shoal.Result]]:
    """The answers to orders that are carried out right after an epoch of the first job, and what came of the run."""
    gate = Gate(jobs[0].name, epoch)
    run = shoal.start(jobs, device="cpu", events=gate, **settings)
    with ThreadPoolExecutor(len(orders)) as pool:
        assert gate.reached.wait(600)
        answers = []
        for order in orders:
            answers.append(pool.submit(order, run))
            while not answers[-1].done() and run._controls._commands.qsize() < len(answers):
                time.sleep(0.001)
        gate.open.set()
        return [answer.result() for answer in answers], {result.name: result for result in run.wait(600)}


def tensors(result: shoal.Result) -> list[Tensor]:
    leaves = pytree.tree_leaves([result.model.state_dict(), result.optimizer_state])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def same(a: shoal.Result, b: shoal.Result) -> bool:
    """Bit for bit, histories too."""
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]  # noqa: E731
    pairs = zip(tensors(a), tensors(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs) and drop(a.history) == drop(b.history)


def trained(*jobs: shoal.Job) -> list[shoal.Result]:
    return list(shoal.train(list(jobs), device="cpu"))


def test_a_run_nobody_asks_anything_of() -> None:
    jobs = [job("a"), job("b", seed=1), job("c", model=Branching)]
    run = shoal.start(jobs, device="cpu")
    results = run.wait(60)
    assert not run.running and [r.status for r in results] == ["done"] * 3
    assert all(same(a, b) for a, b in zip(results, trained(*jobs), strict=True))
    assert run.wait() is results, "it can be asked for again"


def test_stop_and_cancel() -> None:
    jobs = [job("a"), job("b", seed=1), job("long", epochs=LONG), job("gone", model=Branching, epochs=LONG)]
    answers, found = ordered(jobs, 2, lambda run: run.stop("long"), lambda run: run.cancel("gone"))
    assert answers == [True, True]
    assert (found["long"].status, found["gone"].status) == ("stopped", "cancelled")
    assert len(found["long"].history) == 2, "it ended where it was"
    assert same(found["long"], trained(job("long", epochs=2))[0]), "and has what it had become"
    assert all(same(found[r.name], r) for r in trained(jobs[0], jobs[1])), "the others never heard of it"


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_place_that_is_given_up_goes_to_the_next(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanningContext, "bytes", lambda self, members: len(members))  # room for one at a time
    answers, found = ordered(
        [job("a", epochs=LONG), job("b", seed=1), job("c", seed=2)], 2, lambda run: run.status(),
        lambda run: run.cancel("c"), lambda run: getattr(run, end)("a"), memory=1,
    )  # fmt: skip
    assert answers[0] == {"a": ("running", 2, 14), "b": ("waiting", 0, 0), "c": ("waiting", 0, 0)}
    assert found["a"].status == ("stopped" if end == "stop" else "cancelled")
    assert (found["b"].status, found["c"].status, found["c"].steps) == ("done", "cancelled", 0)


def test_add() -> None:
    first, second = job("b", seed=1, epochs=3), job("", model=Branching, epochs=2)
    answers, found = ordered(
        [job("a", epochs=40)], 2, lambda run: run.add(first), lambda run: run.add(second), lambda run: run.status()
    )
    assert answers[:2] == [None, None] and {"a", "b"} < answers[2].keys()
    assert list(found) == ["a", "b", "job-2"], (
        "jobs that were added come last, and one without a name is named by its place"
    )
    alone = trained(job("a", epochs=40), first, job("job-2", model=Branching, epochs=2))
    assert all(same(found[r.name], r) for r in alone)


@pytest.mark.parametrize("model", [net, Branching])
def test_warm_start(model: Any) -> None:
    """From the weights that the other one has at that moment, with an optimizer and an order of its own."""
    source, target = job("a", model=model, epochs=40), job("b", model=model, seed=5, hparams={"lr": 0.1}, epochs=2)
    _, found = ordered([source], 3, lambda run: run.add(target, warm_start="a"))
    (then,) = trained(job("a", model=model, epochs=3))

    def warmed() -> nn.Module:
        made: nn.Module = model()
        made.load_state_dict(then.model.state_dict())
        return made

    (expected,) = trained(job("b", model=warmed, seed=5, hparams={"lr": 0.1}, epochs=2))
    assert same(found["b"], expected)
    assert same(found["a"], trained(source)[0])


def test_warm_start_of_another_network() -> None:
    with live(job("a", epochs=LONG)) as run:
        with pytest.raises(shoal.JobError, match=r"^job 'b': the weights of 'a' do not fit it \(.*\); warm .*$"):
            run.add(job("b", model=lambda: nn.Linear(6, 3)), warm_start="a")
        with pytest.raises(KeyError, match=r"^no job 'z' in this run; it has 'a'$"):
            run.add(job("b"), warm_start="z")
        assert list(run.status()) == ["a"]


SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "function": {"schedule": lambda step: 0.97**step},
    "torch": {"schedule": lambda optimizer: StepLR(optimizer, 5, 0.7)},
    "epochs": {"schedule": lambda optimizer: CosineAnnealingLR(optimizer, 20), "schedule_every": "epoch"},
    "sequence": {
        "schedule": lambda o: SequentialLR(o, [StepLR(o, 5, 0.5), CosineAnnealingLR(o, 200)], milestones=[30])
    },
    "groups": {"params": lambda m: [{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(m.parameters())]},
    "momentum": {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.01, "momentum": 0.9}},
    "accumulate": {"accumulate": 3},
    "EMA": {"average": shoal.EMA(decay=0.8), "val": (X, Y)},
    "SWA": {"average": shoal.SWA(start_epoch=2, use_buffers=True), "val": (X, Y), "keep": "best"},
    "early stop": {"val": (X, Y), "stop": shoal.EarlyStop("val_loss", patience=50), "keep": "best"},
}


def sources(*without: str) -> list[shoal.Job]:
    kinds = {kind: more for kind, more in SCHEDULES.items() if kind not in without}
    return [
        job(f"{kind} {model.__name__}", model=model, epochs=12, **more)
        for kind, more in kinds.items()
        for model in (net, Branching)
    ]


def test_a_clone_without_changes_goes_where_its_source_goes() -> None:
    jobs = sources()
    clones = [lambda run, name=one.name: run.clone(name, f"twin of {name}") for one in jobs]
    _, found = ordered(jobs, 3, *clones)
    for plain in trained(*jobs):
        assert same(found[plain.name], plain), f"{plain.name}: the source does not notice"
        assert same(found[f"twin of {plain.name}"], plain), plain.name


def test_a_clone_with_another_rate() -> None:
    """Its rates are those of its source times a factor, and the source's are as they were."""
    jobs, change = sources("accumulate", "early stop"), {"lr": 0.001, "weight_decay": 0.5}
    clones = [lambda run, name=one.name: run.clone(name, name + "*", hparams=change, epochs=15) for one in jobs]
    clones += [lambda run, name=one.name: run.clone(name, name + "-", hparams={"weight_decay": 0.3}) for one in jobs]
    (then, *_), found = ordered(jobs, 3, lambda run: run.status(), *clones)
    for plain in trained(*jobs):
        assert [row["lr"] for row in found[plain.name + "-"].history] == [row["lr"] for row in plain.history]
        name, clone = plain.name, found[plain.name + "*"]
        assert same(found[name], plain), name
        (_, epochs, steps), rates = then[name], [row["lr"] for row in plain.history]
        others = [row["lr"] for row in clone.history]
        assert 7 * epochs <= steps < 7 * (epochs + 1), name
        assert others[:epochs] == rates[:epochs] and len(others) == 15, name
        assert others[epochs:12] == pytest.approx([rate / 10 for rate in rates[epochs:]]), name
        assert clone.job.hparams["lr"] == 0.001 and plain.job.hparams["lr"] == 0.01
        assert not torch.equal(tensors(clone)[0], tensors(plain)[0])
        decays = [group["weight_decay"] for group in clone.optimizer_state["param_groups"]]
        own = [0.1 * i for i in range(len(decays))]  # what a group has from `params` is its own
        assert decays == (own if name.startswith("groups") else [0.5])


def test_a_clone_of_one_that_has_ended_or_waits() -> None:
    ema = shoal.EMA(decay=0.8)
    jobs = [job("a", epochs=60), job("b", seed=1, epochs=2, average=ema)]
    _, found = ordered(jobs, 4, lambda run: run.clone("b", "longer", epochs=5), lambda run: run.clone("longer", "c"))
    (expected,) = trained(job("b", seed=1, epochs=5, average=ema))
    assert same(found["longer"], expected) and same(found["c"], expected)


def test_what_a_clone_cannot_have() -> None:
    schedule = {"schedule": lambda o: OneCycleLR(o, 0.1, total_steps=LONG * 7)}
    bad = job("bad", hparams={"lr": 1e38}, optimizer=torch.optim.SGD, model=lambda: nn.Linear(6, 3), epochs=LONG)
    jobs = [job("a", epochs=LONG), bad, job("one", epochs=LONG, **schedule), job("steps", steps=3, epochs=None)]
    with live(*jobs) as run:
        while run.status()["a"][1] < 2 or run.status()["bad"][0] != "diverged":
            time.sleep(0.01)
        for changes, words in [
            ({"model": net}, "clone: model cannot be changed in a clone; it takes hparams, epochs"),
            ({"colour": 3}, "clone: colour cannot be changed"),
            ({"hparams": 3}, "clone: hparams is 3; pass a dict"),
            ({"hparams": {"colour": 3}}, "colour"),
            ({"epochs": 1}, "clone: 'a' has had .* epochs and .* steps.*give it more"),
            ({"epochs": None, "steps": 2}, "clone: 'a' has had .* epochs and .* steps.*give it more"),
            ({"steps": 2}, "both epochs and steps"),
        ]:
            with pytest.raises(shoal.JobError, match=words) as caught:
                run.clone("a", "b", **changes)
            assert "\n" not in str(caught.value)
        for name, words in [("bad", "it has diverged"), ("steps", "within an epoch"), ("z", "no job 'z'")]:
            with pytest.raises(shoal.JobError, match=words):
                run.clone(name, "b", epochs=None, steps=LONG)
        with pytest.raises(shoal.JobError, match="max_lr"):
            run.clone("one", "b", hparams={"lr": 0.5})
        assert list(run.status()) == ["a", "bad", "one", "steps"]


def test_names() -> None:
    with live(job("a", epochs=LONG), job("", seed=1, epochs=LONG)) as run:
        assert list(run.status()) == ["a", "job-1"]
        for ask in (run.stop, run.cancel):
            with pytest.raises(KeyError, match=r"^no job 'b' in this run; it has 'a', 'job-1'$"):
                ask("b")
        for taken in (lambda: run.add(job("a")), lambda: run.add(job("job-1")), lambda: run.clone("a", "job-1")):
            with pytest.raises(shoal.JobError, match=r"the run has a job of this name; give it another$"):
                taken()
        run.add(job("", seed=2))
        run.clone("a", "b")
        with pytest.raises(shoal.JobError, match="of this name"):
            run.add(job("b"))
        assert list(run.status()) == ["a", "job-1", "job-2", "b"]
        with pytest.raises(shoal.JobError, match=r"add: str is not a job; pass a shoal.Job"):
            run.add("a job")  # type: ignore[arg-type]
        with pytest.raises(shoal.JobError, match=r"^job 'odd': .*colour"):
            run.add(job("odd", hparams={"colour": 1}))
        assert run.cancel("b") and not run.cancel("b") and not run.stop("b")
        assert run.running, "a mistake in an order is its giver's, not the run's"


def test_wait_with_a_timeout() -> None:
    with live(job("a", epochs=LONG)) as run:
        with pytest.raises(TimeoutError, match=r"not at its end after 0\.05 seconds; it continues"):
            run.wait(timeout=0.05)
        assert run.running and run.stop("a")
        assert run.wait(60)[0].status == "stopped"


def test_orders_after_the_end() -> None:
    run = shoal.start([job("a", epochs=2), job("b", seed=1, steps=3, epochs=None)], device="cpu")
    run.wait(60)
    assert run.status() == {"a": ("done", 2, 14), "b": ("done", 1, 3)}
    assert run.stop("a") is False and run.cancel("b") is False
    with pytest.raises(KeyError, match="no job 'c'"):
        run.stop("c")
    for late in (lambda: run.add(job("c")), lambda: run.clone("a", "c", epochs=9)):
        with pytest.raises(EndedError, match=r"^the run has ended; begin another one with shoal.start$"):
            late()


def test_an_order_that_comes_in_the_last_moment_is_answered() -> None:
    controls = Controls()
    early = controls.give(lambda run: 1)
    controls.close()
    late = controls.give(lambda run: 1)
    for answer in (early, late):
        assert isinstance(answer.exception(0), EndedError)


def test_a_job_that_is_added_at_the_last_epoch() -> None:
    _, found = ordered([job("a", epochs=2)], 2, lambda run: run.add(job("b", seed=1)))
    assert found["b"].status == "done"


def test_a_run_that_raises() -> None:
    run = shoal.start([job("a"), job("a")], device="cpu")
    for ask in (run.wait, run.status, lambda: run.stop("a")):
        with pytest.raises(shoal.JobError, match="2 jobs have this name"):
            ask()
    with pytest.raises(EndedError):
        run.add(job("b"))
    with pytest.raises(ValueError, match="policy"):
        shoal.start([job("a")], policy="first")


def test_a_job_that_leaves_the_program() -> None:
    def leave() -> nn.Module:
        raise SystemExit("bye")

    with live(job("a", epochs=LONG)) as run:
        with pytest.raises(SystemExit, match="bye"):
            run.add(job("b", model=leave))
        assert run.status()["a"][0] == "running"


def test_data_that_the_run_has_is_not_put_there_again() -> None:
    def sources(run: Run) -> list[tuple[Any, Any]]:
        return [(member.data.source, member.val and member.val.source) for member in run.all_members]

    rows = TensorDataset(X.clone(), Y.clone())
    other = X.clone()
    other[-1, -1] += 1
    orders: list[Callable[[shoal.LiveRun], object]] = [
        lambda run: run.add(job("same tensors", val=(X, Y))),
        lambda run: run.add(job("same numbers", data=rows)),
        lambda run: run.add(job("other numbers", data=(other, Y))),
        lambda run: run.add(job("same other numbers", data=(other.numpy(), Y.numpy()))),
        lambda run: run.add(job("only inputs", data=(X,), loss=None, step=lambda net, batch: net(batch[0]).sum())),
        lambda run: run.clone("a", "clone", hparams={"lr": 0.02}),
        lambda run: run._controls.give(sources).result(),
    ]
    answers, found = ordered([job("a", epochs=12)], 2, *orders)
    first, same_tensors, same_numbers, others, same_others, inputs, clone = answers[-1]
    assert same_tensors[0] is same_tensors[1] is same_numbers[0] is clone[0] is first[0]
    assert others[0] is same_others[0] is not first[0] and inputs[0] is not first[0]
    expected = trained(job("same numbers", data=(X, Y)), job("other numbers", data=(other, Y)))
    assert all(same(found[one.name], one) for one in expected)


def test_progress_knows_newcomers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.reporting.progress.Lines.every", 0.0)
    _, found = ordered([job("a")], 2, lambda run: run.add(job("b", seed=1)), progress=True)
    assert found["b"].status == "done"
    assert "2/2 ended" in capsys.readouterr().err.splitlines()[-1]


def test_a_resumed_run_takes_orders(tmp_path: Path) -> None:
    """Members that ended before the kill keep their places and names."""
    jobs, out = [job("a", epochs=30), job("b", seed=1, epochs=2), job("c", seed=2, epochs=3)], tmp_path / "run"
    killed = shoal.start(jobs, device="cpu", out=out, checkpoint_every="0.01s", callbacks=[_interrupt_at("a", 6)])
    with pytest.raises(KeyboardInterrupt):
        killed.wait(60)
    orders = [
        lambda run: run.status(),
        lambda run: run.add(job("d", seed=3)),
        lambda run: run.clone("c", "e", epochs=6),
    ]
    answers, found = ordered(jobs, 8, *orders, out=out)
    assert answers[0] == {"a": ("running", 8, 56), "b": ("done", 2, 14), "c": ("done", 3, 21)}
    assert list(found) == ["a", "b", "c", "d", "e"]
    expected = trained(*jobs, job("d", seed=3), job("e", seed=2, epochs=6))
    assert all(same(one, other) for one, other in zip(found.values(), expected, strict=True))
    with pytest.raises(shoal.JobError, match="of this name"), live(*jobs, out=tmp_path / "other") as run:
        run.add(job("b"))


def _interrupt_at(name: str, epoch: int) -> Callable[[shoal.MemberView], None]:
    def interrupt(view: shoal.MemberView) -> None:
        if (view.name, view.epoch) == (name, epoch):
            raise KeyboardInterrupt

    return interrupt


def test_ctrl_c_while_waiting_saves_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, out = [job("a", epochs=LONG)], tmp_path / "run"
    run = shoal.start(jobs, device="cpu", out=out)
    join = run._thread.join
    pressed = []

    def ctrl_c(timeout: float | None = None) -> None:
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        join(60)

    monkeypatch.setattr(run._thread, "join", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert not run.running and any((out / "members" / "0000").iterdir())
    with live(*jobs, out=out) as again:
        assert again.status()["a"][2] > 0, "it went on where it was"


def test_the_last_one_is_saved_as_it_ended(tmp_path: Path) -> None:
    jobs, out = [job("a", epochs=LONG), job("b", seed=1, epochs=LONG)], tmp_path / "run"
    _, found = ordered(jobs, 2, lambda run: run.stop("a"), lambda run: run.cancel("b"), out=out)
    results = shoal.train(jobs, device="cpu", out=out)
    assert [r.status for r in results] == ["stopped", "cancelled"]
    assert all(same(r, found[r.name]) and r.steps == 14 for r in results)


def test_a_program_that_does_not_wait(tmp_path: Path) -> None:
    """The run ends with it, saved."""
    program = """
import shoal, torch
x = torch.randn(50, 6)
job = shoal.Job(model=torch.nn.Linear(6, 1), data=(x, x[:, :1]), loss=torch.nn.functional.mse_loss, epochs=10**9)
run = shoal.start([job], device="cpu", out="run")
while run.status()["job-0"][1] < 2:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert any((tmp_path / "run" / "members" / "0000").iterdir())
