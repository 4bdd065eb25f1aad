"""Which members are simply looped, without a trace: packing them cannot win, or would win less than it takes to set up.

Members can share a pass only if they are alike (the same kinds of modules, shapes, batches), which is seen at once. Of
members that are alike, a step of one is timed. A small network's step is mostly what torch takes to call its operators,
whatever they compute, and a stack calls them once for all of its members; what remains is computing, which a stack has
to do for each of them as well. Both are counted in calls: what a small call of torch takes on this machine now. What is
computed from frozen weights that members have alike, and the same rows, a stack computes once.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
"""Calls that a node of the autograd graph takes, forward and backward; its share of the update; both in a stack."""
SET_UP, SET_UP_NODE = 120_000, 8_000
"""Calls that it takes to trace, prove and build a stack, and more of them for each node."""
TRACE, TRACE_NODE = 2_000, 700
"""The same for a trace alone."""
VALIDATION, TRIAL = 1.5, 100
"""Times that, where validation has to be traced too; and the steps that a trial takes, where there is one."""
MANY_STEPS, SMALL_SHARE = 500, 0.05
"""Steps from which a list may be long enough to be shared among processes, and the share of its time that traces may
take: whether other cores are free is not known yet."""
SURE, UNSURE = 0.7, 0.2
"""The share of a predicted gain that is counted on; less of it where a step reads numbers out of tensors, since many of
these cannot be traced."""


def looped(members: Sequence[Member], tiers: Mapping[int, str]) -> dict[int, str]:
    """Members that are to train in a plain loop, by their places, and why.

    `tiers`: those of the run that is resumed, which members have again.
    """
    if os.environ.get("SHOAL_PACK") == "always":
        return {}
    kinds: dict[Hashable, list[Member]] = {}
    for member in members:
        if member.index not in tiers:
            kinds.setdefault(_kind(member), []).append(member)
    reasons = {index: "serial as in the run before" for index, tier in tiers.items() if tier == "serial"}
    for alike in kinds.values():
        reason = _reason(alike)
        reasons |= {member.index: reason for member in alike} if reason else {}
    return reasons


def worth_sharing(members: Sequence[Member]) -> bool:
    """Whether members that are looped are worth a trace after all: those that have one may train in other processes."""
    given, cores = os.environ.get("SHOAL_WORKERS"), os.cpu_count() or 1
    steps = {member: expected_steps(member) for member in members}
    if given is not None or min(len(steps), cores) < 2 or sum(steps.values()) < MANY_STEPS:
        return given not in (None, "1")
    try:
        pilot = _pilot(max(steps, key=steps.__getitem__))
    except Exception:  # they stay here
        return False
    kinds = len({_kind(member) for member in members})
    return pilot is not None and kinds * pilot.trace < SMALL_SHARE * pilot.alone * sum(steps.values())


def looped_groups(members: Sequence[Member], reasons: Mapping[int, str], trace_cache: TraceCache | None) -> list[Group]:
    """A group for each of these members, which are looped for these reasons; with recipes, so that they may train in
    other processes, where that is worth a trace. `trace_cache`: None where they may not."""
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
    """Of a step; None where it cannot be timed. By it, and not by the size of the network, it is decided how many
    processes the work is worth: a small network of many layers takes its time in calls."""
    try:
        pilot = _pilot(member)
    except Exception:  # whatever it is will show in training, where it ends its own member
        return None
    return None if pilot is None else pilot.alone


def _reason(alike: Sequence[Member]) -> str:
    """Why members that are alike are better looped; empty where a stack should win, or nothing can be said."""
    if len(alike) == 1:
        return "no other job is like it"
    try:
        pilot = _pilot(alike[0])
    except Untraceable as refusal:
        return str(refusal)
    except Exception:  # whatever it is will show in training, where it ends its own member
        return ""
    steps = [expected_steps(member) for member in alike]
    if pilot is None or pilot.gain(steps, alike[0].val is not None, _same_beginning(alike)) > 0:
        return ""
    return "a stack would take longer to set up than it could save"


def expected_steps(member: Member) -> int:
    """Optimizer steps that a member is likely to have: all that are left, or, where others decide at its pauses whether
    it continues, as many as if each decision let a third continue, at three times the epochs of the one before."""
    left = num_steps(member) - member.step
    paused = member.batches_to_stop // member.job.accumulate
    return left if not 0 < paused < left else round(paused * (1 + math.log(left / paused) * 2 / (3 * math.log(3))))


def _same_beginning(alike: Sequence[Member]) -> bool:
    """Whether members read the same rows, and have the same frozen weights."""
    orders = {(m.job.order_seed if m.job.shuffle else None, id(m.data.source)) for m in alike}
    frozen = [[p for p in m.model.parameters() if not p.requires_grad and not is_lazy(p)] for m in alike]
    if len(orders) > 1 or not frozen[0]:
        return False
    return all(same_bits(a, b) for row in frozen[1:] for a, b in zip(frozen[0], row, strict=True))


def _kind(member: Member) -> Hashable:
    """Equal for members that may turn out to be one computation."""
    job, model = member.job, member.model
    tensors = [*model.parameters(), *model.buffers()]
    shapes = [(t.requires_grad, t.dtype, None if is_lazy(t) else t.shape) for t in tensors]
    code = [getattr(function, "__code__", type(function)) for function in (job.step, job.loss)]
    source = member.data.source
    rows = (id(source), job.order_seed) if source.batched else (job.batch_size, member.num_rows)
    batches = (*rows, job.accumulate, job.precision, source.streamed)
    return tuple(map(type, model.modules())), tuple(shapes), tuple(code), batches


@dataclass(frozen=True, slots=True)
class Pilot:
    """A step of one member: forward and backward."""

    seconds: float
    nodes: int
    call: float
    """Seconds of a small call of torch."""
    reads: bool
    """Whether it reads numbers out of tensors."""
    frozen: float = 0.0
    """Seconds of it that give what needs no gradient."""

    def gain(self, steps: Sequence[int], validated: bool = False, once: bool = False) -> float:
        """Seconds that a stack of members with so many steps should save, its set-up counted.

        `once`: what needs no gradient is computed once for all of them.
        """
        common = self.frozen if once else 0.0
        computing = max(0.0, self.seconds - common - NODE * self.nodes * self.call)
        saved = (self.alone - computing) * sum(steps) - (STACKED * self.nodes * self.call + common) * max(steps)
        cost = self.set_up * (VALIDATION if validated else 1) + TRIAL * self.alone * (max(steps) >= FEW_STEPS)
        return (UNSURE if self.reads else SURE) * saved - cost

    @property
    def alone(self) -> float:
        """Seconds of a step, the update included."""
        return self.seconds + UPDATE * self.nodes * self.call

    @property
    def set_up(self) -> float:
        """Seconds that it takes to set up a stack of them."""
        return (SET_UP + SET_UP_NODE * self.nodes) * self.call

    @property
    def trace(self) -> float:
        """Seconds that it takes to trace one of them."""
        return (TRACE + TRACE_NODE * self.nodes) * self.call


def _pilot(member: Member) -> Pilot | None:
    """Time a copy's step; None where that would leave something behind.

    Raises:
        Untraceable: when the step does what no trace can record.
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

        with patched([]), _Reads() as reads:  # type: ignore[no-untyped-call]  # the first takes longer anyway
            loss = step()
        loss.backward()  # type: ignore[no-untyped-call]
        start, frozen = thread_time(), _Frozen()
        with frozen:
            loss = step()
        nodes = _num_nodes(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return Pilot(thread_time() - start, nodes, _call_seconds(), reads.any, frozen.seconds)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether numbers are read out of tensors."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class _Frozen(TorchFunctionMode):
    """Times the calls that give what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = thread_time()
        out = func(*args, **(kwargs or {}))  # what it calls in turn is not seen here
        if isinstance(out, Tensor) and not out.requires_grad:
            self.seconds += thread_time() - start
        return out


def _num_nodes(loss: Tensor) -> int:
    """Of its autograd graph."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    return len(seen)


def _call_seconds(count: int = 100) -> float:
    value, seconds = torch.ones(8), []
    for _ in range(3):
        start = thread_time()
        for _ in range(count):
            value + value
        seconds.append((thread_time() - start) / count)
    return min(seconds)
