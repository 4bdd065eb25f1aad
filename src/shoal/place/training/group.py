"""Transfers among workers with torch.distributed: NCCL where each has a GPU of its own, otherwise gloo.

A group is made for the current workers. When one of them is lost, waits end (by an error, or because the server asks
for something else), the group is abandoned, and the remaining workers make another one.
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
"""How often a transfer is checked before the wait sleeps between two checks."""
_left_behind: list[Any] = []
"""Groups that a lost worker has broken; freeing one would wait for transfers that never end."""


class GroupLost(ShoalError):
    """Raised if a transfer among workers was not completed."""


class Interrupted(GroupLost):
    """Raised if the server asks for something else."""


def gpu_of(device: torch.device) -> str:
    """Return the name of a GPU, the same in all processes; empty if the device is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def backend_for(gpus: Sequence[str]) -> str:
    """Return the backend for workers on these GPUs (`gpu_of`). NCCL refuses two workers on one GPU.

    >>> backend_for(["GPU-a", "GPU-b"]), backend_for(["GPU-a", "GPU-a"])
    ('nccl', 'gloo')
    """
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


class WorkerGroup:
    """The workers that can currently reach each other; this one has `rank` among `size`."""

    def __init__(
        self, rank: int, size: int, store: tuple[str, int], name: str, host: str, device: torch.device, backend: str,
        seconds: float, interrupted: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Join the group.

        Args:
            store: Where the server stores the addresses.
            name: The same for all members of a group, and for no other group.
            host: The address at which the others reach this worker.
            backend: What `backend_for` returned.
            seconds: The most that a transfer may take.
            interrupted: Returns whether to stop waiting, since the server asks for something else.
        """
        self.rank, self.size, self.device, self.seconds = rank, size, device, seconds
        self.interrupted = interrupted
        self.bytes = 0
        """Bytes sent by this worker, as the algorithms need them, without headers."""
        self._backend: Any = None
        if size == 1:
            return
        self._backend = self._in_thread(lambda: _make_backend(rank, size, store, name, host, backend, seconds))

    def _in_thread(self, make: Callable[[], Any]) -> Any:
        """Return what another thread makes; this one stops waiting if the server asks for something else."""
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
        """Start to sum tensors over all workers, in place; call the result to wait for it."""
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
        """Return every worker's tensor, [size, ...]; all have the same shape."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(self._start(lambda: self._backend.allgather([outputs], [tensor.contiguous()])))
        self.bytes += (self.size - 1) * tensor.nbytes
        return torch.stack(outputs)

    def exchange(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a flat tensor to each worker, by rank, and return what each of them sends, of these sizes."""
        sent = torch.cat(list(outgoing))
        received = sent.new_empty(sum(sizes))
        if self.size == 1:
            return [sent]
        lengths = [len(tensor) for tensor in outgoing]
        self._wait(self._start(lambda: self._backend.alltoall_base(received, sent, list(sizes), lengths)))
        self.bytes += sent.nbytes - outgoing[self.rank].nbytes
        return list(torch.split(received, list(sizes)))

    def _start(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise GroupLost(_line(error)) from error

    def _wait(self, work: Any) -> None:
        """Wait for a transfer to end, but not for one that a lost worker keeps from ending."""
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
        """Abandon the group. It is not freed, since it may still wait for a lost worker."""
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
