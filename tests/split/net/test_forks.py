"""Workers that are forked where torch sees a GPU: they can train only if this process has run no backward pass."""

from __future__ import annotations

import pytest
import torch
from tests.split.net.jobs import METHODS, a_job

from shoal.errors import SplitError
from shoal.split import Serial, train_split
from shoal.split.net.launch import local_workers


def test_subnets_are_checked_without_a_backward_pass_here(autograd_of_a_gpu_machine: list[int]) -> None:
    job = a_job(steps=6)
    method = METHODS["ist"](job, 2)
    assert list(method.units.groups) == ["0", "4"] and not autograd_of_a_gpu_machine  # type: ignore[attr-defined]
    with local_workers(job, method, 2) as (executor, _):
        result = train_split(job, method, executor)
    assert result.status == "done" and not executor.lost


def test_training_before_is_one_line_that_says_what_to_do(autograd_of_a_gpu_machine: list[int]) -> None:
    job = a_job(steps=4)
    method = METHODS["local_sgd"](job, 2)
    train_split(job, method, Serial(job, method, 2))
    assert autograd_of_a_gpu_machine
    line = r"has run a backward pass.*restart the kernel.*--join"
    with pytest.raises(SplitError, match=line) as caught, local_workers(job, method, 2):
        pass
    assert "\n" not in str(caught.value)
    with local_workers(job, method, 0, others=0) as (executor, _):  # none is forked
        assert not executor.lost


def test_without_a_gpu_workers_train_after_training(one_thread: None) -> None:
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    job = a_job(steps=4)
    method = METHODS["local_sgd"](job, 2)
    with local_workers(job, method, 2) as (executor, _):
        assert train_split(job, method, executor).status == "done"
