"""One launch for several sets of tensors, called parts: the blocks of the launch are divided among them.

A small kernel takes longer to start than to run. A kernel's parameters are the pointers of every part, with the number
of its elements and the end of its blocks; a block finds its part by comparing its index with these ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MOST_PARTS, MOST_BYTES = 64, 3072
"""The most parts of one launch, and the most bytes of their parameters; CUDA allows 4096 for all parameters."""

Pointers = Sequence[tuple[str, str]]
"""The pointers that a part has: type and name of each."""


@dataclass(slots=True)
class Part:
    """What a launch does for one set of tensors."""

    tensors: Sequence[Tensor]
    """The tensors of the pointers, in their order."""
    n: int
    """What the kernel reads as `n`, its number of elements."""
    blocks: int


def most_parts(pointers: int) -> int:
    """Return how many parts with so many pointers fit in one launch: a power of two."""
    count = MOST_PARTS
    while count > 1 and count * (8 * pointers + 8) > MOST_BYTES:
        count //= 2
    return count


def places(parts: int, pointers: int) -> int:
    """Return the number of parts that a kernel should have room for: a power of two, so that few kernels are
    compiled."""
    return min(most_parts(pointers), 1 << max(0, parts - 1).bit_length())


def parameters(pointers: Pointers, places: int) -> list[str]:
    """Return the parameters of a kernel with room for so many parts."""
    if places == 1:
        return [*(f"{kind} __restrict__ {name}" for kind, name in pointers), "int n"]
    return [
        parameter
        for k in range(places)
        for parameter in (*(f"{kind} __restrict__ {name}_{k}" for kind, name in pointers), f"int n_{k}", f"int end_{k}")
    ]


def selection(pointers: Pointers, places: int) -> str:
    """Return the statements with which a block finds its part: they define the pointers, the number of elements `n`,
    the block's index `block` in the part, and the part's number of `blocks`."""
    if places == 1:
        return "const unsigned block = blockIdx.x, blocks = gridDim.x;"
    declared = " ".join(f"{kind} __restrict__ {name};" for kind, name in pointers)
    return f"{declared} unsigned n, block, blocks;\n  {_find(pointers, 0, places)}"


def _find(pointers: Pointers, start: int, stop: int) -> str:
    """Return a search among the parts from `start` to `stop`, by halves."""
    if stop - start > 1:
        middle = (start + stop) // 2
        first, second = _find(pointers, start, middle), _find(pointers, middle, stop)
        return f"if (blockIdx.x < (unsigned)end_{middle - 1}) {{ {first} }}\n  else {{ {second} }}"
    begin = f"end_{start - 1}" if start else "0"
    chosen = " ".join(f"{name} = {name}_{start};" for _, name in pointers)
    return f"{chosen} n = n_{start}; block = blockIdx.x - {begin}; blocks = end_{start} - {begin};"


def arguments(parts: Sequence[Part], places: int) -> tuple[list[Tensor | int], int]:
    """Return the arguments of a launch for these parts, and its number of blocks."""
    if places == 1:
        return [*parts[0].tensors, parts[0].n], parts[0].blocks
    given: list[Tensor | int] = []
    end = 0
    for part in parts:
        end += part.blocks
        given += [*part.tensors, part.n, end]
    last = parts[-1]
    for _ in range(places - len(parts)):  # parts without blocks, which no block finds
        given += [*last.tensors, last.n, end]
    return given, end
