"""Messages between a worker and its parent.

A network and its optimizer state may be gigabytes. Small tensors are sent in the message as bytes; large ones in shared
memory that the parent maps, so that they are copied only once.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 14
"""From so many bytes on, a tensor is put into shared memory."""
MANY = 1 << 24
"""From so many bytes on, several threads write."""
ALIGNMENT, MOST_AT_ONCE, WRITERS = 64, 1 << 30, 4


@dataclass(slots=True)
class Message:
    """A received message."""

    data: bytes
    memory: mmap.mmap | None
    _tensors: dict[int, Tensor] = field(default_factory=dict)
    """The tensors in `memory`, by their offset."""

    def load(self) -> Any:
        """Return what was sent. The receiver owns its tensors."""
        unpickler = pickle.Unpickler(io.BytesIO(self.data))
        unpickler.persistent_load = self._tensor  # type: ignore[method-assign]
        return unpickler.load()

    def _tensor(self, where: tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]) -> Tensor:
        offset, dtype, shape, stride = where
        if offset not in self._tensors:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
            self._tensors[offset] = flat.as_strided(shape, stride)
        return self._tensors[offset]


def send(pipe: Connection, message: Any) -> None:
    """Send a message through a pipe made by `multiprocessing.Pipe()`."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    descriptor = _write_shared(list(pickler.large.values()), pickler.size) if pickler.large else None
    if pickler.large and descriptor is None:
        file = io.BytesIO()
        _Pickler(file, share=False).dump(message)
    pipe.send_bytes(b"+" if descriptor is not None else b"-")
    pipe.send_bytes(file.getvalue())
    if descriptor is not None:
        reduction.send_handle(pipe, descriptor, None)
        os.close(descriptor)


def receive(pipe: Connection) -> Message:
    """Receive the next message. Raises EOFError or OSError if there is none any more."""
    shared = pipe.recv_bytes() == b"+"
    data = pipe.recv_bytes()
    if not shared:
        return Message(data, None)
    descriptor = reduction.recv_handle(pipe)
    try:  # private: written pages are copied, also if this process forks later
        return Message(data, mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)


class _Pickler(pickle.Pickler):
    """Pickles tensors as bytes. Torch's own way takes ten times as long, for each of a member's hundreds of tensors."""

    def __init__(self, file: io.BytesIO, *, share: bool = hasattr(os, "memfd_create")) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.large: dict[int, tuple[int, Tensor]] = {}
        """Tensors for shared memory by their ids, with their offsets."""
        self.size, self._share = 0, share

    def persistent_id(self, value: Any) -> Any:
        if not self._share or type(value) is not Tensor or not _is_plain(value) or value.nbytes < LARGE:
            return None
        if id(value) not in self.large:
            self.large[id(value)] = self.size, value
            self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return self.large[id(value)][0], value.dtype, tuple(value.shape), value.stride()

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        return _from_bytes, (bytearray(_bytes(value)), value.dtype, tuple(value.shape), value.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be sent as its bytes: on the CPU, without gaps, with a storage of its own."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _bytes(tensor: Tensor) -> memoryview:
    in_memory_order = tensor.as_strided((tensor.numel(),), (1,))
    view: memoryview = in_memory_order.view(torch.uint8).numpy().data
    return view


def _from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


def _write(descriptor: int, offset: int, tensor: Tensor) -> None:
    left = _bytes(tensor)
    while left:
        count = os.pwrite(descriptor, left[:MOST_AT_ONCE], offset)
        left, offset = left[count:], offset + count


def _write_shared(tensors: list[tuple[int, Tensor]], size: int) -> int | None:
    """Return a descriptor of memory that holds these tensors; None if no memory is available."""
    try:
        descriptor = os.memfd_create("shoal")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
        if size < MANY:  # starting threads would take longer
            for offset, tensor in tensors:
                _write(descriptor, offset, tensor)
            return descriptor
        with ThreadPoolExecutor(WRITERS) as pool:  # a large write releases the GIL
            list(pool.map(partial(_write, descriptor), *zip(*tensors, strict=True)))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
