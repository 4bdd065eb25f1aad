"""Many tensors between the host and a GPU in few copies: a copy by itself costs more than the little that is in it.

Tensors of one dtype are laid side by side and copied as one; what comes out are views of what was copied. The host's
side of it is pinned memory, which torch keeps for the next time and which is therefore bounded: what is larger goes
tensor by tensor, and there the bytes are what costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CPU = torch.device("cpu")
MOST_BYTES = 1 << 26
"""What is laid side by side at a time."""
BLOCK = 1 << 24
"""Of pinned memory."""
PIECE, MOST_HEAP = 1 << 20, 48 << 20
"""Memory of the host is made ready in pieces, and no more of it than the C library keeps."""


def is_away(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is not on a device."""
    there = tensor.device
    return there.type != device.type or (device.index is not None and there.index != device.index)


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These tensors on a device: as they are where they are there already, and else as views of a few copies."""
    moved_tensors = [tensor.detach() for tensor in tensors]
    away = [place for place, tensor in enumerate(moved_tensors) if is_away(tensor, device)]
    for place, value in zip(away, _moved([moved_tensors[place] for place in away], device), strict=True):
        moved_tensors[place] = value
    return moved_tensors


def _moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    if sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES:
        with suppress(torch.OutOfMemoryError):  # a GPU may have no room to lay them side by side
            return across(tensors, device)
    return [tensor.to(device) for tensor in tensors]


def across(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of any shapes on another device, by one copy for each dtype."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(place)
    copies = list(tensors)
    for places in alike.values():
        flat = _copied([tensors[place].reshape(-1) for place in places], device)
        parts = torch.split(flat, [tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            copies[place] = part.view(tensors[place].shape)
    return copies


def _copied(parts: list[Tensor], device: torch.device) -> Tensor:
    """Flat tensors of one dtype and device, side by side on another device."""
    first = parts[0]
    if first.device.type == "cpu":
        flat = _on_host(sum(len(part) for part in parts), first.dtype, pinned=device.type == "cuda")
        torch.cat(parts, out=flat)
        return flat.to(device, non_blocking=True)  # the host's memory is not used again before the copy is done
    flat = torch.cat(parts)
    return _on_host(len(flat), flat.dtype, pinned=flat.is_cuda).copy_(flat) if device.type == "cpu" else flat.to(device)


def expect(nbytes: int, device: torch.device) -> None:
    """Prepare the host for so many bytes from a device: the first use of memory is what takes time.

    What is taken here is freed at once, and the C library keeps it for what comes next.
    """
    if device.type != "cpu" and nbytes <= MOST_BYTES:
        pieces = range(0, min(nbytes, MOST_HEAP), PIECE)
        held = [torch.ones(PIECE, dtype=torch.uint8) for _ in pieces]
        del held


def _on_host(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Room on the host. Pinned memory is taken in blocks of one size, since a new block takes milliseconds."""
    if not pinned:
        return torch.empty(count, dtype=dtype)
    size = count * dtype.itemsize
    return torch.empty(max(size, BLOCK), dtype=torch.uint8, pin_memory=True)[:size].view(dtype)


def stacked(columns: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Each column's tensors, which are alike, as one on a device with an axis more; always a copy."""
    rows = [row.detach() for column in columns for row in column]
    if sum(row.nbytes for row in rows) > MOST_BYTES:
        return [torch.stack([row.detach() for row in column]).to(device) for column in columns]
    there = iter(moved(rows, device))
    return [torch.stack([next(there) for _ in column]) for column in columns]


@torch.no_grad()
def fill(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values into their places, all of which are on one device; no more at a time than there is room for."""
    if pairs and isinstance(pairs[0][0], FakeTensor):
        return  # such a stack holds no values, only their sizes
    for start, stop in portions([value.nbytes for _, value in pairs]):
        places, values = [place for place, _ in pairs[start:stop]], [value for _, value in pairs[start:stop]]
        torch._foreach_copy_(places, moved(values, places[0].device))


def portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours that are few bytes together, as (start, stop); what is larger by itself is alone.

    >>> list(portions([MOST_BYTES // 2, MOST_BYTES // 2, 1, 2 * MOST_BYTES, 1]))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > MOST_BYTES:
            yield start, place
            start, total = place, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
