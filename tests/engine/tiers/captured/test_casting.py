"""Layer norms in a recorded step under autocast: they write and read half precision, with the results of the operators;
kernels are compiled for the host where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.engine.kernels import host_blocks
from tests.engine.tiers.captured import host_kernels
from torch import Tensor

from shoal.engine.kernels import layer_norm, row_sums
from shoal.engine.kernels.layer_norm import LayerNorm
from shoal.engine.tiers.captured.fusion.fused import Fused
from shoal.engine.tiers.captured.fusion.recording import Recording
from shoal.utils import cuda_kernels

ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu if ON_GPU else pytest.mark.skipif(host_blocks.COMPILER is None, reason="needs a C++ compiler")
]
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
LOAD = cuda_kernels.load if ON_GPU else host_kernels.load


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(layer_norm, "load", host_blocks.load)
        monkeypatch.setattr(row_sums, "load", host_blocks.load)


def blocks(x: Tensor, scale: Tensor, weight: Tensor, *, kept: bool) -> Sequence[Tensor]:
    """Two layers and their gradients; with `kept` the last normalised rows are a result too."""
    x, scale, weight = (t.detach().requires_grad_() for t in (x, scale, weight))
    h = x
    with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            rows = LayerNorm.apply(h.view(2, 12, 16), scale, scale, 1e-5, True).view(h.shape)
            h = h + torch.bmm(rows.view(2, 12, 16), weight).float().view(h.shape)
    grads = torch.autograd.grad(h.square().mean() + (rows.sum() if kept else 0), (x, scale, weight))
    return [h.detach(), *grads, *([rows.detach()] if kept else [])]


@pytest.mark.parametrize("kept", [False, True])
def test_conversions_of_layer_norms_are_left_out(kept: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device=DEVICE) for shape in ((2, 3, 4, 16), (2, 16), (2, 16, 16))]
    with Recording(inputs) as recording:
        outputs = blocks(*inputs, kept=kept)
    numbers = [recording.find(output) for output in outputs]
    expected = [output.clone() for output in outputs]
    made = Fused(recording, numbers, DEVICE, LOAD)
    for given, wanted in zip(made(inputs), expected, strict=True):
        assert given is not None and given.dtype == wanted.dtype
        assert (given - wanted).norm() <= 1e-3 * wanted.norm()
    norms = [call for call in made.calls if call.func == layer_norm.layer_norm._opoverload]
    gradients = [call for call in made.calls if call.func == layer_norm.layer_norm_gradient._opoverload]
    written = [call.args[layer_norm.DTYPE_ARGUMENT] for call in norms]
    read = [made.values[call.reads[0]].dtype for call in gradients]
    assert written == [torch.bfloat16, torch.float32 if kept else torch.bfloat16]
    assert sorted(read, key=str) == [torch.bfloat16, torch.float32 if kept else torch.bfloat16]
