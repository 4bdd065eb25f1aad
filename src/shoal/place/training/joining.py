"""What workers are sent when they join or after an update, and what they send back for a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.place.training.group import backend_for
from shoal.place.training.members import Connected, GroupBroken, Wait, WorkerLost, Workers
from shoal.place.training.roles import Built
from shoal.place.training.worker import MOMENT, PARAMETER
from shoal.split.core.moments import load_moments, moments_of
from shoal.utils.tables import size

MANY_BYTES = 100_000_000
"""From so many bytes on, sending or reading the whole state is announced, since it may take long over a slow link."""


class StateLost(ShoalError):
    """Raised if a worker was lost with state that only it had: the run goes back to its last checkpoint."""


class Joining:
    """The state that server and workers share, while workers come and go."""

    def __init__(self, built: Built, workers: Workers) -> None:
        self.built, self.workers, self.member = built, workers, built.member
        self.model = built.member.model
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self.optimizer: Optimizer | None = None
        """Set by the unit."""
        self.attempt = 0
        """The number of the current attempt; messages that belong to an earlier one are out of date."""
        self._last_update: dict[str, Any] = {}
        """What workers are sent with the next message: whether the previous batch counts, and how it is applied."""
        self._sharded = any(built.way(name) == "sharded" for name in built.held_by_workers)
        self._store: Any = None
        self._groups = 0
        self._broken = 0
        """How many times in a row a transfer among workers has failed."""
        self.setup_seconds = 0.0
        """How much longer the next step may take, since workers are sent the whole state before it."""
        self.ended: list[float] = []
        """When each step ended, by `time.monotonic`."""
        self.pulled = 0
        """Bytes that were sent for checkpoints and validation."""

    def committed(self, *, apply: bool, clip: float | None, options: Sequence[Mapping[str, Any]]) -> None:
        """Note that the batch counts. `apply`: the optimizer has stepped, and workers must do the same."""
        if apply:
            self.ended.append(time.monotonic())
        self._last_update = {"commit": self.attempt, "apply": apply}
        if apply and self.built.held_by_workers:
            self._last_update |= {"clip": clip, "options": [dict(option) for option in options]}
        for worker in self.workers.live:
            worker.needs_update = True

    def committed_alone(self, worker: Connected, attempt: int) -> None:
        """Note that the server has taken a step with one worker's gradients, which then needs the new parameters."""
        self.ended.append(time.monotonic())
        worker.own_update = {"commit": attempt, "apply": True}

    def _update_for(self, worker: Connected) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a worker must know of the last update and has not been sent."""
        update = worker.own_update or (self._last_update if worker.needs_update else {"commit": -1})
        worker.needs_update, worker.own_update = False, {}
        changed = update.get("apply") and self.built.held_by_server
        tensors = {PARAMETER + name: self.parameters[name] for name in self.built.held_by_server} if changed else {}
        return tensors, dict(update)

    # --- workers that come and go -------------------------------------------------------------------------------------

    def lose(self, error: WorkerLost, waited: float) -> None:
        """Continue without a worker."""
        self.workers.drop(error, self.member.step, waited)
        self.workers.drop_dead(self.member.step)
        if self.built.held_by_workers and (self._sharded or all(worker.needs_state for worker in self.workers.live)):
            raise StateLost("a worker was lost with optimizer state that only it had")
        if self.workers.live:
            self._regroup(self.workers.live)

    def admit(self) -> None:
        """Send workers that have joined the state of the training."""
        self.workers.gather()
        if not any(worker.needs_state for worker in self.workers.live):
            return
        old = [worker for worker in self.workers.live if not worker.needs_state]
        if old and (self.built.held_by_workers or any(True for _ in self.model.buffers())):
            self.pull()
        for worker, share in zip(self.workers.live, self.built.roles.shares, strict=False):
            worker.share = share
        tensors = self._front_state()
        self._announce("sending", "to", sum(worker.needs_state for worker in self.workers.live), tensors)
        for worker in self.workers.live:
            if worker.needs_state:
                numbers = self._group_numbers(worker)
                worker.channel.send("setup", 0, tensors, **numbers)
                worker.needs_state, worker.needs_update = False, False
                self.setup_seconds = self.workers.state_deadline.limit("setup")
            elif self.built.needs_group:
                self._flush(worker)
                worker.channel.send("group", 0, **self._group_numbers(worker))
        self._groups += 1

    def _announce(self, what: str, where: str, workers: int, tensors: Mapping[str, Tensor]) -> None:
        """Note that the state of the training is sent or read, if it is large."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if workers * num_bytes >= MANY_BYTES:
            count = "a worker" if workers == 1 else f"each of {workers} workers"
            self.workers.log(f"{what} {size(num_bytes)} of weights and optimizer state {where} {count}")

    def _flush(self, worker: Connected) -> None:
        """Send what a worker has not been sent of the last update, before a new group."""
        if worker.needs_update:
            tensors, update = self._update_for(worker)
            worker.channel.send("update", self.attempt, tensors, **update)

    def _regroup(self, live: Sequence[Connected]) -> None:
        self._groups += 1
        if self.built.needs_group:
            for worker in live:
                self._flush(worker)
                worker.channel.send("group", 0, **self._group_numbers(worker))
        self._groups += 1

    def _group_numbers(self, worker: Connected) -> dict[str, Any]:
        live = self.workers.live
        numbers: dict[str, Any] = {"rank": live.index(worker), "size": len(live)}
        if not self.built.needs_group:
            return numbers
        if self._store is None:
            from torch._C._distributed_c10d import TCPStore

            self._store = TCPStore(self.workers.address.host, 0, is_master=True, wait_for_workers=False)
        seconds = min(max(self.workers.deadline.limit("step"), 10.0), 60.0) * 2.0**self._broken
        backend = backend_for([other.gpu for other in live])
        return numbers | {
            "store": self._store.port, "group": f"g{self._groups}", "backend": backend, "seconds": seconds
        }  # fmt: skip

    def _front_state(self) -> dict[str, Tensor]:
        """Return everything that a new worker needs."""
        front = self.built.parts(self.model)[0]
        tensors: dict[str, Tensor] = {PARAMETER + name: tensor for name, tensor in front.named_parameters()}
        tensors |= {PARAMETER + name: tensor for name, tensor in front.named_buffers()}
        if self.optimizer is not None and self.built.held_by_workers:
            names = set(self.built.held_by_workers)
            moments = moments_of(self.optimizer, self.model)
            tensors |= {MOMENT + key: value for key, value in moments.items() if key.rpartition("/")[0] in names}
        return tensors

    def pull(self) -> None:
        """Copy what workers have, parameters that they update and buffers, into the server's own network."""
        while True:
            began = time.monotonic()
            ready = [worker for worker in self.workers.live if not worker.needs_state]
            if not ready:
                return
            if self.built.held_by_workers:
                self._announce("reading", "from", 1, self._front_state())
            self.attempt += 1
            bytes_before = self.workers.traffic.both
            try:
                moments = self._pull(ready, Wait(began + self.workers.state_deadline.limit("state")))
            except WorkerLost as error:
                self.lose(error, time.monotonic() - began)
                continue
            except GroupBroken as error:
                if self._sharded:
                    raise StateLost(f"sharded parameters may differ between workers ({error})") from None
                self._regroup(self.workers.live)
                continue
            self.pulled += self.workers.traffic.both - bytes_before
            self.workers.state_deadline.observe("state", time.monotonic() - began)
            if self.optimizer is not None and moments:
                load_moments(self.optimizer, self.model, {**moments_of(self.optimizer, self.model), **moments})
            return

    @torch.no_grad()
    def _pull(self, ready: Sequence[Connected], wait: Wait) -> dict[str, Tensor]:
        for i, worker in enumerate(ready):
            tensors, update = self._update_for(worker)
            worker.channel.send("state", self.attempt, tensors, all=i == 0, **update)
        state = {**self.parameters, **dict(self.model.named_buffers())}
        moments: dict[str, Tensor] = {}
        for worker in ready:
            arrived = self.workers.expect(worker, self.attempt, ("state",), wait)
            for name, value in arrived.tensors.items():
                if name.startswith(PARAMETER):
                    state[name.removeprefix(PARAMETER)].copy_(value)
                else:
                    moments[name.removeprefix(MOMENT)] = value
        return moments
