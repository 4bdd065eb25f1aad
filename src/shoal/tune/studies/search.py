"""The part of a study in its run: it makes the trials' jobs, follows their values, and carries out the scheduler's
decisions.

The run calls it after each round, in its own thread, so that decisions depend on values alone. Everything is written to
the journal before the run acts on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.data import Pool
from shoal.engine.members.member import Member
from shoal.engine.runtime.clones import clone_of
from shoal.engine.runtime.run import Run
from shoal.errors import OF_ONE_JOB, JobError, OutError, TuneError, describe_with_place
from shoal.jobs.early_stopping import kept_row
from shoal.jobs.job import Job
from shoal.preparation.checks import prepare
from shoal.tune.population import PBT
from shoal.tune.samplers import Sampler
from shoal.tune.schedulers import TRAINING, Action, Exploit, Goal, Promote, Scheduler, Start, Stop
from shoal.tune.studies.jobs import Jobs
from shoal.tune.studies.journal import Journal
from shoal.tune.trial import State, Trial

if TYPE_CHECKING:
    from shoal.tune.optuna_storage import OptunaStorage

ENDS: dict[str, State] = {"done": "complete", "stopped": "complete", "diverged": "failed", "failed": "failed"}
"""The trial's state for each status of its member, if the scheduler did not end it."""


class TrialSearch:
    """The trials of one study. Implements `shoal.engine.processes.training_run.Search`."""

    def __init__(
        self,
        jobs: Jobs,
        goal: Goal,
        scheduler: Scheduler,
        sampler: Sampler,
        metrics: Sequence[str],
        journal: Journal,
        mirror: OptunaStorage | None = None,
        trials: Sequence[Trial] = (),
    ) -> None:
        """Create the search.

        Args:
            metrics: Trials are compared by the first of them.
            mirror: A storage of Optuna to which everything is written too.
            trials: Those of the study that is resumed.
        """
        self.jobs, self.goal, self.scheduler, self.sampler = jobs, goal, scheduler, sampler
        self.metric, self._metrics = metrics[0], tuple(metrics)
        self.trials = list(trials)
        self._journal, self._mirror = journal, mirror
        self._members: dict[int, Member] = {}
        """Members by their trial's number. Trials whose job could not be made have none."""
        self._rows: dict[int, int] = {}
        """By a trial's number, how many rows of its member's history were processed."""
        self._pool: Pool | None = None
        self._begun = False

    @property
    def changed(self) -> set[str]:
        """Names of jobs whose settings have changed since they began."""
        return {trial.name for trial in self.trials if "params" in trial.attrs}

    @property
    def shareable(self) -> bool:
        """Whether trials may train in other processes. Population-based training copies states of running ones, so it
        may not."""
        return not isinstance(self.scheduler, PBT)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def prepare(self, device: torch.device) -> list[Member]:
        """Return the members of all trials of a resumed study, and of the trials that begin now."""
        self._pool = Pool(device)
        for trial in self.trials:
            self.sampler.tell(trial)
        resumed = [trial for trial in self.trials if "no_job" not in trial.attrs]
        members = prepare([self._remake_job(trial) for trial in resumed], device, self._pool) if resumed else []
        self._members = {trial.number: member for trial, member in zip(resumed, members, strict=True)}
        begun = len(self.trials)
        while starts := [a for a in self.scheduler.decide(self.goal, self.trials) if isinstance(a, Start)]:
            members += self._start(starts, len(members), device)
        if not members:
            more = f" (and {len(self.trials) - 1} more trials)" if len(self.trials) > 1 else ""
            raise JobError(f"no trial could be made: {self.trials[0].error}{more}")
        self._announce(self.trials[begun:])
        return members

    def _remake_job(self, trial: Trial) -> Job:
        """Make the job of a trial that began before."""
        try:
            return self.jobs.make(trial)
        except OutError:
            raise
        except Exception as error:
            raise TuneError(
                f"{trial.name} was begun, and now its make_job raised {describe_with_place(error)}; mend it, or use "
                "another folder"
            ) from error

    def _start(self, starts: Sequence[Start], index: int, device: torch.device) -> list[Member]:
        """Create new trials, and members for those whose job can be made. `index` is the first member's index."""
        jobs: dict[int, Job] = {}
        for start in starts:
            trial = Trial(len(self.trials), {}, bracket=start.bracket)
            self.trials.append(trial)
            draw = self.jobs.draw(trial)
            try:
                jobs[trial.number] = draw()
            except TuneError:
                raise  # the same for every trial
            except JobError as error:
                _no_job(trial, _mistake(error))
            except Exception as error:
                _no_job(trial, f"make_job raised {describe_with_place(error)}")
        members = self._built(jobs, device)
        for i, (number, member) in enumerate(members.items()):
            member.index, member.pause_at = index + i, self._until(self.trials[number])
        self._members |= members
        return list(members.values())

    def _announce(self, begun: Sequence[Trial]) -> None:
        """Write trials that have begun to the journal, before the run gets their jobs."""
        self._journal.write(begun)
        for trial in begun:
            if self._mirror is not None:
                self._mirror.begin(trial)
            if trial.ended:
                self._finish(trial)

    def _built(self, jobs: dict[int, Job], device: torch.device) -> dict[int, Member]:
        """Build members for these jobs; if some have mistakes, for the others."""
        if not jobs:
            return {}
        try:
            return dict(zip(jobs, prepare(list(jobs.values()), device, self._pool), strict=True))
        except JobError:
            good = dict(jobs)
            for number, job in jobs.items():
                try:
                    prepare([job], device, self._pool)
                except JobError as error:
                    _no_job(self.trials[number], _mistake(error))
                    del good[number]
            if len(good) == len(jobs):
                raise
        return self._built(good, device)

    def _until(self, trial: Trial) -> int | None:
        """Return the epoch at which a trial pauses; None: it trains to its end."""
        until = self.scheduler.until(self.goal, trial)
        return None if until >= self.goal.max_epochs else until

    # --- during the run -------------------------------------------------------------------------------------------

    def update(self, run: Run) -> None:
        """Read what the trials have reached, and do what the scheduler decides."""
        first, self._begun = not self._begun, True
        if first:
            self._resume(run)
        changed = self._follow()
        self._journal.write(changed)
        ended = [m for n, m in self._members.items() if m.status == "running" and self.trials[n].ended and m.pausing]
        run.end({member.index for member in ended}, "stopped")
        if first or any(trial.state not in TRAINING for trial in changed):
            while actions := self.scheduler.decide(self.goal, self.trials):
                self._carry_out(run, actions)

    def _resume(self, run: Run) -> None:
        """Set the next pause of each restored member.

        This includes members whose trial has ended, since their last state may not have been saved; they then train the
        last part again.
        """
        for trial in self.trials:
            member = self._members.get(trial.number)
            if member is None or member.status != "running" or trial.state == "complete":
                continue
            rungs = [dataclasses.replace(trial, rung=rung) for rung in range(trial.rung)]
            member.paused_at = frozenset(self.scheduler.until(self.goal, at_rung) for at_rung in rungs)
            member.pause_at = self._until(trial)

    def _follow(self) -> list[Trial]:
        """Read new values and states, and return the trials that have any."""
        changed: dict[int, Trial] = {}
        for number, member in self._members.items():
            trial = self.trials[number]
            rows = member.history[self._rows.get(number, 0) :]
            if not rows and trial.ended:
                continue
            self._rows[number] = len(member.history)
            for row in rows:
                if self._take_in(trial, member, row):
                    changed[number] = trial
            if rows and member.job.keep == "best":
                best = kept_row(member.job, member.history)
                kept_epoch = None if best is None else int(best["epoch"])
                if kept_epoch != trial.kept_epoch:
                    trial.kept_epoch, changed[number] = kept_epoch, trial
            if rows and len(self._metrics) > 1:
                self._note_objectives(trial, member)
            state = self._state(trial, member)
            if state != trial.state:
                trial.state, trial.error = state, member.error if state == "failed" else None
                changed[number] = trial
                if trial.ended:
                    self._finish(trial)
        return list(changed.values())

    def _take_in(self, trial: Trial, member: Member, row: dict[str, float]) -> bool:
        """Record a row of a member's history, and return whether it has a new value."""
        epoch = int(row["epoch"])
        missing = [name for name in self._metrics if name not in row]
        if missing:
            if not trial.values and (member.job.val is None or "val_loss" in row):
                names = ", ".join(name for name in row if name not in ("epoch", "step", "lr", "seconds"))
                raise TuneError(f"metric is {missing[0]!r}, which {trial.name} does not have; it has {names}")
            return False
        if epoch in trial.values:
            return False
        trial.values[epoch] = float(row[self.metric])
        if self._mirror is not None:
            self._mirror.report(trial, epoch, trial.values[epoch])
        return True

    def _note_objectives(self, trial: Trial, member: Member) -> None:
        """Record the values of all metrics, for the weights that a trial keeps."""
        epoch = trial.epochs if trial.kept_epoch is None else trial.kept_epoch
        row = next((row for row in member.history if row["epoch"] == epoch), {})
        trial.attrs["objectives"] = [float(row.get(name, math.nan)) for name in self._metrics]

    def _state(self, trial: Trial, member: Member) -> State:
        if trial.ended or member.status == "cancelled":
            return trial.state
        if member.status != "running":
            return ENDS[member.status]
        return "paused" if member.pausing else "running" if member.batches else "waiting"

    def _finish(self, trial: Trial) -> None:
        self.sampler.tell(trial)
        if self._mirror is not None:
            self._mirror.finish(trial)

    # --- decisions ------------------------------------------------------------------------------------------------

    def _carry_out(self, run: Run, actions: Sequence[Action]) -> None:
        """Write a decision to the journal as one line, and carry it out."""
        exploits = [action for action in actions if isinstance(action, Exploit)]
        copies = self._copies(run, exploits)
        decided = [self.trials[action.number] for action in actions if not isinstance(action, Start)]
        for action in actions:
            if isinstance(action, Start):
                continue
            trial = self.trials[action.number]
            if isinstance(action, Stop):
                trial.state = "pruned"
                continue
            if isinstance(action, Exploit):
                _note_mutation(trial, self.trials[action.source], action.params)
            trial.rung, trial.state = trial.rung + 1, "running"
        self._journal.write(decided)
        for member in copies:
            run.replace(member)
        self._end(run, [self.trials[action.number] for action in actions if isinstance(action, Stop)])
        for action in actions:
            if isinstance(action, Promote | Exploit):
                member = self._members[action.number]
                member.pause_at = self._until(self.trials[action.number])
                run.unpause(member.index)
        starts = [action for action in actions if isinstance(action, Start)]
        begun = len(self.trials)
        new = self._start(starts, len(run.all_members), run.planning.device) if starts else []
        self._announce(self.trials[begun:])
        if new:
            run.add(*new)

    def _end(self, run: Run, trials: Iterable[Trial]) -> None:
        trials = list(trials)
        run.end({self._members[trial.number].index for trial in trials}, "stopped")
        for trial in trials:
            self._finish(trial)

    def _copies(self, run: Run, exploits: Sequence[Exploit]) -> list[Member]:
        """Return members with other members' states and new settings. They are saved first, since the journal will
        refer to them."""
        copies = []
        for action in exploits:
            trial, source = self.trials[action.number], self._members[action.source]
            job = self.jobs.make(dataclasses.replace(trial, attrs={**trial.attrs, "params": action.params}))
            changes = {"hparams": job.hparams, "clip_norm": job.clip_norm}
            replaced = self._members[action.number]
            member = clone_of(run, source, trial.name, changes, instead=replaced)
            member.seconds = replaced.seconds
            copies.append(member)
        if run.folder is not None:
            for member in copies:
                run.folder.save(member)
        for action, member in zip(exploits, copies, strict=True):
            self._members[action.number] = member
            self._rows[action.number] = len(member.history)
        return copies


def _no_job(trial: Trial, error: str) -> None:
    trial.state, trial.error, trial.attrs["no_job"] = "failed", error, True


def _mistake(error: JobError) -> str:
    """Return the first mistake of a trial's job in one line, without the job's name, and how many more there are."""
    line = error.lines[0].removeprefix("job: ")
    of_one = OF_ONE_JOB.match(line)
    more = len(error.lines) - 1
    return (of_one[1] if of_one else line) + (f" (and {more} more)" if more else "")


def _note_mutation(trial: Trial, source: Trial, params: dict[str, Any]) -> None:
    """Record whose state and which settings a trial got."""
    changed = {name: [trial.settings.get(name), value] for name, value in params.items()}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    history = [*trial.attrs.get("mutations", []), {"epoch": trial.epochs, "from": source.number, "changed": changed}]
    trial.attrs = {**trial.attrs, "params": params, "mutations": history}
