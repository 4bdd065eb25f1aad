"""How the tests hold a pack to the reference loop: `assert_as_alone` for numbers, `assert_same_bits` for bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.planning.planner import Plan
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.preparation.checks import prepare
from shoal.reference import solo

TOLERANCE = 1e-9
"""max|a-b| / max|b| per tensor, float64, after 50 steps (promise 1)."""
NOISE = 1e-9
"""What rounding may have made, in optimizer state, of a gradient whose exact value is zero."""


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that every run draws alike."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(seed: int, high: int, *shape: int) -> Tensor:
    """Integers below `high` that every run draws alike."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def distance(a: Any, b: Any) -> float:
    """max|a-b| / max|b|; 0 where both are empty or zero, infinite where they are not comparable."""
    a, b = torch.as_tensor(a).detach().cpu(), torch.as_tensor(b).detach().cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b) or b.numel() == 0:
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a[b.isfinite()], b[b.isfinite()]
    if b.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def optimizer_tensors(result: shoal.Result) -> dict[str, Any]:
    """Optimizer state by parameter name and key, and the numbers of the parameter groups."""
    names = [name for name, _ in result.model.named_parameters()]
    if result.job.params is not None:
        names = [f"#{i}" for i in range(len(names))]
    state = result.optimizer_state
    found = {f"{names[index]}/{key}": value for index, entry in state["state"].items() for key, value in entry.items()}
    for i, group in enumerate(state["param_groups"]):
        found |= {f"group {i}/{key}": value for key, value in group.items()}
    return found


def distances(a: shoal.Result, b: shoal.Result) -> dict[str, float]:
    """How far two results are apart, tensor by tensor: weights, buffers, optimizer state, history."""
    found: dict[str, float] = {}
    state_a, state_b = a.model.state_dict(), b.model.state_dict()
    assert state_a.keys() == state_b.keys()
    found |= {name: distance(state_a[name], state_b[name]) for name in state_b}
    own, other = optimizer_tensors(a), optimizer_tensors(b)
    assert own.keys() == other.keys(), own.keys() ^ other.keys()
    for name, value in other.items():
        leaves = zip(pytree.tree_leaves(own[name]), pytree.tree_leaves(value), strict=True)
        found[name] = max((_apart(x, y) for x, y in leaves), default=0.0)
    assert len(a.history) == len(b.history)
    for row, (x, y) in enumerate(zip(a.history, b.history, strict=True)):
        assert x.keys() == y.keys(), x.keys() ^ y.keys()
        found |= {f"history[{row}] {key}": _apart(x[key], y[key]) for key in y if key != "seconds"}
    return found


def _apart(x: Any, y: Any) -> float:
    if isinstance(y, Tensor | float | int) and not isinstance(y, bool):
        if not isinstance(y, Tensor):
            x, y = (torch.tensor(float(v), dtype=torch.float64) for v in (x, y))
        return distance(x, y)
    return 0.0 if x == y else math.inf


def assert_close(a: shoal.Result, b: shoal.Result, tolerance: float = TOLERANCE, noise: Collection[str] = ()) -> None:
    """Two results agree; `noise` names parameters whose exact gradient is zero.

    Those amplify rounding: Adam divides noise by noise. Their optimizer state is held to be noise still, and what they
    do is held by everything else: all other weights, buffers, optimizer state and every loss depend on them.
    """
    assert (a.status, a.error, a.steps) == (b.status, b.error, b.steps)
    apart = {name: d for name, d in distances(a, b).items() if d > tolerance or math.isnan(d)}
    state = optimizer_tensors(b)
    for name in list(apart):
        if name.split("/")[0] in noise:
            value = state.get(name)
            assert value is None or not name.endswith(("exp_avg", "exp_avg_sq")) or float(value.abs().max()) < NOISE, (
                name
            )
            del apart[name]
    assert not apart, f"{a.name}: {apart}"


def train(
    jobs: Sequence[shoal.Job],
    device: str = "cpu",
    compile: bool | Literal["auto"] = "auto",
    deterministic: bool = False,
) -> shoal.Results:
    """`shoal.train`, on the CPU unless told otherwise."""
    return shoal.train(list(jobs), device=device, compile=compile, deterministic=deterministic)


def assert_as_alone(
    jobs: Sequence[shoal.Job],
    *,
    tier: str | None = "stacked",
    tolerance: float = TOLERANCE,
    noise: Collection[str] = (),
    device: str = "cpu",
    compile: bool | Literal["auto"] = "auto",
) -> shoal.Results:
    """Train together; every member must be what the reference loop makes of its job, on the tier that is expected."""
    results = train(jobs, device, compile)
    if tier is not None:
        assert {result.tier for result in results} == {tier}, reasons(jobs)
    for result, job in zip(results, jobs, strict=True):
        assert_close(result, solo(job, device), tolerance, noise)
    return results


def assert_same_bits(a: shoal.Result, b: shoal.Result) -> None:
    """Weights, buffers, optimizer state and history, bit for bit."""
    assert (a.status, a.steps) == (b.status, b.steps)
    apart = {name: d for name, d in distances(a, b).items() if d != 0.0}
    assert not apart, f"{a.name}: {apart}"
    for name, value in b.model.state_dict().items():
        assert torch.equal(a.model.state_dict()[name].nan_to_num(9e9), value.nan_to_num(9e9)), name


def planned(jobs: Sequence[shoal.Job]) -> Plan:
    """The plan for these jobs, without training them."""
    members = prepare(list(jobs), torch.device("cpu"))
    return PlanningContext(members).propose(members)


def reasons(jobs: Sequence[shoal.Job]) -> str:
    """Why each part of the plan has its tier."""
    return "; ".join(f"{part.names}: {part.tier}, {part.reason}" for part in planned(jobs).parts)


def slowly(cases: Iterable[Any], fast: Callable[[Any], bool]) -> list[Any]:
    """Cases of a parametrised test; those that are not `fast` run with the slow tests only."""
    return [case if fast(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]


class Shape(nn.Module):
    """Gives each row another shape: `Shape(3, 4)` makes [B, 3, 4] of [B, 12]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.shape)


class First(nn.Module):
    """The first of the outputs of a module that gives several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        out = self.inner(*inputs)
        assert isinstance(out[0], Tensor)
        return out[0]
