"""Optimizers with train() and eval() of schedulefree: as its README's loop, in every tier, wherever a member goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_close, assert_same_bits, distance, numbers, train, whole
from torch import Tensor, nn

import shoal
from shoal.reference import solo

schedulefree = pytest.importorskip("schedulefree")
pytestmark = pytest.mark.integrations

X, Y = numbers(1, 22, 6), whole(2, 3, 22)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def job(name: str, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "val": (X[:9], Y[:9]), "loss": F.cross_entropy, "batch_size": 4, "epochs": 4,
        "optimizer": schedulefree.AdamWScheduleFree, "hparams": {"lr": 0.02, "warmup_steps": 5},
    }  # fmt: skip
    return shoal.Job(name=name, **(settings | changes))


KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer": schedulefree.SGDScheduleFree, "hparams": {"lr": 0.5, "momentum": 0.8}},
    "RAdam": {"optimizer": schedulefree.RAdamScheduleFree, "hparams": {"lr": 0.01}},
    "loop over weights": {"hparams": {"lr": 0.02, "foreach": False}},
    "best": {"keep": "best", "hparams": {"lr": 0.3}},
    "within epochs": {"val_every_steps": 2, "keep": "best"},
    "rare validation": {"val_every": 2, "epochs": None, "steps": 15},
    "accumulate": {"accumulate": 2},
    "made by a function": {"optimizer": lambda params, **more: schedulefree.SGDScheduleFree(params, **more),
                           "hparams": {"lr": 0.5}},
}  # fmt: skip


def jobs(**changes: Any) -> list[shoal.Job]:
    return [job(name, seed=seed, **(KINDS[name] | changes)) for seed, name in enumerate(KINDS)]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_reference_is_the_readmes_loop(name: str) -> None:
    one = job(name, **KINDS[name])
    torch.manual_seed(0)
    model = net()
    optimizer: Any = one.optimizer(model.parameters(), **one.hparams)
    order = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(4):
        model.train()
        optimizer.train()
        for rows in torch.randperm(22, generator=order).split(4):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            pairs = zip(X[:9].split(4), Y[:9].split(4), strict=True)
            losses.append(sum(float(F.cross_entropy(model(x), y)) * len(x) for x, y in pairs) / 9)
    result = solo(one)
    assert [row["val_loss"] for row in result.history] == pytest.approx(losses, rel=1e-10)
    for key, value in model.state_dict().items():
        assert distance(result.model.state_dict()[key], value) < 1e-10, key
    assert not result.optimizer_state["param_groups"][0]["train_mode"]
    resumed: Any = one.optimizer(result.model.parameters(), **one.hparams)
    resumed.load_state_dict(result.optimizer_state)
    resumed.train()
    for key, value in result.model.named_parameters():
        assert distance(value, result.training_weights[key]) < 1e-12, key


def test_stacked_and_alone() -> None:
    together = jobs()
    for result, one in zip(assert_as_alone(together), together, strict=True):
        for key, value in solo(one).training_weights.items():
            assert distance(result.training_weights[key], value) < 1e-9, key
    for result, one in zip(train(jobs(model=Branch)), jobs(model=Branch), strict=True):
        assert result.tier == "serial"
        assert_close(result, solo(one))


def test_gradients_that_share_memory() -> None:
    """These optimizers write to the gradients, and in a stack two weights that are added have one gradient."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(numbers(seed, 6, 3)) for seed in (4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a + self.b)

    assert_as_alone([job(f"{seed}", model=Added, seed=seed) for seed in range(3)])


def test_killed_resumed_and_made_longer(tmp_path: Path) -> None:
    def run(out: Path | None, epochs: int, kill_after: int = 0) -> shoal.Results:
        written = 0

        def kill(event: shoal.Event) -> None:
            nonlocal written
            written += event.kind == "checkpoint"
            if written == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        named = jobs(epochs=epochs, steps=None)
        named.append(job("branch", model=Branch, epochs=epochs))
        return shoal.train(
            named, device="cpu", threads=1, out=out, checkpoint_every=0.001, deterministic=True, progress=False,
            events=kill if kill_after else None,
        )  # fmt: skip

    pid = os.fork()
    if pid == 0:
        try:
            run(tmp_path, 6, kill_after=3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert any(result.status == "unfinished" and result.steps for result in shoal.load(tmp_path))
    for epochs in (6, 9):
        for resumed, left_alone in zip(run(tmp_path, epochs), run(None, epochs), strict=True):
            assert_same_bits(resumed, left_alone)


def test_a_callback_sees_the_weights_of_eval_mode() -> None:
    seen: list[Tensor] = []

    def look(view: shoal.MemberView) -> None:
        seen.append(next(view.model.parameters()).detach().clone())

    result = shoal.train([job("a")], device="cpu", callbacks=[look])[0]
    assert torch.equal(seen[-1], next(result.model.parameters()))


@pytest.mark.parametrize("kind", [net, Branch])
def test_in_a_loop_of_ones_own(kind: Any) -> None:
    models = [kind() for _ in range(3)]
    pack = shoal.Pack(models, optimizer=schedulefree.SGDScheduleFree, hparams={"lr": 0.5}, loss=F.cross_entropy)
    optimizers = [schedulefree.SGDScheduleFree(model.parameters(), lr=0.5) for model in models]
    for rows in torch.arange(20).split(5):
        pack.step(X[rows], Y[rows])
        pack.eval(X)  # changes nothing
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.train()
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for a, b in zip(pack.member(place).parameters(), model.parameters(), strict=True):
            assert distance(a, b) < 1e-9, "in train mode"
        optimizer.eval()
        assert distance(pack.eval(X)[place], model.eval()(X)) < 1e-9


def test_what_does_not_go_with_it() -> None:
    with pytest.raises(shoal.JobError, match="AdamWScheduleFree averages the weights itself; leave average= out"):
        shoal.train([job("a", average=shoal.EMA())], device="cpu")
    with pytest.raises(shoal.JobError, match="AdamWScheduleFree has a train and an eval mode"):
        shoal.split.local_sgd(job("a"), workers=2)
    wrapped = lambda params, lr: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(params, lr))  # noqa: E731
    with pytest.raises(shoal.JobError, match="optimizer built a ScheduleFreeWrapper; use a torch"):
        shoal.train([job("a", optimizer=wrapped, hparams={"lr": 0.1})])
