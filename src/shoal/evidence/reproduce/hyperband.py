"""Reproduce pack-aware Hyperband: R = 81, eta = 3 over MLPs or CNNs on digits, packed against one trial at a time.

Published: 2.7x over plain Hyperband (Pack, one 16 GB GPU). Every way draws the same settings from the same seeds,
trains the same epochs and validates after each of them. Time is from the call to the winner, in a new process with an
empty cache, set-up included; loading torch and the data is not counted.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.evidence.bench.child import Child, ChildError
from shoal.evidence.bench.report import heading
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.other_searches import optuna_search, ray_search
from shoal.utils.tables import Log

if TYPE_CHECKING:
    from torch import nn

PUBLISHED = 2.7
TITLES = {
    "one": "Hyperband one at a time",
    "shoal": "Shoal",
    "optuna": "Optuna's Hyperband",
    "ray-asha": "Ray Tune's ASHA",
    "ray-hyperband": "Ray Tune's HyperBand",
    "packs-random": "packs at random",
    "packs-batch": "packs of equal batch size",
    "packs-nearest": "packs of nearest neighbours",
}
SPACES: dict[str, dict[str, Any]] = {
    "plain": {"lr": ("log", 1e-4, 1e-1), "weight_decay": ("log", 1e-6, 1e-2)},
    "shapes": {
        "lr": ("log", 1e-4, 1e-1),
        "weight_decay": ("log", 1e-6, 1e-2),
        "width": [16, 32, 64, 128],
        "depth": [1, 2, 3],
        "batch_size": [16, 32, 64],
    },
}
"""What is searched: only numbers of the optimizer; or, as in the paper, also widths, depths and batch sizes."""
NETWORKS = {"mlp": "MLPs", "cnn": "CNNs with batch norm and dropout"}
DROPOUT = 0.25


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What every way does, small enough to send to another process."""

    network: str = "mlp"
    space: str = "plain"
    max_epochs: int = 81
    eta: int = 3
    seed: int = 0
    device: str = "cpu"
    data: str | None = None
    """A folder with mnist.npz; None means digits."""
    pack_size: int = 8
    """The size of packs that are formed by the paper's rules."""


MakeJob = Callable[[dict[str, Any]], Any]
"""A function from settings to a job."""
Way = Callable[[Scene, MakeJob], dict[str, Any]]


def mlp(features: int, classes: int, width: int, depth: int) -> nn.Module:
    """Return a network with hidden layers of one width."""
    from shoal.evidence.bench import published

    return published.mlp(features, *[width] * depth, classes)


def cnn(features: int, classes: int, width: int, depth: int) -> nn.Module:
    """Return convolutions with batch norm, one block more than an MLP of this depth has layers, then dropout and one
    layer."""
    from torch import nn

    side = math.isqrt(features)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for a, b in pairwise([1, *[width] * (depth + 1)]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    pooled = side // 2
    last = nn.Linear(width * pooled * pooled, classes)
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(DROPOUT), last)


def make_job_for(scene: Scene) -> MakeJob:
    """Return the function that makes jobs from settings."""
    import torch.nn.functional as F
    from torch import optim

    from shoal import Job  # imports what training needs, as it does for a user: for every way, before the clock starts
    from shoal.evidence.bench.datasets import accuracy, load

    data = load(None if scene.data is None else Path(scene.data))
    network = {"mlp": mlp, "cnn": cnn}[scene.network]

    def make_job(params: dict[str, Any]) -> Job:
        return Job(
            model=lambda: network(data.features, data.classes, params.get("width", 32), params.get("depth", 1)),
            data=(data.x, data.y),
            val=(data.x_test, data.y_test),
            loss=F.cross_entropy,
            optimizer=optim.AdamW,
            hparams={"lr": params["lr"], "weight_decay": params["weight_decay"]},
            batch_size=params.get("batch_size", 32),
            metrics={"accuracy": accuracy},
            epochs=scene.max_epochs,
        )

    return make_job


def shoal_way(scene: Scene, make_job: MakeJob, grouping: str | None = None) -> dict[str, Any]:
    """Run all trials at the same time in one run, or pack after pack, formed by one of the paper's rules."""
    import shoal
    from shoal.tune.packed_hyperband import PackedHyperband
    from shoal.tune.schedulers import Hyperband, Scheduler

    scheduler: Scheduler = Hyperband(eta=scene.eta)
    note = ""
    if grouping is not None:
        scheduler = PackedHyperband(grouping=grouping, pack_size=scene.pack_size, eta=scene.eta)
        note = f"packs of {scene.pack_size}; "
    study = shoal.tune(
        make_job, SPACES[scene.space], metric="accuracy", max_epochs=scene.max_epochs, scheduler=scheduler,
        seed=scene.seed, device=scene.device,
    )  # fmt: skip
    plan = study.results.plan
    tiers = {result.tier for result in study.results}
    return {
        "best": study.best_value, "params": study.best_params, "epochs": study.epochs, "trials": len(study.trials),
        "set_up": dict(plan.set_up) if plan is not None else {}, "note": f"{note}tiers: {', '.join(sorted(tiers))}",
    }  # fmt: skip


def one_at_a_time(scene: Scene, make_job: MakeJob) -> dict[str, Any]:
    """Run the same brackets and rungs with a plain PyTorch loop: one trial after another, each from its own state."""
    from shoal.evidence.reproduce.plain_training import PlainTraining
    from shoal.tune.schedulers import Goal, Hyperband, Promote, Start
    from shoal.tune.space import parse
    from shoal.tune.studies.study import best_trial
    from shoal.tune.trial import Trial

    space, scheduler = parse(SPACES[scene.space]), Hyperband(eta=scene.eta)
    goal = Goal(max_epochs=scene.max_epochs, mode="max", seed=scene.seed)
    trials: list[Trial] = []
    trainings: list[PlainTraining] = []
    while actions := scheduler.decide(goal, trials):
        for action in actions:
            if isinstance(action, Start):
                trials.append(Trial(len(trials), space.sample(scene.seed, len(trials)), bracket=action.bracket))
                trainings.append(PlainTraining(make_job(trials[-1].params), scene.device))
            elif isinstance(action, Promote):
                trials[action.number].rung += 1
                trials[action.number].state = "running"
            else:
                trials[action.number].state = "pruned"
        for trial, training in zip(trials, trainings, strict=True):
            if trial.state in ("waiting", "running"):
                until = scheduler.until(goal, trial)
                trial.values |= {epoch: training.epoch() for epoch in range(trial.epochs + 1, until + 1)}
                trial.state = "complete" if until == scene.max_epochs else "paused"
    best = best_trial(trials, "max")
    assert best is not None
    epochs = sum(trial.epochs for trial in trials)
    return {"best": best.value, "params": best.params, "epochs": epochs, "trials": len(trials), "note": ""}


def by_plain_loop(search: Callable[..., dict[str, Any]]) -> Way:
    """Return a way that searches with another library, whose trials train with the same plain loop."""

    def way(scene: Scene, make_job: MakeJob) -> dict[str, Any]:
        from shoal.evidence.reproduce.plain_training import PlainTraining

        return search(
            lambda params: PlainTraining(make_job(params), scene.device), SPACES[scene.space],
            max_epochs=scene.max_epochs, eta=scene.eta, seed=scene.seed,
        )  # fmt: skip

    return way


WAYS: dict[str, Way] = {
    "one": one_at_a_time,
    "shoal": shoal_way,
    "optuna": by_plain_loop(optuna_search),
    "ray-asha": by_plain_loop(partial(ray_search, scheduler="asha")),
    "ray-hyperband": by_plain_loop(partial(ray_search, scheduler="hyperband")),
    "packs-random": partial(shoal_way, grouping="random"),
    "packs-batch": partial(shoal_way, grouping="batch"),
    "packs-nearest": partial(shoal_way, grouping="nearest"),
}
"""The ways to do the search by name; each returns its result as plain data. Titles are in `TITLES`."""


def installed_ways(*, ray: bool, groupings: bool = False) -> tuple[str, ...]:
    """Return the ways that can be measured here; Ray's, which take minutes, and the paper's packs only if asked for."""
    return (
        "one", "shoal",
        *(("optuna",) if find_spec("optuna") else ()),
        *(("ray-asha", "ray-hyperband") if ray else ()),
        *(("packs-random", "packs-batch", "packs-nearest") if groupings else ()),
    )  # fmt: skip


def _process(way: str, scene: Scene, cache: str, pipe: Connection) -> None:
    """Do the search in one way, and send its result and seconds."""
    os.environ["SHOAL_CACHE"] = cache
    import torch

    import shoal  # noqa: F401  # what all ways have loaded
    from shoal.tune.studies import api  # noqa: F401

    if way == "optuna":
        import optuna  # noqa: F401
    if scene.device == "cpu":
        torch.set_num_threads(1)
    make_job = make_job_for(scene)
    start = time.perf_counter()
    outcome = WAYS[way](scene, make_job)
    pipe.send({**outcome, "seconds": time.perf_counter() - start})
    pipe.recv()


def _measure(way: str, scene: Scene, end: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shoal-") as cache:
        child = Child(_process, way, scene, cache)
        try:
            outcome: dict[str, Any] = child.receive(end)
            return outcome
        except ChildError as error:
            return {"error": str(error)}
        finally:
            child.close()


def hyperband(
    scene: Scene, *, rounds: int, limit: float, ways: tuple[str, ...] | None = None, log: Log = lambda _: None
) -> dict[str, Any]:
    """Measure all ways in turns, `rounds` times, and return the result as plain data."""
    chosen, end = ways or installed_ways(ray=False), time.monotonic() + limit
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in chosen}
    for number in range(rounds):
        for way in chosen:
            log(f"round {number + 1} of {rounds}: {TITLES[way]}")
            measured[way].append(_measure(way, scene, end))
    lines = [_line(way, measured[way]) for way in chosen]
    one = next((line["seconds"] for line in lines if line["way"] == "one"), None)
    for line in lines:
        line["gain"] = one / line["seconds"] if one and line["seconds"] else None
    return {
        "stamp": stamp(scene.device, 1), "scene": asdict(scene), "published": PUBLISHED, "lines": lines,
        "left_out": [] if find_spec("optuna") else ["Optuna's Hyperband: pip install 'shoal[tune]'"],
    }  # fmt: skip


def _line(way: str, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if "error" not in outcome]
    error = next((outcome["error"] for outcome in outcomes if "error" in outcome), "")
    seconds = statistics.median(outcome["seconds"] for outcome in good) if good else None
    first = good[0] if good else {}
    return {**first, "way": way, "seconds": seconds, "error": error, "outcomes": outcomes}


def table(result: dict[str, Any], console: Any) -> None:
    """Print all measured numbers and the published gain."""
    from rich.table import Table

    shown = Table("way", "seconds", "gain", "trials", "epochs", "best accuracy", "note")
    for line in result["lines"]:
        shown.add_row(
            TITLES[line["way"]],
            "" if line["seconds"] is None else f"{line['seconds']:.1f}",
            "" if line["gain"] is None else f"{line['gain']:.2f}x",
            str(line.get("trials", "")),
            str(line.get("epochs", "")),
            "" if "best" not in line else f"{line['best']:.4f}",
            str(line["error"] or line.get("note", ""))[:90].replace("[", "("),
        )
    console.print(shown)
    for what in result["left_out"]:
        console.print(f"Not measured, since it is not installed: {what}".replace("[", "\\["), style="dim")
    scene = result["scene"]
    trained = f"{NETWORKS[scene['network']]} on {'digits' if scene['data'] is None else 'MNIST'}"
    console.print(
        f"R = {scene['max_epochs']}, eta = {scene['eta']}, {trained}, AdamW, space {scene['space']!r}; medians of "
        f"{len(result['lines'][0]['outcomes'])}; published gain of pack-aware Hyperband: {result['published']}x.",
        style="dim",
    )
    console.print(heading(result), style="dim")


def bars(result: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """Return the label, the measured number and the published one for each bar of the picture."""
    return [
        (TITLES[line["way"]], line["gain"], result["published"]) for line in result["lines"] if line["way"] != "one"
    ]
