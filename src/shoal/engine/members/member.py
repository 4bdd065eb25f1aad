"""Members: jobs that have been built. Here a job's parts become objects, each under the job's own seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.data import Pool, View
from shoal.data.source import content_hash
from shoal.engine.members.stretches import Stretch, joined, packed, packed_logs, stored, unpacked_logs
from shoal.engine.python_state.module_streams import ModuleStreams
from shoal.engine.python_state.saved_state import SavedState, storable
from shoal.errors import JobError, describe
from shoal.jobs.early_stopping import Monitor
from shoal.jobs.job import Job
from shoal.utils.gpu_randomness import CounterMode
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import restored, seed_modules, seed_torch
from shoal.utils.weights import load_other_buffers, load_weights, other_buffers


@dataclass(slots=True, eq=False)
class Member:
    """A job in a pack, with its network, its optimizer state, and how far its training is."""

    job: Job
    index: int
    """Place in the user's list."""
    name: str
    device: torch.device
    model: nn.Module
    """Built under the job's seed on the CPU; it moves to the device when the member gets a place there."""
    rng: torch.Generator
    """CPU generator in the state of the default one right after the model was built."""
    orders: torch.Generator
    """Gives one permutation of the rows an epoch."""
    data: View
    val: View | None = None
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done."""
    status: str = "running"
    error: str | None = None
    tier: str = ""
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    """Those within epochs."""
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    schedule_state: dict[str, Any] | None = None
    """The scheduler's own state_dict(), where there is a schedule and it has moved."""
    scaler_state: dict[str, Any] | None = None
    """torch.amp.GradScaler's state_dict(), where the precision is fp16."""
    monitor: Monitor = field(init=False)
    best: dict[str, Any] | None = None
    """The best weights so far, on the CPU, where keep="best"."""
    average: dict[str, Any] | None = None
    """The average of its weights, where the job has one: how many updates it had ("count"), and "values" by name."""
    trained: dict[str, Any] | None = None
    """Of one that ended with other weights than those in training: these ("model"), and what its optimizer had."""
    batches: int = 0
    """Batches it has had: with the seed, what its draws on a GPU are a function of."""
    order: Tensor | None = None
    """This epoch's rows of the source, on the CPU; None between epochs."""
    order_state: Tensor | None = None
    """`orders` as it was before this epoch's rows were drawn."""
    ahead: tuple[Tensor, Tensor] | None = None
    """The next epoch's `order` and `order_state`, where they are known already."""
    place: int = 0
    """Batches of this epoch that are done."""
    first_step: int = 0
    """Optimizer steps before this epoch."""
    losses: list[float] = field(default_factory=list)
    """Of this epoch's batches, not divided by accumulate. One that is not finite: diverged at that batch."""
    logs: dict[str, list[float]] = field(default_factory=dict)
    """What the step logged, for each of this epoch's batches."""
    rows: list[int] = field(default_factory=list)
    """Of data that comes in batches: the rows of each of this epoch's batches."""
    epoch_length: int | None = None
    """Of data that comes in batches: how many this epoch has, once that is seen."""
    earlier: list[Stretch] = field(default_factory=list)
    """Of a clone whose batches became others within this epoch: what it had of it before. `place`, `order`, `losses`,
    `num_rows` and `num_batches` are then of the rest."""
    reshaped: bool = False
    """Whether such an epoch has ended, so that its recipe is not that of the coming ones."""
    batch_shift: int = 0
    """What to add to `batches` of a clone whose batches became others, to compare it with the job's length."""
    closed: tuple[list[float], dict[str, list[float]]] = field(default_factory=lambda: ([], {}))
    """Losses and logs of the epoch before this one."""
    saved_state: SavedState = field(init=False)
    """Python state that no state_dict() has."""
    pause_at: int | None = None
    """The epoch after which it gives its place back until the run's supervisor lets it continue."""
    paused_at: frozenset[int] = frozenset()
    """Epochs after which it has paused before; one that is trained again, after a kill, is validated there again."""
    before_end: dict[str, Any] | None = None
    """Its state before its last epoch was closed as the last one, where that is not undone easily: see `resuming`."""
    rate: float | None = None
    """The learning rate at its last step, of one that resumes between that step and the end of its epoch."""
    modules: ModuleStreams = field(default_factory=ModuleStreams)
    """Its own random numbers of the modules `random` and `numpy.random`."""
    constants: dict[str, str] = field(init=False)
    """Hashes of large buffers that no state_dict() has, as they are at the beginning; most never change."""

    def __post_init__(self) -> None:
        self.monitor, self.saved_state = Monitor.of(self.job), SavedState()
        plain = {name: b for name, b in other_buffers(self.model).items() if b.layout == torch.strided}
        self.constants = {name: content_hash(b) for name, b in plain.items() if b.nbytes > LARGE_BUFFER}

    @property
    def batched(self) -> bool:
        """Whether its data comes in batches: a row of it is then a whole batch."""
        return self.data.source.batched

    @property
    def batch_size(self) -> int:
        """Rows in a batch."""
        return 1 if self.batched else self.job.batch_size

    @property
    def num_rows(self) -> int:
        """Rows in this epoch. Data that comes in batches shows it near the end of an epoch; before, as it says."""
        if self.batched:
            return self.epoch_length if self.epoch_length is not None else max(len(self.data), self.place + UNSEEN)
        return self._whole(len(self.data) - self.skipped)

    def _whole(self, rows: int) -> int:
        return rows - rows % self.job.batch_size if self.job.drop_last else rows

    @property
    def skipped(self) -> int:
        """Rows of this epoch that it had before its batches became others."""
        return sum(stretch.rows for stretch in self.earlier)

    @property
    def num_batches(self) -> int:
        """Batches in this epoch, the short last one included."""
        return -(-self.num_rows // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; 0 where its data does not say how many batches it has."""
        return -(-(len(self.data) if self.batched else self.usual_batches) // self.job.accumulate)

    @property
    def usual_batches(self) -> int:
        """Batches in an epoch that is had as a whole."""
        return self.num_batches if self.batched else -(-self._whole(len(self.data)) // self.job.batch_size)

    @property
    def shape_rows(self) -> int:
        """Rows in an epoch, for the shapes of its batches; also where none is left of this one."""
        return self.num_rows or self._whole(len(self.data))

    @property
    def drawn_from(self) -> Tensor:
        """`orders` as it is before the rows of the epoch are drawn that it is in, or about to begin."""
        drawn = self.order_state if self.order is not None else self.ahead[1] if self.ahead is not None else None
        return self.orders.get_state() if drawn is None else drawn

    @property
    def at_step_boundary(self) -> bool:
        """Whether it is between optimizer steps, so that it can leave, and be saved."""
        return self.place % self.job.accumulate == 0 or self.place == self.num_batches

    def rows_in(self, batches: int) -> int:
        """Rows in the coming batches of this epoch."""
        if self.batched:
            return batches
        return min((self.place + batches) * self.job.batch_size, self.num_rows) - self.place * self.job.batch_size

    def steps_in(self, batches: int) -> int:
        """Optimizer steps in the coming batches of this epoch."""
        k, end = self.job.accumulate, self.place + batches
        return end // k - self.place // k + (end == self.num_batches and end % k > 0)

    @property
    def batches_left(self) -> int:
        """Batches until the job has had its full length."""
        job = self.job
        if self.batched and job.epochs is not None:  # an epoch may have more batches than another
            return max(0, (job.epochs - self.epoch) * self.num_batches - self.place)
        total = job.steps * job.accumulate if job.steps is not None else (job.epochs or 0) * self.usual_batches
        return max(0, total - self.batches - self.batch_shift)

    @property
    def batches_to_stop(self) -> int:
        """Batches until it ends, or until it pauses before that."""
        pause = math.inf if self.pause_at is None else (self.pause_at - self.epoch) * self.usual_batches - self.place
        return int(min(self.batches_left, max(0, pause)))

    def finished(self) -> bool:
        """Whether the job has had its full length."""
        if self.job.epochs is not None:
            return self.epoch >= self.job.epochs
        assert self.job.steps is not None
        return self.step >= self.job.steps

    @property
    def at_stop(self) -> bool:
        """Whether it ends or pauses after this epoch, so that it is validated whatever `val_every` says."""
        return self.finished() or self.epoch == self.pause_at or self.epoch in self.paused_at

    @property
    def pausing(self) -> bool:
        """Whether it has come to the epoch at which it pauses."""
        return self.pause_at is not None and self.epoch >= self.pause_at and not self.place and not self.finished()

    def close_epoch(self) -> None:
        """Between epochs again."""
        self.order, self.place, self.first_step, self.epoch_length, self.rows = None, 0, self.step, None, []
        self.closed, self.losses, self.logs = joined([*self.earlier, Stretch(0, 0, self.losses, self.logs)]), [], {}
        self.reshaped, self.earlier = self.reshaped or bool(self.earlier), []

    def log(self, done: int, logs: Mapping[str, Sequence[float]]) -> None:
        """Note what the last `done` of `place` batches logged; a batch that did not log a name has NaN there."""
        for name in self.logs.keys() | logs.keys():
            known = self.logs.setdefault(name, [])
            known += [math.nan] * (self.place - done - len(known))
            known += logs.get(name, [math.nan] * done)

    def rest(self) -> None:
        """Wait with the host: nothing of a member that was written back stays on the device."""
        if self.device.type != "cpu":
            self.model.to("cpu")
            self.optimizer_state, self.average = stored(self.optimizer_state), stored(self.average)

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume here, as tensors and plain values; for a member that was written back."""
        in_python_state = self.saved_state.keeps_schedule and not storable(self.schedule_state)
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "schedule_state": None if in_python_state else self.schedule_state,
            "history": [dict(row) for row in self.history],
            "validations": [dict(row) for row in self.validations],
            "model": stored(dict(self.model.state_dict())),
            "buffers": stored(self._moved_buffers()),
            "python": stored(self.saved_state.capture()),
            "optimizer": stored(self.optimizer_state),
            "best": self.best,
            "average": stored(self.average),
            "trained": self.trained,
            "monitor": {"best": self.monitor.best, "misses": self.monitor.misses},
            "rng": self.rng.get_state(),
            "modules": stored(self.modules.saved()),
            "orders": self.drawn_from,
            "losses": packed(self.losses),
            "logs": packed_logs(self.logs),
            "before_end": self.before_end,
            "rows": torch.tensor(self.rows, dtype=torch.int64),
            "epoch_length": self.epoch_length,
            **({"earlier": [s.state() for s in self.earlier]} if self.earlier else {}),
            **({"batch_shift": self.batch_shift} if self.batch_shift else {}),
        }

    def _moved_buffers(self) -> dict[str, Tensor]:
        buffers = other_buffers(self.model)
        return {n: b for n, b in buffers.items() if n not in self.constants or self.constants[n] != content_hash(b)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put the member where `state()` was taken: the same training resumes, here or in another process.

        What it is given is its own from then on.
        """
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.history = [dict(row) for row in state["history"]]
        self.validations = [dict(row) for row in state.get("validations", ())]
        model, optimizer, trained = state["model"], state["optimizer"], state.get("trained")
        if trained is not None and self.status == "running":  # it had ended, and trains on
            model, optimizer, trained = {**model, **trained["model"]}, trained.get("optimizer", optimizer), None
        self.average, self.trained = state.get("average"), trained
        load_weights(self.model, model, give=True)
        load_other_buffers(self.model, state.get("buffers", {}))
        self.saved_state.load(state.get("python"))
        self.optimizer_state, self.best = optimizer, state["best"]
        self.monitor.best, self.monitor.misses = state["monitor"]["best"], state["monitor"]["misses"]
        self.rng.set_state(state["rng"])
        self.modules.load(state.get("modules"))
        self.orders.set_state(state["orders"])
        self.order = self.order_state = self.ahead = None
        self.losses, self.logs = state["losses"].tolist(), unpacked_logs(state["logs"])
        self.rows, self.epoch_length = state.get("rows", torch.empty(0)).tolist(), state.get("epoch_length")
        self.earlier = [Stretch.of_state(stretch) for stretch in state.get("earlier", ())]
        self.reshaped, self.batch_shift = False, state.get("batch_shift", 0)
        self.before_end, self.rate = (None if self.status == "running" else state.get("before_end")), state.get("rate")
        if self.status != "running":
            self.saved_state.finish(self.job, self.model, self.device)


UNSEEN = 8
"""Batches that an epoch is taken to have left, where its data does not say."""
LARGE_BUFFER = 1 << 16
"""Bytes of a buffer from which it is saved only once it has changed."""
_PLAIN = (
    "step", "epoch", "status", "error", "tier", "seconds", "batches", "place", "first_step",
    "schedule_state", "scaler_state",
)  # fmt: skip


def open_data(pool: Pool, job: Job, which: str) -> View:
    """Open `data` or `val`, with errors that say which."""
    try:
        return pool.open(getattr(job, which), job.collate, job.batch_size, job.drop_last and which == "data")
    except JobError as error:
        raise JobError(*(f"{which} {line}" for line in error.lines)) from None
    except Exception as error:
        raise JobError(f"{which} cannot be opened: it raised {describe(error)}; look at it by itself") from error


@contextmanager
def seeded(seed: int, device: torch.device, *, put_back: bool = True) -> Iterator[None]:
    """Inside: torch, `random` and numpy are seeded. After: as they were; the last two only if `put_back`."""
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with one_at_a_time, torch.random.fork_rng(devices=list(devices)), restored() if put_back else nullcontext():
        seed_torch(seed)
        seed_modules(seed)
        yield


@contextmanager
def draws(member: Member, keep: bool = True) -> Iterator[Callable[[], None]]:
    """Inside: random calls draw from this member's own streams, as in its solo loop. What it yields begins a batch.

    keep=False: the streams stay where they were, as in evaluation. On a GPU torch's is counted from (seed, batches).
    """
    with one_at_a_time, member.modules.swapped_in(member.job.seed, keep):
        cpu = torch.get_rng_state()
        torch.set_rng_state(member.rng.get_state())
        try:
            if member.device.type == "cpu":
                yield lambda: None
            else:
                with counted(member.job.seed, member.device) as mode:
                    yield lambda: mode.begin(member.batches)
        finally:
            if keep:
                member.rng.set_state(torch.get_rng_state())
            torch.set_rng_state(cpu)


@contextmanager
def counted(seed: int, device: torch.device) -> Iterator[CounterMode]:
    """Counter-based draws on a GPU; attention is computed in the open: its fused kernels draw inside themselves."""
    with sdpa_kernel(SDPBackend.MATH), CounterMode(seed, device) as mode:
        yield mode
