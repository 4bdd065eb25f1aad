"""Encode floating-point tensors with fewer bits for sending.

    exact   unchanged
    fp16    half precision: 10 bits of fraction, up to 65504
    bf16    the range of float32 with 7 bits of fraction
    int8    whole numbers from -127 to 127 and one float32 scale for each row (for each tensor of one dimension)

Numbers that are not floats (counters, labels) are always sent unchanged. What rounding removes is not lost if the
sender keeps it (`Feedback`) and adds it to what it sends next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from shoal.errors import SplitError
from shoal.net.messages import tensor_bytes
from shoal.split.core.method import Method
from shoal.split.core.parts import Index, Outcome, Slice, Task, Tensors
from shoal.split.core.state import tensors_of

Shape = tuple[int, ...]


class Codec:
    """Converts a tensor of floats to bytes and back, unchanged or as another float type. Both ways are pure."""

    def __init__(self, name: str, kind: torch.dtype | None = None) -> None:
        self.name, self.kind, self.exact = name, kind, name == "exact"

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        """Return the bytes of an encoded tensor, from its shape."""
        return prod(shape) * (self.kind or dtype).itemsize

    def encode(self, value: Tensor) -> Tensor:
        """Return the bytes, as a uint8 tensor of one dimension."""
        if self.kind is None:
            return tensor_bytes(value)
        most = torch.finfo(self.kind).max
        limited = torch.where(value.isfinite(), value.clamp(-most, most), value)  # finite numbers stay finite
        return tensor_bytes(limited.to(self.kind))

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        return data.clone().view(self.kind or dtype).view(shape).to(dtype)


class Int8(Codec):
    """Encodes a row as its largest magnitude in float32, and every element in 127ths of it."""

    def size(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 * _rows(shape) + prod(shape)

    def encode(self, value: Tensor) -> Tensor:
        rows = value.to(torch.float32).reshape(_rows(tuple(value.shape)), -1)
        scale = rows.abs().amax(1) / 127 if rows.numel() else rows.new_zeros(1)
        steps = rows / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        integers = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
        return torch.cat([tensor_bytes(scale), tensor_bytes(integers)])

    def decode(self, data: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        count = _rows(shape)
        scale = data[: 4 * count].clone().view(torch.float32)
        integers = data[4 * count :].clone().view(torch.int8).view(count, prod(shape) // count)
        return (integers.to(torch.float32) * scale.unsqueeze(1)).view(shape).to(dtype)


def _rows(shape: Shape) -> int:
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


EXACT = Codec("exact")
CODECS: Mapping[str, Codec] = {
    "exact": EXACT,
    "fp16": Codec("fp16", torch.float16),
    "bf16": Codec("bf16", torch.bfloat16),
    "int8": Int8("int8"),
}
"""All codecs; a message names its codec by the index here."""


def codec_named(name: str) -> Codec:
    """Return the codec of this name, or raise a SplitError."""
    if name not in CODECS:
        raise SplitError(f"codec is {name!r}; use one of {', '.join(map(repr, CODECS))}")
    return CODECS[name]


def for_weights(codec: Codec, dtype: torch.dtype) -> Codec:
    """Return the codec for a tensor of this type: only floats can be sent with fewer bits."""
    return codec if dtype.is_floating_point else EXACT


def for_moments(codec: Codec, dtype: torch.dtype) -> Codec:
    """Return the codec for optimizer state, at least bf16, since it spans many magnitudes (Adam's squares underflow
    in fp16)."""
    return CODECS["bf16"] if not codec.exact and dtype.is_floating_point and dtype.itemsize > 2 else EXACT


class Feedback:
    """What the codec has rounded away so far, stored by the sender in the shape of the whole network.

    Blocks move from worker to worker, so the remainder of an element waits until this sender has that element again.
    """

    def __init__(self, codec: Codec, shapes: Mapping[str, Shape]) -> None:
        self.codec = codec
        self._shapes = shapes
        self._rest: dict[str, Tensor] = {}

    def corrected(self, piece: Slice, value: Tensor) -> Tensor:
        """Return `value` plus what earlier rounding removed, which is what to send, and store what this will round
        away."""
        if self.codec.exact or not value.dtype.is_floating_point:
            return value
        remainder = self._rest.get(piece.name)
        if remainder is None:
            remainder = self._rest[piece.name] = torch.zeros(self._shapes[piece.name])
        corrected = value + piece.take(remainder).to(value.dtype)
        shape = tuple(value.shape)
        decoded = self.codec.decode(self.codec.encode(corrected), shape, value.dtype)
        piece.put(remainder, (corrected - decoded).nan_to_num(posinf=0.0, neginf=0.0).to(remainder.dtype))
        return corrected


class OutcomeCodec:
    """Converts an outcome to what a worker sends, and back at the coordinator.

    With the exact codec these are the trained values themselves. With fewer bits a worker sends what has changed since
    the task, plus what earlier rounds rounded away. The coordinator adds the change to its own exact copy, so that
    rounding errors do not accumulate in the network.
    """

    def __init__(self, method: Method, codec: Codec) -> None:
        self.method, self.codec = method, codec
        tensors = {**tensors_of(method.model), **method.extra_tensors()}
        self.whole: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.feedback = Feedback(codec, self.whole)

    def sent(self, task: Task, outcome: Outcome) -> Outcome:
        """Return what a worker sends of an outcome."""
        if self.codec.exact:
            return outcome
        slices = self.method.returns(task.part)
        changes = self._add_start(task, outcome.tensors, -1)
        return replace(outcome, tensors={n: self.feedback.corrected(slices[n], t) for n, t in changes.items()})

    def received(self, task: Task, outcome: Outcome) -> Outcome:
        """Return the outcome at the coordinator, which has the task before it was encoded.

        Raises a SplitError if its tensors are not those that the task asked for.
        """
        slices = self.method.returns(task.part)
        for name, tensor in outcome.tensors.items():
            if name not in slices or tuple(tensor.shape) != slices[name].shape(self.whole[slices[name].name]):
                raise SplitError(f"it sent {name!r} of shape {list(tensor.shape)}, which does not fit this job")
        return outcome if self.codec.exact else replace(outcome, tensors=self._add_start(task, outcome.tensors, 1))

    def _add_start(self, task: Task, tensors: Tensors, sign: int) -> Tensors:
        """Return tensors plus or minus what the task started from; gradients start from nothing."""
        if self.method.merge == "gradients":
            return tensors
        task_slices, returned_slices = self.method.slices(task.part), self.method.returns(task.part)
        results: Tensors = {}
        for name, value in tensors.items():
            if value.dtype.is_floating_point:
                base = Slice(name, within(task_slices[name], returned_slices[name])).take(task.tensors[name])
                value = value + base if sign > 0 else value - base
            results[name] = value
        return results


def within(outer_slice: Slice, inner_slice: Slice) -> Index:
    """Return where a slice lies in a larger one of the same tensor."""

    def rows(dim: int) -> Tensor | None:
        inner = inner_slice.index[dim]
        outer = outer_slice.index[dim] if dim < len(outer_slice.index) else None
        return inner if inner is None or outer is None else torch.searchsorted(outer, inner)

    return tuple(rows(dim) for dim in range(len(inner_slice.index)))
