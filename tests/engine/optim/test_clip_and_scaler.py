"""Gradient clipping and loss scaling, each member by its own numbers, against torch's for one network."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.engine.optim.alone import distance
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engine.optim.gradients import MemberScaler, clip_
from shoal.engine.optim.hparams import rule_for, split_hparams

SHAPES = [(4, 6), (6,), ()]


def draws(members: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 2, members, dtype=dtype)
    return [torch.randn((members, *s), generator=draw, dtype=dtype) * sizes.view(-1, *[1] * len(s)) for s in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clip_is_torchs_for_each_member(dtype: torch.dtype) -> None:
    grads = draws(5, torch.float64)
    grads = [g.to(dtype) for g in grads]
    limits = [1.0, 0.5, float("inf"), 3.0, 100.0]
    before = copy.deepcopy(grads)
    norms = clip_(grads, torch.tensor(limits, dtype=torch.float64))
    eps = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for slot, limit in enumerate(limits):
        params = [torch.zeros_like(g[slot]).requires_grad_() for g in before]
        for param, g in zip(params, before, strict=True):
            param.grad = g[slot].clone()
        theirs = torch.nn.utils.clip_grad_norm_(params, limit)
        assert distance(norms[slot], theirs) <= eps
        for param, g in zip(params, grads, strict=True):
            assert param.grad is not None
            assert distance(g[slot], param.grad) <= eps


def test_clip_leaves_the_unclipped_and_the_small_alone() -> None:
    """No limit: every bit kept, even at a norm that is not finite. A norm under the limit: coefficient exactly one."""
    grads = draws(4, torch.float32)
    grads[0][0, 0, 0] = float("inf")
    grads[0][1, 0, 0] = float("nan")
    before = copy.deepcopy(grads)
    clip_(grads, torch.tensor([float("inf"), 1.0, float("inf"), 1e9]))
    for slot in (0, 2, 3):
        assert all(torch.equal(new[slot], old[slot]) for new, old in zip(grads, before, strict=True))
    assert all(new[1].isnan().all() for new in grads)


def test_members_that_clip_by_value_beside_others() -> None:
    grads = draws(4, torch.float32)
    grads[0][3, 0, 0] = float("nan")
    before = copy.deepcopy(grads)
    limits = [-0.001, float("inf"), 0.5, -2.0]
    clip_(grads, torch.tensor(limits, dtype=torch.float64), by_value=True)
    for slot, limit in enumerate(limits):
        params = [torch.zeros_like(g[slot]).requires_grad_() for g in before]
        for param, g in zip(params, before, strict=True):
            param.grad = g[slot].clone()
        if limit < 0:
            torch.nn.utils.clip_grad_value_(params, -limit)
        elif limit < float("inf"):
            torch.nn.utils.clip_grad_norm_(params, limit)
        for param, g in zip(params, grads, strict=True):
            assert param.grad is not None
            torch.testing.assert_close(g[slot], param.grad, rtol=1e-6 if limit > 0 else 0, atol=0, equal_nan=True)


def test_clip_without_gradients() -> None:
    assert clip_([], torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3, "growth_factor": 2.0, "backoff_factor": 0.5}


class QuickScaler(MemberScaler):
    """Begins lower and grows sooner than torch's default."""

    init_scale, growth_interval = 1024.0, 3


def gradients(step: int, slot: int, scale: float) -> list[Tensor]:
    """What backward through a scaled loss gives: finite, but for an overflow now and then, of one member alone."""
    draw = torch.Generator().manual_seed(100 * step + slot)
    grads = [torch.randn(s, generator=draw, dtype=torch.float64) * scale for s in SHAPES]
    if (step, slot) in {(2, 1), (3, 1), (9, 0), (10, 2)}:
        grads[slot % 2].view(-1)[0] = float("inf") if slot else float("nan")
    return grads


def test_scaler_is_torchs_for_each_member() -> None:
    """20 steps of SGD with momentum; overflows in one member skip its step and back its scale off, nobody else's."""
    members, hparams = 3, {"lr": 0.1, "momentum": 0.9}
    split = split_hparams(torch.optim.SGD, hparams)
    assert split is not None
    rule = rule_for(torch.optim.SGD, split[0])
    h = {name: torch.full((members,), value, dtype=torch.float64) for name, value in split[1].items()}
    params = [torch.zeros((members, *s), dtype=torch.float64) for s in SHAPES]
    states = rule.init_all(params)
    scaler = QuickScaler(members)
    alone = []
    for _ in range(members):
        own = [torch.zeros(s, dtype=torch.float64).requires_grad_() for s in SHAPES]
        alone.append((own, torch.optim.SGD(own, **hparams), torch.amp.GradScaler("cpu", **OPTIONS)))
    scales = set()
    for step in range(20):
        per_member = []
        for slot, (own, optimizer, theirs) in enumerate(alone):
            scale = float(theirs.scale(torch.tensor(1.0)))
            assert scale == float(scaler.scale(torch.ones(members))[slot])
            scales.add(scale)
            per_member.append(gradients(step, slot, scale))
            for param, grad in zip(own, per_member[-1], strict=True):
                param.grad = grad.clone()
            theirs.unscale_(optimizer)
            theirs.step(optimizer)
            theirs.update()
        grads = [torch.stack([g[i] for g in per_member]) for i in range(len(SHAPES))]
        found = scaler.unscale_(grads)
        rule.update_all_(params, grads, states, h, ~found)
        scaler.update_(found)
        for slot, (own, _, theirs) in enumerate(alone):
            assert scaler.state_dict(slot) == theirs.state_dict()
            assert all(distance(p[slot], q.detach()) <= 1e-12 or step == 0 for p, q in zip(params, own, strict=True))
    assert len(scales) > 4
    assert len({float(s) for s in scaler.scale_M}) > 1
    assert states[0]["step"].tolist() == [19, 18, 19]


def test_scaler_does_not_grow_beyond_the_finite() -> None:
    largest = 2.0**127
    scaler = MemberScaler(2)
    scaler.load_state_dict(0, {**scaler.state_dict(0), "scale": largest, "_growth_tracker": 1999})
    scaler.load_state_dict(1, {**scaler.state_dict(1), "scale": largest, "_growth_tracker": 1999})
    scaler.update_(torch.tensor([False, True]))
    assert scaler.scale_M.tolist() == [largest, largest / 2]
    assert scaler.growth_tracker_M.tolist() == [0, 0]


def test_scaler_state_moves_between_slots_and_torch() -> None:
    theirs = torch.amp.GradScaler("cpu", **{**OPTIONS, "init_scale": 64.0})
    scaler = QuickScaler(3)
    scaler.load_state_dict(2, {**theirs.state_dict(), "_growth_tracker": 2})
    assert scaler.scale_M.tolist() == [1024.0, 1024.0, 64.0]
    kept = scaler.on(scaler.scale_M[[2, 0]], scaler.growth_tracker_M[[2, 0]])
    assert kept.state_dict(0)["scale"] == 64.0 and kept.state_dict(0)["_growth_tracker"] == 2
    kept.update_(torch.tensor([False, False]))
    assert kept.scale_M.tolist() == [128.0, 1024.0]


def test_clip_and_scaler_trace_without_reading_a_value() -> None:
    scaler = QuickScaler(3)

    def step(scale: Tensor, tracker: Tensor, limit: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        scaler.scale_M, scaler.growth_tracker_M = scale.clone(), tracker.clone()
        own = [g.clone() for g in grads]
        found = scaler.unscale_(own)
        norms = clip_(own, limit)
        scaler.update_(found)
        return (found, norms, scaler.scale_M, scaler.growth_tracker_M, *own)

    limit = torch.tensor([1.0, float("inf"), 2.0])
    arguments = (torch.tensor([4.0, 8.0, 2.0]), torch.tensor([2, 1, 2], dtype=torch.int32), limit, *draws(3))
    graph = make_fx(step, tracing_mode="fake")(*arguments)
    poisoned = [a.clone() for a in arguments]
    poisoned[3][0, 0, 0] = float("inf")
    for given in (arguments, tuple(poisoned)):
        outcome, expected = graph(*given), step(*given)
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(outcome, expected, strict=True))
