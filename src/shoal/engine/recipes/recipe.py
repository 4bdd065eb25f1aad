"""What members must have in common to be one stack, worked out once for all of them.

A recipe is a job's training as far as the stack is concerned: its step as a graph for every batch shape it will see,
and its optimizer as a rule. Members with equal recipe keys are one stack, whatever their optimizers; why a member has
no recipe is an `Untraceable` with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.loader import LoaderSource
from shoal.engine.members.member import Member
from shoal.engine.members.step import call_model, run_step, targets_of
from shoal.engine.python_state.watch import Watch
from shoal.engine.recipes._within_epoch import refuse_changes
from shoal.engine.recipes.frozen import FrozenWeights
from shoal.engine.recipes.optimizer_plan import OptimizerPlan, plan_optimizer
from shoal.engine.tracing.derive import Known, derive, remember
from shoal.engine.tracing.fingerprint import fingerprint, without_floats
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import Path, skeleton
from shoal.engine.tracing.trace import Call, Trace, same_graph, trace
from shoal.errors import describe
from shoal.jobs.job import Job

if TYPE_CHECKING:
    from shoal.engine.recipes.program import Program


MOST_PROGRAMS = 256
"""Compositions of stacks whose programs stay in the cache."""


@dataclass(slots=True, eq=False)
class Recipe:
    """One member's training as a stack sees it."""

    member: Member
    steps: dict[int, Trace]
    """Rows in a batch -> the step as a graph."""
    optimizer: OptimizerPlan
    key: Hashable = field(init=False)
    """Of the computation, which all members of a stack share; optimizers may differ."""
    shared: frozenset[int] = frozenset()
    """Of parameters, then buffers: those that a stack keeps once for all its members; see `frozen`."""

    def __post_init__(self) -> None:
        job, member = self.member.job, self.member
        frozen = tuple(p.requires_grad for _, p in member.model.named_parameters())
        self.key = (
            tuple((rows, skeleton(graph)) for rows, graph in self.steps.items()),
            frozen, _reads(member), job.accumulate, job.precision, job.step is None, member.data.source.streamed,
            member.device,
        )  # fmt: skip
        if job.average is not None:
            self.key = (self.key, "average", job.average.use_buffers)

    def share(self, places: Sequence[int], number: int) -> None:
        """Have these weights in common with all recipes of this number."""
        self.shared = frozenset(places)
        self.key = (self.key, "shared", tuple(places), number)

    def same_steps(self, other: Recipe | None) -> bool:
        """Whether the steps are the same, number for number."""
        if other is None or self.key != other.key:
            return False
        return all(same_graph(graph, other.steps[rows]) for rows, graph in self.steps.items())


@dataclass(slots=True)
class Proofs:
    """What has been proven in a run."""

    reasons: dict[Hashable, str] = field(default_factory=dict)
    """By kind: why it may not be stacked; empty where it may."""
    lifted: dict[Hashable, set[Path | int]] = field(default_factory=dict)
    """By graph: the numbers and constants that were proven with different values for different members."""
    used: dict[tuple[Hashable, int], list[bool]] = field(default_factory=dict)
    """By graph and rows in a batch: the parameters that got a gradient. A backward pass may come to one without."""
    steps: int = 0
    """Steps of users' own code that were run for it."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, key: Hashable) -> int:
        """A number for a key, which may be long."""
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Something to be computed in eval mode, without gradients."""

    function: Hashable
    """What it is, for Python: equal for the same code."""
    call: Call
    precision: str | None = None

    @classmethod
    def forward(cls, precision: str | None = None) -> Evaluation:
        """A model's outputs; a batch is the tuple of its inputs."""
        return cls("forward", lambda model, batch: model(*batch), precision)

    @classmethod
    def validation(cls, job: Job, wanted: bool) -> Evaluation:
        """A job's step on a validation batch: `((loss, logs), outputs)`; outputs only if wanted."""

        def call(model: nn.Module, batch: Any) -> Any:
            if job.step is not None:
                return run_step(job, model, batch), call_model(model, batch) if wanted else None
            assert job.loss is not None
            outputs = call_model(model, batch)
            return (job.loss(outputs, targets_of(batch)), {}), outputs if wanted else None

        return cls(("validation", job.step, job.loss, wanted), call, job.precision)


_Code = tuple[Hashable, Hashable, str, str | None, bool]
"""What is recorded, for Python: model, function, how batches are folded, precision, whether it is evaluated."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What was recorded."""

    made: Trace | Untraceable
    read: Watch
    """What else it read: globals, classes, what closures hold."""
    held: list[Any]
    """Objects whose ids are in its key: while they live, no others have them."""


class TraceCache:
    """Makes recipes, tracing each distinct step once."""

    def __init__(self, *, deterministic: bool = False, share: bool = False) -> None:
        """`deterministic`: programs whose bits for a member depend on that member alone. `share`: members with the same
        frozen weights may have them in common, where nobody changes one member's while it trains."""
        self.deterministic = deterministic
        self.share = share and not deterministic
        self.frozen = FrozenWeights()
        self._traces: dict[tuple[_Code, Hashable], _Record] = {}
        self._prints: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self._held: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        """Objects whose ids are in the fingerprints."""
        self._kinds: dict[Hashable, int] = {}
        """Code, whatever the floating-point numbers in it."""
        self._by_kind: dict[Hashable, Known] = {}
        """What was recorded, by kind and the shapes of the batch."""
        self._shapes: dict[Hashable, tuple[str, str]] = {}
        """Of two batches of a streamed source."""
        self._programs: dict[Hashable, Program] = {}
        self.proofs = Proofs()
        self.executables: dict[Hashable, Any] = {}
        """Compiled steps, for `captured`: by what they compute and its shape."""

    def recipe(self, member: Member, *, brief: bool = False) -> Recipe:
        """The member's recipe.

        `brief`: for one that is not stacked, of which only that it can be traced is to be known: its step on a full
        batch, recorded once.

        Raises:
            Untraceable: with the reason why it cannot be stacked.
        """
        sizes = batch_sizes(member)[: 1 if brief else None]
        steps = {rows: self.step(member, rows, twice=not brief) for rows in sizes}
        optimizer = plan_optimizer(member)
        touched = [any(flags) for flags in zip(*(graph.used for graph in steps.values()), strict=True)]
        if optimizer.flags is not None and not optimizer.began_together(member, touched):
            optimizer = replace(optimizer, flags=None, runner=None)
        refuse_changes(member, optimizer.settings, optimizer.kind)
        return Recipe(member, steps, optimizer)

    def program(
        self,
        traces: Sequence[Trace],
        stacked_batch: Sequence[bool],
        device: torch.device,
        shared: frozenset[int] = frozenset(),
    ) -> Program:
        """The stacked program of these traces of mine, made once for each composition of a stack; see `Program`.

        Raises:
            NotStackable: when an operator has no exact member axis.
        """
        from shoal.engine.recipes.program import Program

        key = (tuple(trace.number for trace in traces), tuple(stacked_batch), device, shared)
        if key not in self._programs:
            while len(self._programs) >= MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = Program(
                traces, device=device, stacked_batch=stacked_batch, deterministic=self.deterministic, shared=shared
            )
        return self._programs[key]

    def step(self, member: Member, rows: int, *, twice: bool = True) -> Trace:
        """The training step on a batch of so many rows: `((loss, logs), buffers)`; `twice`: see `trace`."""
        batch = sample(member, rows)
        if member.data.source.streamed and not member.batched:
            self._refuse_other_shapes(member, rows, batch)
        return self.step_on(member, batch, twice=twice)

    def _refuse_other_shapes(self, member: Member, rows: int, batch: Any) -> None:
        """Untraceable where a batch of other rows has other shapes, as one that is padded to its longest row has."""
        view = member.data
        key = (id(view.source), rows, len(view))
        if key not in self._shapes:
            self._shapes[key] = (_shapes(batch), _shapes(sample(member, rows, last=True)))
        first, last = self._shapes[key]
        if first != last:
            raise Untraceable(f"its batches have different shapes ({first}, {last})")

    def step_on(self, member: Member, batch: Any, *, twice: bool = True) -> Trace:
        """The training step on a batch like this one; `twice`: see `trace`."""
        job = member.job
        call = lambda model, batch: run_step(job, model, batch)  # noqa: E731
        return self.graph(member.model, (job.step, job.loss), call, batch, precision=job.precision, twice=twice)

    def evaluation(self, model: nn.Module, what: Evaluation, batch: Any, *, twice: bool = True) -> Trace:
        """What is evaluated, on a batch like this one; `twice`: see `trace`."""
        return self.graph(
            model, what.function, what.call, batch, precision=what.precision, evaluating=True, twice=twice
        )

    def validations(self, member: Member) -> list[Trace]:
        """The member's validation on a batch of each size that it has; none where it has no validation data."""
        if member.val is None:
            return []
        what, full = Evaluation.validation(member.job, bool(member.job.metrics)), member.job.batch_size
        sizes = sorted({min(full, len(member.val)), len(member.val) % full} - {0}, reverse=True)
        try:
            batches = [member.val.take(0, rows) for rows in sizes]
        except Exception as error:
            raise Untraceable(f"its validation data cannot be read ({describe(error)})") from error
        return [self.evaluation(member.model, what, batch) for batch in batches]

    def forget(self, model: nn.Module) -> None:
        """Python state that this model's step reads has changed: what was recorded of it holds no longer."""
        look = self._prints.pop(model, None)
        self._traces = {key: made for key, made in self._traces.items() if key[0][0] != look}
        self._by_kind.clear()

    def graph(
        self,
        model: nn.Module,
        function: Any,
        call: Call,
        batch: Any,
        *,
        precision: str | None,
        evaluating: bool = False,
        twice: bool = True,
    ) -> Trace:
        """`call(model, batch)` as a graph, traced once for all models, functions and batches that look the same."""
        leaves, spec = pytree.tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise Untraceable("its batches hold something that is not a tensor")
        if not all(leaf.layout == torch.strided for leaf in leaves):
            raise Untraceable("its batches hold sparse tensors")
        shapes = tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves)
        if model not in self._prints:
            self._prints[model] = fingerprint(model, hold=self._held.setdefault(model, []))
        held: list[Any] = []
        code = (self._prints[model], fingerprint(function, hold=held), repr(spec), precision, evaluating)
        key = (code, shapes)
        if key not in self._traces or self._traces[key].read.changes():
            kind = without_floats(code)
            made: Trace | Untraceable
            watch = Watch()
            watch.add(0, {"step": function}, model, private=True)  # what is the model's own is in its fingerprint
            try:
                there = _beside(model, leaves)
                known = self._by_kind.setdefault((kind, shapes), [])
                derived = derive(known, code, there, call, batch, reached=function, evaluating=evaluating)
                made = derived or trace(
                    there, call, batch, precision=precision, evaluating=evaluating, reached=function,
                    twice=twice and kind not in self._kinds,
                )  # fmt: skip
                if derived is None:
                    remember(known, code, made)
                made.kind = self._kinds.setdefault(kind, len(self._kinds))
            except Untraceable as refusal:
                made = refusal
            self._traces[key] = _Record(made, watch, [*self._held.get(model, ()), *held])
        recorded = self._traces[key].made
        if isinstance(recorded, Untraceable):
            raise recorded
        return recorded


def _beside(model: nn.Module, leaves: list[Tensor]) -> nn.Module:
    """The model where the batch is: a stack on a GPU keeps its members' own models on the CPU meanwhile."""
    first = next(model.parameters(), None)
    if first is None or not leaves or first.device == leaves[0].device:
        return model
    return copy.deepcopy(model).to(leaves[0].device)


def _reads(member: Member) -> Hashable:
    """How a member reads its data. Those that read a DataLoader together get the same batches all the way."""
    source = member.data.source
    if isinstance(source, LoaderSource):
        return source.number, member.job.order_seed
    return member.job.batch_size, member.num_rows


def batch_sizes(member: Member) -> list[int]:
    """The sizes of the batches a member will see: the full one, and the short last one where it comes to that. Of a
    DataLoader: the first kind of batch; others are looked at when they come."""
    job, n = member.job, member.shape_rows
    if member.batched:
        return [1]
    full = min(job.batch_size, n)
    changed = member.earlier or member.batch_shift
    if job.steps is not None and job.steps * job.accumulate < member.num_batches and not changed:
        return [full]
    return sorted({full, n % job.batch_size or full}, reverse=True)


def sample(member: Member, rows: int, last: bool = False) -> Any:
    """A batch of so many rows, for its shapes: the first ones, or the last.

    Raises:
        Untraceable: when they cannot be read.
    """
    start = len(member.data) - rows if last else 0
    source = member.data.source
    try:
        return source.sample(rows) if isinstance(source, LoaderSource) else member.data.take(start, start + rows)
    except Exception as error:
        raise Untraceable(f"some of its rows cannot be read ({describe(error)})") from error


def _shapes(batch: Any) -> str:
    """The shapes of a batch, in words."""
    return ", ".join(
        str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in pytree.tree_leaves(batch)
    )
