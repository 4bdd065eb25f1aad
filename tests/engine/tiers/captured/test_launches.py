"""What a step launches besides its operators, and how much of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.tiers.captured import host_kernels
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.engine.kernels import gathering
from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.rules import op_context
from shoal.engine.stack import _flat_state, _update_kernel, fused_update
from shoal.engine.tiers.captured import _ending, _step
from shoal.engine.tiers.captured._step import Inputs, Step
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.preparation.checks import prepare
from shoal.utils import cuda_kernels

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
X, Y = torch.randn(64, 12, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched; everything is done as on a GPU, with kernels for the host."""
    names_of_launches: list[str] = []

    def load(source: str, names: Sequence[str]) -> list[Any]:
        def noted(name: str, kernel: Any) -> Any:
            return lambda **how: (names_of_launches.append(name), kernel(**how))

        return [noted(name, kernel) for name, kernel in zip(names, host_kernels.load(source, names), strict=True)]

    monkeypatch.setattr(cuda_kernels, "load", load)
    monkeypatch.setattr(_step, "can_fuse", lambda _: True)
    monkeypatch.setattr(_update_kernel, "on_gpu", lambda _: True)
    monkeypatch.setattr(op_context, "one_by_one", lambda _: False)
    for module in (_flat_state, fused_update):
        monkeypatch.setattr(module, "suits", lambda *_: False)
    return names_of_launches


class Operators(TorchDispatchMode):
    """Counts the operators that a GPU would launch a kernel for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = not func._schema.is_mutable and any(given.alias_info for given in func._schema.returns)
        if not is_view and "empty" not in str(func) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(out)):
            self.names.append(str(func))
        return out


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def unit_of(**changes: Any) -> CapturedUnit:
    jobs = [
        shoal.Job(
            **{
                "model": build, "data": (X, Y), "loss": F.cross_entropy, "optimizer": torch.optim.AdamW,
                "hparams": {"lr": 1e-2 * (i + 1)}, "batch_size": 16, "epochs": 1, "seed": i, **changes,
            }
        )
        for i in range(3)
    ]  # fmt: skip
    trace_cache = TraceCache()
    (alike,) = group(prepare(jobs, CPU), trace_cache)
    return CapturedUnit(alike.recipes, trace_cache, {}, chunk=3, compiled=False)


def test_kernels_of_a_step(launched: list[str]) -> None:
    unit = unit_of(precision="bf16")
    (chunk,) = unit.chunks
    unit.load(4)
    chunk.prepare(16)
    launched.clear()
    with Operators() as operators:
        chunk.branch(16)()
    outside = [name for name in launched if not name.startswith("shoal_")]
    assert outside == ["gather", "end_step", "tick", "update"]
    products = [name for name in operators.names if "mm" in name]
    sums = [name for name in operators.names if "sum" in name]
    assert (len(products), len(sums)) == (8, 5), "forward 3, backward 5; biases 3, the loss 2"
    assert len(operators.names) - len(products) - len(sums) <= 5, "the rest of the loss"
    assert len(launched) - len(outside) <= 14, "elementwise kernels"


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "optimizer": torch.optim.SGD, "hparams": {"lr": 0.1, "momentum": 0.9}},
        {"precision": "bf16", "clip_norm": 0.1},
        {"schedule": lambda step: 0.9**step},
    ],
)
def test_steps_with_all_kernels_train_as_without(
    launched: list[str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[tuple[Tensor, list[Tensor]]] = []
    for kernels in (True, False):
        monkeypatch.setattr(_step, "can_fuse", lambda _, kernels=kernels: kernels)
        monkeypatch.setattr(_update_kernel, "on_gpu", lambda _, kernels=kernels: kernels)
        unit = unit_of(**changes)
        (chunk,) = unit.chunks
        unit.load(4)
        chunk.prepare(16)
        assert (chunk.step(16).fused is not None) == kernels
        for _ in range(4):
            chunk.branch(16)()
        state = [*chunk.stack.params, *chunk.stack.optimizer.tensors(), chunk.inputs.place, chunk.inputs.count]
        results.append((chunk.inputs.losses, state))
    assert {"gather", "end_step", "tick", "update"} <= set(launched)
    tolerance = 3e-2 if "precision" in changes else 1e-5
    torch.testing.assert_close(results[0][0], results[1][0], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def inputs_of(members: int, n: int, data: list[Tensor], *, shared: bool, random: Random) -> Inputs:
    numbers = torch.Generator().manual_seed(random.randrange(1 << 30))
    orders = torch.stack([torch.randperm(n, generator=numbers) for _ in range(members)])
    place = torch.randint(0, 4, (members,), generator=numbers)
    return Inputs(
        data=data,
        orders=orders[0] if shared else orders,
        place=place[0].clone() if shared else place,
        tick=torch.tensor(random.randrange(3)),
        moving=torch.rand(members, generator=numbers) < random.choice([0.0, 0.5, 1.0]),
        count=torch.randint(0, 9, (members,), generator=numbers),
        seeds=torch.zeros(members, dtype=torch.int64),
        losses=torch.rand(3, members, generator=numbers, dtype=torch.float64),
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("launched")
def test_the_end_of_a_step(shared: bool, dtype: torch.dtype) -> None:
    random = Random(0)
    for members in (1, 2, 7):
        for _ in range(6):
            inputs = inputs_of(members, 20, [], shared=shared, random=random)
            active = torch.tensor([random.random() < 0.7 for _ in range(members)])
            losses = torch.tensor([random.choice([0.5, 2.0, math.inf, math.nan]) for _ in range(members)], dtype=dtype)
            before, was_active = _step.inputs_like(inputs), active.clone()
            assert _ending.suits(inputs, losses)
            stepping = _ending.end_step(inputs, active, losses)
            moving, finite = inputs.moving, losses.isfinite()
            assert torch.equal(active, was_active & (finite | ~moving))
            assert torch.equal(stepping, active & moving)
            at = int(before.tick)
            seen = torch.where(active | ~finite, losses, math.nan).double()
            before.losses[at] = torch.where(moving, seen, before.losses[at])
            torch.testing.assert_close(inputs.losses, before.losses, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(inputs.place, before.place + (moving.any() if shared else moving))
            assert torch.equal(inputs.count, before.count + moving) and int(inputs.tick) == at + 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_gathered_batch(shared: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size, of which some lie where few bytes can be read at once; members at the end of their epoch."""
    n = 20
    bytes_ = torch.arange(n * 5 + 1, dtype=torch.uint8)
    data = [
        torch.randn(n, 3, 4), torch.randn(n, dtype=torch.float64), torch.arange(n * 3).view(n, 3),
        bytes_[1:].view(n, 5), torch.rand(n, 2) < 0.5, torch.randn(n * 3 + 1)[1:].view(n, 3),
        torch.randn(n, 3, dtype=torch.bfloat16),
    ]  # fmt: skip
    for rows, members in ((8, 3), (5, 1)):
        inputs = inputs_of(members, n, data, shared=shared, random=Random(rows))
        assert inputs.orders is not None and gathering.suits(data, inputs.orders, rows)
        step: Any = SimpleNamespace(rows=rows, batch_size=8)
        given = Step._gather(step, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(_step, "can_fuse", lambda _: False)
            wanted = Step._gather(step, inputs)
        assert launched.pop() == "gather" and not launched
        for a, b in zip(given, wanted, strict=True):
            assert a.shape == b.shape and torch.equal(a, b)
