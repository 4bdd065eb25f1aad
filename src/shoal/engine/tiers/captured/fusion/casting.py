"""Leave out conversions around kernels that convert by themselves: a layer norm under autocast computes in float32, and
the products that read its result want half precision. Its kernels write and read that directly, rounded as before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.engine.kernels.layer_norm import DTYPE_ARGUMENT, layer_norm, layer_norm_gradient
from shoal.engine.tiers.captured.fusion.recording import Call, Recording, Ref, Value

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)


def absorb_casts(recording: Recording, outputs: Sequence[int | None]) -> None:
    """Change the calls of layer norms so that conversions after and before them are not needed."""
    results = {recording.values[number].root for number in outputs if number is not None}
    for call in recording.calls:
        if call.func == layer_norm._opoverload:
            _write_half(call, recording, results)
        elif call.func == layer_norm_gradient._opoverload:
            _read_half(call, recording)


def _write_half(call: Call, recording: Recording, results: set[int]) -> None:
    """Let a layer norm return half precision if all that reads its result converts it to that."""
    values, number = recording.values, call.gives[0]
    assert number is not None
    readers = [other for other in recording.calls if any(values[n].root == number for n in other.reads)]
    views = [other for other in readers if other.gives[0] is not None and values[other.gives[0]].root == number]
    casts = [other for other in readers if _is_cast(other, values) and not other.written]
    targets = [values[n] for other in casts if (n := other.gives[0]) is not None]
    roots = {number, *(target.root for target in targets)}
    dtypes = {target.dtype for target in targets}
    written = any(value.storage in recording.written for value in (values[number], *targets))
    if len(views) + len(casts) != len(readers) or len(dtypes) != 1 or written or roots & results:
        return
    (dtype,) = dtypes
    if dtype not in _HALF:
        return
    call.args[DTYPE_ARGUMENT] = dtype
    for value in values:
        value.dtype = dtype if value.root == number else value.dtype
    for cast in casts:
        assert cast.gives[0] is not None
        _replace(cast.gives[0], cast.reads[0], recording)


def _is_cast(call: Call, values: list[Value]) -> bool:
    """Return whether a call only converts a contiguous tensor to another dtype."""
    if call.func != aten._to_copy.default or call.gives[0] is None:
        return False
    value, given = values[call.reads[0]], values[call.gives[0]]
    same = (value.shape, value.stride, value.device) == (given.shape, given.stride, given.device)
    return same and value.contiguous and given.root == call.gives[0]


def _replace(number: int, other: int, recording: Recording) -> None:
    """Let everything that reads one value read another, which is the same."""
    values = recording.values
    for call in recording.calls:
        call.args = [Ref(other) if isinstance(leaf, Ref) and leaf == number else leaf for leaf in call.args]
        call.reads = [other if read == number else read for read in call.reads]
    for value in values:
        value.root = values[other].root if value.root == number else value.root


def _read_half(call: Call, recording: Recording) -> None:
    """Let the gradient of a layer norm read what was converted from half precision for it."""
    values = recording.values
    index = values[values[call.reads[0]].root].call
    if index < 0 or not _is_cast(recording.calls[index], values):
        return
    number = recording.calls[index].reads[0]
    if values[number].dtype in _HALF and values[number].storage not in recording.written:
        call.args[0], call.reads[0] = Ref(number), number
