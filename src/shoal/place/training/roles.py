"""What the server and the workers compute and update in a placed training: a placement, applied to one built job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.members.member import Member
from shoal.engine.members.step import autocast, run_step
from shoal.errors import PlaceError
from shoal.jobs.job import Job
from shoal.place.devices import divide
from shoal.place.graph import LayerGraph, trace_layers
from shoal.place.training.joined_batch import batch_norms

WAYS = ("server", "allreduce", "sharded", "factors")
"""How a replicated parameter is synchronised."""


@dataclass(kw_only=True, slots=True)
class Roles:
    """What the server and the workers of one placed training do, as plain data."""

    cut: int
    """How many layers are replicated on the workers. If all are, the workers compute the loss too, if possible."""
    ways: dict[str, str]
    """How each replicated parameter is synchronised."""
    workers: int
    shares: tuple[float, ...] = ()
    """Each worker's share of the batch; empty: equal."""
    micro_batches: int = 1
    batch_norm: str = "joined"
    """ "joined" or "own", see `joined_batch.py`."""
    staleness: int | None = None
    """Asynchronous: how many steps a worker may be ahead of the slowest one; None: synchronous."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for a handshake and a run folder."""
        return {
            "cut": self.cut, "ways": self.ways, "micro_batches": self.micro_batches, "batch_norm": self.batch_norm,
            "staleness": self.staleness,
        }  # fmt: skip


@dataclass(eq=False)
class Built:
    """A built job with its layers, which server and workers both start from."""

    member: Member
    roles: Roles
    graph: LayerGraph = field(init=False)

    def __post_init__(self) -> None:
        member, roles = self.member, self.roles
        self.graph = trace_layers(member.model, self.sample(member.data.take(0, min(2, len(member.data)))))
        if not 1 <= roles.cut <= len(self.graph.layers):
            raise PlaceError(
                f"the placement has {roles.cut} layers at the workers, the job's network {len(self.graph.layers)} "
                "layers; use a placement of this network"
            )

    @property
    def job(self) -> Job:
        return self.member.job

    @property
    def whole(self) -> bool:
        """Whether every layer is replicated."""
        return self.roles.cut == len(self.graph.layers)

    def parts(self, model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
        """Return front and back of a network of this class; the back is None if every layer is replicated."""
        if self.whole:
            return model, None
        return self.graph.split(self.roles.cut, model)

    @cached_property
    def replicated(self) -> list[str]:
        """Names of the trained parameters in the workers' layers."""
        front = self.parts(self.member.model)[0]
        return [name for name, p in front.named_parameters() if p.requires_grad]

    def way(self, name: str) -> str:
        """Return how a replicated parameter is synchronised."""
        return self.roles.ways.get(name, "server")

    @property
    def held_by_server(self) -> list[str]:
        """Replicated parameters that the server updates."""
        return [name for name in self.replicated if self.way(name) == "server"]

    @property
    def held_by_workers(self) -> list[str]:
        """Replicated parameters that the workers update."""
        return [name for name in self.replicated if self.way(name) != "server"]

    @property
    def joins_batch_norms(self) -> bool:
        """Whether workers exchange statistics of batch norm layers."""
        front = self.parts(self.member.model)[0]
        return self.roles.batch_norm == "joined" and bool(batch_norms(front))

    @property
    def needs_group(self) -> bool:
        """Whether workers send to each other."""
        return self.roles.workers > 1 and (bool(self.held_by_workers) or self.joins_batch_norms)

    def sample(self, batch: Any) -> Any:
        """Return what the job's step calls its network with for this batch: a tuple of arguments, or a dict of named
        ones."""
        if self.job.step is None:
            return tuple(batch[:-1])
        try:
            with autocast(self.job, self.member.device):
                run_step(self.job, _ArgumentProbe(self.member.model), batch)
        except _Called as call:
            if call.args and call.kwargs:
                raise PlaceError(
                    "the step calls its network with both positional and named arguments; use one kind"
                ) from None
            return call.kwargs or call.args
        raise PlaceError("the job's step does not call its network, so there is nothing to place")

    def micro_batches(self, rows: int) -> int:
        """Return the number of parts in which a share of so many rows is computed."""
        if self.joins_batch_norms:
            return 1  # statistics need all rows
        return max(1, min(self.roles.micro_batches, rows))


class _Called(Exception):
    """Raised with the arguments with which the step has called its network."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


class _ArgumentProbe(nn.Module):
    """Replaces a network to see what it is called with. Its attributes are the network's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


class Given(_ArgumentProbe):
    """Replaces a network whose output is known: `compute` returns it, whatever it is called with."""

    def __init__(self, model: nn.Module, compute: Any) -> None:
        super().__init__(model)
        self.__dict__["_compute"] = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_compute"]()


def chunks(rows: int, count: int) -> list[slice]:
    """Divide so many rows into so many parts of nearly the same size, in order."""
    sizes = divide(rows, [1.0] * max(1, min(count, max(rows, 1))))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@contextmanager
def random_state(state: Tensor | None) -> Iterator[None]:
    """Set torch's random state of the CPU inside this context; restore it afterwards."""
    previous = torch.get_rng_state()
    if state is not None:
        torch.set_rng_state(state.clone())  # a tensor of a message may be unaligned, which torch does not accept
    try:
        yield
    finally:
        torch.set_rng_state(previous)
