"""The run folder, `out=`: the jobs, their checkpoints and their results.

    jobs.json                   what the jobs were: names, settings, shapes, hashes of data, code and initial weights
    plan.json                   how they run, so that a resume replays the same arithmetic
    members/0003/000008.ckpt    a checkpoint: weights, optimizer, schedule, random state, position in the data
    history/0003.jsonl          one row per epoch
    results.json                how each ended, and the environment
    weights/0003.safetensors    the model's state_dict (.pt where it holds more than plain tensors)
    lock                        the process that uses the folder

Every file is written atomically, so a process that is killed at any moment leaves a folder that the next one can resume
from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from shoal.engine.members.member import Member, seeded
from shoal.engine.members.ownership import build_model
from shoal.engine.members.resuming import reopened
from shoal.errors import NotStorable, OutError, describe, warn
from shoal.results import Results
from shoal.storage import _store, atomic
from shoal.storage._checkpoints import Checkpoints, Copy
from shoal.storage._histories import Histories, from_text
from shoal.storage._initial_weights import compare_weights, describe_weights
from shoal.storage._jobdiff import compare, extension, remarks
from shoal.storage._result_files import VERSION, read_file, write_results
from shoal.storage.jobtable import ADDED, CODE, WEIGHTS, JobTable, describe_functions, without_network
from shoal.storage.lock import Lock
from shoal.storage.lost_state import describe_lost_state, lost_state
from shoal.utils.tables import say

_left_functions: dict[tuple[Path, str], dict[str, Any]] = {}
"""(folder, job) -> a description of the job's functions after a run in this process: closures may have changed."""
FOLDERS = ("members", "history", "weights")
OTHER_WEIGHTS = "other initial weights (was the seed or the factory changed?)"


class Saved(Protocol):
    """Something that can be saved and restored: a member, or a split."""

    index: int
    name: str

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any], /) -> None: ...


class RunFolder:
    """A folder that holds one list of jobs, their checkpoints and their results.

    >>> with RunFolder(path) as folder:
    ...     resumed = folder.claim(members)
    ...     for member in members:
    ...         folder.restore(member)
    ...     ...  # train; now and then folder.save_many(members)
    ...     folder.finish(results)
    """

    def __init__(self, path: Path, *, passing: bool = False) -> None:
        """Open the folder; with `passing` it is temporary and does not save ended members, which the run has in
        memory."""
        self.path, self.passing = path, passing
        if importlib.util.find_spec("safetensors") is None:
            raise ImportError("out= writes weights with safetensors: pip install safetensors")
        if path.exists() and not path.is_dir():
            raise OutError(f"out is {str(path)!r}, which is a file; name a folder")
        self._lock = Lock(path)
        self._checkpoints = Checkpoints(path / "members")
        self._histories = Histories(path / "history")
        self.grows = self._extends = False
        """Whether jobs may be added later, and whether more or longer jobs are accepted."""
        self._table = JobTable([])
        self._jobs: dict[int, str] = {}
        self._claimed: list[Member] = []
        self._not_storable: set[int] = set()
        self._lossy: set[str] = set()
        """Jobs for which a warning said that some state cannot be saved."""
        self._reported_failure = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until everything is written, and release the folder."""
        self._checkpoints.wait()
        try:
            self._remember_functions()
        finally:
            self._lock.release()

    def claim(
        self,
        members: Sequence[Member],
        also: Mapping[str, Any] | None = None,
        *,
        grows: bool = False,
        extends: bool = False,
        changed: Collection[str] = (),
    ) -> bool:
        """Lock the folder, store the jobs in it, and return whether it has them from an earlier run.

        Args:
            members: Built jobs.
            also: Further settings to compare, such as those of a split.
            grows: More jobs may be added later by `add`; the folder may have only the first of these.
            extends: Jobs may be new, or longer than before. A member's index becomes its index in the folder.
            changed: Names of jobs whose settings the run itself changed, which are not compared.

        Raises an OutError if the folder holds other jobs or files, is in use or damaged, or cannot be written.
        """
        self.grows, self._extends = grows, extends
        table = JobTable.of(members, also, passing=self.passing)
        if not self._is_run_folder():
            raise OutError(f"out={str(self.path)!r} has files that are not those of a run; use a new or empty folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            return self._claim(members, table, changed)
        except OSError as error:
            self._lock.release()
            raise OutError(
                f"out={str(self.path)!r} cannot be written ({_reason(error)}); "
                "free some space or allow writing to it, or use another folder"
            ) from None
        except BaseException:
            self._lock.release()
            raise

    def _is_run_folder(self) -> bool:
        """Return whether the folder is empty or a run folder, even one of a run that was killed early."""
        entries = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set[str]()
        return entries <= {"lock", ".jobs.json.tmp"} or "jobs.json" in entries or any(self._saved())

    def _saved(self) -> Iterator[Path]:
        return self.path.glob("members/*/*.ckpt")

    def _claim(self, members: Sequence[Member], table: JobTable, changed: Collection[str]) -> bool:
        jobs_file = self.path / "jobs.json"
        content = read_file(jobs_file, "or, if the jobs are the same, remove this file: it is written again")
        if content is not None:
            stored_table = JobTable.read(content)
            updates = self._check(members, stored_table, table, changed)
            stored_table.update(updates)
            self._table = stored_table  # the checkpoints have its keys
            self._add(members, table, changed=bool(updates))
        else:
            self._add(members, table)
        atomic.remove_left_overs(self.path)
        for folder in (*FOLDERS, *(f"members/{member.index:04d}" for member in members)):
            (self.path / folder).mkdir(exist_ok=True)
        for folder in FOLDERS:
            atomic.write_text(self.path / folder / "probe", "can it be written?", durable=False)
            (self.path / folder / "probe").unlink()
        if not self.passing:
            atomic.sync_folder(self.path / "members")
        return content is not None or any(self._saved())

    def add(self, members: Sequence[Member]) -> None:
        """Store jobs that are added to a running run, before their first step."""
        self._store_jobs(members, JobTable.of(members, passing=self.passing))

    def _store_jobs(self, members: Sequence[Member], table: JobTable, *, changed: bool = False) -> None:
        try:
            self._add(members, table, changed=changed)
        except OSError as error:
            raise OutError(f"out={str(self.path)!r}: jobs.json cannot be written ({_reason(error)})") from None

    def place_of(self, name: str) -> int:
        """Return the index in the folder of the job of this name, or the next free index."""
        names = [job["name"] for job in self._table.jobs]
        return names.index(name) if name in names else len(names)

    def has_state(self, name: str) -> bool:
        return bool(self._checkpoints.of(self.place_of(name)))

    def join(self, member: Member) -> bool:
        """Store a job that is added to a live run, or restore it if the folder has it; return whether it was restored.

        Only settings are compared, since a clone has its code and weights from another job.
        """
        table = JobTable.of([member], {ADDED: True}, names_only=True)
        diff = compare(self._table, table, extends=True, part=True)
        if diff.lines:
            raise OutError(f"out={str(self.path)!r}: {'; '.join(diff.lines)}; add it unchanged, or under another name")
        self._table.update(diff.updates())
        self._store_jobs([member], table, changed=bool(diff.updates()))
        self.reopen()
        if not (restored := self.restore(member)):
            self.save_many([member])  # a clone's initial state cannot be built again
        return restored

    def _add(self, members: Sequence[Member], table: JobTable, *, changed: bool = False) -> None:
        if self._table.extend(table) or changed:
            atomic.write_sealed(self.path / "jobs.json", {"version": VERSION, **self._table.to_json()})
        keys = dict(zip((job["name"] for job in self._table.jobs), self._table.keys(), strict=True))
        if self._extends:
            index_of = {name: index for index, name in enumerate(keys)}
            for member in members:
                member.index = index_of[member.name]
        self._jobs |= {member.index: keys[member.name] for member in members}
        self._claimed += members

    def _check(
        self, members: Sequence[Member], stored: JobTable, current: JobTable, changed: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """Raise an OutError if the folder holds other jobs, warn of what is not comparable, and return what its
        entries take over: longer lengths, other configs."""
        self._recognize(stored, current)
        diff = compare(stored, current, grows=self.grows, extends=self._extends, changed=changed)
        unstable = [m.name for m in members if m.name in diff.other_weights and _draws_elsewhere(m, current)]
        other_weights = [name for name in diff.other_weights if name not in unstable]
        lines = [*diff.lines, *(f"job {name!r} has {OTHER_WEIGHTS}" for name in other_weights)]
        if lines:
            more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
            raise OutError(
                f"out={str(self.path)!r} holds other jobs: {'; '.join(lines[:5])}{more}; "
                "use another folder, or remove this one"
            )
        for text in remarks(diff, unstable, stored, current):
            warn(f"out={str(self.path)!r}: {text}")
        if self._extends and (new := extension(diff, stored)):
            say(f"out={str(self.path)!r}: {new}; the rest continues as it was")
        return diff.updates()

    def _recognize(self, stored: JobTable, current: JobTable) -> None:
        """Accept functions whose closures an earlier run of this process in this folder has changed."""
        jobs = {job["name"]: job for job in stored.jobs}
        for job in current.jobs:
            left = _left_functions.get((self.path.resolve(), job["name"]))
            if left is not None and left == without_network(current.code(job)) and CODE in jobs.get(job["name"], {}):
                current.take_functions(job, stored, jobs[job["name"]])

    def _remember_functions(self) -> None:
        """Remember the jobs' functions as training left them, for a later run of this process in this folder."""
        for member in self._claimed:
            if member.saved_state.job is not None and not self.passing:
                _left_functions[self.path.resolve(), member.name] = describe_functions(member)
        self._claimed = []

    def plan(self) -> dict[str, Any] | None:
        """Return the saved plan, or None if there is none. Raises a DamagedError if the file has changed."""
        fix = "or remove this file: a new plan is made, and results may differ in the last digits"
        content = read_file(self.path / "plan.json", fix)
        return None if content is None else content["plan"]

    def save_plan(self, plan: Mapping[str, Any]) -> None:
        """Save how the jobs run, as plain data, so that a resumed run does the same arithmetic."""
        try:
            atomic.write_sealed(self.path / "plan.json", {"version": VERSION, "plan": dict(plan)})
        except OSError as error:
            raise OutError(f"out={str(self.path)!r}: plan.json cannot be written ({_reason(error)})") from None

    @property
    def busy(self) -> bool:
        """Whether the last checkpoints are still being written: saving now would wait for them."""
        return self._checkpoints.busy

    def save(self, member: Saved) -> bool:
        """Write a member's checkpoint and history, wait for the disk, and return whether that succeeded."""
        self.save_many([member])
        return self.flush() and member.index not in self._not_storable

    def save_many(self, members: Sequence[Saved]) -> None:
        """Copy members' states and write them in the background; `flush` waits for it.

        If writing fails (a full disk), the previous checkpoints stay. A member whose state cannot be stored at all
        starts again from its beginning after a kill; one warning names each such member.
        """
        copies, reasons = list[Copy](), dict[str, str]()
        for member in {member.index: member for member in members}.values():
            try:
                copies.append(self._copy(member))
            except NotStorable as error:
                if member.index not in self._not_storable:
                    reasons[member.name] = str(error)
                self._not_storable.add(member.index)
        self._checkpoints.wait()
        self._report_failures()
        self._checkpoints.put(copies)
        self._warn_of(
            {m.name: m.saved_state.problems for m in members if isinstance(m, Member) and m.saved_state.problems}
        )
        if reasons:
            name, why = next(iter(reasons.items()))
            more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            warn(f"job {name!r}{more} is not checkpointed: {why}; after a kill it starts again from its beginning")

    def warn_of_lost_state(self, members: Sequence[Member]) -> None:
        """Warn, before the first step, about state that jobs change and checkpoints cannot contain."""
        self._warn_of(lost_state(members))

    def _warn_of(self, lost: dict[str, dict[str, str]]) -> None:
        lost = {name: problems for name, problems in lost.items() if name not in self._lossy}
        self._lossy |= lost.keys()
        if lost and not self.passing:
            what = "a resumed run finds it as it is at the beginning, and ends with other weights"
            warn(f"out={str(self.path)!r}: {describe_lost_state(lost, what)}")

    def _copy(self, member: Saved) -> Copy:
        state = dict(member.state())
        lines = self._histories.lines(member.index, state.get("history"))
        if lines is not None:
            state["history"] = lines
        frozen = _store.freeze(state)
        return Copy(member.index, frozen, self._jobs.get(member.index, ""), self._histories.view(member.index))

    def flush(self) -> bool:
        """Wait until all checkpoints are on the disk, and return whether that succeeded."""
        self._checkpoints.wait()
        return not self._report_failures()

    def _report_failures(self) -> bool:
        """Return whether writing failed since the last call, and warn of the first failure."""
        errors, self._checkpoints.errors = self._checkpoints.errors, []
        if errors and not self._reported_failure:
            self._reported_failure = True
            warn(
                f"out={str(self.path)!r}: a checkpoint could not be written ({_reason(errors[0])}); "
                "the one before it is still there, training continues, and writing is tried again at the next one"
            )
        return bool(errors)

    def restore(self, member: Saved) -> bool:
        """Load a member's newest undamaged checkpoint, warn of damaged ones, and return whether there was one."""
        state, path, problems = self._checkpoints.newest(member.index, self._jobs.get(member.index, ""))
        if problems:
            then = f"resuming from {path.name}" if path is not None else "it starts again from its beginning"
            warn(f"job {member.name!r}: {'; '.join(problems)}; {then}")
        if path is None:
            return False
        if isinstance(state.get("history"), bytes):
            state["history"] = from_text(state["history"])
        if isinstance(member, Member):
            state = reopened(member, state)
            if state is None:
                return False
        try:
            member.load_state(state)
        except Exception as error:
            more = [line.strip() for line in str(error).splitlines()[1:2]]  # torch names the weights there
            what = " ".join([describe(error), *more]).rstrip(". ")
            raise OutError(
                f"{str(path)!r} does not fit job {member.name!r} ({what}); put the code back as it was, or use another "
                "folder. What a step adds to its network or takes from it cannot be resumed"
            ) from error
        return True

    def reopen(self) -> None:
        """Remove results.json: training continues, so the results of the earlier run are no longer final."""
        (self.path / "results.json").unlink(missing_ok=True)

    def finish(self, results: Results) -> None:
        """Write the results, or raise an OutError. The checkpoints stay, so that the same run can resume."""
        self._checkpoints.wait()
        try:
            for folder in FOLDERS:
                (self.path / folder).mkdir(exist_ok=True)
            write_results(self.path, self._in_order(results))
        except OSError as error:
            raise OutError(
                f"out={str(self.path)!r}: the results cannot be written ({_reason(error)}); "
                "free some space, and run the same again: it resumes from the checkpoints"
            ) from None

    def _in_order(self, results: Results) -> Results:
        """Return the results in the order of the folder's jobs."""
        index_of = {job["name"]: index for index, job in enumerate(self._table.jobs)}
        return Results(sorted(results, key=lambda result: index_of.get(result.name, len(index_of))))


def _draws_elsewhere(member: Member, table: JobTable) -> bool:
    """Return whether a job's factory draws weights from a generator that the seed does not set."""
    job = next(job for job in table.jobs if job["name"] == member.name)
    try:
        with seeded(member.job.seed, member.device):
            weights = describe_weights(build_model(member.job))
    except Exception:
        return False
    return compare_weights(table.parts[job[WEIGHTS]], weights) != "same"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or describe(error)
