"""Copy many tensors between the host and a GPU in few copies, since for small tensors each copy costs more than its
bytes.

Tensors of one dtype are laid side by side and copied as one; the results are views of that copy. The host side is
pinned memory. Torch caches it, so it is bounded: larger amounts are copied tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CPU = torch.device("cpu")
MOST_BYTES = 1 << 26
"""The most bytes that are laid side by side at a time."""
BLOCK = 1 << 24
"""Bytes of one block of pinned memory."""
COPIERS = 4
"""Threads that copy large tensors to the host."""
PIECE, MOST_HEAP = 1 << 20, 48 << 20
"""`expect` touches memory of the host in pieces of this size, and no more of it than the C library keeps for reuse."""


def is_away(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on another device than `device`."""
    current = tensor.device
    return current.type != device.type or (device.index is not None and current.index != device.index)


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`. Those that are there already are returned as they are; others become views of a
    few copies."""
    moved_tensors = [tensor.detach() for tensor in tensors]
    away = [i for i, tensor in enumerate(moved_tensors) if is_away(tensor, device)]
    for i, value in zip(away, _move_together([moved_tensors[i] for i in away], device), strict=True):
        moved_tensors[i] = value
    return moved_tensors


def _move_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    if sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES:
        with suppress(torch.OutOfMemoryError):  # a GPU may have no memory for the flat copy
            return across(tensors, device)

    if len(tensors) == 1 or device.type != "cpu":
        return [tensor.contiguous().to(device) for tensor in tensors]
    stream = torch.cuda.current_stream(tensors[0].device) if tensors[0].is_cuda else None

    def move(tensor: Tensor) -> Tensor:
        with nullcontext() if stream is None else torch.cuda.stream(stream):  # a new thread has the default stream
            with suppress(torch.OutOfMemoryError):  # contiguous as in a flat copy: channels last is slow to send
                tensor = tensor.contiguous()
            return tensor.to(device).contiguous()

    with ThreadPoolExecutor(COPIERS) as pool:  # the first use of a page of the host's memory takes longer than the copy
        return list(pool.map(move, tensors))


def across(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of any shapes to another device, with one copy for each dtype."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(i)
    copies = list(tensors)
    for indices in by_dtype.values():
        flat = _copy_flat([tensors[i].reshape(-1) for i in indices], device)
        parts = torch.split(flat, [tensors[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            copies[i] = part.view(tensors[i].shape)
    return copies


def _copy_flat(parts: list[Tensor], device: torch.device) -> Tensor:
    """Copy flat tensors of one dtype and device into one flat tensor on another device."""
    first = parts[0]
    if first.device.type == "cpu":
        flat = _empty_on_host(sum(len(part) for part in parts), first.dtype, pinned=device.type == "cuda")
        torch.cat(parts, out=flat)
        return flat.to(device, non_blocking=True)  # the host's memory is not used again before the copy is done
    flat = torch.cat(parts)
    return (
        _empty_on_host(len(flat), flat.dtype, pinned=flat.is_cuda).copy_(flat)
        if device.type == "cpu"
        else flat.to(device)
    )


def expect(nbytes: int, device: torch.device) -> None:
    """Touch memory of the host ahead of a copy of so many bytes from a device, since the first use of memory is slow.

    The memory is freed at once, and the C library keeps it for the copy.
    """
    if device.type != "cpu" and nbytes <= MOST_BYTES:
        pieces = range(0, min(nbytes, MOST_HEAP), PIECE)
        blocks = [torch.ones(PIECE, dtype=torch.uint8) for _ in pieces]
        del blocks


def _empty_on_host(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Allocate memory on the host. Pinned memory is taken in blocks of one size, since a new block takes
    milliseconds."""
    if not pinned:
        return torch.empty(count, dtype=dtype)
    size = count * dtype.itemsize
    return torch.empty(max(size, BLOCK), dtype=torch.uint8, pin_memory=True)[:size].view(dtype)


def stacked(columns: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Stack the tensors of each column on a device. The results are always copies."""
    rows = [row.detach() for column in columns for row in column]
    if sum(row.nbytes for row in rows) > MOST_BYTES:
        return [torch.stack([row.detach() for row in column]).to(device) for column in columns]
    on_device = iter(moved(rows, device))
    return [torch.stack([next(on_device) for _ in column]) for column in columns]


@torch.no_grad()
def fill(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each value (second of a pair) into its target (first), in portions of limited size. All targets are on one
    device."""
    if pairs and isinstance(pairs[0][0], FakeTensor):
        return  # fake tensors have shapes and no data
    for start, stop in portions([value.nbytes for _, value in pairs]):
        targets, values = [target for target, _ in pairs[start:stop]], [value for _, value in pairs[start:stop]]
        torch._foreach_copy_(targets, moved(values, targets[0].device))


def portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Group neighbours into portions of at most `MOST_BYTES`, as (start, stop). A larger one is a portion by itself.

    >>> list(portions([MOST_BYTES // 2, MOST_BYTES // 2, 1, 2 * MOST_BYTES, 1]))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > MOST_BYTES:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
