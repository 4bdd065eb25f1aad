"""The batch of every member, gathered from the data set by one kernel, which computes its rows itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.engine.kernels.elements import LARGEST
from shoal.utils import cuda_kernels

THREADS, MOST_BLOCKS, MOST_LEAVES = 256, 8192, 16
_WORDS = {16: "word16", 8: "unsigned long long", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}
"""The C type of a word of so many bytes; rows are copied word by word."""

_SHARED = """
struct alignas(16) word16 { unsigned v[4]; };
template <typename W>
__device__ inline void copy_rows(const W* data, W* out, unsigned words, unsigned begin, unsigned end,
                                 const long long* orders, const long long* place, int members, int rows,
                                 int batch_size, int n) {
  const unsigned total = members * rows * words, step = (end - begin) * blockDim.x;
  for (unsigned i = (blockIdx.x - begin) * blockDim.x + threadIdx.x; i < total; i += step) {
    const unsigned line = i / words, member = line / rows;
    long long at = place[member] * batch_size + line % rows;
    at = at < 0 ? 0 : at >= n ? n - 1 : at;
    out[i] = data[orders[(long long)member * n + at] * words + i % words];
  }
}
"""
_KERNEL = """
extern "C" __global__ void gather({parameters}, const long long* orders, const long long* place, int members, int rows,
                                  int batch_size, int n) {{
  {leaves}
}}
"""


def suits(leaves: Sequence[Tensor], orders: Tensor, rows: int) -> bool:
    """Return whether there is a kernel for these leaves of a data set."""
    lines = rows * orders.shape[:-1].numel()
    return (
        len(leaves) <= MOST_LEAVES
        and orders.is_contiguous()
        and orders.numel() > 0
        and all(
            leaf.is_contiguous()
            and leaf.device == orders.device
            and cuda_kernels.has_memory(leaf)
            and 0 < lines * _row_bytes(leaf) < LARGEST
            for leaf in leaves
        )
    )


def gather(leaves: Sequence[Tensor], orders: Tensor, place: Tensor, rows: int, batch_size: int) -> list[Tensor]:
    """Return `rows` rows of each leaf for every member, from its next batch on.

    Args:
        orders: The rows of the data set in each member's order, [M, n], or [n] if all read the same.
        place: The number of each member's next batch, [M], or [] if all read the same. A row beyond the last is the
            last.
    """
    lines = orders.shape[:-1].numel() * rows
    sizes = [_word_bytes(leaf) for leaf in leaves]
    batch = [leaf.new_empty((*orders.shape[:-1], rows, *leaf.shape[1:])) for leaf in leaves]
    arguments: list[Tensor | int] = []
    end = 0
    for leaf, out, size in zip(leaves, batch, sizes, strict=True):
        words = _row_bytes(leaf) // size
        end += min(-(-lines * words // THREADS), MOST_BLOCKS)
        arguments += [leaf, out, words, end]
    arguments += [orders, place, lines // rows, rows, batch_size, orders.shape[-1]]
    with cuda_kernels.current_device(orders.device):
        (kernel,) = cuda_kernels.load(_source(sizes), ["gather"])
        kernel(grid=(end, 1, 1), block=(THREADS, 1, 1), args=arguments)
    return batch


def _row_bytes(leaf: Tensor) -> int:
    return leaf.shape[1:].numel() * leaf.itemsize


def _word_bytes(leaf: Tensor) -> int:
    """Return the size of the words in which rows are copied."""
    return next(size for size in _WORDS if _row_bytes(leaf) % size == 0 and leaf.data_ptr() % size == 0)


def _source(sizes: Sequence[int]) -> str:
    """Return the source of the kernel for leaves with words of these sizes."""
    parameters, branches = [], []
    for i, size in enumerate(sizes):
        kind, begin = _WORDS[size], f"end_{i - 1}" if i else "0"
        parameters.append(f"const {kind}* data_{i}, {kind}* out_{i}, int words_{i}, int end_{i}")
        given = f"data_{i}, out_{i}, words_{i}, {begin}, end_{i}, orders, place, members, rows, batch_size, n"
        branches.append(f"if (blockIdx.x < (unsigned)end_{i}) copy_rows({given});")
    return _SHARED + _KERNEL.format(parameters=", ".join(parameters), leaves="\n  else ".join(branches))
