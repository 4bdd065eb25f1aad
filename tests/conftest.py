"""What all tests share: a cache of their own, so that they neither read nor fill the developer's. Their jobs are short,
and would be looped: they are packed, unless a test says otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes longer
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def cache_folder() -> Iterator[None]:
    """One cache for each test process, removed with it."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-cache-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SHOAL_CACHE", os.path.join(folder, "cache"))
        patch.setenv("SHOAL_PACK", "always")
        yield


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    """What a test sets is not the next one's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads_restored: None) -> None:
    """For tests that compare bits: with several threads, sums have another order."""
    torch.set_num_threads(1)


@pytest.fixture
def autograd_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Autograd as where torch sees a GPU: once a process has run a backward pass, those that it forks cannot.

    The list has this process's id once it has run one.
    """
    run, began = torch.autograd._engine_run_backward, list[int]()

    def starting_threads(*args: Any, **more: Any) -> Any:
        if began and began[0] != os.getpid():
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        began[:] = [os.getpid()]
        return run(*args, **more)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", starting_threads)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return began
