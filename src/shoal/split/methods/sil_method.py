"""SIL as a split method: the parts between a network's cuts train apart, with labels or with local heads.

A round is a window of steps. If parts read one another's activations (labels B, heads), part k trains in each round on
the window that part k - 1 had in the round before, and reads the activations that part k - 1 computed for it after
training. So all parts train at the same time, each one round behind the one before it. Gradients never cross a cut, and
each activation crosses once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.data.pool import batch_rows
from shoal.engine.members.member import Member, seeded
from shoal.engine.members.step import autocast, evaluating, run_step
from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.core.checks import check_choice, check_count, prepare_job
from shoal.split.core.memory import WHOLE
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Part, Slice, Task, Tensors
from shoal.split.core.reading import Reading, mixed
from shoal.split.core.state import tensors_of
from shoal.split.methods._balance import choose
from shoal.split.methods._cuts import cut, record
from shoal.split.methods.heads import Head, WithHead, make_head
from shoal.split.methods.labels import Labels

ACROSS = "activations"
FEW = 3
"""How many rows the cut network is tried on."""
PER_PART = ("optimizer", "hparams", "clip_norm", "schedule")
"""The settings that a single part may have of its own."""


@dataclass
class SILSettings(Labels):
    """The settings of `shoal.split.sil`, including those of labels."""

    cuts: Sequence[str] | int | None = None
    method: Literal["labels", "heads"] = "heads"
    variant: Literal["A", "B"] | None = None
    _: KW_ONLY
    head_width: int | None = None
    recovery: int = 0
    local_steps: int | None = None
    per_part: Mapping[int, Mapping[str, Any]] | None = None
    moments: Literal["travel", "fresh"] = "travel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, ("labels", "heads"))
        check_choice("moments", self.moments, ("travel", "fresh"))
        check_count("recovery", self.recovery, least=0, hint=" (epochs)")
        if self.local_steps is not None:
            check_count("local_steps", self.local_steps, hint=", or None for an epoch")
        if self.head_width is not None:
            check_count("head_width", self.head_width, hint=", or None for one layer")
        if isinstance(self.cuts, int) and (isinstance(self.cuts, bool) or self.cuts < 2):
            raise SplitError(f"cuts is {self.cuts!r}; use names of modules, or a number of parts, 2 or more")
        named = isinstance(self.cuts, Sequence) and not isinstance(self.cuts, str) and self.cuts
        if not (named or self.cuts is None or isinstance(self.cuts, int)):
            raise SplitError(f"cuts is {self.cuts!r}; use a list of module names, such as ['fc3'], or None")
        if self.method == "heads":
            self._check_heads()
        else:
            self._check_labels()

    def _check_heads(self) -> None:
        if self.variant is not None:
            raise SplitError(
                f"variant is {self.variant!r}, and method='heads' has none; use method='labels', or leave it out"
            )
        if any(getattr(self, f.name) != f.default for f in dataclasses.fields(Labels)):
            raise SplitError(
                "method='heads' has no labels, so their settings would do nothing; leave them out, or use 'labels'"
            )

    def _check_labels(self) -> None:
        self.variant = "A" if self.variant is None else self.variant
        check_choice("variant", self.variant, ("A", "B"))
        if self.head_width is not None:
            raise SplitError(f"head_width is {self.head_width!r} and method='labels' has no heads; leave it out")
        if self.variant == "B" and self.noise:
            raise SplitError(f"noise is {self.noise!r} and variant 'B' reads activations, not labels; use 0")


class SILMethod(Method):
    """A network cut into parts that are trained apart."""

    name = "sil"
    options = SILSettings

    def __init__(self, job: Job | Member, *args: Any, **kwargs: Any) -> None:
        settings = SILSettings(*args, **kwargs)
        self.member = prepare_job(job)
        self.source = job = self.member.job
        self.way, self.variant, self.moments, self.recovery = (
            settings.method,
            settings.variant,
            settings.moments,
            settings.recovery,
        )
        self.labels: Labels | None = settings if self.way == "labels" else None
        if job.loss is None:
            raise SplitError("the job has its own step, so a part's loss is not known; use loss= in place of step=")
        if job.params is not None:
            raise SplitError(
                "params is set, and a part is a network of its own, which params would not know; leave it out, or "
                "give parts settings of their own by per_part="
            )
        tensors_of(self.model)  # raises if weights have no shapes yet
        batch = self.data.take(0, min(job.batch_size, len(self.data)))
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise SplitError(f"a batch is a {type(batch).__name__}; cut networks need (inputs, ..., targets)")
        few = tuple(self.data.take(0, min(FEW, len(self.data)))[:-1])
        recorded = record(self.model, few)
        cuts = settings.cuts
        self.shares: list[float] | None = None
        if cuts is None or isinstance(cuts, int):
            cuts, self.shares = choose(recorded, job, batch[:-1], 2 if cuts is None else cuts)
        self.pieces = cut(self.model, few, list(cuts), recorded)
        self.count = self.num_workers = len(self.pieces.networks)
        self.lag = self.way == "heads" or self.variant == "B"
        self.tables = self._draw(batch[-1]) if self.way == "labels" else []
        self.heads: list[Head] = self._make_heads(settings.head_width) if self.way == "heads" else []
        self.per_part = check_per_part(settings.per_part, self.count)
        self._plan(settings.local_steps)
        self._known: dict[int, tuple[int, Tensor]] = {}
        """Part -> its last window and the activations that it computed for it."""
        self._missing: set[tuple[int, int]] = set()
        """(part, window) pairs whose activations were lost."""
        self.crossed = 0
        """Bytes of activations that have crossed cuts."""
        self.settings = MappingProxyType(
            {
                "method": f"sil {self.way}" + (f" {self.variant}" if self.way == "labels" else ""),
                "cuts": [c.name for c in self.pieces.cuts],
                "local_steps": self.local_steps,
                "recovery": settings.recovery,
                "head_width": settings.head_width,
                "moments": settings.moments,
                "per_part": {
                    str(part): repr(sorted(changes.items())) for part, changes in sorted(self.per_part.items())
                },
                **({f.name: getattr(settings, f.name) for f in dataclasses.fields(Labels)} if self.labels else {}),
            }
        )

    # --- what it is made of -----------------------------------------------------------------------------------------

    def _plan(self, local_steps: int | None) -> None:
        """Divide the job's steps into windows. Parts that read activations end one round after the part before them."""
        self.reading = Reading(self.source, len(self.data))
        epoch = self.reading.steps
        self.steps = self.source.steps if self.source.steps is not None else (self.source.epochs or 0) * epoch
        self.local_steps = local_steps if local_steps is not None else epoch
        self.windows = -(-self.steps // self.local_steps)
        self.separate_rounds = self.windows + (self.count - 1 if self.lag and self.windows else 0)
        """How many rounds come before recovery."""
        self.rounds = self.separate_rounds + self.recovery

    def _draw(self, target: Any) -> list[Tensor]:
        """Draw the labels of every cut, or raise a SplitError if there are no classes."""
        output = self.pieces.output
        are_classes = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
        if not are_classes or len(output) != 1:
            what = f"{target.dtype} of shape {list(target.shape)}" if isinstance(target, Tensor) else type(target)
            raise SplitError(
                f"labels need classes: targets are {what} and the output has rows of shape {list(output)}; use whole "
                "numbers and one output for each class, or method='heads'"
            )
        assert self.labels is not None
        for cut_point in self.pieces.cuts:
            if not cut_point.dtype.is_floating_point:
                raise SplitError(
                    f"cut {cut_point.name!r}: {cut_point.dtype} crosses it; labels are floating-point numbers"
                )
        return [
            self.labels.draw(output[0], cut_point.shape, self.source.seed, index).to(cut_point.dtype)
            for index, cut_point in enumerate(self.pieces.cuts)
        ]

    def _make_heads(self, width: int | None) -> list[Head]:
        with seeded(mixed(self.source.seed, self.count), torch.device("cpu")):
            return [make_head(cut_point, self.pieces.output, width) for cut_point in self.pieces.cuts]

    def extra_tensors(self) -> Tensors:
        return {
            f"{_head(index)}{name}": tensor
            for index, head in enumerate(self.heads)
            for name, tensor in tensors_of(head).items()
        }

    def job(self, job: Job, part: Part) -> Job:
        changes = self.per_part.get(int(part.role), {}) if part.role != WHOLE else {}
        return dataclasses.replace(job, **changes) if changes else job

    # --- rounds -----------------------------------------------------------------------------------------------------

    def parts(self, number: int, workers: Sequence[Worker]) -> list[Part]:
        if any(worker.shard is not None for worker in workers):
            raise SplitError("the parts of a cut network read the same rows; give all workers all the data")
        if number >= self.separate_rounds:
            step = (number - self.separate_rounds) * self.reading.steps
            return [self._part(0, WHOLE, number, step, self.reading.steps)]
        if len(workers) < self.count and number == 0:
            raise SplitError(
                f"{self.count} parts need {self.count} workers, not {len(workers)}; use fewer cuts or more workers"
            )
        turn = sorted((number + index) % self.count for index in range(min(self.count, len(workers))))
        busy = [part for part in (self.part_of(number, role) for role in turn) if part.steps]
        return [dataclasses.replace(part, number=index) for index, part in enumerate(busy)]

    def part_of(self, number: int, index: int) -> Part:
        """Return what part `index` does in a round: nothing before its first window, after its last, or without
        input."""
        window = number - index if self.lag else number
        step = window * self.local_steps
        steps = max(0, min(self.local_steps, self.steps - step)) if window >= 0 else 0
        if self.lag and index and (index - 1, window) in self._missing:
            steps = 0
        return self._part(index, str(index), number, max(0, step), steps)

    def _part(self, index: int, role: str, number: int, step: int, steps: int) -> Part:
        seed = mixed(self.source.seed, number, index)
        return Part(number=index, role=role, start=self.reading.first_batch(step), steps=steps, seed=seed)

    def network(self, part: Part) -> nn.Module:
        if part.role == WHOLE:
            return copy.deepcopy(self.model)
        index = int(part.role)
        network = copy.deepcopy(self.pieces.networks[index])
        return WithHead(network, copy.deepcopy(self.heads[index])) if index < len(self.heads) else network

    def slices(self, part: Part) -> Mapping[str, Slice]:
        if part.role == WHOLE:
            return {name: Slice(name) for name in tensors_of(self.model)}
        index = int(part.role)
        names = self.pieces.names[index]
        if index >= len(self.heads):
            return {name: Slice(whole) for name, whole in names.items()}
        slices = {f"body.{name}": Slice(whole) for name, whole in names.items()}
        return slices | {f"head.{name}": Slice(f"{_head(index)}{name}") for name in tensors_of(self.heads[index])}

    # --- a part's training ------------------------------------------------------------------------------------------

    def step(self, part: Part) -> Callable[[nn.Module, Any], Any]:
        job = self.job(self.source, part)
        if part.role == WHOLE:
            return lambda network, batch: run_step(job, network, batch)[0]
        index = int(part.role)
        input_labels = self.tables[index - 1] if self.way == "labels" and self.variant == "A" and index else None
        output_labels = self.tables[index] if self.way == "labels" and index < self.count - 1 else None
        labels = self.labels

        def step(network: nn.Module, batch: Any) -> Tensor:
            target = batch[-1]
            if input_labels is not None and labels is not None:
                outputs = network(labels.read(input_labels.to(target.device), target))
            else:
                outputs = network(*batch[:-1])
            if output_labels is not None and labels is not None:
                return labels.loss(outputs, output_labels.to(outputs.device), target)
            assert job.loss is not None
            return job.loss(outputs, target)

        return step

    def batches(self, task: Task, read: Iterator[Any]) -> Iterator[Any]:
        """Yield a part's batches: the job's for the first part, (activations, targets) or targets alone for the
        others."""
        if task.part.role in (WHOLE, "0"):
            yield from read
            return
        at = 0
        for batch in read:
            rows = batch_rows(batch)
            if self.lag:
                yield task.extras[ACROSS][at : at + rows].to(batch[-1].device), batch[-1]
            else:
                yield (batch[-1],)
            at += rows

    def yields(self, task: Task, network: nn.Module, read: Callable[[], Iterator[Any]]) -> Tensors:
        if not self.lag or task.part.role in (WHOLE, str(self.count - 1)):
            return {}
        body = network.body if isinstance(network, WithHead) else network
        device = next(body.parameters()).device
        with evaluating(body), autocast(self.job(self.source, task.part), device):
            activations = torch.cat([body(*batch[:-1]).cpu() for batch in read()])
        return {ACROSS: activations.to(self.pieces.cuts[int(task.part.role)].dtype)}

    # --- between parts ----------------------------------------------------------------------------------------------

    def extras(self, number: int, part: Part) -> Tensors:
        if not self.lag or part.role in (WHOLE, "0") or not part.steps:
            return {}
        window, activations = self._known[int(part.role) - 1]
        assert window == number - int(part.role), "activations of another window"
        return {ACROSS: activations}

    def example(self, part: Part, batch: Any) -> Any:
        if part.role in (WHOLE, "0"):
            return batch
        if not self.lag:
            return (batch[-1],)
        cut_point = self.pieces.cuts[int(part.role) - 1]
        return torch.zeros(batch_rows(batch), *cut_point.shape, dtype=cut_point.dtype), batch[-1]

    def predicted_extras(self, part: Part) -> tuple[Tensors, Tensors]:
        if not self.lag or part.role == WHOLE or not part.steps:
            return {}, {}
        rows = sum(len(batch) for _, group in self.reading.groups(part.start, part.steps) for batch in group)

        def crossing(index: int) -> Tensors:
            if not 0 <= index < len(self.pieces.cuts):
                return {}
            cut_point = self.pieces.cuts[index]
            return {ACROSS: torch.empty(rows, *cut_point.shape, dtype=cut_point.dtype, device="meta")}

        return crossing(int(part.role) - 1), crossing(int(part.role))

    def see(self, number: int, parts: Sequence[Part], outcomes: Sequence[Outcome | None]) -> None:
        outcome_of = {part.role: outcome for part, outcome in zip(parts, outcomes, strict=True) if outcome is not None}
        for index in range(self.count - 1 if self.lag else 0):
            window = number - index
            if not 0 <= window < self.windows:
                continue
            activations = outcome_of[str(index)].extras.get(ACROSS) if str(index) in outcome_of else None
            if activations is None:  # lost with its worker, or no worker was there to train it
                self._missing.add((index, window))
            else:
                self._known[index] = (window, activations)
                self.crossed += activations.nbytes

    def finish_merge(self, model: nn.Module, tensors: Tensors) -> None:
        for index, head in enumerate(self.heads):
            head.load_state_dict({name: tensors[f"{_head(index)}{name}"] for name in tensors_of(head)})

    def stored(self) -> dict[str, Any]:
        return {"known": dict(self._known), "missing": sorted(self._missing), "crossed": self.crossed}

    def restore(self, state: dict[str, Any]) -> None:
        self._known = {part: (window, activations) for part, (window, activations) in state["known"].items()}
        self._missing = {(part, window) for part, window in state["missing"]}
        self.crossed = state["crossed"]

    def crossing_bytes(self) -> int:
        """Count the bytes that will cross all cuts: C x D numbers once (labels A), or N x D in each epoch."""
        if not self.lag:
            return sum(table.nbytes for table in self.tables)
        rows = sum(len(batch) for _, group in self.reading.groups(0, self.steps) for batch in group)
        return rows * sum(cut_point.row_bytes for cut_point in self.pieces.cuts)


def _head(index: int) -> str:
    return f"shoal_head_{index}."


def check_per_part(per_part: Any, count: int) -> dict[int, dict[str, Any]]:
    """Check the settings of single parts, and return them by the part's number."""
    settings = {key: dict(value) for key, value in (per_part or {}).items()}
    for key, value in settings.items():
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < count:
            raise SplitError(f"per_part has settings of part {key!r}; there are parts 0 to {count - 1}")
        unknown = next((name for name in value if name not in PER_PART), None)
        if unknown is not None:
            raise SplitError(f"per_part: part {key} has {unknown!r}; a part may have {', '.join(PER_PART)} of its own")
    return settings
