"""What the benchmark trains, as jobs: for each network its data, batch size, loss and a learning rate per member.

Every way takes these jobs, so that all train the same networks from the same weights on the same rows in the same
order: a member's model is built under its seed, and its rows come from `torch.randperm(rows, generator)` per epoch with
a generator of that seed, as for any job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import models
from shoal.evidence.bench import published
from shoal.jobs.job import Job

Loss = Callable[[Tensor, Tensor], Tensor]
TINY = partial(models.MLP, 64, 32, layers=1)
"""A network with one hidden layer, whose step is almost all overhead, so that packing helps most."""
MIXED = ("mlp", "cnn", "gpt", "resnet")
WITH_DROPOUT = ("tiny", "mlp", "cnn", "gpt", "encoder")
"""Networks whose rate of dropout can be set. Without it, only `encoder` has dropout."""
MIXED_BATCHES = 64
"""The number of batches in an epoch of different networks in one list."""
EPOCHS = 1000
"""More epochs than any measurement takes."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The name and size of a workload, small enough to send to another process."""

    network: str
    members: int = 32
    precision: str | None = None
    batch_size: int | None = None
    """The batch size; None means the network's own."""
    side: int | None = None
    """The image side of the published networks; None means 224."""
    batches: int | None = None
    """The number of batches in the data set; None means an epoch of the network's usual data."""
    dropout: float | None = None
    """The rate of the network's dropout; None means the network's own."""

    def __post_init__(self) -> None:
        if self.members < 1:
            raise ValueError(f"members is {self.members}; train at least 1")
        if self.precision not in (None, "bf16"):
            raise ValueError(f"precision is {self.precision!r}; the benchmark knows none (float32) and bf16")
        if self.network not in names():
            raise ValueError(f"no network {self.network!r}; there are {', '.join(names())}")
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout:g}; use a rate of at least 0 and below 1")
        if self.dropout is not None and self.network not in WITH_DROPOUT:
            raise ValueError(f"{self.network} has no rate of dropout to set; {', '.join(WITH_DROPOUT)} have one")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A network with its data."""

    name: str
    make: Callable[..., nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    """A function from a number of rows to inputs and targets on the CPU."""
    batch_size: int
    batches: int = 64
    """The number in an epoch, of 60,000 small grey images, 50,000 small colour ones, or a text of 1.1 million
    characters."""
    loss: Loss = F.cross_entropy


def kind_of(job: Job) -> str:
    """Return the name of the network that a job of the benchmark trains."""
    return str(job.name).rpartition("-")[0]


def token_loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean cross entropy over every token."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def _images(shape: tuple[int, ...], classes: int, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    return torch.randn(rows, *shape, generator=g), torch.randint(classes, (rows,), generator=g)


def _tokens(length: int, vocabulary: int, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    text = torch.randint(vocabulary, (rows, length + 1), generator=g)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _channels_last(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the network with channels last, the usual layout of convolutions in reduced precision, for every way."""
    model: Any = make()
    done: nn.Module = model.to(memory_format=torch.channels_last)
    return done


def _kinds() -> dict[str, Kind]:
    kinds = (
        Kind(name="tiny", make=TINY, data=partial(_images, (64,), 10), batch_size=32),
        Kind(name="mlp", make=models.MLP, data=partial(_images, (784,), 10), batch_size=64, batches=937),
        Kind(name="cnn", make=models.CNN, data=partial(_images, (1, 28, 28), 10), batch_size=64, batches=937),
        Kind(
            name="resnet",
            make=partial(_channels_last, models.ResNet18),
            data=partial(_images, (3, 32, 32), 10),
            batch_size=128,
            batches=390,
        ),
        Kind(
            name="gpt",
            make=models.GPT,
            data=partial(_tokens, 128, 256),
            batch_size=16,
            batches=540,
            loss=token_loss,
        ),
        Kind(name="lstm", make=models.LSTMClassifier, data=partial(_images, (32, 32), 10), batch_size=64),
        Kind(name="encoder", make=models.Encoder, data=partial(_images, (32, 32), 10), batch_size=64),
    )
    return {k.name: k for k in kinds}


def _published(side: int) -> dict[str, Kind]:
    makes: dict[str, Callable[[], nn.Module]] = {
        "mlp3": partial(published.mlp3, side),
        "mobilenetv2": published.mobilenet_v2,
        "resnet50": published.ResNet50,
        "densenet121": published.densenet121,
    }
    data = partial(_images, (3, side, side), 1000)
    return {name: Kind(name=name, make=make, data=data, batch_size=32) for name, make in makes.items()}


def names() -> tuple[str, ...]:
    """Return the names of all networks of the benchmark."""
    return (*_kinds(), "mixed", *_published(224))


def learning_rates(members: int) -> list[float]:
    """Return a learning rate for each member, from 3e-4 to 3e-3 in equal factors."""
    return [3e-4 * 10 ** (i / max(1, members - 1)) for i in range(members)]


def workload(spec: Spec, epochs: int = EPOCHS) -> list[Job]:
    """Return the jobs that a Spec names, with data made on the CPU once for each kind of network.

    >>> jobs = workload(Spec(network="tiny", members=3, batches=2))
    >>> len(jobs), jobs[0].data[0].shape, jobs[0].data is jobs[1].data
    (3, torch.Size([64, 64]), True)
    """
    known = _kinds() | _published(spec.side or 224)
    chosen = MIXED if spec.network == "mixed" else (spec.network,)
    kinds = [known[name] for name in chosen[: spec.members]]
    if spec.dropout is not None:
        kinds = [replace(kind, make=partial(kind.make, dropout=spec.dropout)) for kind in kinds]
    if spec.batch_size is not None:
        kinds = [replace(kind, batch_size=spec.batch_size) for kind in kinds]
    batches = spec.batches or (MIXED_BATCHES if spec.network == "mixed" else None)
    data = [kind.data((batches or kind.batches) * kind.batch_size) for kind in kinds]
    return [
        Job(
            model=kinds[i % len(kinds)].make,
            data=data[i % len(kinds)],
            loss=kinds[i % len(kinds)].loss,
            optimizer=torch.optim.Adam,
            hparams={"lr": rate},
            batch_size=kinds[i % len(kinds)].batch_size,
            epochs=epochs,
            seed=i,
            precision=cast("Literal['bf16'] | None", spec.precision),
            name=f"{kinds[i % len(kinds)].name}-{i}",
        )
        for i, rate in enumerate(learning_rates(spec.members))
    ]
