"""What members need in common to be one stack, computed once for all of them.

A recipe describes a job's training as a stack sees it: its step as a graph for every batch shape that it will get, and
its optimizer as a rule. Members with equal recipe keys can be one stack, even with different optimizers. A member
without a recipe raises `Untraceable` with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data import View
from shoal.data.loader import LoaderSource
from shoal.data.source import TensorSource, cloned
from shoal.engine.members.member import Member
from shoal.engine.members.optimizers import of_users
from shoal.engine.members.step import call_model, run_step, targets_of
from shoal.engine.python_state.watch import Watch
from shoal.engine.recipes._within_epoch import refuse_changes, refuse_changes_by_optimizer
from shoal.engine.recipes.frozen import FrozenWeights
from shoal.engine.recipes.optimizer_plan import OptimizerPlan, plan_optimizer
from shoal.engine.recipes.program import Programs
from shoal.engine.tracing.derive import Known, derive, remember, with_rates
from shoal.engine.tracing.fingerprint import fingerprint, split_floats
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import Path, skeleton
from shoal.engine.tracing.trace import Call, Trace, same_graph, trace
from shoal.errors import describe
from shoal.jobs.job import Job


@dataclass(slots=True, eq=False)
class Recipe:
    """A description of one member's training that decides with which members it can be stacked."""

    member: Member
    steps: dict[int, Trace]
    """The graph of the step, by the number of rows in a batch."""
    optimizer: OptimizerPlan
    key: Hashable = field(init=False)
    """A key of the computation. Members of one stack have the same key; their optimizers may differ."""
    shared: frozenset[int] = frozenset()
    """Indices into parameters, then buffers, of those that a stack keeps once for all its members; see `frozen`."""

    def __post_init__(self) -> None:
        job, member = self.member.job, self.member
        frozen = tuple(p.requires_grad for _, p in member.model.named_parameters())
        self.key = (
            tuple((rows, skeleton(graph)) for rows, graph in self.steps.items()),
            frozen, _reading_key(member), job.accumulate, job.precision, job.step is None, member.data.source.streamed,
            member.device,
        )  # fmt: skip
        if job.average is not None:
            self.key = (self.key, "average", job.average.use_buffers)

    def share(self, indices: Sequence[int], number: int) -> None:
        """Share the weights at these indices with all recipes of the same `number`."""
        self.shared = frozenset(indices)
        self.key = (self.key, "shared", tuple(indices), number)

    def same_steps(self, other: Recipe | None) -> bool:
        """Return whether the steps of both recipes are the same, including their numbers."""
        if other is None or self.key != other.key:
            return False
        return all(same_graph(graph, other.steps[rows]) for rows, graph in self.steps.items())


@dataclass(slots=True)
class Proofs:
    """Results of the proofs of a run, so that each kind of step is proven once."""

    reasons: dict[Hashable, str] = field(default_factory=dict)
    """For each kind of step, why it may not be stacked; empty if it may."""
    lifted: dict[Hashable, set[Path | int]] = field(default_factory=dict)
    """For each graph, the numbers and constants that were proven with different values for different members."""
    used: dict[tuple[Hashable, int], list[bool]] = field(default_factory=dict)
    """For each graph and number of rows in a batch, which parameters got a gradient in the proof. The autograd graph
    may reach a parameter whose gradient is None."""
    steps: int = 0
    """The number of steps of users' code that were run for the proofs."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, key: Hashable) -> int:
        """Return a short number for a key, which may be long."""
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A computation in eval mode, without gradients."""

    function: Hashable
    """A key that is equal for the same Python code."""
    call: Call
    precision: str | None = None

    @classmethod
    def forward(cls, precision: str | None = None) -> Evaluation:
        """Return an evaluation of a model's outputs. A batch is the tuple of its inputs."""
        return cls("forward", lambda model, batch: model(*batch), precision)

    @classmethod
    def validation(cls, job: Job, with_outputs: bool) -> Evaluation:
        """Return an evaluation of a job's step on a validation batch, as `((loss, logs), outputs)`.

        Args:
            with_outputs: Whether the outputs are needed, for metrics; otherwise they are None.
        """

        def call(model: nn.Module, batch: Any) -> Any:
            if job.step is not None:
                inputs = cloned(batch) if with_outputs else None  # the step may write to its batch
                return run_step(job, model, batch), call_model(model, inputs) if with_outputs else None
            assert job.loss is not None
            outputs = call_model(model, batch)
            return (job.loss(outputs, targets_of(batch)), {}), outputs if with_outputs else None

        return cls(("validation", job.step, job.loss, with_outputs), call, job.precision)


_Code = tuple[Hashable, Hashable, str, str | None, bool]
"""A key of recorded code: model, function, structure of the batch, precision, and whether it is an evaluation."""


@dataclass(frozen=True, slots=True)
class _Record:
    """The result of one recording."""

    made: Trace | Untraceable
    read: Watch
    """Watches other Python state that the code read: globals, classes, contents of closures."""
    held: list[Any]
    """Objects whose ids are in the key. They are kept alive so that no other object gets the same id."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a batch looks like, and how to read it if a step must be traced."""

    spec: str
    shapes: Hashable
    make: Callable[[], Any]

    @classmethod
    def like(cls, batch: Any) -> _Batch:
        """Describe a batch.

        Raises:
            Untraceable: If no graph can take it.
        """
        leaves, spec = pytree.tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise Untraceable("its batches hold something that is not a tensor")
        if not all(leaf.layout == torch.strided for leaf in leaves):
            raise Untraceable("its batches hold sparse tensors")
        shapes = tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves)
        return cls(repr(spec), shapes, lambda: batch)


class TraceCache:
    """Makes recipes, and traces each distinct step once."""

    def __init__(self, *, deterministic: bool = False, share: bool = False) -> None:
        """Create an empty cache.

        Args:
            deterministic: Make programs in which a member's bits depend on that member alone.
            share: Let members with equal frozen weights share them. Use it only if no member's weights are changed from
                outside while it trains.
        """
        self.deterministic = deterministic
        self.share = share and not deterministic
        self.frozen = FrozenWeights()
        self._traces: dict[tuple[_Code, Hashable], _Record] = {}
        self._prints: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self._held: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        """Objects whose ids are in the fingerprints."""
        self._kinds: dict[Hashable, int] = {}
        """A number for each kind of code, which does not depend on the floating-point numbers in it."""
        self._by_kind: dict[Hashable, Known] = {}
        """Recorded traces, by kind and by the shapes of the batch."""
        self._batches: dict[tuple[int, int], tuple[TensorSource, _Batch]] = {}
        """What batches of so many rows of a source look like; the source is kept alive, so that no other gets its
        id."""
        self._stream_shapes: dict[Hashable, tuple[str, str]] = {}
        """The shapes of the first and last batch of each streamed source."""
        self._checked_optimizers: dict[tuple[int, int], Any] = {}
        """Optimizers of the users' own that change nothing that a kind of step reads, by the kind and their id."""
        self.programs = Programs(deterministic=deterministic)
        self.proofs = Proofs()
        self.executables: dict[Hashable, Any] = {}
        """Compiled steps of the `captured` tier, by what they compute and its shape."""

    def recipe(self, member: Member, *, brief: bool = False) -> Recipe:
        """Return the member's recipe.

        Args:
            brief: Only find out whether the member can be traced, for one that is not stacked: its step on a full batch
                is recorded once.

        Raises:
            Untraceable: With the reason why it cannot be stacked.
        """
        sizes = batch_sizes(member)[: 1 if brief else None]
        steps = {rows: self.step(member, rows, twice=not brief) for rows in sizes}
        optimizer = plan_optimizer(member)
        gets_grad = [any(flags) for flags in zip(*(graph.used for graph in steps.values()), strict=True)]
        if optimizer.flags is not None and not optimizer.began_together(member, gets_grad):
            optimizer = replace(optimizer, flags=None, runner=None)
        refuse_changes(member, optimizer.settings, optimizer.kind)
        checked = steps[sizes[0]].kind, id(member.job.optimizer)
        if of_users(member.job.optimizer) and checked not in self._checked_optimizers:
            refuse_changes_by_optimizer(member)
            self._checked_optimizers[checked] = member.job.optimizer
        return Recipe(member, steps, optimizer)

    def step(self, member: Member, rows: int, *, twice: bool = True) -> Trace:
        """Trace the training step on a batch of so many rows: `((loss, logs), buffers)`. `twice`: see `trace`."""
        source, make = member.data.source, partial(sample, member, rows)
        if (id(source), rows) in self._batches:
            return self.step_on(member, replace(self._batches[id(source), rows][1], make=make), twice=twice)
        batch = make()
        if isinstance(source, TensorSource):
            self._batches[id(source), rows] = source, replace(_Batch.like(batch), make=tuple)
        if source.streamed and not member.batched:
            self._refuse_other_shapes(member, rows, batch)
        return self.step_on(member, batch, twice=twice)

    def _refuse_other_shapes(self, member: Member, rows: int, batch: Any) -> None:
        """Raise Untraceable if other rows give a batch of other shapes, as padding to the longest row does."""
        view = member.data
        key = (id(view.source), rows, len(view))
        if key not in self._stream_shapes:
            self._stream_shapes[key] = (_format_shapes(batch), _format_shapes(sample(member, rows, last=True)))
        first, last = self._stream_shapes[key]
        if first != last:
            raise Untraceable(f"its batches have different shapes ({first}, {last})")

    def step_on(self, member: Member, batch: Any, *, twice: bool = True) -> Trace:
        """Trace the training step on a batch like this one. `twice`: see `trace`."""
        job = member.job
        call = lambda model, batch: run_step(job, model, batch)  # noqa: E731
        return self.graph(member.model, (job.step, job.loss), call, batch, precision=job.precision, twice=twice)

    def evaluation(self, model: nn.Module, what: Evaluation, batch: Any, *, twice: bool = True) -> Trace:
        """Trace an evaluation on a batch like this one. `twice`: see `trace`."""
        return self.graph(
            model, what.function, what.call, batch, precision=what.precision, evaluating=True, twice=twice
        )

    def validations(self, member: Member) -> list[Trace]:
        """Trace the member's validation on a batch of each size that occurs; an empty list without validation data."""
        if member.val is None:
            return []
        what = Evaluation.validation(member.job, bool(member.job.metrics))
        try:
            batches = validation_batches(member.val, member.job.batch_size)
        except Exception as error:
            raise Untraceable(f"its validation data cannot be read ({describe(error)})") from error
        return [self.evaluation(member.model, what, batch) for batch in batches]

    def forget(self, model: nn.Module) -> None:
        """Drop what was recorded of this model, since Python state that its step reads has changed."""
        model_print = self._prints.pop(model, None)
        self._traces = {key: record for key, record in self._traces.items() if key[0][0] != model_print}
        self._by_kind.clear()
        self._checked_optimizers.clear()

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
        """Return `call(model, batch)` as a graph, traced once for all models, functions and batches that look the
        same."""
        batch = batch if isinstance(batch, _Batch) else _Batch.like(batch)
        if model not in self._prints:
            self._prints[model] = fingerprint(model, hold=self._held.setdefault(model, []))
        function_objects: list[Any] = []
        code = (self._prints[model], fingerprint(function, hold=function_objects), batch.spec, precision, evaluating)
        key = (code, batch.shapes)
        if key not in self._traces or self._traces[key].read.changes():
            kind, floats = split_floats(code)
            result: Trace | Untraceable
            watch = Watch()
            watch.add(0, {"step": function}, model, private=True)  # the model's own attributes are in its fingerprint
            try:
                derivable = self._by_kind.setdefault((kind, batch.shapes), Known())
                result = with_rates(derivable, code, floats) or _record(
                    model, function, call, batch, precision, evaluating, twice and kind not in self._kinds,
                    floats, derivable,
                )  # fmt: skip
                result.kind = self._kinds.setdefault(kind, len(self._kinds))
            except Untraceable as refusal:
                result = refusal
            self._traces[key] = _Record(result, watch, [*self._held.get(model, ()), *function_objects])
        recorded = self._traces[key].made
        if isinstance(recorded, Untraceable):
            raise recorded
        return recorded


def _record(
    model: nn.Module,
    function: Any,
    call: Call,
    batch: _Batch,
    precision: str | None,
    evaluating: bool,
    twice: bool,
    floats: list[str],
    derivable: Known,
) -> Trace:
    """Derive a graph from known ones and compare it with the step, or record it."""
    rows = batch.make()
    model = _on_batch_device(model, pytree.tree_leaves(rows))
    derived = derive(derivable, floats, model, call, rows, reached=function, evaluating=evaluating)
    if derived is not None:
        return derived
    made = trace(model, call, rows, precision=precision, evaluating=evaluating, reached=function, twice=twice)
    remember(derivable, floats, made)
    return made


def validation_batches(val: View, full: int) -> list[Any]:
    """Return a batch of each size that validation has, the largest first."""
    sizes = sorted({min(full, len(val)), len(val) % full} - {0}, reverse=True)
    return [val.take(0, rows) for rows in sizes]


def _on_batch_device(model: nn.Module, leaves: list[Tensor]) -> nn.Module:
    """Return the model on the batch's device. The models of members in a stack on a GPU stay on the CPU."""
    first = next(model.parameters(), None)
    if first is None or not leaves or first.device == leaves[0].device:
        return model
    return copy.deepcopy(model).to(leaves[0].device)


def _reading_key(member: Member) -> Hashable:
    """Return what members need in common to read batches together. Members that share a DataLoader get all its
    batches."""
    source = member.data.source
    if isinstance(source, LoaderSource):
        return source.number, member.job.order_seed
    return member.job.batch_size, member.num_rows


def batch_sizes(member: Member) -> list[int]:
    """Return the sizes of the batches that a member will get: the full size, and that of a short last batch.

    For a DataLoader it is the first kind of batch; other kinds are traced when they occur.
    """
    job, n = member.job, member.shape_rows
    if member.batched:
        return [1]
    full = min(job.batch_size, n)
    changed = member.earlier or member.batch_shift
    if job.steps is not None and job.steps * job.accumulate < member.num_batches and not changed:
        return [full]
    return sorted({full, n % job.batch_size or full}, reverse=True)


def sample(member: Member, rows: int, last: bool = False) -> Any:
    """Read a batch of so many rows, for its shapes: the first rows, or the last.

    Raises:
        Untraceable: If they cannot be read.
    """
    start = len(member.data) - rows if last else 0
    source = member.data.source
    try:
        return source.sample(rows) if isinstance(source, LoaderSource) else member.data.take(start, start + rows)
    except Exception as error:
        raise Untraceable(f"some of its rows cannot be read ({describe(error)})") from error


def _format_shapes(batch: Any) -> str:
    """Format the shapes of a batch for a message."""
    return ", ".join(
        str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in pytree.tree_leaves(batch)
    )
