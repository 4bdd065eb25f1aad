"""Members: jobs that have been built. A job's model, data and optimizer become objects here, each under the job's own
seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.data import Pool, View
from shoal.data.dataset import DatasetSource
from shoal.data.source import content_hash
from shoal.engine.members.stretches import Stretch, joined, packed, packed_logs, stored, unpacked_logs
from shoal.engine.python_state.module_modes import (
    built_in_eval_mode,
    changed_trainable,
    enter_train_mode,
    note_trainable,
    set_trainable,
)
from shoal.engine.python_state.module_streams import ModuleStreams
from shoal.engine.python_state.preserve import preserved
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
    """A job in a pack, with its network, its optimizer state, and its progress in training."""

    job: Job
    index: int
    """The job's index in the user's list."""
    name: str
    device: torch.device
    model: nn.Module
    """The network, built under the job's seed on the CPU. It moves to the device when the member starts there."""
    rng: torch.Generator
    """A CPU generator in the state that the default generator had right after the model was built."""
    orders: torch.Generator
    """Draws one permutation of the rows for each epoch."""
    data: View
    val: View | None = None
    step: int = 0
    """The number of optimizer steps so far."""
    epoch: int = 0
    """The number of completed epochs."""
    status: str = "running"
    error: str | None = None
    tier: str = ""
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    """The results of validations within epochs."""
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    schedule_state: dict[str, Any] | None = None
    """The scheduler's `state_dict()`, if there is a schedule and it has advanced."""
    scaler_state: dict[str, Any] | None = None
    """The `state_dict()` of torch.amp.GradScaler, if the precision is fp16."""
    monitor: Monitor = field(init=False)
    best: dict[str, Any] | None = None
    """The best weights so far, on the CPU, if keep="best"."""
    average: dict[str, Any] | None = None
    """The average of the weights, if the job has one: the number of updates ("count"), and "values" by name."""
    trained: dict[str, Any] | None = None
    """If the member ended with other weights than those in training: the latter ("model") and their optimizer state."""
    batches: int = 0
    """Batches trained so far. On a GPU, random draws are a function of this and the seed."""
    order: Tensor | None = None
    """This epoch's rows of the source, on the CPU; None between epochs."""
    order_state: Tensor | None = None
    """The state of `orders` before this epoch's rows were drawn."""
    ahead: tuple[Tensor, Tensor] | None = None
    """The next epoch's `order` and `order_state`, if they were drawn already."""
    place: int = 0
    """The number of batches of this epoch that are done."""
    first_step: int = 0
    """The number of optimizer steps before this epoch."""
    losses: list[float] = field(default_factory=list)
    """The losses of this epoch's batches, not divided by `accumulate`. A loss that is not
    finite means that the member diverged at that batch."""
    logs: dict[str, list[float]] = field(default_factory=dict)
    """The values that the step logged, by name, one for each of this epoch's batches."""
    rows: list[int] = field(default_factory=list)
    """For data that comes in batches: the number of rows of each of this epoch's batches."""
    epoch_length: int | None = None
    """For data that comes in batches: the number of batches in this epoch, once it is known."""
    earlier: list[Stretch] = field(default_factory=list)
    """For a clone whose batch size changed within this epoch: the parts of the epoch before that. `place`, `order`,
    `losses`, `num_rows` and `num_batches` then refer to the remaining part."""
    reshaped: bool = False
    """Whether an epoch with parts in `earlier` has ended, so that the next epochs need another recipe."""
    batch_shift: int = 0
    """For a clone whose batch size changed: what to add to `batches` to compare it with the job's length."""
    closed: tuple[list[float], dict[str, list[float]]] = field(default_factory=lambda: ([], {}))
    """Losses and logs of the previous epoch."""
    saved_state: SavedState = field(init=False)
    """Python state that no `state_dict()` contains."""
    pause_at: int | None = None
    """The epoch after which the member pauses until the run's supervisor lets it continue."""
    paused_at: frozenset[int] = frozenset()
    """Epochs after which it has paused before. If such an epoch is trained again after a kill, it is validated there
    again."""
    before_end: dict[str, Any] | None = None
    """Its state before its last epoch was closed as the last one, if that is not easily undone; see `resuming`."""
    rate: float | None = None
    """The learning rate at its last step, for a member that resumes between that step and the end of its epoch."""
    unvalidated: bool = False
    """Whether a validation within its epoch is due before its next batch, since it had ended there."""
    modules: ModuleStreams = field(default_factory=ModuleStreams)
    """The member's own random state of the modules `random` and `numpy.random`."""
    built_in_eval: frozenset[str] = field(init=False)
    """Modules of its network that were built in eval mode, by their names."""
    constants: dict[str, str] = field(init=False)
    """Hashes of the initial values of large buffers that no `state_dict()` contains; most of them never change."""

    def __post_init__(self) -> None:
        self.monitor, self.saved_state = Monitor.of(self.job), SavedState()
        self.built_in_eval = built_in_eval_mode(self.model)
        note_trainable(self.model)
        plain = {name: b for name, b in other_buffers(self.model).items() if b.layout == torch.strided}
        self.constants = {name: content_hash(b) for name, b in plain.items() if b.nbytes > LARGE_BUFFER}

    def enter_train_mode(self) -> None:
        """Put the network into train mode before an epoch, except for modules that were built in eval mode."""
        enter_train_mode(self.model, self.built_in_eval)

    @property
    def batched(self) -> bool:
        """Whether the member's data comes in batches. A row of such data is a whole batch."""
        return self.data.source.batched

    @property
    def batch_size(self) -> int:
        """The number of rows in a batch."""
        return 1 if self.batched else self.job.batch_size

    @property
    def num_rows(self) -> int:
        """The number of rows in this epoch. For data in batches it is an estimate until the epoch has nearly ended."""
        if self.batched:
            return self.epoch_length if self.epoch_length is not None else max(len(self.data), self.place + UNSEEN)
        return self._whole(len(self.data) - self.skipped)

    def _whole(self, rows: int) -> int:
        return rows - rows % self.job.batch_size if self.job.drop_last else rows

    @property
    def skipped(self) -> int:
        """The number of rows of this epoch that it trained on before its batch size changed."""
        return sum(stretch.rows for stretch in self.earlier)

    @property
    def num_batches(self) -> int:
        """The number of batches in this epoch, including a short last one."""
        return -(-self.num_rows // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in one epoch; 0 if its data does not say how many batches it has."""
        return -(-(len(self.data) if self.batched else self.usual_batches) // self.job.accumulate)

    @property
    def usual_batches(self) -> int:
        """The number of batches in a complete epoch."""
        return self.num_batches if self.batched else -(-self._whole(len(self.data)) // self.job.batch_size)

    @property
    def shape_rows(self) -> int:
        """The number of rows in an epoch, for the shapes of its batches, even if none of this epoch is left."""
        return self.num_rows or self._whole(len(self.data))

    @property
    def drawn_from(self) -> Tensor:
        """The state of `orders` before the rows of the current epoch, or of the next one between epochs, are drawn."""
        drawn = self.order_state if self.order is not None else self.ahead[1] if self.ahead is not None else None
        return self.orders.get_state() if drawn is None else drawn

    @property
    def at_step_boundary(self) -> bool:
        """Whether the member is between optimizer steps, so that it can leave its unit and be saved."""
        return self.place % self.job.accumulate == 0 or self.place == self.num_batches

    def rows_in(self, batches: int) -> int:
        """Return the rows in the next `batches` batches of this epoch."""
        if self.batched:
            return batches
        return min((self.place + batches) * self.job.batch_size, self.num_rows) - self.place * self.job.batch_size

    def steps_in(self, batches: int) -> int:
        """Return the optimizer steps in the next `batches` batches of this epoch."""
        k, end = self.job.accumulate, self.place + batches
        return end // k - self.place // k + (end == self.num_batches and end % k > 0)

    @property
    def batches_left(self) -> int:
        """The number of batches until the job reaches its full length."""
        job = self.job
        if self.batched and job.epochs is not None:  # an epoch may have more batches than another
            return max(0, (job.epochs - self.epoch) * self.num_batches - self.place)
        total = job.steps * job.accumulate if job.steps is not None else (job.epochs or 0) * self.usual_batches
        return max(0, total - self.batches - self.batch_shift)

    @property
    def batches_to_stop(self) -> int:
        """The number of batches until it ends or pauses, whichever is first."""
        pause = math.inf if self.pause_at is None else (self.pause_at - self.epoch) * self.usual_batches - self.place
        return int(min(self.batches_left, max(0, pause)))

    def finished(self) -> bool:
        """Return whether the job has reached its full length."""
        if self.job.epochs is not None:
            return self.epoch >= self.job.epochs
        assert self.job.steps is not None
        return self.step >= self.job.steps

    @property
    def at_stop(self) -> bool:
        """Whether the member ends or pauses after this epoch, so that it is validated regardless of `val_every`."""
        return self.finished() or self.epoch == self.pause_at or self.epoch in self.paused_at

    @property
    def pausing(self) -> bool:
        """Whether the member has reached the epoch at which it pauses."""
        return self.pause_at is not None and self.epoch >= self.pause_at and not self.place and not self.finished()

    def close_epoch(self) -> None:
        """End the current epoch, and reset what belongs to it."""
        self.order, self.place, self.first_step, self.epoch_length, self.rows = None, 0, self.step, None, []
        self.closed, self.losses, self.logs = joined([*self.earlier, Stretch(0, 0, self.losses, self.logs)]), [], {}
        self.reshaped, self.earlier = self.reshaped or bool(self.earlier), []

    def log(self, done: int, logs: Mapping[str, Sequence[float]]) -> None:
        """Append the logs of the last `done` batches, which `place` counts already. A batch that did not log a name has
        NaN there."""
        for name in self.logs.keys() | logs.keys():
            known = self.logs.setdefault(name, [])
            known += [math.nan] * (self.place - done - len(known))
            known += logs.get(name, [math.nan] * done)

    def rest(self) -> None:
        """Move a member that was written back to the host, so that nothing of it stays on the device."""
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
            **({"trainable": changed} if (changed := changed_trainable(self.model)) else {}),
            **({"earlier": [s.state() for s in self.earlier]} if self.earlier else {}),
            **({"batch_shift": self.batch_shift} if self.batch_shift else {}),
            **({"unvalidated": True} if self.unvalidated else {}),
        }

    def _moved_buffers(self) -> dict[str, Tensor]:
        buffers = other_buffers(self.model)
        return {n: b for n, b in buffers.items() if n not in self.constants or self.constants[n] != content_hash(b)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state()` returned, so that the same training resumes, here or in another process.

        The member owns the given tensors from then on.
        """
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.history = [dict(row) for row in state["history"]]
        self.validations = [dict(row) for row in state.get("validations", ())]
        model, optimizer, trained = state["model"], state["optimizer"], state.get("trained")
        if trained is not None and self.status == "running":  # it had ended, and continues to train
            model, optimizer, trained = {**model, **trained["model"]}, trained.get("optimizer", optimizer), None
        self.average, self.trained = state.get("average"), trained
        load_weights(self.model, model, give=True)
        load_other_buffers(self.model, state.get("buffers", {}))
        set_trainable(self.model, state.get("trainable", {}))
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
        self.unvalidated = state.get("unvalidated", False)
        if self.status != "running":
            self.saved_state.finish(self.job, self.model, self.device)


UNSEEN = 8
"""The number of batches that are assumed to be left in an epoch if its data does not say."""
LARGE_BUFFER = 1 << 16
"""Buffers of more bytes are saved only if they have changed."""
_PLAIN = (
    "step", "epoch", "status", "error", "tier", "seconds", "batches", "place", "first_step",
    "schedule_state", "scaler_state",
)  # fmt: skip


def open_data(pool: Pool, job: Job, which: str) -> View:
    """Open the job's `data` or `val`, with errors that name it."""
    try:
        view = pool.open(getattr(job, which), job.collate, job.batch_size, job.drop_last and which == "data")
    except JobError as error:
        raise JobError(*(f"{which} {line}" for line in error.lines)) from None
    except Exception as error:
        raise JobError(f"{which} cannot be opened: it raised {describe(error)}; look at it by itself") from error
    if isinstance(view.source, DatasetSource) and job.collate is not None:
        view.source.trying = partial(preserved, {"collate": job.collate})
    return view


@contextmanager
def seeded(seed: int, device: torch.device, *, put_back: bool = True) -> Iterator[None]:
    """Seed torch, `random` and numpy inside this context. Afterwards torch is restored, and the others too if
    `put_back`."""
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with one_at_a_time, torch.random.fork_rng(devices=list(devices)), restored() if put_back else nullcontext():
        seed_torch(seed)
        seed_modules(seed)
        yield


@contextmanager
def draws(member: Member, keep: bool = True) -> Iterator[Callable[[], None]]:
    """Draw random numbers from this member's own streams inside this context, as in its solo loop.

    It yields a function to call at the start of each batch. On a GPU, draws are counted from (seed, batches).

    Args:
        keep: If False, the streams are restored afterwards, as in evaluation, also where code inside this context
            draws from them and keeps what it drew.
    """
    with one_at_a_time, member.modules.swapped_in(member.job.seed, keep):
        cpu, before = torch.get_rng_state(), member.rng.get_state()
        torch.set_rng_state(before)
        try:
            if member.device.type == "cpu":
                yield lambda: None
            else:
                with counted(member.job.seed, member.device) as mode:
                    yield lambda: mode.begin(member.batches)
        finally:
            member.rng.set_state(torch.get_rng_state() if keep else before)
            torch.set_rng_state(cpu)


@contextmanager
def counted(seed: int, device: torch.device) -> Iterator[CounterMode]:
    """Use counter-based random draws on a GPU. Attention is computed without its fused kernels, which draw
    internally."""
    with sdpa_kernel(SDPBackend.MATH), CounterMode(seed, device) as mode:
        yield mode
