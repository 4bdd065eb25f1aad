"""Load the GPU kernels of common operators in a thread, while the CPU traces and checks steps.

CUDA loads a kernel, and cuBLAS makes its handle, at the first call, which takes 10 to 100 ms each. A short run would
wait for dozens of them one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F

SIDE = 16
"""The size of the matrices."""


@contextmanager
def loading_common_kernels(device: torch.device, dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """On a GPU, run common operators on small tensors of these dtypes and float64 in a thread, inside this context.

    When the context ends, the thread stops after the operator that it is at, for which nothing waits.
    """
    if device.type != "cuda":
        yield
        return
    others = sorted(set(dtypes) - {torch.float64}, key=str)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(device, [*others, torch.float64], stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()


@torch.no_grad()
def _run(device: torch.device, dtypes: Collection[torch.dtype], stop: threading.Event) -> None:
    with torch.cuda.device(device), suppress(RuntimeError):  # what fails here is reported where it is needed
        for dtype in dtypes:
            for _ in _operators(device, dtype):
                if stop.is_set():
                    return


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
