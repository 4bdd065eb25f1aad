"""What runs in a forked process so that this one can still fork others that train."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shoal.engine.processes.child import Child, compute_in_fork, forks_can_train

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def _trained() -> tuple[int, int, float]:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return os.getpid(), torch.get_num_threads(), float(x.grad.sum())


def test_a_backward_pass_runs_apart_where_it_would_prevent_forking(autograd_of_a_gpu_machine: list[int]) -> None:
    pid, threads, gradient = compute_in_fork(_trained)
    assert (pid != os.getpid(), threads, gradient) == (True, torch.get_num_threads(), 6.0)
    assert not autograd_of_a_gpu_machine and forks_can_train()
    _trained()
    assert not forks_can_train()
    assert compute_in_fork(_trained)[0] == os.getpid()  # it does no more harm here


def test_a_process_that_uses_the_gpu_runs_it_itself(
    autograd_of_a_gpu_machine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children could not, and none of them is to train."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert compute_in_fork(_trained)[0] == os.getpid()


def test_elsewhere_it_runs_here() -> None:
    _trained()
    assert compute_in_fork(_trained)[0] == os.getpid() and forks_can_train()


def test_several_threads_work_apart(autograd_of_a_gpu_machine: list[int]) -> None:
    """OpenMP's threads are not copied by a fork, and waiting for them would take for ever."""
    torch.set_num_threads(2)
    a = torch.randn(400, 400)
    expected = float((a @ a).exp_().clamp_(max=2).sum())
    assert compute_in_fork(lambda: (torch.get_num_threads(), float((a @ a).exp_().clamp_(max=2).sum()))) == (
        2,
        expected,
    )


def test_ctrl_c_ends_what_runs_apart(autograd_of_a_gpu_machine: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    here, pids = os.getpid(), list[int]()
    wait = Child.end

    def end(child: Child, until: float = 0.0) -> str:
        pids.append(child.pid)
        return wait(child, until)

    monkeypatch.setattr(Child, "end", end)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        compute_in_fork(lambda: time.sleep(60) if os.getpid() != here else None)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_what_fails_apart_raises_here(autograd_of_a_gpu_machine: list[int]) -> None:
    def fails() -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        compute_in_fork(fails)
