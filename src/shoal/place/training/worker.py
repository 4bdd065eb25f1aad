"""A worker: it computes its layers on its share of each batch, as the server asks."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.members.step import autocast, number, run_step
from shoal.engine.tiers.serial import Buffers
from shoal.errors import PlaceError, ShoalError, describe
from shoal.net.channel import DAY, Arrived, Channel
from shoal.net.handshake import describe_training
from shoal.net.joining import join_and_serve
from shoal.net.links import Address, Link, LinkLost
from shoal.net.messages import WireError
from shoal.place.training.front import Factors, GradientSender, Shards
from shoal.place.training.group import GroupLost, Interrupted, WorkerGroup, gpu_of
from shoal.place.training.joined_batch import JoinedDraws, JoinedRows, join_batch_norms
from shoal.place.training.roles import Built, chunks, random_state
from shoal.split.core.moments import load_moments, moments_of
from shoal.utils.tables import Log

PARAMETER, MOMENT = "p:", "m:"
"""Prefixes of the names of tensors in messages."""
REPLACED = "placed again"
"""The reason with which a server ends workers that will start again with another placement."""


class Replaced(ShoalError):
    """Raised if the server continues with another placement."""


class ServerEnded(PlaceError):
    """Raised if the server ended with an error."""


def describe_placed(built: Built) -> dict[str, Any]:
    """Return what both sides must agree on before a worker may join."""
    plan = describe_training(built.job, built.member, built.member.model)
    placement: dict[str, Any] = json.loads(json.dumps(built.roles.to_dict()))
    return plan | {"placement": placement}


def serve_worker(
    built: Built,
    where: Address,
    *,
    device: torch.device | str = "cpu",
    patience: float = 60.0,
    log: Log | None = None,
) -> int:
    """Work for the server at `where` until it ends the run, and return how many batches were computed here.

    It looks for a missing server for `patience` seconds. Raises a PlaceError if the server ended with an error or does
    not come back, and Refused if it has another job.
    """
    worker = Worker(built, torch.device(device))
    name, gpu = f"{socket.gethostname()}:{os.getpid()}", gpu_of(worker.device)
    request = {"name": name, "job": describe_placed(built), "gpu": gpu}

    def serve(link: Link) -> None:
        channel = Channel(link, echo=True)
        try:
            worker.serve(channel)
        finally:
            worker.leave_group()
            channel.close()

    join_and_serve(where, request, serve, leader="server", patience=patience, error=PlaceError, log=log)
    return worker.done


@dataclass(slots=True)
class _Pending:
    """A batch that was computed here and that the server has not committed yet."""

    attempt: int
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of parameters that workers update, summed over all of them."""


class Worker:
    """What a worker keeps while links come and go."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self.built, self.job, self.device = built, built.job, device
        self.model = copy.deepcopy(built.member.model).to(device)
        self.front, _ = built.parts(self.model)
        self.source = built.member.data.source
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in self.front.named_parameters() if p.requires_grad}
        ways = {way: [n for n in built.replicated if built.way(n) == way] for way in ("server", "allreduce", "sharded")}
        self.sharded = ways["sharded"]
        self.sender = GradientSender(self.front, ways["server"], ways["allreduce"], self._push)
        self.factors = Factors(self.front, [n for n in built.replicated if built.way(n) == "factors"])
        self.optimizer = make_optimizer(self.job, self.model) if built.held_by_workers else None
        self.joined = JoinedRows(self._gather)
        if built.joins_batch_norms:
            join_batch_norms(self.front, self.joined)
        self.buffers = Buffers(self.front)
        self.group: WorkerGroup | None = None
        self.shards: Shards | None = None
        self.pending: _Pending | None = None
        self.sums: dict[str, Tensor] = {}
        """Gradients of committed batches, until the end of their group."""
        self.leader = False
        """Whether it reports for all workers in this batch."""
        self.size = 1
        self.unusable = ""
        """Why its state is not the server's; empty if it is."""
        self.draws = True
        """Whether the layers here draw random numbers; False if the server has seen that they do not."""
        self.done = 0
        self.channel: Channel
        self.attempt = 0

    # --- messages -----------------------------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> None:
        """Do what the server asks for, until the end."""
        self.channel, self.pending, self.sums = channel, None, {}
        while True:
            arrived = channel.receive(DAY)
            if arrived.what == "end":
                if arrived.numbers.get("why") == REPLACED:
                    raise Replaced(REPLACED)
                if arrived.numbers.get("why"):
                    raise ServerEnded(str(arrived.numbers["why"]))
                return
            try:
                self._handle(arrived)
            except Interrupted:
                self._discard()
            except GroupLost as error:
                self._discard()
                channel.send("broken", arrived.attempt, why=str(error))
            except (LinkLost, WireError, ServerEnded):
                raise
            except Exception as error:
                self._discard()
                if arrived.what in ("setup", "update"):
                    self.unusable = describe(error)
                channel.send("raised", arrived.attempt, why=describe(error))

    def _handle(self, arrived: Arrived) -> None:
        if arrived.what == "setup":
            self.unusable = ""
            self._set_up(arrived)
        elif arrived.what == "group":
            self._discard()
            self._join_group(arrived.numbers)
        elif self.unusable:
            raise PlaceError(f"it could not take in the server's state ({self.unusable})")
        elif arrived.what == "task":
            self._update(arrived)
            self._compute(arrived)
            self.done += 1
        elif arrived.what == "update":
            self._update(arrived)
        elif arrived.what == "state":
            self._update(arrived)
            self.channel.send("state", arrived.attempt, self._state(arrived.numbers))
        else:
            raise WireError(f"the server sent a message about {arrived.what!r}")

    def _set_up(self, arrived: Arrived) -> None:
        """Start, or start again, from the server's state."""
        self.pending, self.sums = None, {}
        self.sender.stop()
        self._load(arrived.tensors)
        moments = _named(arrived.tensors, MOMENT)
        if self.optimizer is not None:
            self.optimizer.state.clear()
            load_moments(self.optimizer, self.model, moments)
        self._join_group(arrived.numbers)

    def _join_group(self, numbers: Mapping[str, Any]) -> None:
        self.leave_group()
        self.size = int(numbers["size"]) if "store" in numbers else 1
        if "store" not in numbers:
            return
        host, seconds = self.channel.link.local_host, float(numbers["seconds"])
        self.group = WorkerGroup(
            int(numbers["rank"]), int(numbers["size"]), (self.channel.link.remote_host, int(numbers["store"])),
            str(numbers["group"]), host, self.device, str(numbers["backend"]), seconds,
            lambda: self.channel.interrupted,
        )  # fmt: skip
        if self.sharded:
            self.shards = Shards(self.parameters, self.sharded, self.group)

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.leave()
        self.group = self.shards = None

    def _gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if self.group is None else self.group.gather(tensor)

    def _push(self, gradients: dict[str, Tensor]) -> None:
        self.channel.send("pushed", self.attempt, gradients)

    # --- updates ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers from the server."""
        state = {**dict(self.front.named_parameters()), **dict(self.front.named_buffers())}
        for name, value in _named(tensors, PARAMETER).items():
            state[name].copy_(value)

    def _update(self, arrived: Arrived) -> None:
        """Commit the previous batch if the server did, or drop it."""
        numbers = arrived.numbers
        if self.pending is None or numbers.get("commit") != self.pending.attempt:
            self._discard()
            self._load(arrived.tensors)
            return
        for name, gradient in self.pending.gradients.items():
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        self.pending = None
        self.sender.stop()
        self._load(arrived.tensors)
        if numbers.get("apply") and self.optimizer is not None:
            self._apply(numbers)

    def _apply(self, numbers: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        for group, options in zip(self.optimizer.param_groups, numbers.get("options") or (), strict=False):
            _set_options(group, options)
        self.optimizer.zero_grad()
        limit = self.job.clip_value
        for name, gradient in self.sums.items():
            gradient = gradient if numbers.get("clip") is None else gradient * float(numbers["clip"])
            self.parameters[name].grad = gradient if limit is None else gradient.clamp(-limit, limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums = {}
        if self.shards is not None:
            self.shards.spread()

    def _discard(self) -> None:
        """Drop a batch that was not committed."""
        if self.pending is not None:
            self.buffers.restore()
            self.pending = None
        self.sender.stop()
        self.factors.clear()

    def _state(self, asked: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return buffers, and this worker's state of parameters that workers update."""
        tensors: dict[str, Tensor] = {}
        names = self._owned
        if asked.get("all"):
            tensors |= {PARAMETER + name: buffer for name, buffer in self.front.named_buffers()}
            tensors |= {PARAMETER + name: self.parameters[name] for name in self.built.held_by_workers}
            names |= set(self.built.held_by_workers) - set(self.sharded)
        if self.optimizer is not None:
            moments = moments_of(self.optimizer, self.model)
            tensors |= {MOMENT + key: value for key, value in moments.items() if key.rpartition("/")[0] in names}
        return tensors

    @property
    def _owned(self) -> set[str]:
        """Sharded parameters that this worker updates; all of them if it is alone."""
        return set(self.shards.own) if self.shards is not None else set(self.sharded)

    # --- one batch ----------------------------------------------------------------------------------------------------

    def _compute(self, task: Arrived) -> None:
        numbers, self.attempt, self.leader = task.numbers, task.attempt, bool(task.numbers["leader"])
        if self.size > 1 and self.group is None:
            raise GroupLost("the group of workers was not made")
        rows, total, first = task.tensors["rows"], int(numbers["total"]), int(numbers["first"])
        counts = bool(numbers["counts"])
        self.joined.counts = counts
        self.buffers.save()
        self.pending = _Pending(task.attempt)
        index = torch.arange(first, first + len(rows)) if counts else torch.zeros(1, dtype=torch.int64)
        draws, self.draws = JoinedDraws(total), "rng" in task.tensors
        parts = chunks(len(rows), int(numbers["chunks"]))
        with random_state(task.tensors.get("rng")):
            before = torch.get_rng_state()
            results: dict[str, Any] = {}
            if numbers["local"]:
                results = self._compute_with_loss(rows, index, draws, numbers, counts)
            else:
                outputs = [
                    self._forward(rows[part], index[part], draws, numbers, i, before) for i, part in enumerate(parts)
                ]
                for i, output in enumerate(outputs):
                    self._backward(output, i, counts, last=i == len(outputs) - 1)
            rng = {"rng": torch.get_rng_state()} if numbers["local"] and self.leader and _drew(before) else {}
        self._synchronise(len(rows), int(numbers["most_rows"]))
        squares = self._squares() if self.job.clip_norm is not None else 0.0
        sent = 0 if self.group is None else self.group.bytes
        self.channel.send("done", task.attempt, rng, squares=squares, group_bytes=sent, **results)

    def _forward(
        self, rows: Tensor, index: Tensor, draws: JoinedDraws, numbers: Mapping[str, Any], chunk: int, before: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one micro-batch through the front, and send its tensors at the cut to the server."""
        batch = self._take(rows, int(numbers["epoch"]))
        drawing = draws.rows(index) if self.draws else nullcontext()
        with autocast(self.job, self.device), drawing:
            outputs: tuple[Tensor, ...] = self.front(*self.built.graph.tensors_of(self.built.sample(batch)))
        named = {str(i): output for i, output in enumerate(outputs)}
        if chunk == 0 and self.leader and _drew(before):
            named["rng"] = torch.get_rng_state()
        if bool(numbers["counts"]):
            self.channel.send("cut", self.attempt, named, chunk=chunk)
        return outputs

    def _backward(self, outputs: tuple[Tensor, ...], chunk: int, counts: bool, *, last: bool) -> None:
        """Run one micro-batch back through the front, with the gradients that the server sends."""
        leaving = {str(i): output for i, output in enumerate(outputs) if output.requires_grad}
        if counts:
            arrived = self._expect("gradients", chunk)
            gradients = {name: arrived.tensors[name].to(self.device) for name in leaving if name in arrived.tensors}
        else:
            gradients = {name: torch.zeros_like(output) for name, output in leaving.items()}
        if last:
            self.sender.begin(self.group)
        if gradients:
            torch.autograd.backward([leaving[name] for name in gradients], list(gradients.values()))

    def _compute_with_loss(
        self, rows: Tensor, index: Tensor, draws: JoinedDraws, numbers: Mapping[str, Any], counts: bool
    ) -> dict[str, Any]:
        """Compute the whole network and its loss on this share; the loss is weighted by its rows."""
        batch = self._take(rows, int(numbers["epoch"]))
        with autocast(self.job, self.device), draws.rows(index):
            loss, logs = run_step(self.job, self.model, batch)
        weight = len(rows) / int(numbers["total"]) if counts else 0.0
        self.sender.begin(self.group)
        (loss * (weight * float(numbers["scale"]))).backward()  # type: ignore[no-untyped-call]
        return {"loss": number(loss), "weight": weight, "logs": {name: number(value) for name, value in logs.items()}}

    def _take(self, rows: Tensor, epoch: int) -> Any:
        from torch.utils import _pytree as pytree

        batch = self.source.take(rows, seed=self.job.order_seed, epoch=epoch)
        if self.device.type == "cpu":
            return batch
        return pytree.tree_map_only(Tensor, lambda x: x.to(self.device), batch)

    def _expect(self, what: str, chunk: int) -> Arrived:
        arrived = self.channel.receive(DAY)
        if (arrived.what, arrived.attempt, arrived.numbers.get("chunk")) != (what, self.attempt, chunk):
            self.channel.put_back(arrived)
            raise Interrupted("the server asks for something else")
        return arrived

    def _synchronise(self, rows: int, most_rows: int) -> None:
        """Finish the batch: send gradients to the server, and sum over all workers those that they update."""
        assert self.pending is not None
        summed = self.sender.finish()
        if self.factors.layers:
            summed |= self.factors.gather(self.group, rows, most_rows)
        if self.sharded:
            gradients = {name: self.sender._gradient(name) for name in self.sharded}
            summed |= gradients if self.shards is None else self.shards.reduce(gradients)
        self.pending.gradients = {name: gradient.clone() for name, gradient in summed.items()}
        self.sender.stop()

    def _squares(self) -> float:
        """Return the squared norm of the gradients known here, each parameter counted on one worker."""
        assert self.pending is not None
        total, owned = 0.0, self._owned
        for name, gradient in self.pending.gradients.items():
            if name in owned or (self.leader and name not in self.sharded):
                summed = gradient + self.sums[name] if name in self.sums else gradient
                total += float(summed.double().square().sum())
        return total


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _drew(before: Tensor) -> bool:
    """Return whether random numbers were drawn since."""
    return not torch.equal(before, torch.get_rng_state())


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Copy the settings of a parameter group from the server, whose schedule may have changed them."""
    for name, value in options.items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value
