"""The server's side of a step: send shares, receive tensors at the cut, send their gradients, receive gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.engine.members.member import Member
from shoal.engine.tiers.serial import Buffers
from shoal.errors import PlaceError
from shoal.net.channel import Arrived
from shoal.place.devices import divide
from shoal.place.training.back import Back, Computed, take_rows
from shoal.place.training.joined_batch import JoinedDraws
from shoal.place.training.joining import Joining, StateLost
from shoal.place.training.members import Connected, GroupBroken, Wait, WorkerLost, Workers
from shoal.place.training.roles import Built, chunks

MOST_BROKEN = 5
"""How many times in a row workers may fail to reach each other."""


@dataclass(slots=True)
class Batch:
    """One batch of the job, as the server sees it."""

    content: Any
    rows: Tensor
    """Row numbers of the source."""
    epoch: int
    factor: float
    """The factor of the loss: one over the number of batches of the optimizer step."""


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes sent so far, after a number of batches."""

    batches: int
    moved: int
    """Bytes to and from the server, without those between steps."""
    between: int


@dataclass(slots=True)
class Done:
    """The result of a batch: the loss; gradients are stored with the parameters."""

    loss: float
    logs: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Share:
    """What one worker computes of a batch."""

    worker: Connected
    first: int
    rows: int
    parts: list[slice]
    """Micro-batches, as rows of the share."""

    @property
    def counts(self) -> bool:
        return self.rows > 0

    def index(self, chunk: int) -> Tensor:
        """Return the rows of a micro-batch in the joined batch."""
        part = self.parts[chunk]
        return torch.arange(self.first + part.start, self.first + part.stop)


class Server(Joining):
    """Computes batches together with the workers, and again if one of them is lost on the way."""

    def __init__(self, built: Built, workers: Workers) -> None:
        super().__init__(built, workers)
        self.back = Back(built)
        self.scaler: Any = None
        self.squares = 0.0
        """The squared norm of the gradients that workers have, for clipping."""
        self._front_draws = True
        self._buffers = Buffers(self.model)
        self._batches = 0
        self.sent_bytes: list[SentBytes] = []
        """After the first batch and the last one."""

    # --- one batch ----------------------------------------------------------------------------------------------------

    def compute(self, batch: Batch) -> Done:
        """Compute loss and gradients of a batch with all connected workers."""
        earlier_grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._buffers.save()
        rng_state = torch.get_rng_state()
        while True:
            began = time.monotonic()
            for parameter in self.parameters.values():
                parameter.grad = None
            try:
                self.workers.check_links()
                self.admit()
                done = self._attempt(batch, began)
            except WorkerLost as error:
                self.lose(error, time.monotonic() - began)
            except GroupBroken as error:
                self._mend_group(error, began)
            else:
                self._broken, self.setup_seconds = 0, 0.0
                self._add(earlier_grads)
                self._batches += 1
                moved = self.workers.traffic.both - self.pulled
                self.sent_bytes = [*self.sent_bytes[:1], SentBytes(self._batches, moved, self.workers.group_bytes)]
                return done
            self._buffers.restore()
            torch.set_rng_state(rng_state)

    def _mend_group(self, error: GroupBroken, began: float) -> None:
        """Let the workers form another group, without one whose link is too slow."""
        self._broken += 1
        try:
            self.workers.check_slow()
        except WorkerLost as slow:
            self.lose(slow, time.monotonic() - began)
            return
        if self._sharded:
            raise StateLost(f"sharded parameters may differ between workers ({error})")
        self.workers.log(f"step {self.member.step}: {error}; the workers form a new group")
        if self._broken >= MOST_BROKEN:
            raise PlaceError(f"workers cannot reach each other ({error}); check the network between them")
        time.sleep(0.2)  # if a worker has died, its link ends too
        self._regroup([worker for worker in self.workers.live if worker.channel.lost is None])

    def _add(self, earlier_grads: Mapping[str, Tensor | None]) -> None:
        """Add the gradients of earlier batches of this optimizer step."""
        for name, parameter in self.parameters.items():
            earlier = earlier_grads[name]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _attempt(self, batch: Batch, began: float) -> Done:
        self.attempt += 1
        wait = Wait(began + self.workers.deadline.limit("step") + self.setup_seconds)
        shares, local = self._send_tasks(batch)
        if local:
            done = None
        else:
            done = self._exchange(batch, [share for share in shares if share.counts], wait)
            if done.loss - done.loss != 0.0:
                return done
        pushed, ends = self._collect(shares, wait)
        self.squares = sum(float(end.numbers.get("squares", 0.0)) for end in ends)
        for name in self.built.held_by_server:
            total = self.parameters[name].grad
            for gradients in pushed:
                total = gradients[name] if total is None else total + gradients[name]
            self.parameters[name].grad = total
        if done is None:
            done = self._mean(ends)
        seconds = time.monotonic() - began
        if self.setup_seconds:
            self.workers.state_deadline.observe("setup", seconds)
        else:
            self.workers.deadline.observe("step", seconds)
        return done

    def _send_tasks(self, batch: Batch) -> tuple[list[_Share], bool]:
        total, live = len(batch.rows), self.workers.live
        sizes, first = divide(total, [worker.share for worker in live]), 0
        local = self.built.whole
        if local and not self.back.can_split(None, batch.content, total):
            raise PlaceError(
                "the job's loss is not a mean over rows, so workers cannot compute it on their shares; "
                "use a placement with layers at the server"
            )
        count = min((self.built.micro_batches(size) for size in sizes if size), default=1)
        shares = []
        for worker, size in zip(live, sizes, strict=True):
            if size or self.built.needs_group:
                shares.append(_Share(worker, first, size, chunks(max(size, 1), count)))
            first += size
        leader = next(share for share in shares if share.counts)
        scale = batch.factor
        if local and self.scaler is not None:
            scale *= float(self.scaler.scale(torch.ones((), device=self.member.device)))
        for share in shares:
            rows = batch.rows[share.first : share.first + share.rows] if share.counts else batch.rows[:1]
            fields = {
                "scale": scale,
                "chunks": count,
                "most_rows": max(sizes),
                "local": local,
                "leader": share is leader,
            }
            self._send_task(share, rows, batch, fields)
        return shares, local

    def _send_task(
        self, share: _Share, rows: Tensor, batch: Batch, fields: Mapping[str, Any], rng: Tensor | None = None
    ) -> None:
        tensors, update = self._update_for(share.worker)
        tensors["rows"] = rows
        if self._front_draws:
            tensors["rng"] = torch.get_rng_state() if rng is None else rng
        share.worker.channel.send(
            "task", self.attempt, tensors, **update, total=len(batch.rows), first=share.first, counts=share.counts,
            epoch=batch.epoch, **fields,
        )  # fmt: skip

    def begin_alone(self, worker: Connected, batch: Batch) -> None:
        """Let one worker compute a whole batch, with the current parameters."""
        self.attempt += 1
        total = len(batch.rows)
        share = _Share(worker, 0, total, chunks(total, 1))
        fields = {"scale": batch.factor, "chunks": 1, "most_rows": total, "local": self.built.whole, "leader": False}
        seed = int(torch.randint(2**62, ()))  # it draws its own masks, since no other worker has its rows
        self._send_task(share, batch.rows, batch, fields, torch.Generator().manual_seed(seed).get_state())

    def _exchange(self, batch: Batch, shares: list[_Share], wait: Wait) -> Done:
        """Receive the tensors at the cut, compute the server's layers, and send the gradients back.

        This is done in micro-batches if the result is that of the whole batch.
        """
        total, count = len(batch.rows), len(shares[0].parts)
        draws = JoinedDraws(total)
        cuts: Iterator[list[list[Tensor]]]
        cuts = ([self._cut(share, chunk, wait) for share in shares] for chunk in range(count))
        if count > 1 and self.back.splits is None:
            all_cuts = list(cuts)
            self.back.can_split(self._joined(shares, all_cuts), batch.content, total)
            cuts = iter(all_cuts)
        if count == 1 or not self.back.splits:
            return self._whole(batch, shares, list(cuts), draws)
        losses, logs = 0.0, dict[str, float]()
        for chunk, arrived in enumerate(cuts):
            rows = torch.cat([share.index(chunk) for share in shares])
            weight, part_batch = len(rows) / total, take_rows(batch.content, rows)
            computed = self.back.compute(
                self.back.join(arrived), part_batch, draws, rows, batch.factor * weight, self.scaler
            )
            losses += weight * computed.loss
            logs = {name: logs.get(name, 0.0) + weight * value for name, value in computed.logs.items()}
            if computed.loss - computed.loss != 0.0:
                return Done(computed.loss)
            self._send_gradients(shares, computed, chunk)
        return Done(losses, logs)

    def _whole(
        self, batch: Batch, shares: list[_Share], all_cuts: list[list[list[Tensor]]], draws: JoinedDraws
    ) -> Done:
        """Compute all rows at once, in the order of the batch."""
        total = len(batch.rows)
        tensors = self._joined(shares, all_cuts)
        computed = self.back.compute(tensors, batch.content, draws, torch.arange(total), batch.factor, self.scaler)
        if computed.loss - computed.loss == 0.0:
            for chunk in range(len(all_cuts)):
                self._send_gradients(shares, computed, chunk, joined=True)
        return Done(computed.loss, computed.logs)

    def _joined(self, shares: list[_Share], all_cuts: list[list[list[Tensor]]]) -> list[Tensor]:
        """Join the micro-batches of all workers to one batch, worker by worker, in the order of the rows."""
        by_worker = [[all_cuts[chunk][i] for chunk in range(len(all_cuts))] for i in range(len(shares))]
        return self.back.join([part for parts in by_worker for part in parts])

    def _cut(self, share: _Share, chunk: int, wait: Wait) -> list[Tensor]:
        arrived = self.workers.expect(share.worker, self.attempt, ("cut",), wait)
        tensors = arrived.tensors
        if chunk == 0 and share.first == 0:
            self._front_draws = "rng" in tensors
            if "rng" in tensors:
                torch.set_rng_state(tensors["rng"].clone())
        expected = len(self.back.batched)
        if arrived.numbers.get("chunk") != chunk or any(str(i) not in tensors for i in range(expected)):
            raise WorkerLost(share.worker, "it did not send what it was asked for")
        return [tensors[str(i)] for i in range(expected)]

    def _send_gradients(
        self, shares: Sequence[_Share], computed: Computed, chunk: int, *, joined: bool = False
    ) -> None:
        """Send each worker's rows of the gradients at the cut; those of a tensor without rows go to the first
        worker."""
        next_row = 0
        for share in shares:
            part, rows = share.parts[chunk], share.parts[chunk].stop - share.parts[chunk].start
            begin = share.first + part.start if joined else next_row
            next_row += rows
            tensors = {}
            for i, gradient in enumerate(computed.gradients):
                if gradient is not None and self.back.batched[i]:
                    tensors[str(i)] = gradient[begin : begin + rows]
                elif gradient is not None and share is shares[0] and chunk == 0:
                    tensors[str(i)] = gradient
            share.worker.channel.send("gradients", self.attempt, tensors, chunk=chunk)

    def _collect(self, shares: Sequence[_Share], wait: Wait) -> tuple[list[dict[str, Tensor]], list[Arrived]]:
        """Receive the gradients that workers push, and the end of their work."""
        pushed, ends = list[dict[str, Tensor]](), list[Arrived]()
        for share in shares:
            gradients: dict[str, Tensor] = {}
            while True:
                arrived = self.workers.expect(share.worker, self.attempt, ("pushed", "done"), wait)
                if arrived.what == "done":
                    break
                gradients |= {name: tensor.to(self.member.device) for name, tensor in arrived.tensors.items()}
            missing = [name for name in self.built.held_by_server if name not in gradients]
            if missing:
                raise WorkerLost(share.worker, f"it sent no gradient of {missing[0]!r}")
            share.worker.group_bytes = int(arrived.numbers.get("group_bytes", 0))
            pushed.append(gradients)
            ends.append(arrived)
        return pushed, ends

    def _mean(self, ends: Sequence[Arrived]) -> Done:
        """Return the loss of the joined batch, from those that workers computed."""
        self._front_draws = False
        loss, logs = 0.0, dict[str, float]()
        for end in ends:
            weight = float(end.numbers["weight"])
            if weight:
                loss += weight * float(end.numbers["loss"])
                for name, value in end.numbers["logs"].items():
                    logs[name] = logs.get(name, 0.0) + weight * value
            if "rng" in end.tensors:
                self._front_draws = True
                torch.set_rng_state(end.tensors["rng"].clone())
        return Done(loss, logs)


def build_server(built: Built, workers: Workers) -> Server:
    """Create the server of a built job."""
    member: Member = built.member
    member.model.to(member.device)
    return Server(built, workers)
