"""Load the GPU kernels of common operators in a thread, while the CPU traces and checks steps.

CUDA loads a kernel, and cuBLAS makes its handle, at the first call, which takes 10 to 100 ms each. A short run would
wait for dozens of them one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F

SIDE = 16
"""The size of the matrices."""


@contextmanager
def loading_common_kernels(device: torch.device, dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """On a GPU, run common operators on small tensors of float64 and these dtypes in a thread, inside this context.

    The thread has ended at the end, since other threads must not use the GPU while a CUDA graph is captured.
    """
    if device.type != "cuda":
        yield
        return
    others = sorted(set(dtypes) - {torch.float64}, key=str)
    thread = threading.Thread(target=_run, args=(device, [torch.float64, *others]), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@torch.no_grad()
def _run(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    with torch.cuda.device(device), suppress(RuntimeError):  # what fails here is reported where it is needed
        for dtype in dtypes:
            _operators(device, dtype)


def _operators(device: torch.device, dtype: torch.dtype) -> None:
    """Run the operators that most steps, their check in float64 and their first update need."""
    x = torch.ones(2, SIDE, SIDE, dtype=dtype, device=device)
    rows = torch.zeros(SIDE, dtype=torch.int64, device=device)
    bias = x[0, 0]
    torch.baddbmm(x[:, :1], x, x.mT)
    torch.bmm(x.mT, x)
    F.linear(x[0], x[1], bias)
    log_probs = F.log_softmax(x, 2)
    torch._log_softmax_backward_data(x, log_probs, 2, dtype)
    log_probs.gather(2, rows.view(1, SIDE, 1).expand(2, -1, 1)).squeeze(2).neg().mul(x[:, 0]).sum(1)
    torch.stack([bias, bias]).clamp_min(0.0).index_select(0, rows[:2])
    torch.ops.aten.threshold_backward(x, x, 0.0)
    torch.where(torch.isfinite(x), x, 0.0)
    x.double().sub(1.0).abs().max()
    if dtype == torch.float64:
        x[torch.isfinite(x)].norm()
        torch.pow(bias.unsqueeze(1), bias.float())
        bias.sqrt().reciprocal().to(torch.float32)
