"""C source of a kernel that joins tensors along a dimension, up to 16 bytes at a time; torch reads and writes single
elements wherever a tensor is not contiguous, and takes several times as long."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch.utils import _pytree as pytree

from shoal.engine.tiers.captured.fusion import kernel_source as source
from shoal.engine.tiers.captured.fusion.grouping import offset
from shoal.engine.tiers.captured.fusion.recording import Call, Value

aten = torch.ops.aten

MOST_PARTS = 32
"""The largest number of tensors that one kernel joins."""
_BYTES = 16
"""The most bytes that a thread reads or writes at once."""


def joined_parts(call: Call, values: list[Value], device: torch.device) -> tuple[list[int], int] | None:
    """Return the tensors that a call joins, and along which dimension, or None if there is no kernel for it."""
    if call.func != aten.cat.default or call.gives[0] is None:
        return None
    args, kwargs = pytree.tree_unflatten(call.args, call.spec)
    out, parts = values[call.gives[0]], [int(number) for number in args[0]]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not out.contiguous or out.dtype not in source.STORED or out.device != device or not 0 < out.numel < 2**31:
        return None
    for number in parts:
        value = values[number]
        extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
        alike = value.dtype == out.dtype and value.device == device and len(value.shape) == len(out.shape)
        if not alike or not value.numel or extent >= 2**32:
            return None
    return (parts, dim % len(out.shape)) if len(parts) <= MOST_PARTS else None


def joining_source(parts: list[Value], pointers: list[str], out: Value, dim: int) -> str:
    """Return the kernel's source; several parts may have the same pointer."""
    kind = source.STORED[out.dtype]
    columns = [prod(part.shape[dim:]) for part in parts]
    wide = next(
        n for n in (16, 8, 4, 2, 1) if n * out.dtype.itemsize <= _BYTES and not any(count % n for count in columns)
    )
    word = f"joined_word<{kind}, {wide}>"
    parameters = [f"const {kind}* __restrict__ {pointer}" for pointer in dict.fromkeys(pointers)]
    lines = [
        f'extern "C" __global__ void NAME({", ".join(parameters)}, {kind}* __restrict__ o0, int n) {{',
        f"  for (unsigned base = (blockIdx.x * blockDim.x + threadIdx.x) * {wide}u; base < (unsigned)n;",
        f"       base += gridDim.x * blockDim.x * {wide}u) {{",
        f"    const unsigned row = base / {sum(columns)}u, column = base % {sum(columns)}u;",
        f"    {word} value;",
    ]
    begin = 0
    for part, pointer, count in zip(parts, pointers, columns, strict=True):
        begin += count
        lines += [
            f"    {'else ' if begin > count else ''}if (column < {begin}u) {{",
            f"      const unsigned first = row * {count}u + column - {begin - count}u;",
            f"      {_read(part, pointer, word, wide)}",
            "    }",
        ]
    return "\n".join([*lines, f"    *({word}*)(o0 + base) = value;", "  }", "}\n"])


def _read(part: Value, pointer: str, word: str, wide: int) -> str:
    """Return the statement that reads a word of a part, from its element number `first` on."""
    if part.contiguous:
        return f"value = *(const {word}*)({pointer} + first);"
    stride = [prod(part.shape[d + 1 :]) for d in range(len(part.shape))]
    place = offset(part, replace(part, stride=tuple(stride), contiguous=True))
    return (
        f"for (unsigned j = 0; j < {wide}u; ++j) {{ const unsigned i = first + j; value.v[j] = {pointer}[{place}]; }}"
    )
