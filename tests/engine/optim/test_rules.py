"""A member of a stack equals the same member alone under torch's own class."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.optim.alone import (
    CASES,
    Alone,
    Stacked,
    assert_same,
    distance,
    from_torch_state,
    group_settings,
    to_torch_state,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from shoal.engine.optim import rule as rule_module
from shoal.engine.optim.hparams import RULES, merge_flags, rule_for, split_hparams
from shoal.engine.optim.state import optimizer_state_dict

STEPS = 50


@pytest.fixture
def double() -> Iterator[None]:
    """float64 by default, where torch keeps its own scalars in float64 too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(case: str, dtype: torch.dtype = torch.float64) -> tuple[Stacked, list[Alone], list[dict[str, Any]]]:
    cls, hparams = CASES[case]
    members = [Alone(cls, own, seed, dtype) for seed, own in enumerate(hparams)]
    return Stacked(cls, members, hparams), members, hparams


def test_every_rule_has_a_case() -> None:
    assert {cls for cls, _ in CASES.values()} == set(RULES)


@pytest.mark.parametrize("case", CASES)
def test_a_member_equals_its_solo_run(case: str) -> None:
    stacked, members, _ = pair(case)
    for step in range(STEPS):
        stacked.step([step] * len(members))
        for member in members:
            member.step()
        if step in (0, 1, 7):
            assert_same(stacked, members, 1e-12)
    assert_same(stacked, members, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_members_start_at_different_steps(case: str) -> None:
    """Member m sits out its first 3 * m steps; then everything is as if it had begun there."""
    stacked, members, _ = pair(case)
    for step in range(STEPS):
        begun = [step >= 3 * slot for slot in range(len(members))]
        stacked.step([member.step_count for member in members], torch.tensor(begun))
        for member, runs in zip(members, begun, strict=True):
            if runs:
                member.step()
    assert_same(stacked, members, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_sitting_out_keeps_every_bit(case: str) -> None:
    """Even when the gradient of the inactive member is not finite."""
    stacked, members, _ = pair(case)
    for step in range(3):
        stacked.step([step] * len(members))
    before = [copy.deepcopy(stacked.params), copy.deepcopy(stacked.states)]
    grads = stacked.grads([3] * len(members))
    grads[0][1] = float("nan")
    active = torch.ones(len(members), dtype=torch.bool)
    active[1] = False
    stacked.rule.update_all_(stacked.params, grads, stacked.states, stacked.h, active)
    for old, new in zip(before[0], stacked.params, strict=True):
        assert torch.equal(old[1], new[1])
        assert torch.isfinite(new).all()
    assert not torch.equal(before[0][0][0], stacked.params[0][0])
    for old, new in zip(before[1], stacked.states, strict=True):
        assert all(torch.equal(old[name][1], new[name][1]) for name in new)
    assert (stacked.states[0]["step"] == torch.where(active, 4, 3)).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("double")
def test_state_goes_to_torch_and_back(case: str) -> None:
    """20 steps stacked, 15 on the real class from that state, 15 stacked again: as 50 without a change."""
    stacked, members, hparams = pair(case)
    cls = stacked.rule.torch_class
    for step in range(20):
        stacked.step([step] * len(members))
    resumed = []
    for slot, own in enumerate(hparams):
        member = Alone(cls, own, slot, torch.float64)
        numbers = stacked.columns.row(slot)
        entries = [to_torch_state(stacked.rule, state, slot, numbers[0]) for state in stacked.states]
        for param, stack in zip(member.params, stacked.params, strict=True):
            param.data.copy_(stack[slot])
        state = optimizer_state_dict(
            member.optimizer.state_dict()["param_groups"], entries, [group_settings(numbers[0])]
        )
        assert set(state["param_groups"][0]) == set(member.optimizer.state_dict()["param_groups"][0])
        member.optimizer.load_state_dict(state)
        member.step_count = 20
        for _ in range(15):
            member.step()
        resumed.append(member)
    again = Stacked(cls, resumed, hparams)
    for slot, member in enumerate(resumed):
        for entry, state in zip(member.entries(), again.states, strict=True):
            from_torch_state(again.rule, entry, state, slot, step=35)
    for step in range(35, 50):
        again.step([step] * len(members))
    for member in members:
        for _ in range(50):
            member.step()
    assert_same(again, members, 1e-12)
    assert (again.states[0]["step"] == 50).all()


@pytest.mark.parametrize("case", CASES)
def test_state_before_the_first_step(case: str) -> None:
    """As torch: no entry yet, except where the class makes it at once."""
    stacked, members, _ = pair(case)
    assert_same(stacked, members, 0.0)


@pytest.mark.parametrize("case", CASES)
def test_float32_stays_within_rounding(case: str) -> None:
    """A few steps, weights only: at most ten times as far from torch as torch is from the same steps in float64."""
    stacked, members, hparams = pair(case, torch.float32)
    exact = [Alone(CASES[case][0], own, 0, torch.float64) for own in hparams]
    for twin, member in zip(exact, members, strict=True):
        twin.take(member)
    for step in range(8):
        stacked.step([step] * len(members))
        for member in (*members, *exact):
            member.step()
    eps = torch.finfo(torch.float32).eps
    for slot, (member, twin) in enumerate(zip(members, exact, strict=True)):
        for ours, theirs, wanted in zip(stacked.params, member.params, twin.params, strict=True):
            rounding = max(eps, distance(theirs.detach(), wanted.detach()))
            assert distance(ours[slot], theirs.detach()) <= 10 * rounding, slot


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_coefficients_are_not_rounded_to_half(case: str, dtype: torch.dtype) -> None:
    """One step from the same place lands within two units in the last place of torch, measured where it started."""
    stacked, members, _ = pair(case, dtype)
    stacked.step([0] * len(members))
    for slot, member in enumerate(members):
        largest = [float(param.detach().abs().max()) for param in member.params]
        member.step()
        for ours, theirs, size in zip(stacked.params, member.params, largest, strict=True):
            assert ours.dtype == dtype
            assert float((ours[slot] - theirs.detach()).abs().max()) <= 2 * size * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES)
def test_pieces_change_no_bit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, members, _ = pair(case)
    pieces, _, _ = pair(case)
    for step in range(5):
        monkeypatch.setattr(rule_module, "PIECE", 2**18)
        whole.step([step] * len(members))
        monkeypatch.setattr(rule_module, "PIECE", 1)
        pieces.step([step] * len(members))
    for a, b in zip(whole.params, pieces.params, strict=True):
        assert torch.equal(a, b)
    for x, y in zip(whole.states, pieces.states, strict=True):
        assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("case", CASES)
def test_complex_parameters(case: str) -> None:
    cls, hparams = CASES[case]
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(len(hparams), 4, dtype=torch.complex128, generator=draw)
    grads = torch.randn(12, len(hparams), 4, dtype=torch.complex128, generator=draw)
    split = [split_hparams(cls, own) for own in hparams]
    flags = merge_flags(cls, [part[0] for part in split if part])
    assert flags is not None
    rule = rule_for(cls, flags)
    h = {name: torch.tensor([part[1][name] for part in split if part], dtype=torch.float64) for name in rule.columns}
    stacked = start.clone()
    state = rule.init(stacked, h)
    for grad in grads:
        rule.update_all_([stacked], [grad], [state], h)
    for slot, own in enumerate(hparams):
        param = start[slot].clone().requires_grad_()
        optimizer = cls([param], **{"foreach": False, **own})
        for grad in grads:
            param.grad = grad[slot].clone()
            optimizer.step()
        assert float((stacked[slot] - param.detach()).abs().max()) <= 1e-12


@pytest.mark.parametrize("case", CASES)
def test_traces_without_reading_a_value(case: str) -> None:
    """make_fx with fake tensors, then run the graph: the same numbers as the rule itself."""
    stacked, members, _ = pair(case)
    rule, h = stacked.rule, stacked.h
    state, names = stacked.states[0], list(stacked.states[0])

    def update(param: Tensor, grad: Tensor, active: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        param, values = param.clone(), tuple(value.clone() for value in values)
        rule.update_all_([param], [grad], [dict(zip(names, values, strict=True))], h, active)
        return (param, *values)

    grad = stacked.grads([0] * len(members))[0]
    active = torch.tensor([True] * (len(members) - 1) + [False])
    arguments = (stacked.params[0], grad, active, *state.values())
    for mode in ("fake", "real"):
        graph = make_fx(update, tracing_mode=mode, _allow_non_fake_inputs=True)(*arguments)
        for _ in range(2):
            outcome, expected = graph(*arguments), update(*arguments)
            assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))
        fences = [node for node in graph.graph.nodes if node.target is torch.ops.shoal.hold.default]
        assert len(fences) == 1


def test_parameters_that_share_a_clock_tick_once() -> None:
    stacked, _, _ = pair("nadam")
    clocks = {id(state["step"]) for state in stacked.states}
    assert len(clocks) == 1
    mixed = stacked.rule.init_all([stacked.params[0], stacked.params[1].float()])
    assert mixed[0]["step"] is not mixed[1]["step"]


RANGES: dict[str, st.SearchStrategy[Any]] = {
    "lr": st.floats(0, 0.3),
    "momentum": st.sampled_from([0.0, 0.5, 0.95]),
    "dampening": st.floats(0, 0.9),
    "weight_decay": st.sampled_from([0.0, 0.01, 0.4]),
    "betas": st.tuples(st.floats(0, 0.99), st.floats(0.1, 0.9999)),
    "eps": st.floats(1e-8, 1e-1),
    "momentum_decay": st.floats(0, 0.3),
    "lr_decay": st.floats(0, 0.5),
    "initial_accumulator_value": st.sampled_from([0.0, 0.3]),
    "alpha": st.floats(0.5, 0.99),
    "rho": st.floats(0.1, 0.99),
    "lambd": st.floats(0, 0.1),
    "t0": st.floats(0, 20),
    "etas": st.tuples(st.floats(0.1, 0.9), st.floats(1.1, 3)),
    "step_sizes": st.tuples(st.floats(1e-6, 1e-3), st.floats(0.1, 10)),
}


@st.composite
def packs(draw: st.DrawFn) -> tuple[type[Optimizer], list[dict[str, Any]]]:
    cls = draw(st.sampled_from(sorted(RULES, key=lambda c: c.__name__)))
    known = split_hparams(cls, {"lr": 0.1})
    assert known is not None
    names = [n for n in group_settings(known[1]) if n in RANGES]
    shared = {n: draw(st.booleans()) for n in RULES[cls].structural if n not in ("nesterov", "decoupled_weight_decay")}
    members = draw(st.lists(st.fixed_dictionaries({n: RANGES[n] for n in names}), min_size=2, max_size=5))
    return cls, [{**own, **shared} for own in members]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(packs())
def test_any_pack_of_hyper_parameters(pack: tuple[type[Optimizer], list[dict[str, Any]]]) -> None:
    cls, hparams = pack
    members = [Alone(cls, own, seed, torch.float64) for seed, own in enumerate(hparams)]
    stacked = Stacked(cls, members, hparams)
    for step in range(12):
        stacked.step([step] * len(members))
        for member in members:
            member.step()
    assert_same(stacked, members, 1e-9)


def test_momentum_that_begins_later() -> None:
    """torch makes the buffer at the first step that has momentum: undamped, and from that step's gradient alone."""
    stacked, members, _ = pair("sgd-momentum")
    for step in range(12):
        if step == 5:
            stacked.h["momentum"][2] = 0.9
            members[2].optimizer.param_groups[0]["momentum"] = 0.9
        stacked.step([step] * len(members))
        for member in members:
            member.step()
    assert_same(stacked, members, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("sgd", "asgd", "adamw", "adadelta"))])
def test_half_precision_rounds_numbers_where_torch_does(case: str, dtype: torch.dtype) -> None:
    """Three steps on a wide parameter: all but a few elements have torch's bits, none is further than rounding."""
    cls, hparams = CASES[case]
    grads = torch.randn(3, len(hparams), 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    split = [part for part in (split_hparams(cls, own) for own in hparams) if part]
    flags = merge_flags(cls, [part[0] for part in split])
    assert flags is not None
    rule = rule_for(cls, flags)
    h = {name: torch.tensor([part[1][name] for part in split], dtype=torch.float64) for name in rule.columns}
    stacked = torch.zeros_like(grads[0])
    state = rule.init(stacked, h)
    for grad in grads:
        rule.update_all_([stacked], [grad], [state], h)
    for slot, own in enumerate(hparams):
        param = torch.zeros(400, dtype=dtype, requires_grad=True)
        optimizer = cls([param], **{"foreach": False, **own})
        for grad in grads:
            param.grad = grad[slot].clone()
            optimizer.step()
        same = (stacked[slot] == param.detach()).double().mean()
        scalar = torch.backends.cpu.get_cpu_capability() == "DEFAULT"  # torch's scalar kernels round once more
        assert same >= (0.5 if "ada" in case or scalar else 0.97), (slot, float(same))
        expected = param.detach().double()
        gap = (stacked[slot].double() - expected).abs().max()
        assert "ada" in case or gap <= 4 * torch.finfo(dtype).eps * expected.abs().max(), (slot, float(gap))


@pytest.mark.parametrize("members", [1, 3, 16, 17])
def test_coefficients_worked_out_ahead_have_the_bits_of_one_step(members: int) -> None:
    """Whoever writes to the clock or to a number in between is followed."""
    start = torch.Generator().manual_seed(members)
    h = {name: torch.rand(members, dtype=torch.float64, generator=start) for name in RULES[torch.optim.Adam].columns}
    step = torch.arange(members, dtype=torch.float64)
    rule, clock = rule_for(torch.optim.Adam, frozenset()), {"step": step.clone()}
    for number in range(100):
        if number == 50:
            h["lr"] *= 0.5
        if number == 80:
            clock["step"] -= 7
            step -= 7
        fresh = rule_for(torch.optim.Adam, frozenset())  # it looks no further than its first step
        expected = fresh.tick_({"step": step}, h, torch.float32)
        given = rule.tick_(clock, h, torch.float32)
        assert torch.equal(clock["step"], step)
        assert all(torch.equal(given[name], expected[name]) for name in expected), number
