"""Torch's fused update in the serial tier: the same training, and nothing of it in the optimizer's state."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import shoal
from shoal.engine.optim.fused_steps import clearing, step_of
from shoal.engine.optim.state import load_optimizer

X, Y = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def job(optimizer: type[optim.Optimizer], **hparams: Any) -> shoal.Job:
    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), data=(X, Y),
        loss=F.cross_entropy, optimizer=optimizer, hparams={"lr": 0.01, **hparams}, batch_size=5, epochs=10, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "hparams"),
    [
        (optim.Adam, {}),
        (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
        (optim.AdamW, {"foreach": True}),
        (optim.Adam, {"maximize": 1, "amsgrad": 1}),
        (optim.AdamW, {"lr": torch.tensor(0.01), "weight_decay": 0.1}),
        (optim.Adam, {"lr": 0.01, "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
        (optim.AdamW, {"lr": np.float32(0.01), "weight_decay": 1}),
    ],
)
def test_it_equals_the_plain_loop(
    optimizer: type[optim.Optimizer], hparams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_PACK", raising=False)
    packed = shoal.train([job(optimizer, **hparams)], device="cpu")[0]
    alone = shoal.solo(job(optimizer, **hparams))
    assert packed.tier == "serial"
    for a, b in zip(packed.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    expected = alone.optimizer_state
    assert packed.optimizer_state["param_groups"] == expected["param_groups"]
    for place, entry in expected["state"].items():
        for name, value in entry.items():
            assert packed.optimizer_state["state"][place][name].dtype == value.dtype
            torch.testing.assert_close(packed.optimizer_state["state"][place][name], value, rtol=1e-9, atol=1e-12)


def test_the_learning_rate_of_a_schedule_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_PACK", raising=False)
    scheduled = [dataclasses.replace(job(optim.AdamW), schedule=lambda step: 1 / (1 + step)) for _ in range(2)]
    packed, alone = shoal.train(scheduled[:1], device="cpu")[0], shoal.solo(scheduled[1])
    assert packed.tier == "serial"
    for a, b in zip(packed.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_schedule_may_make_the_learning_rate_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensors(optim.lr_scheduler.LambdaLR):
        def step(self, *args: Any) -> None:
            super().step(*args)
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]))

    monkeypatch.delenv("SHOAL_PACK", raising=False)
    scheduled = [
        dataclasses.replace(job(optim.AdamW, weight_decay=0.1), schedule=lambda o: Tensors(o, lambda step: 0.9**step))
        for _ in range(2)
    ]
    packed, alone = shoal.train(scheduled[:1], device="cpu")[0], shoal.solo(scheduled[1])
    for a, b in zip(packed.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("hparams", [{"lr": torch.tensor(0.01)}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}])
def test_a_tensor_of_fewer_digits_counts_as_it_does_for_torch(hparams: dict[str, Any]) -> None:
    packed = shoal.train([job(optim.AdamW, weight_decay=0.1, **hparams) for _ in range(2)], device="cpu")
    alone = shoal.solo(job(optim.AdamW, weight_decay=0.1, **hparams))
    for result in packed:
        for a, b in zip(result.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def fused_in_step(optimizer: optim.Optimizer) -> list[Any]:
    """What a step sees in the parameter groups."""
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.extend(g.get("fused") for g in o.param_groups))
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    step_of(optimizer)()
    return seen


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda p: optim.AdamW([p]), True),
        (lambda p: optim.AdamW([p], foreach=False), None),
        (lambda p: optim.AdamW([p], fused=False), False),
        (lambda p: optim.NAdam([p]), None),
        (lambda p: type("Mine", (optim.Adam,), {})([p]), None),
    ],
)
def test_what_its_owner_said_stays(make: Any, fused: bool | None) -> None:
    optimizer = make(nn.Parameter(torch.ones(3)))
    before = optimizer.param_groups[0].get("fused")
    with torch.no_grad():
        assert fused_in_step(optimizer) == [fused]
    assert optimizer.param_groups[0].get("fused") == before


def test_half_precision_weights_are_not_fused() -> None:
    assert fused_in_step(optim.Adam([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])) == [None]


def test_parameters_without_a_gradient_are_not_counted() -> None:
    """Each has its own count of steps, also where they are counted at once."""
    ours, theirs = ([nn.Parameter(torch.full((3,), 1.0 + place)) for place in range(3)] for _ in range(2))
    fused, plain = optim.Adam(ours, lr=0.1), optim.Adam(theirs, lr=0.1)
    step = step_of(fused)
    for number in range(8):
        for params in (ours, theirs):
            for place, param in enumerate(params):
                missing = place == 1 and number in (3, 4)
                param.grad = None if missing else torch.full((3,), float(number - 3))
        step()
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
        assert float(fused.state[a]["step"]) == float(plain.state[b]["step"])
    fused.load_state_dict(plain.state_dict())
    step()
    assert [float(fused.state[param]["step"]) for param in ours] == [9.0, 7.0, 9.0]
    assert [float(plain.state[param]["step"]) for param in theirs] == [8.0, 6.0, 8.0]


def test_state_in_another_memory_layout_counts_as_it_is() -> None:
    """A stack on a GPU gives contiguous moments back, also to a network with channels last."""
    networks = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]  # type: ignore[call-overload]
    networks[1].load_state_dict(networks[0].state_dict())
    fused, plain = (optim.AdamW(network.parameters(), lr=0.1) for network in networks)
    step, images = step_of(fused), torch.randn(2, 3, 6, 6)
    for number in range(4):
        if number in (1, 2):
            for entry in fused.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    entry[name] = entry[name].contiguous()
            if number == 2:
                load_optimizer(fused, fused.state_dict())
                assert all(s["exp_avg"].stride() == p.stride() for p, s in fused.state.items())
        for network in networks:
            network.zero_grad()
            network(images).square().sum().backward()
        step()
        plain.step()
    for a, b in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "amsgrad": True}, {"maximize": True}])
def test_on_a_gpu_the_steps_are_counted_on_the_cpu_as_torch_does(settings: dict[str, Any]) -> None:
    """One step has a learning rate that is a tensor, which torch's own step must take."""
    ours, theirs = ([nn.Parameter(torch.full((3,), 1.0 + i, device="cuda")) for i in range(3)] for _ in range(2))
    fused, plain = optim.AdamW(ours, lr=0.1, **settings), optim.AdamW(theirs, lr=0.1, **settings)
    step = step_of(fused)
    for number in range(8):
        for params in (ours, theirs):
            for place, param in enumerate(params):
                missing = place == 1 and number in (3, 4)
                param.grad = None if missing else torch.full((3,), float(number - 3), device="cuda")
        for optimizer in (fused, plain):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1) if number == 5 else 0.1
        step()
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
        count = fused.state[a]["step"]
        assert count.device.type == "cpu" and float(count) == float(plain.state[b]["step"])


def test_an_own_way_to_clear_gradients_is_used() -> None:
    class Keeps(optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    weight = nn.Parameter(torch.ones(2))
    for kind, cleared in ((optim.SGD, True), (Keeps, False)):
        weight.grad = torch.ones(2)
        clearing(kind([weight], lr=0.1))()
        assert (weight.grad is None) is cleared
