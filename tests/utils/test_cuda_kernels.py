"""Kernels from source text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shoal.utils import cuda_kernels

SOURCE = "typedef float T;\n" + "".join(
    f'extern "C" __global__ void add_{i}(T* x, int n) {{ if (threadIdx.x < n) x[threadIdx.x] += {i}; }}\n'
    for i in range(5)
)
ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_source_is_compiled_in_parts_that_hold_every_kernel_once(count: int) -> None:
    parts = cuda_kernels._parts(SOURCE, count)
    assert len(parts) == min(count, 5)
    names = [name for part in parts for name in cuda_kernels._NAMES.findall(part)]
    assert sorted(names) == [f"add_{i}" for i in range(5)]
    assert all(part.startswith("typedef float T;") for part in parts)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_kernels_are_stored_and_a_damaged_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    for damaged in (False, False, True):
        if damaged:
            for path in (tmp_path / "kernels").iterdir():
                path.write_bytes(path.read_bytes()[:-100])
        monkeypatch.setattr(cuda_kernels, "_LOADED", {})
        x = torch.zeros(4, device="cuda")
        for i, kernel in enumerate(cuda_kernels.load(SOURCE, [f"add_{i}" for i in range(5)])):
            kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[x, 4])
            assert x.tolist() == [sum(range(i + 1))] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_an_nvrtc_that_does_not_know_the_device_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")
    assert cuda_kernels.available.__wrapped__()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (999, 0))
    assert not cuda_kernels.available.__wrapped__()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_new_thread_may_launch_a_kernel_first() -> None:
    """As the thread of a backward pass does whose first operator is a kernel of ours."""
    x = torch.zeros(4, device="cuda")
    (kernel,) = cuda_kernels.load(SOURCE, ["add_3"])
    kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[x, 4])

    def launch() -> None:
        (kernel,) = cuda_kernels.load(SOURCE, ["add_3"])
        kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[x, 4])

    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch).result()
    assert x.tolist() == [6] * 4
