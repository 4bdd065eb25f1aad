"""What workers do among themselves, by torch.distributed: NCCL where each has a GPU of its own, otherwise gloo.

A group is made for the workers of the moment. When one of them is lost, waits end (by an error, or because the server
asks for something else), the group is left behind, and those that remain make another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ShoalError

SPIN = 200
"""Looks at a transfer before the wait sleeps between two of them."""
_left_behind: list[Any] = []
"""Groups that a lost worker has broken: to free one would wait for transfers that never end."""


class GroupLost(ShoalError):
    """A transfer among workers did not come to its end."""


class Interrupted(GroupLost):
    """The server asks for something else."""


def gpu_of(device: torch.device) -> str:
    """Which GPU a device is, by a name that all processes have for it; empty: it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def backend_for(gpus: Sequence[str]) -> str:
    """What a group uses, from the GPU of each worker (`gpu_of`): NCCL refuses two workers on one GPU.

    >>> backend_for(["GPU-a", "GPU-b"]), backend_for(["GPU-a", "GPU-a"])
    ('nccl', 'gloo')
    """
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


class WorkerGroup:
    """The workers that can reach each other now; this one's `rank` among `size`."""

    def __init__(
        self, rank: int, size: int, store: tuple[str, int], name: str, host: str, device: torch.device, backend: str,
        seconds: float, interrupted: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`store`: where the server keeps the addresses. `name`: the same for all members of a group and no other.
        `host`: the address at which the others reach this worker. `backend`: as `backend_for` says. `seconds`: the
        most that a transfer may take. `interrupted`: whether to stop waiting, since the server asks for something
        else."""
        self.rank, self.size, self.device, self.seconds = rank, size, device, seconds
        self.interrupted = interrupted
        self.bytes = 0
        """Sent by this worker, as the algorithms need it; no headers."""
        self._backend: Any = None
        if size == 1:
            return
        self._backend = self._aside(lambda: _make_backend(rank, size, store, name, host, backend, seconds))

    def _aside(self, make: Callable[[], Any]) -> Any:
        """What another thread makes; this one stops waiting where the server asks for something else."""
        made: list[Any] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                made.append(make())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="shoal-group", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            if self.interrupted():
                raise Interrupted("the server asks for something else")
        if errors:
            raise GroupLost(f"the group of workers cannot be made ({str(errors[0]).splitlines()[0]})") from errors[0]
        return made[0]

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to add up tensors over all workers, in place; call the result to wait for it."""
        if self.size == 1:
            return lambda: None
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
        work = self._start(lambda: self._backend.allreduce([flat]))
        self.bytes += 2 * (self.size - 1) * flat.nbytes // self.size

        def finish() -> None:
            self._wait(work)
            if len(tensors) > 1 or flat.data_ptr() != tensors[0].data_ptr():
                for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))

        return finish

    def gather(self, tensor: Tensor) -> Tensor:
        """Every worker's tensor, [size, ...]; all have the same shape."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(self._start(lambda: self._backend.allgather([every], [tensor.contiguous()])))
        self.bytes += (self.size - 1) * tensor.nbytes
        return torch.stack(every)

    def exchange(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a flat tensor to each worker, by rank; what each of them sends here, of these sizes."""
        given = torch.cat(list(outgoing))
        taken = given.new_empty(sum(sizes))
        if self.size == 1:
            return [given]
        lengths = [len(tensor) for tensor in outgoing]
        self._wait(self._start(lambda: self._backend.alltoall_base(taken, given, list(sizes), lengths)))
        self.bytes += given.nbytes - outgoing[self.rank].nbytes
        return list(torch.split(taken, list(sizes)))

    def _start(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise GroupLost(_line(error)) from error

    def _wait(self, work: Any) -> None:
        """Until a transfer has ended; it does not wait for one that a lost worker keeps from ending."""
        until, looks = time.monotonic() + self.seconds, 0
        while not work.is_completed():
            looks += 1
            if looks > SPIN:
                time.sleep(0.0002)
            elif looks % 8 == 0:
                time.sleep(0)
            if looks % 32 == 0 and self.interrupted():
                raise Interrupted("the server asks for something else")
            if time.monotonic() > until:
                raise GroupLost(f"a transfer among workers took more than {self.seconds:g} s")
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupLost(_line(error)) from error

    def leave(self) -> None:
        """Use it no more; after an error it may still wait for a lost worker, so it is not freed."""
        if self._backend is not None:
            _left_behind.append(self._backend)
            self._backend = None


def _make_backend(
    rank: int, size: int, store: tuple[str, int], name: str, host: str, backend: str, seconds: float
) -> Any:
    limit = timedelta(seconds=seconds)
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    table = PrefixStore(name, TCPStore(*store, is_master=False, timeout=limit))
    if backend == "nccl":
        return dist.ProcessGroupNCCL(table, rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = limit, 2
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(table, rank, size, options)


def _line(error: RuntimeError) -> str:
    return f"a transfer among workers failed ({str(error).splitlines()[0][:120]})"
