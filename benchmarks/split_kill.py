"""Workers killed and stopped at random moments of one run: how long it ever waits, and what becomes of the accuracy.

python benchmarks/split_kill.py --kills 50 --out benchmarks/results/split_kill.json

A network is trained on scikit-learn's digits by four worker processes, over several seeds without trouble; then with
so many SIGKILLs at random moments of one run, each followed by a new worker that joins, and some SIGSTOPs that go on
after a while. The longest time that a round took is held against its deadline, and the accuracy against that of the
undisturbed runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import shoal
from shoal.evidence.bench.stamp import stamp
from shoal.net.local_workers import LocalWorker
from shoal.split import IST, LocalSGD, train_split
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.net.coordinator import Distributed
from shoal.split.net.launch import fork_workers

WORKERS = 4


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).float().mean().item()


def a_job(seed: int, steps: int) -> shoal.Job:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    train, test = order[:1400], order[1400:]
    return shoal.Job(
        model=lambda: nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        data=(x[train], y[train]), val=(x[test], y[test]), loss=F.cross_entropy, optimizer=torch.optim.SGD,
        hparams={"lr": 0.1}, batch_size=32, steps=steps, seed=seed, metrics={"accuracy": accuracy},
    )  # fmt: skip


class Troubled:
    """An executor whose workers are killed or stopped in some rounds, at random moments. Rounds are timed."""

    tier = "distributed"

    def __init__(
        self, executor: Distributed, at_work: list[LocalWorker], spare: list[LocalWorker], kills: set[int]
    ) -> None:
        self.executor, self.at_work, self.spare, self.kills = executor, at_work, spare, kills
        self.stops = {number + 1 for number in sorted(kills)[:: max(1, len(kills) // 5)]}
        self.random = random.Random(0)
        self.seconds: list[float] = []
        self.killed = self.stopped = 0

    def workers_of_round(self, number: int) -> Sequence[Worker]:
        return self.executor.workers_of_round(number)

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        usual = statistics.median(self.seconds) if self.seconds else 0.1
        moment = self.random.uniform(0, usual)
        timer = threading.Timer(moment, self._trouble, (tasks[0].round,))
        timer.start()
        began = time.monotonic()
        outcomes = self.executor.run(tasks)
        self.seconds.append(time.monotonic() - began)
        timer.join()
        return outcomes

    def _trouble(self, number: int) -> None:
        victim = self.random.choice(self.at_work)
        if number in self.kills:
            self.at_work.remove(victim)
            os.kill(victim.pid, signal.SIGKILL)
            self.killed += 1
            new = self.spare.pop()
            self.at_work.append(new)
            new.go(self.executor.address)
        elif number in self.stops:
            self.stopped += 1
            os.kill(victim.pid, signal.SIGSTOP)
            threading.Timer(self.random.uniform(1, 6), os.kill, (victim.pid, signal.SIGCONT)).start()


def disturbed(job: shoal.Job, method: Method, kills: int) -> dict[str, Any]:
    at_work = fork_workers(WORKERS, job, method, log=lambda line: None)
    spare = fork_workers(kills, job, method, log=lambda line: None)
    everybody = [*at_work, *spare]
    when = set(random.Random(1).sample(range(1, method.rounds - 1), kills))
    try:
        with Distributed(job, method, workers=WORKERS) as executor:
            for worker in at_work:
                worker.go(executor.address)
            executor.workers_of_round(0)
            troubled = Troubled(executor, at_work, spare, when)
            began = time.monotonic()
            result = train_split(job, method, troubled)
            seconds = time.monotonic() - began
            lost = list(executor.lost)
    finally:
        for worker in everybody:
            if worker.alive():
                os.kill(worker.pid, signal.SIGCONT)
            worker.end(time.monotonic() + 1)
    worst = max(lost, key=lambda one: one.waited)
    return {
        "accuracy": result.history[-1]["accuracy"],
        "status": result.status,
        "kills": troubled.killed,
        "stops": troubled.stopped,
        "parts_lost": len(lost),
        "rounds": len(troubled.seconds),
        "seconds": seconds,
        "usual_round": statistics.median(troubled.seconds),
        "longest_round": max(troubled.seconds),
        "longest_wait_for_a_lost_worker": worst.waited,
        "its_deadline": worst.allowed,
        "most_seconds_past_a_deadline": max(one.waited - one.allowed for one in lost),
    }


def undisturbed(job: shoal.Job, method: Method) -> tuple[float, float]:
    workers = fork_workers(WORKERS, job, method, log=lambda line: None)
    try:
        with Distributed(job, method, workers=WORKERS) as executor:
            for worker in workers:
                worker.go(executor.address)
            executor.workers_of_round(0)
            began = time.monotonic()
            result = train_split(job, method, executor)
            return result.history[-1]["accuracy"], time.monotonic() - began
    finally:
        for worker in workers:
            worker.end(time.monotonic() + 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--method", choices=("ist", "local-sgd"), default="ist")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def build(seed: int) -> tuple[shoal.Job, Method]:
        job = a_job(seed, args.steps)
        make = IST if args.method == "ist" else LocalSGD
        return job, make(job, WORKERS, args.local_steps)

    plain = [undisturbed(*build(seed)) for seed in range(args.seeds)]
    usual = statistics.mean(seconds for _, seconds in plain)
    found = disturbed(*build(0), args.kills)
    accuracies = [value for value, _ in plain]
    found |= {
        "undisturbed": accuracies,
        "undisturbed_mean": statistics.mean(accuracies),
        "undisturbed_deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "undisturbed_seconds": usual,
        "settings": vars(args) | {"out": None},
        "stamp": stamp("cpu", 1),
    }
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
