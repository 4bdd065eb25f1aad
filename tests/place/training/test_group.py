"""What workers use among themselves."""

import pytest

from shoal.place.training.group import backend_for


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),  # NCCL refuses two ranks on one device
        (["GPU-a", "GPU-b", "GPU-a"], "gloo"),
        (["GPU-a", ""], "gloo"),  # one of them has none
        (["", ""], "gloo"),
    ],
)
def test_nccl_only_where_each_worker_has_a_gpu_of_its_own(gpus: list[str], backend: str) -> None:
    assert backend_for(gpus) == backend
