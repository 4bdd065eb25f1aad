"""A placed training where torch sees a GPU: workers are forked before this process runs a backward pass."""

from __future__ import annotations

import pytest
from tests.place.training.jobs import job_of, mlp, rows

import shoal
from shoal.errors import PlaceError


def test_layers_are_timed_without_a_backward_pass_here(autograd_of_a_gpu_machine: list[int]) -> None:
    job = job_of(mlp, rows(12))
    placement = shoal.place(mlp().double(), rows(12)[0][:6], workers=2, mode="placed")
    assert placement.profile["measured"] and not autograd_of_a_gpu_machine
    (result,) = shoal.train([job], placement=placement, device="cpu")
    assert result.status == "done" and autograd_of_a_gpu_machine  # the server has trained
    with pytest.raises(PlaceError, match=r"has run a backward pass.*or use torchrun"):
        shoal.train([job], placement=placement, device="cpu")
