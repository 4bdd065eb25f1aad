"""Processes of a placed training killed and stopped at random moments: how long it ever waits, and what the result is.

python benchmarks/place_kill.py --out benchmarks/results/place_kill.json

Rows of other attacks that are in the file stay, so that they can be made one by one.

Three attacks on the same job, for each way to synchronise:

- workers: one run, in which workers get SIGKILL (some SIGSTOP) at random moments, each followed by a new worker that
  joins. The result is held against the plain loop in float64.
- server: the server and its workers get SIGKILL at random moments, and the same call resumes. The result is held
  against that of an undisturbed run, bit for bit.
- link (as root, where there is tc): the link of one worker, or those of all, get a hundredth of their rate in the
  middle of a run, or carry nothing any more. The result is held against the plain loop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without a name

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.namespaces import missing, shaped
from shoal.net.links import Address
from shoal.net.local_workers import LocalWorker, ending
from shoal.place.api import place
from shoal.place.placement import Placement, Sync
from shoal.place.training.api import fork_workers, serve_job, serving, train_placed
from shoal.place.training.members import Workers
from shoal.place.training.roles import Built
from shoal.settings import make_settings

WORKERS = 4
SYNCS: tuple[Sync, ...] = ("server", "allreduce", "sharded", "factors")
SETTINGS = make_settings("cpu", None, 1, "auto", "5s", False, "fifo")
EXACT = make_settings("cpu", None, 1, "auto", "5s", True, "fifo")
"""deterministic=True: the network is not placed again, so that a resumed run has the same bits."""


class Slowly(nn.Module):
    """So that a step takes some time, and processes die in the middle of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and type(x) is torch.Tensor:
            time.sleep(0.003)
        return x


def network(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Dropout(0.2), Slowly(), nn.Linear(width, width), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(width, 5),
    ).double()  # fmt: skip


def make_job(steps: int, width: int = 64) -> shoal.Job:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(480, 20, generator=draw, dtype=torch.float64), torch.randint(0, 5, (480,), generator=draw)
    return shoal.Job(model=partial(network, width), data=(x, y), loss=F.cross_entropy, optimizer=torch.optim.AdamW,
                     hparams={"lr": 1e-3}, batch_size=32, steps=steps, seed=1)  # fmt: skip


def make_placement(job: shoal.Job, sync: Sync) -> Placement:
    return place(
        job.model(),
        job.data[0][:8],  # type: ignore[operator]
        workers=WORKERS,
        link="1Gbit",
        cut="6",
        sync=sync,
        measure=False,
    )


def largest_difference(ours: shoal.Result, theirs: shoal.Result) -> float:
    """Over all weights, relative to each tensor's largest value."""
    reference = theirs.model.state_dict()
    return max(
        float((value - reference[name]).abs().max() / reference[name].abs().max().clamp_min(1e-6))
        for name, value in ours.model.state_dict().items()
    )


def same_bits(ours: shoal.Result, theirs: shoal.Result) -> bool:
    reference = theirs.model.state_dict()
    return all(torch.equal(value, reference[name]) for name, value in ours.model.state_dict().items())


# --- workers --------------------------------------------------------------------------------------------------------


class Attack:
    """Kills workers at random moments, from a thread, and lets others join."""

    def __init__(self, kills: int, stops: int, seed: int) -> None:
        self.actions = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
        self.draw = random.Random(seed)
        self.draw.shuffle(self.actions)
        self.done: list[str] = []
        self.over = threading.Event()

    def run(self, workers: Workers, forked: list[LocalWorker]) -> None:
        """`forked`: those that work now, and then those that wait for their turn."""
        active, spares = forked[:WORKERS], forked[WORKERS:]
        for action in self.actions:
            if self.over.wait(self.draw.uniform(0.1, 0.8)):
                return
            victim = active.pop(self.draw.randrange(len(active)))
            os.kill(victim.pid, action)
            self.done.append(action.name)
            spare = spares.pop()
            spare.go(workers.address)
            active.append(spare)


def attack_workers(sync: Sync, kills: int, stops: int, steps: int, seed: int) -> dict[str, Any]:
    job = make_job(steps)
    attack = Attack(kills, stops, seed)

    @contextmanager
    def server(built: Built, placement: Placement) -> Iterator[Workers]:
        forked = fork_workers(built, WORKERS + kills + stops)
        with ending(forked), serving(built, expected=WORKERS) as workers:
            for process in forked[:WORKERS]:
                process.go(workers.address)
            thread = threading.Thread(target=attack.run, args=(workers, forked), daemon=True)
            thread.start()
            yield workers
            attack.over.set()
            thread.join()

    run_ends: list[float] = []
    notes: list[str] = []

    def listen(event: shoal.Event) -> None:
        if event.kind == "note":
            notes.append(event.data["text"])
        if event.kind == "turn":
            run_ends.append(time.monotonic())

    began = time.monotonic()
    (result,) = serve_job(job, make_placement(job, sync), server, settings=SETTINGS, events=listen)
    seconds, waits = time.monotonic() - began, [lost["waited"] for lost in result.split.lost]
    return {
        "attack": "workers", "sync": sync, "steps": steps, "acts": attack.done, "seconds": seconds,
        "lost": len(waits), "longest_wait": max(waits, default=0.0),
        "longest_time_without_a_turn": max((b - a for a, b in pairwise(run_ends)), default=0.0),
        "status": result.status, "error": result.error, "went_back": sum("continues from" in note for note in notes),
        "largest_difference": largest_difference(result, shoal.solo(job)),
    }  # fmt: skip


# --- the server -----------------------------------------------------------------------------------------------------


def serve(sync: Sync, steps: int, folder: str) -> None:
    """One process: the server, with its workers."""
    job = make_job(steps)
    settings = make_settings("cpu", None, 1, "auto", "0.2s", True, "fifo")
    train_placed(job, make_placement(job, sync), settings, out=folder)


def attack_server(sync: Sync, kills: int, steps: int, seed: int) -> dict[str, Any]:
    job, draw = make_job(steps), random.Random(seed)
    (undisturbed,) = train_placed(job, make_placement(job, sync), EXACT)
    began, killed, left = time.monotonic(), 0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", sync, "--steps", str(steps), "--folder", f"{folder}/run"]
        while True:
            process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(1.5, 4.5) if killed < kills else 300.0)
            if process.poll() is not None:
                break
            alone = draw.random() < 0.5  # the server by itself, or with all of its workers
            moment = time.monotonic()
            (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            if alone:
                left.append(_wait_for_end(process.pid, moment))
        returned = process.returncode
        (result,) = train_placed(job, make_placement(job, sync), EXACT, out=f"{folder}/run")
    return {
        "attack": "server", "sync": sync, "steps": steps, "kills": killed, "seconds": time.monotonic() - began,
        "returned": returned, "status": result.status, "same_bits_as_undisturbed": same_bits(result, undisturbed),
        "longest_life_of_workers_without_server": max(left, default=0.0),
        "largest_difference": largest_difference(result, shoal.solo(job)),
    }  # fmt: skip


def _wait_for_end(group: int, moment: float) -> float:
    """How long processes of a group were left."""
    while time.monotonic() - moment < 60.0:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    return time.monotonic() - moment


# --- a link ---------------------------------------------------------------------------------------------------------


FAULTS = ("crawls", "stalls", "stalls for a while", "all crawl")
"""What happens to the link of one worker, or to those of all: a hundredth of the rate, or nothing passes."""


def attack_link(sync: Sync, fault: str, steps: int) -> dict[str, Any]:
    """Links that change in the middle of a run."""
    job, turns, notes = make_job(steps, width=256), list[float](), list[str]()
    settings = make_settings("cpu", None, 1, "auto", "5s", False, "fifo")
    with shaped(1 + WORKERS, "100mbit") as links:
        devices = {number: f"sh{os.getpid() % 100000}v{number}" for number in range(1, 1 + WORKERS)}

        def change() -> None:
            if fault.startswith("stalls"):
                subprocess.run(["ip", "link", "set", devices[2], "down"], check=True)
                return
            for number in devices if fault == "all crawl" else (2,):
                limit = ["root", "tbf", "rate", "1mbit", "burst", "2kb", "latency", "10s"]
                for where, device in (([], devices[number]), (["-n", links.names[number]], "eth0")):
                    subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, *limit], check=True)

        def listen(event: shoal.Event) -> None:
            if event.kind == "turn":
                turns.append(time.monotonic())
                if len(turns) == 3:
                    change()
            if event.kind == "note":
                notes.append(event.data["text"])
                if fault == "stalls for a while" and "lost worker" in notes[-1]:
                    subprocess.run(["ip", "link", "set", devices[2], "up"], check=True)

        began = time.monotonic()
        (result,) = train_placed(
            job, make_placement(job, sync), settings, events=listen, address=Address(links.host, 0),
            enter=lambda number: links.enter(1 + number),
        )  # fmt: skip
    return {
        "attack": "link", "sync": sync, "fault": fault, "steps": steps, "seconds": time.monotonic() - began,
        "lost": result.split.lost, "notes": notes, "status": result.status, "error": result.error,
        "longest_time_without_a_turn": max((b - a for a, b in pairwise(turns)), default=0.0),
        "largest_difference": largest_difference(result, shoal.solo(job)),
    }  # fmt: skip


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["attack"], row["sync"], row.get("fault", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--server-kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", default=",".join(SYNCS), help="with commas")
    parser.add_argument("--attacks", default="workers,server,link", help="with commas")
    parser.add_argument("--faults", default=",".join(FAULTS), help="of links, with commas")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.steps, options.folder)
        return
    attacks: dict[str, list[Any]] = {
        "workers": [lambda sync: attack_workers(sync, options.kills, options.stops, options.steps, options.seed)],
        "server": [lambda sync: attack_server(sync, options.server_kills, options.steps, options.seed)],
        "link": [partial(attack_link, fault=fault, steps=options.steps) for fault in options.faults.split(",")],
    }
    rows: dict[Any, dict[str, Any]] = {}
    if options.out is not None and options.out.exists():  # of other attacks
        rows = {key_of(row): row for row in json.loads(options.out.read_text())["rows"]}
    for name in options.attacks.split(","):
        if name == "link" and (reason := missing()) is not None:
            print(reason)
            continue
        for sync in options.sync.split(","):
            for attack in attacks[name]:
                row = {**attack(sync), "command": f"python {' '.join(sys.argv)}"}
                rows[key_of(row)] = row
                print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({**stamp("cpu", 1), "rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
