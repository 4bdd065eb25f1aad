"""Jobs and placements for the tests of placed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.place.graph import trace_layers
from shoal.place.links import Link
from shoal.place.placement import Alternative, PlacedLayer, Placement
from shoal.reference import solo


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 16, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 3),
    )  # fmt: skip


def rows(*shape: int, count: int = 44, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, *shape, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (count,), generator=generator),
    )


def double(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: factory().double()


def job_of(factory: Callable[[], nn.Module], data: Any, **settings: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "loss": F.cross_entropy, "optimizer": torch.optim.AdamW, "hparams": {"lr": 1e-2}, "batch_size": 12,
        "steps": 20, "seed": 3,
    }  # fmt: skip
    if "step" in settings:
        del given["loss"]
    return shoal.Job(model=double(factory), data=data, **{**given, **settings})


def placement_of(
    job: shoal.Job, cut: int | str, sync: str = "server", workers: int = 3, sample: Any = None, **settings: Any
) -> Placement:
    """A placement with the layers before `cut` (a number, or the last one's name) on the workers."""
    model = job.model()  # type: ignore[operator]
    sample = sample if sample is not None else tuple(part[:2] for part in job.data[:-1])
    graph = trace_layers(model, sample)
    index = cut if isinstance(cut, int) else graph.cut_named(cut).index
    linear = {"Linear"}

    def way(kind: str) -> str:
        return "allreduce" if sync == "factors" and kind not in linear else sync

    layers = tuple(
        PlacedLayer(
            name=layer.name, kind=layer.kind, where="workers" if place < index else "server",
            sync=way(layer.kind) if place < index and layer.parameters else None,  # type: ignore[arg-type]
            parameters=layer.parameters, parameter_bytes=layer.parameter_bytes, output_bytes=layer.output_bytes(),
            forward_seconds=0.0, backward_seconds=0.0, bytes_up=0, bytes_down=0,
        )
        for place, layer in enumerate(graph.layers)
    )  # fmt: skip
    whole = index == len(layers)
    mode = settings.pop("mode", ("data parallel" if sync == "allreduce" else "parameter server") if whole else "placed")
    shares = settings.pop("rows", tuple(4 for _ in range(workers)))
    micro = settings.pop("micro_batches", 1)
    predicted = Alternative(
        mode=mode, cut=index, cut_name=layers[index - 1].name, micro_batches=micro, seconds=0.1, worker_seconds=0.0,
        network_seconds=0.0, server_seconds=0.0, bytes_up=0, bytes_down=0, worker_memory=0, server_memory=0,
    )  # fmt: skip
    return Placement(
        mode=mode, cut=index, cut_name=layers[index - 1].name, layers=layers, workers=workers, batch_size=4,
        rows=shares, micro_batches=micro, link=Link.parse("1Gbit"), server_link=Link.parse("1Gbit"),
        predicted=predicted, **settings,
    )  # fmt: skip


def largest_difference(ours: shoal.Result, job: shoal.Job) -> float:
    """From the plain loop: over all weights, buffers and optimizer state, relative to each tensor's largest value."""
    theirs = solo(job)
    assert ours.status == theirs.status == "done", ours.error
    assert ours.steps == theirs.steps
    weights = theirs.model.state_dict()
    pairs = {name: (value, weights[name]) for name, value in ours.model.state_dict().items()}
    state, reference = ours.optimizer_state["state"], theirs.optimizer_state["state"]
    assert state.keys() == reference.keys()
    for place, entry in reference.items():
        assert state[place].keys() == entry.keys()
        pairs |= {f"{place}/{name}": (state[place][name], x) for name, x in entry.items() if isinstance(x, Tensor)}
    for name, value in theirs.history[-1].items():
        if name != "seconds":
            pairs[name] = (torch.tensor(ours.history[-1][name]), torch.tensor(value))
    differences = {
        name: float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6))
        for name, (a, b) in pairs.items()
    }
    print(sorted(differences.items(), key=lambda item: -item[1])[:3])  # shown where a test fails
    return max(differences.values())
