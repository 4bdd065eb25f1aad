"""Fewer bits for each number that travels.

    exact   as it is
    fp16    half precision: 10 bits of fraction, up to 65504
    bf16    the range of float32 with 7 bits of fraction
    int8    whole numbers from -127 to 127 and one float32 scale for each row (for each tensor of one dimension)

Numbers that are no floats (counters, labels) always travel as they are. What int8 and the others round away is not
lost where the sender keeps it (`Feedback`) and adds it to what it sends next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from shoal.errors import SplitError
from shoal.split.core.method import Method
from shoal.split.core.parts import Index, Outcome, Slice, Task, Tensors
from shoal.split.core.state import tensors_of
from shoal.split.net.messages import tensor_bytes

Shape = tuple[int, ...]


class Codec:
    """How a tensor of floats becomes bytes, and back, as close as it keeps them: as it is, or as another float type for
    the way. Both ways are pure."""

    def __init__(self, name: str, kind: torch.dtype | None = None) -> None:
        self.name, self.kind, self.exact = name, kind, name == "exact"

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of an encoded tensor, known from its shape."""
        return prod(shape) * (self.kind or dtype).itemsize

    def encode(self, value: Tensor) -> Tensor:
        """The bytes, a uint8 tensor of one dimension."""
        if self.kind is None:
            return tensor_bytes(value)
        most = torch.finfo(self.kind).max
        limited = torch.where(value.isfinite(), value.clamp(-most, most), value)  # large is not infinite
        return tensor_bytes(limited.to(self.kind))

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        return data.clone().view(self.kind or dtype).view(shape).to(dtype)


class Int8(Codec):
    """A row is its largest magnitude in float32, and every element in 127ths of it."""

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 * _rows(shape) + prod(shape)

    def encode(self, value: Tensor) -> Tensor:
        rows = value.to(torch.float32).reshape(_rows(tuple(value.shape)), -1)
        scale = rows.abs().amax(1) / 127 if rows.numel() else rows.new_zeros(1)
        steps = rows / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        whole = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
        return torch.cat([tensor_bytes(scale), tensor_bytes(whole)])

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        count = _rows(shape)
        scale = data[: 4 * count].clone().view(torch.float32)
        whole = data[4 * count :].clone().view(torch.int8).view(count, prod(shape) // count)
        return (whole.to(torch.float32) * scale.unsqueeze(1)).view(shape).to(dtype)


def _rows(shape: Shape) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


EXACT = Codec("exact")
CODECS: Mapping[str, Codec] = {
    "exact": EXACT,
    "fp16": Codec("fp16", torch.float16),
    "bf16": Codec("bf16", torch.bfloat16),
    "int8": Int8("int8"),
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


class OutcomeCodec:
    """What a worker sends of an outcome, and what the coordinator makes of it.

    With the exact codec these are the trained values themselves. With fewer bits a worker sends what has changed since
    the task, plus what earlier rounds rounded away. The coordinator adds the change to its own copy, which never lost a
    bit, so that rounding does not pile up in the network.
    """

    def __init__(self, method: Method, codec: Codec) -> None:
        self.method, self.codec = method, codec
        whole = {**tensors_of(method.model), **method.companions()}
        self.whole: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        self.feedback = Feedback(codec, self.whole)

    def sent(self, task: Task, outcome: Outcome) -> Outcome:
        """What a worker sends of an outcome."""
        if self.codec.exact:
            return outcome
        wanted = self.method.returns(task.part)
        changes = self._add_start(task, outcome.tensors, -1)
        return replace(outcome, tensors={n: self.feedback.corrected(wanted[n], t) for n, t in changes.items()})

    def received(self, task: Task, outcome: Outcome) -> Outcome:
        """The outcome again, at the coordinator, which has the task as it was before it was encoded. SplitError where
        its tensors are not those that the task asked for."""
        wanted = self.method.returns(task.part)
        for name, tensor in outcome.tensors.items():
            if name not in wanted or tuple(tensor.shape) != wanted[name].shape(self.whole[wanted[name].name]):
                raise SplitError(f"it sent {name!r} of shape {list(tensor.shape)}, which does not fit this job")
        return outcome if self.codec.exact else replace(outcome, tensors=self._add_start(task, outcome.tensors, 1))

    def _add_start(self, task: Task, tensors: Tensors, sign: int) -> Tensors:
        """Tensors plus or minus what the task started from; gradients start from nothing."""
        if self.method.merge == "gradients":
            return tensors
        held, wanted = self.method.slices(task.part), self.method.returns(task.part)
        moved: Tensors = {}
        for name, value in tensors.items():
            if value.dtype.is_floating_point:
                base = Slice(name, within(held[name], wanted[name])).take(task.tensors[name])
                value = value + base if sign > 0 else value - base
            moved[name] = value
        return moved


def within(held: Slice, wanted: Slice) -> Index:
    """Where a slice lies in a larger one of the same tensor."""

    def rows(dim: int) -> Tensor | None:
        inner = wanted.index[dim]
        outer = held.index[dim] if dim < len(held.index) else None
        return inner if inner is None or outer is None else torch.searchsorted(outer, inner)

    return tuple(rows(dim) for dim in range(len(wanted.index)))
