"""Fewer bits for each number that travels.

    exact   as it is
    fp16    half precision: 10 bits of fraction, up to 65504
    bf16    the range of float32 with 7 bits of fraction
    int8    whole numbers from -127 to 127 and one float32 scale for each row (for each tensor of one dimension)

Numbers that are no floats (counters, labels) always travel as they are. What int8 and the others round away is not
lost where the sender keeps it (`Feedback`) and adds it to what it sends next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from shoal.errors import SplitError
from shoal.split.core.parts import Slice

Shape = tuple[int, ...]


class Codec(ABC):
    """How a tensor of floats becomes bytes, and back. Both ways are pure."""

    name: str
    exact = False

    @abstractmethod
    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of an encoded tensor, known from its shape."""

    @abstractmethod
    def encode(self, value: Tensor) -> Tensor:
        """The bytes, a uint8 tensor of one dimension."""

    @abstractmethod
    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The tensor again, as close as the codec keeps it."""


class Exact(Codec):
    name = "exact"
    exact = True

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        return prod(shape) * dtype.itemsize

    def encode(self, value: Tensor) -> Tensor:
        return _bytes(value)

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        return data.clone().view(dtype).view(shape)


class Half(Codec):
    """Another float type for the way."""

    def __init__(self, name: str, kind: torch.dtype) -> None:
        self.name, self.kind = name, kind

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        return prod(shape) * self.kind.itemsize

    def encode(self, value: Tensor) -> Tensor:
        most = torch.finfo(self.kind).max
        kept = torch.where(value.isfinite(), value.clamp(-most, most), value)  # large is not infinite
        return _bytes(kept.to(self.kind))

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        return data.clone().view(self.kind).view(shape).to(dtype)


class Int8(Codec):
    """A row is its largest magnitude in float32, and every element in 127ths of it."""

    name = "int8"

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 * _rows(shape) + prod(shape)

    def encode(self, value: Tensor) -> Tensor:
        rows = value.to(torch.float32).reshape(_rows(tuple(value.shape)), -1)
        scale = rows.abs().amax(1) / 127 if rows.numel() else rows.new_zeros(1)
        steps = rows / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        whole = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
        return torch.cat([_bytes(scale), _bytes(whole)])

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        count = _rows(shape)
        scale = data[: 4 * count].clone().view(torch.float32)
        whole = data[4 * count :].clone().view(torch.int8).view(count, prod(shape) // count)
        return (whole.to(torch.float32) * scale.unsqueeze(1)).view(shape).to(dtype)


def _rows(shape: Shape) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


EXACT = Exact()
CODECS: Mapping[str, Codec] = {
    "exact": EXACT,
    "fp16": Half("fp16", torch.float16),
    "bf16": Half("bf16", torch.bfloat16),
    "int8": Int8(),
}
"""All of them; a message names its own by its place here."""


def codec_named(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise SplitError(f"codec is {name!r}; use one of {', '.join(map(repr, CODECS))}")
    return CODECS[name]


def for_weights(codec: Codec, dtype: torch.dtype) -> Codec:
    """The codec for a tensor of this type: only floats can do with fewer bits."""
    return codec if dtype.is_floating_point else EXACT


def for_moments(codec: Codec, dtype: torch.dtype) -> Codec:
    """Optimizer state spans many magnitudes (Adam's squares underflow in fp16): bf16 at the least."""
    return CODECS["bf16"] if not codec.exact and dtype.is_floating_point and dtype.itemsize > 2 else EXACT


class Feedback:
    """What the codec has rounded away so far, kept by the sender at its place in the whole network.

    Blocks go from worker to worker, so the rest of an element waits until this sender has that element again.
    """

    def __init__(self, codec: Codec, shapes: Mapping[str, Shape]) -> None:
        self.codec = codec
        self._shapes = shapes
        self._rest: dict[str, Tensor] = {}

    def corrected(self, piece: Slice, value: Tensor) -> Tensor:
        """What to send instead of `value`: with what is left from before. Remembers what this will round away."""
        if self.codec.exact or not value.dtype.is_floating_point:
            return value
        rest = self._rest.get(piece.name)
        if rest is None:
            rest = self._rest[piece.name] = torch.zeros(self._shapes[piece.name])
        wanted = value + piece.take(rest).to(value.dtype)
        shape = tuple(value.shape)
        arrives = self.codec.decode(self.codec.encode(wanted), shape, value.dtype)
        piece.put(rest, (wanted - arrives).nan_to_num(posinf=0.0, neginf=0.0).to(rest.dtype))
        return wanted
