"""A run in a program that has set, frozen or taken away what a process has only one of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, numbers
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reference import solo
from shoal.utils.torch_flags import driver_not_started, flush_output, torch_flags

X, Y = numbers(1, 32, 4), numbers(2, 32, 1)


def jobs(**changes: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1)).double(),
        "data": (X, Y), "val": (X, Y), "loss": F.mse_loss, "epochs": 2, "batch_size": 8,
    }  # fmt: skip
    return [shoal.Job(seed=i, name=f"{i}", **(settings | changes)) for i in range(6)]


def assert_as_alone(**settings: Any) -> None:
    for result, own in zip(shoal.train(jobs(), device="cpu", **settings), jobs(), strict=True):
        assert_close(result, solo(own))


@contextmanager
def grad_off() -> Iterator[None]:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad, "grad off": grad_off, "inference": torch.inference_mode,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_caller_that_records_no_gradients(mode: str) -> None:
    pack = shoal.Pack([nn.Linear(4, 1).double(), nn.Linear(4, 1).double()], loss=F.mse_loss)
    with MODES[mode]():
        enabled = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert_as_alone()
        assert "stacked" in str(shoal.explain(jobs(), device="cpu", measure=False))
        pack.step(X[:8], Y[:8])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == enabled


FROZEN = """
import torch, torch.nn.functional as F, shoal
from torch import nn
torch.backends.disable_global_flags()
x, y = torch.randn(32, 4), torch.randn(32, 1)
jobs = [shoal.Job(model=lambda: nn.Linear(4, 1), data=(x, y), loss=F.mse_loss, epochs=1, seed=i) for i in range(2)]
for deterministic in (False, True):
    print([r.status for r in shoal.train(jobs, device="cpu", deterministic=deterministic)])
from shoal.utils.torch_flags import _set_benchmark
before = torch.backends.cudnn.benchmark
_set_benchmark(not before)
print(torch.backends.cudnn.benchmark == (not before), torch.backends.flags_frozen())
"""


def test_flags_that_are_frozen() -> None:
    """In a process of its own: they cannot be unfrozen."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", FROZEN], capture_output=True, text=True, check=False)
    assert (run.stdout.split("\n"), run.returncode) == (
        ["['done', 'done']", "['done', 'done']", "True True", ""], 0,
    ), run.stderr  # fmt: skip


def test_only_what_was_asked_for_is_set_and_put_back() -> None:
    threads = torch.get_num_threads()
    with torch_flags(torch.device("cpu")):
        torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1, "the host's own change was taken back"
    with torch_flags(torch.device("cpu"), threads=threads, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_as_alone(deterministic=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Closed:
    """A stream that is gone."""

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, Closed()])
def test_programs_without_output(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKERS", "2")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        flush_output()
        results = shoal.train(jobs(), device="cpu")
    assert [result.status for result in results] == ["done"] * 6


def test_no_more_processes_may_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setenv("SHOAL_WORKERS", "2")
    monkeypatch.setattr(os, "fork", full)
    told: list[shoal.Event] = []
    assert_as_alone(events=told.append)
    (note,) = [event.data["text"] for event in told if event.kind == "note"]
    said = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    assert note == f"a worker process could not begin: {said}; its jobs train here"


def test_what_a_worker_raises_before_it_begins_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, init = os.getpid(), Run.__init__

    def broken(self: Run, *args: Any, **settings: Any) -> None:
        if os.getpid() != parent:
            raise OSError("no room in the worker")
        init(self, *args, **settings)

    monkeypatch.setenv("SHOAL_WORKERS", "2")
    monkeypatch.setattr(Run, "__init__", broken)
    told: list[shoal.Event] = []
    assert_as_alone(events=told.append)
    assert any("could not begin: OSError: no room in the worker" in str(event.data) for event in told)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_in_a_thread(workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals belong to the main thread."""
    monkeypatch.setenv("SHOAL_WORKERS", workers)
    handler = signal.getsignal(signal.SIGINT)
    done: list[list[str]] = []
    thread = threading.Thread(
        target=lambda: done.append([r.status for r in shoal.train(jobs(), device="cpu", out=tmp_path)])
    )
    thread.start()
    thread.join()
    assert done == [["done"] * 6] and signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_python_cannot_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another language has installed is None to Python."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert [r.status for r in shoal.train(jobs(), device="cpu", out=tmp_path)] == ["done"] * 6
    finally:
        assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler


def test_a_network_without_numbers_is_a_mistake() -> None:
    with pytest.raises(shoal.JobError, match=r"job '0': its parameter weight is on the meta device"):
        shoal.train(jobs(model=lambda: nn.Linear(4, 1, device="meta")), device="cpu")


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs torch with CUDA, and no GPU")
def test_forked_processes_train_also_where_torch_is_built_for_cuda() -> None:
    code = """
        import os, torch, shoal
        from torch import nn
        from torch._subclasses.fake_tensor import FakeTensorMode

        data = torch.randn(8, 2), torch.randn(8, 1)
        shoal.explain([shoal.Job(model=lambda: nn.Linear(2, 1), data=data, loss=nn.MSELoss(), epochs=1)])
        with FakeTensorMode():
            nn.Linear(2, 1)(torch.randn(3, 2)).sum().backward()
        if not os.fork():
            torch.ones((), requires_grad=True).backward()
            os._exit(0)
        assert os.wait()[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_preparing_networks_does_not_start_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(nn.Linear):
        """Asks whether a CUDA graph is being captured, as networks of transformers do."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert not torch.cuda.is_current_stream_capturing()
            return super().forward(input)

    def ask() -> bool:
        asked.append(preparing[0])
        return False

    def note(*args: Any, **settings: Any) -> list[Member]:
        preparing[0] = True
        members = prepare(*args, **settings)
        preparing[0] = False
        return members

    asked: list[bool] = []
    preparing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask)
    monkeypatch.setattr("shoal.training.prepare", note)
    shoal.train(jobs(model=lambda: Asks(4, 1).double()), device="cpu")
    assert asked and not any(asked)
    assert torch.cuda.is_current_stream_capturing is ask


def test_two_threads_may_prepare_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask)
    first, second = driver_not_started(), driver_not_started()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.cuda.is_current_stream_capturing()
    second.__exit__(None, None, None)
    assert torch.cuda.is_current_stream_capturing is ask
