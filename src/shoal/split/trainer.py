"""The training loop of every split: parts of the round -> tasks -> outcomes -> the whole network."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.data import Pool, View
from shoal.engine.members.history import exact_sum
from shoal.engine.members.member import open_data
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.planning.memory import free_bytes
from shoal.engine.processes.sharing import threads_of_step
from shoal.engine.python_state.module_modes import in_eval_mode
from shoal.environment import environment
from shoal.errors import SplitError
from shoal.jobs.early_stopping import Monitor
from shoal.jobs.job import Job
from shoal.results import Result, Results
from shoal.settings import parse_seconds
from shoal.split._evaluation import MeanGradientOptimizer, evaluate
from shoal.split.core.checks import check_count, shard_problems
from shoal.split.core.memory import part_costs
from shoal.split.core.method import Method, TaskExecutor, Worker
from shoal.split.core.moments import load_moments
from shoal.split.core.parts import Outcome, Part, Task
from shoal.split.core.reading import Reading
from shoal.split.core.report import Forecast, SplitReport, tensor_bytes
from shoal.split.core.state import State, tensors_of
from shoal.split.executors.local import diverged
from shoal.storage.run_folder import RunFolder
from shoal.utils.tables import Log
from shoal.utils.torch_flags import torch_flags


def train_split(
    job: Job,
    method: Method,
    executor: TaskExecutor,
    *,
    device: str | torch.device = "cpu",
    out: str | os.PathLike[str] | None = None,
    log: Log | None = None,
    val_every: int | None = None,
    checkpoint_every: float | str = "60s",
) -> Result:
    """Train a job in parts, round by round, and return a result with the whole network.

    Args:
        job: The job to train.
        method: What the parts are.
        executor: What trains them. If it has `moved`, that is the number of bytes it has sent and received so far.
        device: Where the whole network is evaluated.
        out: A run folder. Run the same split again to resume, however it ended before.
        log: Called with each line of progress.
        val_every: Rounds between two rows of the history; None means about `job.val_every` epochs.
        checkpoint_every: Seconds between checkpoints, if `out` is given.
    """
    member = method.member
    shard_problems(member, method.shards)
    if val_every is not None:
        check_count("val_every", val_every)
    run = _Run(method, executor, torch.device(device), log or (lambda line: None), val_every)
    run.save_every = parse_seconds(checkpoint_every)
    with RunFolder(Path(out)) if out is not None else nullcontext() as folder:
        settings = {"method": method.name, **method.settings}
        if folder is not None and folder.claim([member], {"split": settings}):
            folder.restore(run)
        run.go(folder)
        result = run.result()
        if folder is not None:
            folder.finish(Results([result]))
    return result


class _Run:
    """A running split; `state()` returns everything that it needs to resume."""

    def __init__(
        self, method: Method, executor: TaskExecutor, device: torch.device, log: Log, val_every: int | None
    ) -> None:
        self.method, self.executor, self.device, self.log = method, executor, device, log
        self.member = method.member
        job = self.job = self.member.job
        self.index, self.name = 0, self.member.name
        self.tensors = State.of(
            method.model, method.extra_tensors(), _initial_moments(job), _state_device(executor, method.model)
        )
        self.whole = copy.deepcopy(method.model).to(device)
        """The network that is evaluated, and that the result will have."""
        self.val: View | None = self.member.val
        if job.val is not None and device.type != "cpu":
            self.val = open_data(Pool(device), job, "val")
        self.monitor = Monitor.of(job)
        self.round = self.step = self.threads = 0
        self.status, self.error = "running", ""
        self.history: list[dict[str, float]] = []
        self.losses: list[float] = []
        """The losses since the last row of the history."""
        self.logs: dict[str, list[float]] = {}
        self.best: dict[str, Any] | None = None
        self.report = SplitReport(method=method.name, workers=0, tier=_tier(executor), rounds=method.rounds)
        self.mean_gradient_optimizer: MeanGradientOptimizer | None = None
        self.save_every = 60.0
        self._moved = 0
        self.val_every = val_every or self._rounds_per_row()

    def _rounds_per_row(self) -> int:
        return max(1, round(self.job.val_every * self._steps_per_epoch() / self.method.local_steps))

    def _steps_per_epoch(self) -> int:
        return Reading(self.job, len(self.member.data), (0, self.method.shards)).steps

    # --- the loop -------------------------------------------------------------------------------------------------

    def go(self, folder: RunFolder | None) -> None:
        """Train round after round; save first if interrupted."""
        if self.method.merge == "gradients":
            self.mean_gradient_optimizer = MeanGradientOptimizer(
                self.job, copy.deepcopy(self.method.model), self.tensors
            )
        saved = time.monotonic()
        try:
            with torch_flags(self.device, self._choose_threads()):
                while self.status == "running" and self.round < self.method.rounds:
                    self._round()
                    if folder is not None and time.monotonic() - saved >= self.save_every:
                        folder.save_many([self])
                        saved = time.monotonic()
            if self.status == "running":
                self.status = "done"
        except KeyboardInterrupt:
            if folder is not None:
                folder.save(self)
                self.log(f"round {self.round} of {self.method.rounds}: saved; run the same command again to resume")
            raise
        if folder is not None:
            folder.save(self)

    def _choose_threads(self) -> int | None:
        """Return how many of torch's threads to use, or None for torch's own number.

        It is decided once, so that a resumed run has the same bits.
        """
        most = torch.get_num_threads()
        if self.device.type != "cpu" or self.report.tier != "serial" or most == 1 or self.status != "running":
            return None
        if not self.threads:
            try:
                with torch_flags(self.device, 1):
                    self.threads = threads_of_step(self.member, self.method.rounds * self.method.local_steps, most)
            except Exception:  # the first round shows what it is
                self.threads = most
        return self.threads

    def _round(self) -> None:
        """Train one round: distribute the parts, merge their outcomes, and add a row to the history if it is due."""
        workers = self.executor.workers_of_round(self.round)
        if not workers:
            raise SplitError("there are no workers; a round needs at least one")
        parts = self.method.parts(self.round, workers)
        slices = [self.method.slices(part) for part in parts]
        returns = [self.method.returns(part) for part in parts]
        if not self.report.workers:
            self._predict(workers, parts)
        started = time.perf_counter()
        carried = self.method.moments == "travel" and self.method.merge == "weights"
        tasks = [
            self.tensors.task(self.round, part, pieces, moments=carried, extras=self.method.extras(self.round, part))
            for part, pieces in zip(parts, slices, strict=True)
        ]
        outcomes = list(self.executor.run(tasks))
        good = self._finite_only(parts, outcomes)
        step = self.step
        self.step += max((part.steps for part in parts), default=0)
        if self.status == "running":
            if self.mean_gradient_optimizer is None:
                self.tensors.commit(parts, returns, good)
            elif any(outcome is not None for outcome in good):
                gradients = self.tensors.gradients(parts, returns, good, self.mean_gradient_optimizer.trained)
                self.mean_gradient_optimizer.step(gradients, step, self._steps_per_epoch())
        self.method.see(self.round, parts, good)
        self._account(tasks, outcomes, time.perf_counter() - started)
        self.round += 1
        if self.status != "running" or self.round % self.val_every == 0 or self.round == self.method.rounds:
            self._add_row()

    def _finite_only(self, parts: Sequence[Part], outcomes: list[Outcome | None]) -> list[Outcome | None]:
        """Return the outcomes with None for lost or non-finite ones, which are reported."""
        good: list[Outcome | None] = []
        diverged_parts = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                self.log(f"round {self.round + 1}: part {part.number} was lost; its weights stay as they were")
            elif diverged(outcome):
                diverged_parts.append(part.number)
                self.log(
                    f"round {self.round + 1}: part {part.number} was not finite at its step {len(outcome.losses)} or "
                    "before; it is left out, and its weights stay as they were"
                )
            usable = outcome is not None and not diverged(outcome)
            good.append(outcome if usable else None)
            self.report.lost += not usable
            if outcome is not None and usable:
                self._collect_losses(outcome)
        if diverged_parts and not any(outcome is not None and outcome.losses for outcome in good):
            self.status = "diverged"
            self.error = f"no part of round {self.round + 1} had a finite loss; use a smaller learning rate"
        return good

    def _collect_losses(self, outcome: Outcome) -> None:
        self.losses += outcome.losses
        for name, values in outcome.extras.items():
            if name.startswith("log/"):
                self.logs.setdefault(name.removeprefix("log/"), []).extend(values.tolist())

    # --- the report --------------------------------------------------------------------------------------------

    def _predict(self, workers: Sequence[Worker], parts: Sequence[Part]) -> None:
        report = self.report
        report.workers, report.rounds = len(workers), self.method.rounds
        report.bytes_predicted = Forecast(self.method).all_rounds(workers).both
        report.peak_predicted = {name: cost.peak_bytes for name, cost in part_costs(self.method, parts).items()}

    def _account(self, tasks: Sequence[Task], outcomes: Sequence[Outcome | None], seconds: float) -> None:
        """Add the bytes, seconds and memory of a round to the report."""
        report = self.report
        now = getattr(self.executor, "moved", None)
        if now is None:
            report.bytes_measured += sum(tensor_bytes(task) for task in tasks)
            report.bytes_measured += sum(tensor_bytes(outcome) for outcome in outcomes if outcome is not None)
        else:
            report.bytes_measured, self._moved = report.bytes_measured + int(now) - self._moved, int(now)
        report.seconds_measured += seconds
        report.rounds_done = self.round + 1
        if not report.seconds_predicted:
            report.seconds_predicted = seconds * self.method.rounds
        for task, outcome in zip(tasks, outcomes, strict=True):
            if outcome is not None and outcome.peak_bytes:
                first = self.method.rounds - self.method.recovery
                key = "recovery" if 0 < first <= task.round else task.part.role or str(outcome.number)
                report.peak_measured[key] = max(report.peak_measured.get(key, 0), outcome.peak_bytes)

    def _add_row(self) -> None:
        """Add a row to the history: the losses since the last one, and the evaluation of the whole network."""
        row: dict[str, float] = {
            "epoch": self.step / self._steps_per_epoch(),
            "round": self.round,
            "step": self.step,
            "loss": exact_sum(self.losses) / len(self.losses) if self.losses else math.nan,
        }
        row |= {name: exact_sum(values) / len(values) for name, values in self.logs.items()}
        self.losses, self.logs = [], {}
        if self.val is not None:
            row |= evaluate(self.job, self.merged(), self.val, self.device)
        row |= {"bytes": self.report.bytes_measured, "seconds": self.report.seconds_measured}
        self.history.append(row)
        self.log(f"round {self.round} of {self.method.rounds}: " + _format(row))
        best, stop = self.monitor.see(row)
        if best and self.job.keep == "best":
            self.best = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.tensors.items()}
        if stop and self.status == "running" and self.round < self.method.rounds:
            self.status = "stopped"

    def merged(self) -> nn.Module:
        """Return the whole network as it is now."""
        self.tensors.load_into(self.whole)
        self.method.finish_merge(self.whole, self.tensors.tensors)
        return self.whole

    # --- in and out -----------------------------------------------------------------------------------------------

    def result(self) -> Result:
        """Return the result of the split."""
        if self.best is not None:
            self.tensors.tensors = self.best
        self.report.history = [dict(row) for row in self.history]
        model = self.merged().to("cpu")
        optimizer = make_optimizer(self.job, model)
        load_moments(optimizer, model, self.tensors.moments)
        return Result(
            name=self.name,
            job=self.job,
            model=in_eval_mode(model),
            history=self.history,
            status=self.status,
            tier=self.report.tier,
            error=self.error or None,
            optimizer_state=optimizer.state_dict(),
            seconds=self.report.seconds_measured,
            environment=environment(self.device),
            steps=self.step,
            split=self.report,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that is needed to resume from here."""
        return {
            **self.tensors.state(),
            **{name: getattr(self, name) for name in _PLAIN},
            "history": [dict(row) for row in self.history],
            "logs": {name: list(values) for name, values in self.logs.items()},
            "best": self.best,
            "method": self.method.stored(),
            "monitor": {"best": self.monitor.best, "misses": self.monitor.misses},
            "report": self.report.to_dict() | {"history": []},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state()` returned."""
        self.tensors.load_state(state)
        for name in _PLAIN:
            setattr(self, name, state.get(name, getattr(self, name)))  # earlier versions did not store threads
        self.history, self.logs, self.best = state["history"], state["logs"], state["best"]
        self.monitor.best, self.monitor.misses = state["monitor"]["best"], state["monitor"]["misses"]
        self.report = SplitReport(**state["report"])
        self.method.restore(state["method"])
        if self.status == "running":
            self.log(f"round {self.round} of {self.method.rounds}: resumed")


_PLAIN = ("round", "step", "status", "error", "losses", "threads")


def _initial_moments(job: Job) -> dict[str, float]:
    """Return the initial values of optimizer state that does not begin with zero."""
    initial = {"step_size": float(job.hparams.get("lr", 0.01))}  # Rprop's state
    if "initial_accumulator_value" in job.hparams:
        initial["sum"] = float(job.hparams["initial_accumulator_value"])
    return initial


def _state_device(executor: TaskExecutor, model: nn.Module) -> torch.device:
    """Return where the state is: on the device of local workers if weights and moments fit there twice, else on the
    CPU."""
    device: torch.device = getattr(executor, "result_device", torch.device("cpu"))
    if device.type != "cuda":
        return device
    weights = sum(tensor.nbytes for tensor in tensors_of(model).values())
    if 8 * weights >= free_bytes(device):
        device = torch.device("cpu")
        executor.result_device = device  # type: ignore[attr-defined]
    return device


def _tier(executor: TaskExecutor) -> str:
    return str(getattr(executor, "tier", type(executor).__name__.lower()))


def _format(row: dict[str, float]) -> str:
    shown = [name for name in row if name not in ("epoch", "round", "bytes", "seconds")]
    return ", ".join(f"{name} {row[name]:.4g}" for name in shown)
