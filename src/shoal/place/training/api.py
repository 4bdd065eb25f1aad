"""`shoal.train(job, placement=...)`: train a job with a server and workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from shoal.engine.members.member import Member
from shoal.engine.processes.child import compute_in_fork
from shoal.environment import environment, usable_cores
from shoal.errors import PlaceError, describe
from shoal.jobs.job import Job
from shoal.jobs.loaders import refuse_batches
from shoal.net.links import Address, Link, LinkLost, Listener, read_offer, send_answer
from shoal.net.local_workers import LocalWorker, ending, fork_local_workers
from shoal.net.torchrun import Torchrun
from shoal.place.api import place
from shoal.place.placement import DATA_PARALLEL, ONE_MACHINE, PARAMETER_SERVER, WORKERS, Placement
from shoal.place.training.checks import check_agreement, check_job
from shoal.place.training.members import Lost, Workers
from shoal.place.training.roles import Built, Roles
from shoal.place.training.run import PlacedRun
from shoal.place.training.worker import REPLACED, Replaced, ServerEnded, describe_placed, serve_worker
from shoal.preparation.checks import DRY_ROWS, prepare
from shoal.reporting.callbacks import Callback, Callbacks
from shoal.reporting.events import Listener as EventListener
from shoal.reporting.events import Listeners, new_event
from shoal.reporting.progress import progress_for
from shoal.results import Results
from shoal.settings import Settings
from shoal.storage.run_folder import RunFolder
from shoal.training import carry_out, collect
from shoal.utils.tables import Log
from shoal.utils.torch_flags import backward_prevents_forking, torch_flags, training_mode

Server = Callable[[Built, Placement], Any]
"""Returns the workers of a built job, as a context manager of `Workers`."""


def roles_of(placement: Placement) -> Roles:
    """Return the roles of server and workers in a placement."""
    if not isinstance(placement, Placement):
        raise PlaceError(f"placement is a {type(placement).__name__}; pass what shoal.place returned")
    everything = placement.mode in (PARAMETER_SERVER, DATA_PARALLEL)
    usual = "allreduce" if placement.mode == DATA_PARALLEL else "server"
    ways = {
        name: (layer.sync or usual)
        for layer in placement.layers
        if everything or layer.where == WORKERS
        for name in layer.parameters
    }
    return Roles(
        cut=len(placement.layers) if everything else placement.cut, ways=ways, workers=placement.workers,
        shares=tuple(float(rows) for rows in placement.rows), micro_batches=placement.micro_batches,
        batch_norm=placement.batch_norm, staleness=placement.staleness,
    )  # fmt: skip


def build(job: Job, placement: Placement, device: torch.device) -> Built:
    """Build the job's network and data, with its layers. Raises a JobError or PlaceError for mistakes in them."""
    (member,) = prepare([job], device, dry_rows=DRY_ROWS)
    built = Built(member, roles_of(placement))
    layers = ([f"{layer.kind} {layer.name}" for layer in source.layers] for source in (placement, built.graph))
    for planned, actual in zip_longest(*layers, fillvalue="no layer"):
        if planned != actual:
            raise PlaceError(
                f"the placement has {planned} where the job's network has {actual}; use a placement of this network"
            )
    return built


def one_job(jobs: Any) -> Job:
    """Return the job to place; a PlaceError unless there is exactly one."""
    given = [jobs] if isinstance(jobs, Job) else list(jobs)
    if len(given) != 1 or not isinstance(given[0], Job):
        raise PlaceError(f"a placement trains one job, and there are {len(given)}; train the others separately")
    refuse_batches(given[0], "a placed training")
    return given[0]


def train_job(jobs: Job | Sequence[Job], placement: Placement, settings: Settings, **how: Any) -> Results:
    """Train one job as a placement says: in several processes, or on this machine if that is faster."""
    job = one_job(jobs)
    if roles_of(placement).staleness is None and placement.mode == ONE_MACHINE:
        return carry_out([job], settings, **how)
    return train_placed(job, placement, settings, **how)


def train_placed(
    job: Job,
    placement: Placement,
    settings: Settings,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] | None = None,
    events: EventListener | None = None,
    **how: Any,
) -> Results:
    """Train one job with a server, which is this process, and forked workers. `how` are settings of `local_workers`."""

    @contextmanager
    def server(built: Built, placement: Placement) -> Iterator[Workers]:
        device = settings.device if settings.device.type == "cuda" else "cpu"
        with local_workers(built, placement.workers, **{"device": device, **how}) as (workers, _):
            yield workers

    return serve_job(
        job, placement, server, out=out, progress=progress, callbacks=callbacks, events=events, settings=settings,
        threads=server_threads(settings), may_replan=not backward_prevents_forking(),
    )  # fmt: skip


def server_threads(settings: Settings, started: Torchrun | None = None) -> int:
    """Return how many of torch's threads the server uses.

    One beside workers on the CPU of this machine, and with `deterministic`, since sums depend on the number. Where
    workers compute on a GPU or are elsewhere, as many as torch uses by itself: one for each physical core, or
    OMP_NUM_THREADS, which torchrun sets to 1 where it starts several processes on a machine.

    Args:
        started: What torchrun says of this process, if it has started it.
    """
    if settings.threads is not None or settings.deterministic:
        return settings.threads or 1
    alone = started is not None and (started.alone or "OMP_NUM_THREADS" in os.environ)
    return min(torch.get_num_threads(), usable_cores()) if alone or settings.device.type == "cuda" else 1


def serve_job(
    job: Job,
    placement: Placement,
    server: Server,
    *,
    settings: Settings,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] | None = None,
    events: EventListener | None = None,
    threads: int | None = None,
    may_replan: bool = True,
) -> Results:
    """Train one job as the server of the workers that `server` returns.

    Args:
        threads: Torch's threads; None: those of the settings, or one.
        may_replan: Whether `server` can start workers for another placement later.
    """
    assert placement.mode != ONE_MACHINE, "one machine needs no server"
    calls, cpu = Callbacks(callbacks), torch.device("cpu")
    flags = torch_flags(cpu, threads or settings.threads or 1, settings.deterministic)
    with training_mode(), flags, RunFolder(Path(out)) if out is not None else nullcontext() as folder:
        built = build(job, placement, cpu)
        member = built.member
        if folder is not None and folder.claim([member], {"placement": built.roles.to_dict()}):
            folder.restore(member)
        with progress_for([member], progress) as watch:
            notify = Listeners([watch, *calls.listeners(), *([events] if events is not None else [])])
            notify(new_event("start", jobs=1, device=str(settings.device), plan=None))
            replans = may_replan and not settings.deterministic
            run = _train(built, placement, server, settings, folder, calls, notify, replans)
            results = _results(member, run)
            notify(new_event("end", statuses={member.status: 1}, seconds=member.seconds, running=1.0))
        if folder is not None:
            folder.finish(results)
        return results


def _train(
    built: Built, placement: Placement, server: Server, settings: Settings, folder: RunFolder | None,
    calls: Callbacks, notify: Listeners, replans: bool,
) -> PlacedRun | None:  # fmt: skip
    if built.member.status != "running":
        return None
    check_job(built)
    compute_in_fork(partial(check_agreement, built))
    notes, lost = list[str](), list[Lost]()
    while True:
        replan_links = partial(replan, built, placement) if replans else None
        with server(built, placement) as workers:
            workers.log = lambda line: notify(new_event("note", text=line))
            run = PlacedRun(
                built, workers, placement, folder=folder, save_every=settings.checkpoint_every,
                callbacks=calls or None, notify=notify, replan=replan_links,
            )  # fmt: skip
            workers.lost += lost  # those of the previous placement
            run.go()
            lost = workers.lost
            workers.ending = REPLACED if run.next is not None else ""
        run.report.notes = notes = notes + run.report.notes
        if run.next is None:
            return run
        placement = run.next
        built = Built(built.member, roles_of(placement))


def replan(built: Built, placement: Placement, times: float) -> Placement | None:
    """Place again for links that are `times` times as fast; None if the roles stay the same."""
    member, rows = built.member, placement.rows
    sample = built.sample(member.data.take(0, min(max(2, max(rows)), len(member.data))))
    mean = sum(rows) / len(rows)
    arguments: dict[str, Any] = {
        "workers": len(rows) if len(set(rows)) == 1 else [count / mean for count in rows],
        "link": placement.link.faster(times), "server_link": placement.server_link.faster(times),
        "batch_size": max(1, round(mean)), "batch_norm": placement.batch_norm,
        "cores": placement.profile.get("cores"),
    }  # fmt: skip
    if "worker" in placement.profile:  # reuse earlier measurements
        arguments["profile"] = placement
    if placement.staleness is not None:
        arguments["sync"] = "server"
    planned = place(built.graph, sample, **arguments)
    if planned.mode == ONE_MACHINE:  # the processes exist already, so use the best alternative with them
        others = [other for other in planned.alternatives if other.mode != ONE_MACHINE and not other.problem]
        planned = place(built.graph, sample, mode=min(others, key=lambda other: other.seconds).mode, **arguments)
    planned = replace(planned, staleness=placement.staleness)
    return None if roles_of(planned).to_dict() == built.roles.to_dict() else planned


def run_process(
    job: Job,
    placement: Placement | None,
    settings: Settings,
    started: Torchrun,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    patience: float = 60.0,
    log: Log | None = None,
) -> Results | None:
    """Run the process that torchrun has started: rank 0 is the server, the others are workers. Returns the results at
    the server.

    The placement is that of rank 0; the others, which need none, read it from there.
    """
    if started.rank > 0:
        offered = _read_placement(started.where, patience)
        if offered.mode == ONE_MACHINE:
            return None
        built = build(job, offered, torch.device("cpu"))
        try:
            done = serve_worker(built, started.where, device=settings.device, patience=patience, log=log)
        except Replaced:
            return run_process(job, None, settings, started, patience=patience, log=log)
        if log is not None:
            log(f"the server at {started.where} has finished; {done} batches were computed here")
        return None
    assert placement is not None, "rank 0 has a placement"
    if placement.mode == ONE_MACHINE:
        with _offering(placement, started, patience):
            return carry_out([job], settings, out=out, progress=progress)

    @contextmanager
    def server(built: Built, placement: Placement) -> Iterator[Workers]:
        with serving(
            built, expected=placement.workers, address=started.where, patience=patience, start_seconds=patience,
            offer=placement.to_dict(),
        ) as workers:  # fmt: skip
            yield workers

    threads = server_threads(settings, started)
    return serve_job(job, placement, server, settings=settings, out=out, progress=progress, threads=threads)


@contextmanager
def _offering(placement: Placement, started: Torchrun, patience: float) -> Iterator[None]:
    """Let the other processes read the placement inside this context; it ends when all have, or after `patience`
    seconds."""
    answered = threading.Semaphore(0)

    def answer(link: Link, request: dict[str, Any]) -> bool:
        send_answer(link, offer=placement.to_dict())
        answered.release()
        return False

    listener = Listener(started.where, answer)
    try:
        yield
        until = time.monotonic() + patience
        for _ in range(started.world - 1):  # a short training may end before slow processes have started
            answered.acquire(timeout=max(until - time.monotonic(), 0.0))
    finally:
        listener.close()


def _read_placement(where: Address, patience: float) -> Placement:
    try:
        return Placement.from_dict(read_offer(where, patience))
    except LinkLost as error:
        raise PlaceError(f"{error}; is rank 0 running?") from None


def _results(member: Member, run: PlacedRun | None) -> Results:
    results = collect([member], environment(member.device))
    if run is not None:
        results[0].split = run.report
    return results


@contextmanager
def serving(built: Built, **settings: Any) -> Iterator[Workers]:
    """Admit workers to this server until the block ends; they are sent how it ended. `settings` are those of
    `Workers`."""
    workers = Workers(describe_placed(built), **settings)
    why = "the server ended"
    try:
        yield workers
        why = workers.ending
    except BaseException as error:
        why = f"the server ended: {describe(error)}"
        raise
    finally:
        workers.close(why)


@contextmanager
def local_workers(
    built: Built,
    local: int,
    *,
    others: int = 0,
    device: torch.device | str = "cpu",
    address: Address | None = None,
    enter: Callable[[int], None] | None = None,
    **settings: Any,
) -> Iterator[tuple[Workers, list[LocalWorker]]]:
    """Yield a server's workers: some forked here, and some that join from elsewhere.

    They are forked, so a job may contain lambdas and its data is not copied. `settings` are those of `Workers`.

    Args:
        enter: Called first in each forked worker, with its number.
    """
    forked = fork_workers(built, local, device, enter)
    with ending(forked), serving(built, expected=local + others, address=address, **settings) as workers:
        for process in forked:
            process.go(workers.address)
        yield workers, forked


def fork_workers(
    built: Built, count: int, device: torch.device | str = "cpu", enter: Callable[[int], None] | None = None
) -> list[LocalWorker]:
    """Fork worker processes that wait for the address of their server (`LocalWorker.go`)."""

    def serve(number: int, where: Address) -> None:
        if enter is not None:
            enter(number)
        with suppress(Replaced):  # new workers will be forked
            serve_worker(built, where, device=device, patience=20.0)

    return fork_local_workers(count, serve, ServerEnded, device=device, error=PlaceError, instead="use torchrun")
