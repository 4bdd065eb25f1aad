"""Hooks on parameters and modules: never left out, never set twice; what a copy would lose is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, reasons, train, whole
from torch import Tensor, nn

import shoal

X, Y = numbers(1, 20, 6), whole(2, 3, 20)
MASK = (torch.arange(48).reshape(8, 6) % 2).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x.detach().requires_grad_(torch.is_grad_enabled()))))
        return out


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


HOOKS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "scale": (lambda m: m.a.weight.register_hook(lambda grad: grad * 0.1), "a.weight has a gradient hook"),
    "clamp": (lambda m: m.b.bias.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2)), "b.bias has a gradient hook"),
    "mask": (lambda m: m.a.weight.register_hook(lambda grad: grad * MASK), "a.weight has a gradient hook"),
    "after accumulation": (
        lambda m: m.a.weight.register_post_accumulate_grad_hook(halve), "a.weight has a gradient hook"
    ),
    "backward": (
        lambda m: m.b.register_full_backward_hook(lambda module, given, out: (given[0] * 0.1,)), "has a backward hook"
    ),
    "before backward": (
        lambda m: m.b.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.1,)), "has a backward hook"
    ),
    "forward": (lambda m: m.a.register_forward_hook(lambda module, given, out: out * 0.5), ""),
    "before forward": (lambda m: m.a.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,)), ""),
}  # fmt: skip


def hooked(name: str) -> Net:
    model = Net()
    HOOKS[name][0](model)
    return model


def job(seed: int = 0, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "batch_size": 4, "epochs": 2, "model": Net}
    settings |= {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.5}, "seed": seed, "name": f"{seed}"}
    return shoal.Job(**(settings | changes))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_set_where_the_network_is_built(name: str, accumulate: int) -> None:
    jobs = [job(seed, model=lambda: hooked(name), accumulate=accumulate) for seed in range(3)]
    why = HOOKS[name][1]
    results = assert_as_alone(jobs, tier="serial" if why else "stacked")
    assert why in reasons(jobs)
    plain = train([job(0, accumulate=accumulate)])[0]
    assert not torch.equal(plain.model.a.weight, results[0].model.a.weight)


@pytest.mark.parametrize("name", HOOKS)
def test_set_by_params_or_the_optimizer(name: str) -> None:
    def params(model: Any) -> Iterable[nn.Parameter]:
        HOOKS[name][0](model)
        return iter(model.parameters())

    gradients = bool(HOOKS[name][1])
    with nullcontext() if gradients else pytest.warns(shoal.ShoalWarning, match="runs unstacked"):
        results = assert_as_alone([job(seed, params=params) for seed in range(2)], tier="serial")
    plain = train([job(0)])[0]
    assert not torch.equal(plain.model.a.weight, results[0].model.a.weight)

    def optimizer(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        made = list(params)
        made[0].register_hook(lambda grad: grad * 0.5)
        return torch.optim.SGD(made, lr)

    assert_as_alone([job(seed, optimizer=optimizer) for seed in range(2)], tier="serial")


def test_resumed_with_its_hooks(tmp_path: Any) -> None:
    def jobs(epochs: int) -> list[shoal.Job]:
        return [job(model=lambda: hooked("mask"), epochs=epochs)]

    shoal.train(jobs(1), device="cpu", out=tmp_path, progress=False)
    longer = shoal.train(jobs(3), device="cpu", out=tmp_path, progress=False)[0]
    assert torch.equal(longer.model.a.weight, train(jobs(3))[0].model.a.weight)


def test_what_a_copy_would_lose_is_refused() -> None:
    model = hooked("scale")
    with pytest.raises(shoal.JobError, match="and it is copied for its job, which loses the hook; pass a function"):
        shoal.train([job(model=model)], device="cpu")
    with pytest.raises(shoal.JobError, match="its factory returns weights that others share, so it is copied"):
        shoal.train([job(seed, model=lambda: model) for seed in range(2)], device="cpu")
    forward = hooked("forward")  # a copy has it
    assert_as_alone([job(seed, model=forward) for seed in range(2)])
    removed = Net()
    removed.a.weight.register_hook(lambda grad: grad * 0.1).remove()
    assert_as_alone([job(seed, model=removed) for seed in range(2)])


def test_a_clone_of_a_hooked_network_is_refused() -> None:
    run = shoal.start([job(model=lambda: hooked("scale"), epochs=10**6)], device="cpu")
    try:
        with pytest.raises(shoal.JobError, match=r"cannot continue \(it has a gradient hook on parameter"):
            run.clone("0", "copy")
    finally:
        run.cancel("0")
        run._thread.join(30)
