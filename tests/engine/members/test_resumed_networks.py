"""Networks that a step changes beside its weights: what it unfreezes or freezes, and shapes that come late, over a
resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import numbers
from torch import Tensor, nn

import shoal
from shoal.reference import solo

X, Y = numbers(1, 40, 4), torch.arange(40) % 3


class Unfreezing(nn.Module):
    """The first layer is trained from the n-th call on, and the second one no longer."""

    def __init__(self, first: int = 9) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 3).double())
        self.a.requires_grad_(False)
        self.calls, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == self.first:
                self.a.requires_grad_(True)
                self.b.requires_grad_(False)
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": Unfreezing, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "epochs": 5, "seed": seed,
        "name": f"{seed}", "optimizer": torch.optim.Adam, "hparams": {"lr": 0.02},
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


def interrupted_and_resumed(jobs: list[shoal.Job], folder: Path, calls: int) -> shoal.Results:
    """Interrupt a run when a callback is called for the n-th time, and return the results of the same call again."""

    def interrupt(view: Any) -> None:
        if next(number) == calls:
            raise KeyboardInterrupt

    number = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):
        shoal.train(jobs, device="cpu", out=folder, callbacks=[interrupt], checkpoint_every=1e-4)
    return shoal.train(jobs, device="cpu", out=folder)


def only_trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("params", [None, only_trained, lambda model: iter(only_trained(model))])
@pytest.mark.parametrize("interrupted", range(1, 6))
def test_an_interrupted_run_goes_on_with_the_same_layers(
    params: Callable[[nn.Module], Any] | None, interrupted: int, tmp_path: Path
) -> None:
    jobs = [job(seed, params=params) for seed in range(2)]
    for result, own in zip(interrupted_and_resumed(jobs, tmp_path, interrupted), jobs, strict=True):
        expected = solo(own)
        assert [p.requires_grad for p in result.model.parameters()] == [True, True, False, False, True, True]
        for a, b in zip(result.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class OwnLazyBuffer(nn.Module):
    """A buffer that gets its shape with the first batch, without torch's lazy modules."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("scale", nn.UninitializedBuffer(dtype=torch.float64))  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.scale, nn.UninitializedBuffer):
            self.scale = x.detach().std(0) + 1
        out: Tensor = self.layer(x / self.scale)
        return out


def test_a_buffer_that_gets_its_shape_late_is_resumed(tmp_path: Path) -> None:
    jobs = [job(seed, model=OwnLazyBuffer) for seed in range(2)]
    for result, own in zip(interrupted_and_resumed(jobs, tmp_path, 3), jobs, strict=True):
        expected = solo(own).model.state_dict()
        for name, value in result.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("params", [None, only_trained])
def test_a_clone_trains_the_same_layers(params: Callable[[nn.Module], Any] | None) -> None:
    def clone(view: Any) -> None:
        if view.epoch == 3 and view.name == "0":
            view.run.clone("0", "clone")

    results = shoal.start([job(0, params=params)], device="cpu", callbacks=[clone]).wait()
    expected = solo(job(0, params=params)).model.state_dict()
    for result in results:
        assert result.status == "done", result.error
        for name, value in result.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


class Registering(Unfreezing):
    """A buffer that its state_dict() leaves out appears with the third call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 2:
            self.register_buffer("extra", torch.ones(2), persistent=False)
        return super().forward(x)


def test_a_buffer_that_a_step_adds_stays_out_of_the_state_dict(tmp_path: Path) -> None:
    jobs = [job(seed, model=Registering) for seed in range(2)]
    for result in interrupted_and_resumed(jobs, tmp_path, 3):
        assert result.status == "done" and hasattr(result.model, "extra") and "extra" not in result.model.state_dict()


class CountsModes(nn.Module):
    """Its own `train()` counts calls, and scales the output by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.calls = 0

    def train(self, mode: bool = True) -> CountsModes:
        self.calls += mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:  # cannot be traced
            return x
        out: Tensor = self.layer(x) * (1 + 0.1 * self.calls)
        return out


def test_train_of_the_users_own_is_called_once_for_each_validation() -> None:
    jobs = [
        job(
            seed,
            model=CountsModes,
            val=(X[:9], Y[:9]),
            metrics={"right": lambda o, y: (o.argmax(1) == y).double().mean()},
        )
        for seed in range(3)
    ]
    for result, own in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        expected = solo(own)
        assert result.tier == "serial" and result.model.calls == expected.model.calls
        for name, value in result.model.state_dict().items():
            torch.testing.assert_close(value, expected.model.state_dict()[name], rtol=1e-9, atol=1e-12)
        assert [row["right"] for row in result.history] == [row["right"] for row in expected.history]
