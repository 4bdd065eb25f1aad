"""Load the GPU kernels of common operators in a thread, while the CPU traces and checks steps.

CUDA loads a kernel, and cuBLAS makes its handle, at the first call, which takes 10 to 100 ms each. A short run would
wait for dozens of them one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

aten = torch.ops.aten
SIDE = 16
"""The size of the matrices."""


@contextmanager
def loading_common_kernels(
    device: torch.device, dtypes: Collection[torch.dtype], network: nn.Module | None = None
) -> Iterator[None]:
    """On a GPU, run common operators on small tensors of these dtypes in a thread, inside this context; float64 last.

    When the context ends, the thread stops after the operator that it is at, for which nothing waits.

    Args:
        network: One that will be trained; operators of its kinds of layers are run too.
    """
    if device.type != "cuda":
        yield
        return
    ordered = sorted(dtypes, key=lambda dtype: (dtype == torch.float64, str(dtype)))
    kinds = _kinds_of(network) if network is not None else []
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(device, ordered, kinds, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()


Operators = Callable[[torch.device, torch.dtype], Iterator[Any]]
"""Runs operators on tensors of this dtype, one at a time."""


@torch.no_grad()
def _run(
    device: torch.device, dtypes: Collection[torch.dtype], kinds: Collection[Operators], stop: threading.Event
) -> None:
    with torch.cuda.device(device):
        for dtype in dtypes:
            for operators in (_operators, *kinds):
                with suppress(RuntimeError):  # what fails here is reported where it is needed
                    for _ in operators(device, dtype):
                        if stop.is_set():
                            return


def _kinds_of(network: nn.Module) -> list[Operators]:
    """Return what to run for the kinds of layers that a network has."""
    layers = {type(module) for module in network.modules()}
    return [run for kinds, run in _LAYERS.items() if any(issubclass(layer, kinds) for layer in layers)]


def _operators(device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Run the operators that most steps, their check in float64 and their first update need, one at a time."""
    x = torch.ones(2, SIDE, SIDE, dtype=dtype, device=device)
    rows = torch.zeros(SIDE, dtype=torch.int64, device=device)
    bias = x[0, 0]
    yield torch.baddbmm(x[:, :1], x, x.mT)
    yield torch.bmm(x.mT, x)
    yield F.linear(x[0], x[1], bias)
    yield (log_probs := F.log_softmax(x, 2))
    yield torch._log_softmax_backward_data(x, log_probs, 2, dtype)
    yield (picked := log_probs.gather(2, rows.view(1, SIDE, 1).expand(2, -1, 1)).squeeze(2))
    yield picked.neg().mul(x[:, 0]).sum(1)
    yield torch.stack([bias, bias]).clamp_min(0.0)
    yield x[0].index_select(0, rows)
    yield torch.ops.aten.threshold_backward(x, x, 0.0)
    yield torch.where(torch.isfinite(x), x, 0.0)
    yield x.double().sub(1.0).abs().max()
    if dtype == torch.float64:
        yield x[torch.isfinite(x)].norm()
        yield torch.pow(bias.unsqueeze(1), bias.float())
        yield bias.sqrt().reciprocal().to(torch.float32)


def _convolutions(device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Run a convolution, which loads cuDNN, and its backward pass."""
    x, weight = (torch.ones(8, 8, size, size, dtype=dtype, device=device) for size in (SIDE, 3))
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    yield (out := F.conv2d(x, weight, padding=1))
    pairs: list[list[int]] = [[1, 1], [1, 1], [1, 1]]
    yield aten.convolution_backward(out, x, weight, None, *pairs, False, [0, 0], 1, [True, True, False])


def _layer_norms(device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Run a layer norm and what transformers have besides."""
    x = torch.ones(2, SIDE, SIDE, dtype=dtype, device=device)
    yield F.layer_norm(x, (SIDE,))
    yield F.gelu(x)
    yield F.gelu(x, approximate="tanh")
    yield aten.gelu_backward(x, x)
    yield (shares := torch.softmax(x, -1))
    yield aten._softmax_backward_data(x, shares, -1, dtype)
    yield torch.cat([x, x], -1)
    yield x.transpose(0, 1).contiguous().sum((0, 1))


def _embeddings(device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    rows = torch.zeros(SIDE, dtype=torch.int64, device=device)
    yield (out := F.embedding(rows, torch.ones(SIDE, SIDE, dtype=dtype, device=device)))
    yield aten.embedding_dense_backward(out, rows, SIDE, -1, False)


_LAYERS: dict[tuple[type[nn.Module], ...], Operators] = {
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): _convolutions, (nn.LayerNorm,): _layer_norms, (nn.Embedding,): _embeddings,
}  # fmt: skip
"""What is run for a network that has one of these layers."""
