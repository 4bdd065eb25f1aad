"""Decide which members train in a plain loop without being traced: stacking them cannot be faster, or would save less
than its set-up costs.

Members can share a stack only if they are alike (the same kinds of modules, shapes and batches), which is cheap to
check. Of members that are alike, one step of one member is timed. The step of a small network is mostly the overhead of
calling operators, and a stack calls them once for all members; the rest is arithmetic, which a stack does for each
member too. Both are counted in calls: the time of one small torch operator on this machine now. What depends only on
equal frozen weights and the same rows, a stack computes once.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine.members.member import Member, draws
from shoal.engine.members.step import autocast, run_step
from shoal.engine.proof.group import Group
from shoal.engine.python_state.preserve import preserved
from shoal.engine.recipes.frozen import same_bits
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tracing.patches import Untraceable, patched
from shoal.engine.units.trials import FEW_STEPS, num_steps

NODE, UPDATE, STACKED = 20, 18, 90
"""In calls, for each node of the autograd graph: forward and backward; the node's share of the update; both in a
stack."""
SET_UP, SET_UP_NODE = 120_000, 8_000
"""In calls: tracing, proving and building a stack, and what each node adds to it."""
TRACE, TRACE_NODE = 2_000, 700
"""In calls: a trace alone, and what each node adds to it."""
VALIDATION, TRIAL = 1.5, 100
"""The factor on the set-up if validation has to be traced too, and the steps that a trial takes if there is one."""
MANY_STEPS, SMALL_SHARE = 500, 0.05
"""From so many steps on, jobs may be worth sharing among processes, and traces may take this share of their time. It is
not known yet whether other cores are free."""
ASPECTS = (
    "layers", "weights (shapes, dtypes or which are frozen)", "loss or step", "DataLoader", "data_seed", "batch_size",
    "rows an epoch", "accumulate", "precision", "data held or read as it is needed",
)  # fmt: skip
"""What must be equal for members to share a stack, as far as it is checked without a trace."""
MOST_KINDS = 100
"""The most kinds of members that one of another kind is compared with, to say in what it differs."""
NO_GAIN = "a stack would take longer to set up than it could save"
SURE, UNSURE = 0.7, 0.2
"""The share of a predicted gain that is relied on. It is lower if a step reads numbers out of tensors, since many such
steps cannot be traced."""


def looped(members: Sequence[Member], tiers: Mapping[int, str]) -> dict[int, str]:
    """Return the members that should train in a plain loop, by index, and why.

    Args:
        tiers: The tiers of the run that is resumed, by member index; members get them again.
    """
    if os.environ.get("SHOAL_PACK") == "always":
        return {}
    by_kind: dict[tuple[Hashable, ...], list[Member]] = {}
    for member in members:
        if member.index not in tiers:
            by_kind.setdefault(_kind(member), []).append(member)
    reasons = {index: "serial as in the run before" for index, tier in tiers.items() if tier == "serial"}
    for kind, similar in by_kind.items():
        reason = _reason_to_loop(similar) if len(similar) > 1 else _describe_lone(kind, by_kind)
        reasons |= {member.index: reason for member in similar} if reason else {}
    return reasons


def worth_sharing(members: Sequence[Member]) -> bool:
    """Return whether members that train in a loop are worth tracing, since traced ones may train in other processes."""
    workers_setting, cores = os.environ.get("SHOAL_WORKERS"), os.cpu_count() or 1
    steps = {member: expected_steps(member) for member in members}
    if workers_setting is not None or min(len(steps), cores) < 2 or sum(steps.values()) < MANY_STEPS:
        return workers_setting not in (None, "1")
    try:
        timing = _time_step(max(steps, key=steps.__getitem__))
    except Exception:  # they train in this process
        return False
    kinds = len({_kind(member) for member in members})
    return timing is not None and kinds * timing.trace < SMALL_SHARE * timing.alone * sum(steps.values())


def looped_groups(members: Sequence[Member], reasons: Mapping[int, str], trace_cache: TraceCache | None) -> list[Group]:
    """Return a group for each of these members, which train in a loop for these reasons.

    The groups have recipes if it is worth tracing the members, so that they may train in other processes.

    Args:
        trace_cache: None if the members must train in this process.
    """
    if trace_cache is None or not worth_sharing(members):
        return [Group([member], reason=reasons[member.index]) for member in members]
    groups = []
    seconds: dict[Hashable, float | None] = {}
    for member in members:
        kind = _kind(member)
        if kind not in seconds:
            seconds[kind] = _alone_seconds(member)
        try:
            recipe = trace_cache.recipe(member, brief=True)
            groups.append(Group([member], [recipe], reasons[member.index], seconds[kind]))
        except Untraceable as refusal:
            groups.append(Group([member], reason=str(refusal)))
    return groups


def _alone_seconds(member: Member) -> float | None:
    """Return seconds of a step of one member alone; None if it cannot be timed.

    It decides how many processes the work is worth. The size of the network would not do: a small network of many
    layers spends its time in calls.
    """
    try:
        timing = _time_step(member)
    except Exception:  # the same error will end this member in training
        return None
    return None if timing is None else timing.alone


def _reason_to_loop(similar: Sequence[Member]) -> str:
    """Return why several members that are alike should train in a loop; empty if a stack should be faster or it is
    not known."""
    steps, validated, once = (
        [expected_steps(m) for m in similar],
        similar[0].val is not None,
        _share_frozen_part(similar),
    )
    if not once and not can_gain(steps, validated):
        return NO_GAIN
    try:
        timing = _time_step(similar[0])
    except Untraceable as refusal:
        return str(refusal)
    except Exception:  # the same error will end this member in training
        return ""
    return "" if timing is None or timing.gain(steps, validated, once) > 0 else NO_GAIN


def can_gain(steps: Sequence[int], validated: bool) -> bool:
    """Return whether a stack could save more than its set-up costs, whatever the members compute.

    `StepTiming.gain` is at most this much for each node of the graph, so few steps need not be timed.

    Args:
        steps: The steps of each member.
        validated: Whether validation has to be traced too.
    """
    saved = (NODE + UPDATE) * sum(steps) - STACKED * max(steps)
    return SURE * saved > SET_UP_NODE * (VALIDATION if validated else 1)


def expected_steps(member: Member) -> int:
    """Return the optimizer steps that a member is likely to take.

    These are all that are left. If a search decides at pauses whether the member continues, the estimate is that a
    third of the members continues each time, with three times as many epochs.
    """
    steps_left = num_steps(member) - member.step
    steps_to_pause = member.batches_to_stop // member.job.accumulate
    return (
        steps_left
        if not 0 < steps_to_pause < steps_left
        else round(steps_to_pause * (1 + math.log(steps_left / steps_to_pause) * 2 / (3 * math.log(3))))
    )


def _share_frozen_part(similar: Sequence[Member]) -> bool:
    """Return whether members read the same rows and have equal frozen weights."""
    orders = {(m.job.order_seed if m.job.shuffle else None, id(m.data.source)) for m in similar}
    frozen = [[p for p in m.model.parameters() if not p.requires_grad and not is_lazy(p)] for m in similar]
    if len(orders) > 1 or not frozen[0]:
        return False
    return all(same_bits(a, b) for row in frozen[1:] for a, b in zip(frozen[0], row, strict=True))


def _kind(member: Member) -> tuple[Hashable, ...]:
    """Return a key that is equal for members that may be the same computation: a value for each of ASPECTS."""
    job, model = member.job, member.model
    tensors = [*model.parameters(), *model.buffers()]
    shapes = [(t.requires_grad, t.dtype, None if is_lazy(t) else t.shape) for t in tensors]
    code = [getattr(function, "__code__", type(function)) for function in (job.step, job.loss)]
    source = member.data.source
    reading = (
        (id(source), job.order_seed, None, None) if source.batched else (None, None, job.batch_size, member.num_rows)
    )
    layers = tuple(map(type, model.modules()))
    return layers, tuple(shapes), tuple(code), *reading, job.accumulate, job.precision, source.streamed


def _describe_lone(kind: tuple[Hashable, ...], kinds: Iterable[tuple[Hashable, ...]]) -> str:
    """Return the reason of a member that is the only one of its kind: in what the most similar other kind differs."""
    differences = [
        [name for name, a, b in zip(ASPECTS, kind, other, strict=True) if a != b]
        for other in islice(kinds, MOST_KINDS)
        if other != kind
    ]
    lone = "no other job is like it"
    if not differences:
        return lone
    fewest = min(differences, key=lambda names: len(names))
    return f"{lone}: the most similar one differs in {', '.join(fewest)}"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The measured forward and backward pass of one member."""

    seconds: float
    nodes: int
    call: float
    """Seconds of a call of a small torch operator."""
    reads: bool
    """Whether the step reads numbers out of tensors."""
    frozen: float = 0.0
    """Seconds of the step that compute values without gradients."""

    def gain(self, steps: Sequence[int], validated: bool = False, once: bool = False) -> float:
        """Return the seconds that a stack should save, its set-up subtracted.

        Args:
            steps: The steps of each member.
            validated: Whether validation has to be traced too.
            once: Whether values without gradients are computed once for all members.
        """
        common = self.frozen if once else 0.0
        computing = max(0.0, self.seconds - common - NODE * self.nodes * self.call)
        saved = (self.alone - computing) * sum(steps) - (STACKED * self.nodes * self.call + common) * max(steps)
        cost = self.set_up * (VALIDATION if validated else 1) + TRIAL * self.alone * (max(steps) >= FEW_STEPS)
        return (UNSURE if self.reads else SURE) * saved - cost

    @property
    def alone(self) -> float:
        """Seconds of a step, including the update."""
        return self.seconds + UPDATE * self.nodes * self.call

    @property
    def set_up(self) -> float:
        """Seconds to set up a stack of such members."""
        return (SET_UP + SET_UP_NODE * self.nodes) * self.call

    @property
    def trace(self) -> float:
        """Seconds to trace one such member."""
        return (TRACE + TRACE_NODE * self.nodes) * self.call


def _time_step(member: Member) -> StepTiming | None:
    """Time a step of a copy of the member; None if that would change Python state that cannot be restored.

    Raises:
        Untraceable: If the step does something that cannot be traced.
    """
    job = member.job
    roots = {"step": job.step, "loss": job.loss, "model": member.model}
    with draws(member, keep=False), preserved(roots, skip=member.model) as state:
        if state.unrestorable or not state.complete:
            return None
        model = copy.deepcopy(member.model)
        batch = member.data.take(0, min(member.batch_size, member.num_rows))

        def step() -> Tensor:
            with autocast(job, member.device):
                return run_step(job, model, batch)[0]

        with patched([]), _Reads() as reads:  # type: ignore[no-untyped-call]  # the first step is slower anyway
            loss = step()
        loss.backward()  # type: ignore[no-untyped-call]
        start, frozen = thread_time(), _Frozen()
        with frozen:
            loss = step()
        nodes = _num_nodes(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return StepTiming(thread_time() - start, nodes, _call_seconds(), reads.any, frozen.seconds)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether numbers are read out of tensors."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class _Frozen(TorchFunctionMode):
    """Times the calls whose results need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = thread_time()
        out = func(*args, **(kwargs or {}))  # nested calls are not intercepted
        if isinstance(out, Tensor) and not out.requires_grad:
            self.seconds += thread_time() - start
        return out


def _num_nodes(loss: Tensor) -> int:
    """Count the nodes of the loss's autograd graph."""
    seen, to_visit = set(), [loss.grad_fn]
    while to_visit:
        node = to_visit.pop()
        if node is not None and node not in seen:
            seen.add(node)
            to_visit += [other for other, _ in node.next_functions]
    return len(seen)


def _call_seconds(count: int = 100) -> float:
    """Time one call of a small torch operator."""
    value, seconds = torch.ones(8), []
    for _ in range(3):
        start = thread_time()
        for _ in range(count):
            value + value
        seconds.append((thread_time() - start) / count)
    return min(seconds)
