"""Networks with a `train()` of their own train and validate as in a plain loop that calls `model.train()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, distance, numbers, whole
from torch import Tensor, nn

import shoal
from shoal.engine.python_state.module_modes import enter_train_mode

X, Y = numbers(1, 24, 6), whole(2, 3, 24)
EPOCHS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()
        ).double()
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


class Frozen(Net):
    """As the documentation of PyTorch's fine-tuning does it; it forgets to return itself."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.features[1].eval()


class Backbone(nn.Linear):
    """Always in eval mode, as part of another network."""

    def train(self, mode: bool = True) -> Backbone:
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Merged(Net):
    """Adds its adapter to the weight for evaluation, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.merged = nn.Parameter(torch.zeros(3, 8).double()), False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if self.merged == mode:
            self.head.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(x) if self.merged else self.head(x) + x @ self.adapter.T


class Cached(Net):
    """Computes something once for evaluation, and forgets it when it trains, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Cached:
        super().train(mode)
        if mode:
            self.table = {}
        return self

    def forward(self, x: Tensor) -> Tensor:
        scale = self.head.weight.abs().mean()
        if not self.training:
            scale = self.table.setdefault("scale", scale)
        out: Tensor = self.head(self.features(x)) * scale
        return out


class Thawed(Net):
    """Freezes its features while `frozen`."""

    frozen = True

    def train(self, mode: bool = True) -> Thawed:
        super().train(mode)
        self.features.train(mode and not self.frozen)
        return self


def backboned() -> nn.Module:
    return nn.Sequential(Backbone(6, 8, dtype=torch.float64), nn.Dropout(0.2), nn.Linear(8, 3, dtype=torch.float64))


def patched() -> nn.Module:
    """One module's `train()` does nothing, which an object may have too."""
    net = Net()
    net.features.eval()
    net.features.train = lambda mode=True: net.features  # type: ignore[method-assign]
    return net


def jobs(make: Callable[[], nn.Module], **settings: Any) -> list[shoal.Job]:
    common = {"data": (X, Y), "val": (X, Y), "batch_size": 8, "epochs": EPOCHS, "loss": F.cross_entropy} | settings
    return [
        shoal.Job(model=make, seed=seed, hparams={"lr": 0.02 * (seed + 1)}, name=str(seed), **common)
        for seed in range(3)
    ]


def looking_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Which cannot be stacked."""
    assert outputs.sum().item() < 1e9
    return F.cross_entropy(outputs, targets)


def plain_loop(job: shoal.Job, between: Callable[[int], None] = lambda epoch: None) -> tuple[nn.Module, list[float]]:
    """Trained as PyTorch's tutorials do it; its validation losses."""
    torch.manual_seed(job.seed)
    model: nn.Module = job.model()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for rows in torch.randperm(24, generator=order).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(sum(float(F.cross_entropy(model(X[i : i + 8]), Y[i : i + 8])) for i in (0, 8, 16)) / 3)
        between(epoch)
    return model, losses


def assert_same_weights(result: shoal.Result, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert distance(result.model.state_dict()[name], value) < 1e-9, name


@pytest.mark.parametrize("make", [Frozen, backboned, Merged, Cached, patched])
@pytest.mark.parametrize("tier", ["stacked", "serial", "reference"])
def test_its_train_method_is_called_as_in_a_plain_loop(make: Callable[[], nn.Module], tier: str) -> None:
    made = jobs(make, loss=looking_loss if tier == "serial" else F.cross_entropy)
    results = [shoal.solo(job) for job in made] if tier == "reference" else shoal.train(made, device="cpu")
    assert {result.tier for result in results} == {tier}
    for job, result in zip(made, results, strict=True):
        model, losses = plain_loop(job)
        assert_same_weights(result, model)
        assert [row["val_loss"] for row in result.history] == pytest.approx(losses, rel=1e-9)
        assert not result.model.training


def test_a_train_method_may_do_something_else_from_an_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thawed, "frozen", True)

    def thaw(view: shoal.MemberView) -> None:
        Thawed.frozen = view.epoch < 2

    made = jobs(Thawed, val=None)
    results = shoal.train(made, device="cpu", callbacks=[thaw])
    for job, result in zip(made, results, strict=True):
        Thawed.frozen = True
        model, _ = plain_loop(job, lambda epoch: setattr(Thawed, "frozen", epoch + 1 < 2))
        assert_same_weights(result, model)


class Counted(nn.Linear):
    """Counts how often it is put into train mode, and computes with the number."""

    count = 0

    def train(self, mode: bool = True) -> Counted:
        self.count += mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.count)


def test_a_train_method_is_called_after_each_validation_of_a_stack_too() -> None:
    made = jobs(lambda: Counted(X.shape[1], 3, dtype=X.dtype), val=(X, Y))
    results = shoal.train(made, device="cpu")
    assert {result.tier for result in results} == {"stacked"}
    for job, result in zip(made, results, strict=True):
        alone = shoal.solo(job)
        assert_same_weights(result, alone.model)
        assert [row["val_loss"] for row in result.history] == pytest.approx([row["val_loss"] for row in alone.history])
        assert result.model.count == alone.model.count


def test_what_was_built_in_eval_mode_stays_so() -> None:
    def build() -> nn.Module:
        net = Frozen()
        net.features[2].eval()  # no dropout
        return net

    assert_as_alone(jobs(build))
    net = build()
    enter_train_mode(net, frozenset({"features.2"}))
    assert [module.training for module in net.features] == [True, False, False, True]


def test_an_error_of_a_train_method_is_the_jobs() -> None:
    class Refuses(Net):
        def train(self, mode: bool = True) -> Refuses:
            raise RuntimeError("not me")

    with pytest.raises(shoal.JobError, match=r"model.train\(\) raised RuntimeError: not me"):
        shoal.train(jobs(Refuses), device="cpu")
