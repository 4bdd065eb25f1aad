"""The update of all members' weights in one kernel, against the optimizers' rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.tiers.captured import host_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.engine.optim.hparams import rule_for
from shoal.engine.optim.rule import Rule
from shoal.engine.stack import _update_kernel
from shoal.utils import cuda_kernels

CASES: list[tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = [
    (torch.optim.Adam, ()),
    (torch.optim.Adam, ("weight_decay",)),
    (torch.optim.Adam, ("amsgrad", "maximize", "weight_decay")),
    (torch.optim.AdamW, ("decoupled_weight_decay", "weight_decay")),
    (torch.optim.AdamW, ("amsgrad", "decoupled_weight_decay")),
    (torch.optim.SGD, ()),
    (torch.optim.SGD, ("weight_decay", "maximize")),
    (torch.optim.SGD, ("momentum",)),
    (torch.optim.SGD, ("momentum", "nesterov", "weight_decay")),
]
NUMBERS = {
    "lr": (0.1, 0.01, 0.3), "beta1": (0.9, 0.5, 0.2), "beta2": (0.99, 0.9, 0.999), "eps": (1e-8, 1e-4, 1e-2),
    "weight_decay": (0.1, 0.0, 0.01), "momentum": (0.9, 0.0, 0.5), "dampening": (0.0, 0.0, 0.1),
}  # fmt: skip


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def _weights(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    filters = torch.randn(3, 4, 2, 3, 3, generator=generator, dtype=torch.float64)
    filters = filters.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # channels last
    plain = [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (), (1000,))]
    return [t.to(device, dtype) for t in [filters, *plain]]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run; on a CPU they are compiled for the host."""
    name: str = request.param
    if name == "cpu":
        monkeypatch.setattr(_update_kernel, "on_gpu", lambda _: True)
        monkeypatch.setattr(cuda_kernels, "load", host_kernels.load)
    return name


@pytest.mark.parametrize(("kind", "flags"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_kernel_steps_as_the_rule_does(
    device: str, kind: type[torch.optim.Optimizer], flags: tuple[str, ...], dtype: torch.dtype
) -> None:
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    rule = rule_for(kind, frozenset(flags))
    h = {name: torch.tensor(NUMBERS[name], dtype=torch.float64, device=device) for name in rule.columns}
    sides = []
    for _ in range(2):
        params = _weights(device, dtype)
        sides.append((params, rule.init_all(params, h)))
    assert _update_kernel.suits(rule, *sides[0])
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device, dtype) for p in sides[0][0]]
        active = torch.tensor([True, step % 2 == 0, step != 1], device=device)
        _update_kernel.update(rule, sides[0][0], grads, sides[0][1], h, None if step == 4 else active)
        rule.update_all_(sides[1][0], grads, sides[1][1], h, None if step == 4 else active)
        _assert_same(rule, sides, rtol)


@pytest.mark.parametrize(("count", "launches"), [(4, 3), (180, 5)])
def test_many_parameters_and_gradients_in_half_precision(
    device: str, count: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parameters have no elements, some begin where no vector can be read, some gradients are float32 or lie
    otherwise."""
    rule = rule_for(torch.optim.AdamW, frozenset({"decoupled_weight_decay"}))
    h = {name: torch.tensor(NUMBERS[name], dtype=torch.float64, device=device) for name in rule.columns}
    launched: list[int] = []
    load = cuda_kernels.load

    def counting(source: str, names: list[str]) -> list[Any]:
        def counted(kernel: Any) -> Any:
            return lambda **how: (launched.append(1), kernel(**how))

        return list(map(counted, load(source, names)))

    monkeypatch.setattr(cuda_kernels, "load", counting)
    generator = torch.Generator().manual_seed(2)
    sizes = [(i % 5, 4 + i % 7) for i in range(count)]
    flat = torch.randn(3 * sum(a * b for a, b in sizes) + count, generator=generator).to(device)
    params, begin = [], 0
    for i, (a, b) in enumerate(sizes):
        begin += i % 2
        params.append(flat[begin : begin + 3 * a * b].view(3, a, b))
        begin += 3 * a * b
    others = [param.clone() for param in params]
    dtypes = [(torch.bfloat16, torch.float32)[i % 2] for i in range(count)]
    grads = [torch.randn(p.shape, generator=generator).to(device, d) for p, d in zip(params, dtypes, strict=True)]
    grads[1] = grads[1].mT.contiguous().mT
    states, other_states = rule.init_all(params, h), rule.init_all(others, h)
    _update_kernel.update(rule, params, grads, states, h, None)
    rule.update_all_(others, [grad.float() for grad in grads], other_states, h, None)
    _assert_same(rule, [(params, states), (others, other_states)], 1e-5)
    assert len(launched) == launches, "one for the coefficients, then 64 parameters at a time"


def test_tensors_without_memory_are_no_kernels_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction of what a step takes runs it on fake tensors, whose address is zero."""
    monkeypatch.setattr("shoal.utils.cuda_kernels.available", lambda: True)
    rule = rule_for(torch.optim.Adam, frozenset())
    with FakeTensorMode():
        params = [torch.empty(3, 5, device="cuda")]
        assert params[0].is_cuda
        states = rule.init_all(params, {name: torch.empty(3, device="cuda") for name in rule.columns})
        assert not _update_kernel.suits(rule, params, states)


def _assert_same(rule: Rule, sides: list[tuple[list[torch.Tensor], list[dict[str, Any]]]], rtol: float) -> None:
    for a, b in zip(sides[0][0], sides[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    for state, other in zip(sides[0][1], sides[1][1], strict=True):
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=rtol, atol=rtol)


def test_members_that_do_not_move_keep_every_bit(device: str) -> None:
    rule = rule_for(torch.optim.Adam, frozenset())
    h = {name: torch.tensor(NUMBERS[name], dtype=torch.float64, device=device) for name in rule.columns}
    params = _weights(device, torch.float32)
    states = rule.init_all(params, h)
    before = [p.clone() for p in params]
    grads = [torch.full_like(p, float("nan")) for p in params]
    _update_kernel.update(rule, params, grads, states, h, torch.tensor([False, True, False], device=device))
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param[0], old[0]) and torch.equal(param[2], old[2]) and param[1].isnan().all()
    assert states[0]["step"].tolist() == [0.0, 1.0, 0.0]
