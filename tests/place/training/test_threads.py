"""How many of torch's threads the server uses, and the plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.place.networks import chain
from tests.place.training.jobs import job_of, mlp, placement_of, rows

import shoal
from shoal.net.torchrun import Torchrun
from shoal.place.profile import Profile, estimate_profile
from shoal.place.training import api
from shoal.place.training.api import server_threads, train_placed
from shoal.settings import make_settings

CPU = make_settings("cpu", None, None, "auto", "60s", False, "fifo")
GPU = replace(CPU, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)


def started(local: str) -> Torchrun:
    names = {"RANK": "0", "WORLD_SIZE": "5", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": local}
    read = Torchrun.read(names)
    assert read is not None
    return read


def test_the_server_uses_the_cores_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_threads(CPU) == 1  # workers compute on these cores
    assert server_threads(GPU) == 3
    assert server_threads(replace(GPU, threads=2)) == server_threads(replace(CPU, threads=2)) == 2
    assert server_threads(replace(GPU, deterministic=True)) == 1
    assert (server_threads(CPU, started("1")), server_threads(CPU, started("5"))) == (3, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # as torch has read it; torchrun sets it to 1
    assert server_threads(CPU, started("5")) == 3
    monkeypatch.setattr(api, "usable_cores", lambda: 2)
    assert server_threads(GPU) == 2


@pytest.mark.parametrize(("settings", "threads"), [(CPU, 1), (GPU, 3)], ids=["CPU", "GPU"])
def test_a_run_uses_them(settings: Any, threads: int) -> None:
    used = set[int]()

    def note(event: shoal.Event) -> None:
        if event.kind == "turn":
            used.add(torch.get_num_threads())

    job = job_of(mlp, rows(12))
    (result,) = train_placed(job, placement_of(job, 2, "server"), settings, events=note, device="cpu")
    assert result.status == "done" and used == {threads}
    assert torch.get_num_threads() == 3


def test_the_plan_times_the_server_with_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[str, int, int]] = []

    def measure(graph: Any, sample: Any, *, rows: Sequence[int], device: torch.device, busy_processes: int) -> Profile:
        timed.append((device.type, torch.get_num_threads(), busy_processes))
        speed = 1e9 if device.type == "cpu" else 1e12
        return replace(estimate_profile(graph, operations_per_second=speed), measured=True, device=device.type)

    monkeypatch.setattr("shoal.place.api.measure_profile", measure)
    monkeypatch.setattr("shoal.settings.pick_device", torch.device)
    arguments: dict[str, Any] = {"model": chain(20, 30, 5), "sample": torch.randn(4, 20), "workers": 2}
    on_gpu = shoal.place(**arguments, device="cuda")
    assert timed == [("cuda", 3, 0), ("cpu", 3, 0)] and on_gpu.profile["server"] is not None
    timed.clear()
    given = shoal.place(**arguments, device="cuda", server_speed=0.1)
    assert timed == [("cuda", 3, 0)] and given.profile["server"] is None
    timed.clear()
    shoal.place(**arguments, device="cuda", server_profile=on_gpu)
    assert timed == [("cuda", 3, 0)]
    timed.clear()
    shoal.place(**arguments)  # on machines of their own
    shoal.place(**arguments, cores=2)  # on this one, with a thread each
    assert timed == [("cpu", 3, 0), ("cpu", 1, 0), ("cpu", 1, 1)]
