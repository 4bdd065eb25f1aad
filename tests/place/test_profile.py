"""Times of layers: complete, in proportion, saved and read back; the network stays as it is."""

import os
import time
from pathlib import Path

import pytest
import torch
from tests.place import networks
from torch import nn

from shoal.errors import PlaceError
from shoal.place._timing import LayerTimer, repeat_rows
from shoal.place.graph import trace_layers
from shoal.place.profile import LayerTimes, Profile, beside_busy_processes, estimate_profile, measure_profile


def test_every_layer_has_times_and_the_network_is_left_alone() -> None:
    model, sample, _ = networks.in_place()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = trace_layers(model, sample)
    random = torch.get_rng_state()
    times = measure_profile(graph, sample, rows=(2, 6), budget=1.0)
    assert times.measured and times.rows == (2, 6) and times.update_seconds > 0
    assert [layer.name for layer in times.layers] == [layer.name for layer in graph.layers]
    assert all(t > 0 for layer in times.layers for t in layer.forward)
    assert all(layer.backward[0] > 0 for layer in times.layers if layer.name in ("0", "1", "2", "4"))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("make", [networks.bert, networks.gpt2, networks.recurrent], ids=["bert", "gpt2", "lstm"])
def test_networks_of_others_are_timed(make: object) -> None:
    model, sample, _ = make()  # type: ignore[operator]
    graph = trace_layers(model, sample)
    times = measure_profile(graph, sample, rows=(2, 4), budget=1.0)
    heavy = [i for i, layer in enumerate(graph.layers) if layer.trained_bytes]
    assert all(times.backward(i, 3) > 0 for i in heavy)


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_processes_that_compute_meanwhile_end_with_it() -> None:
    graph = trace_layers(networks.chain(30, 20, 5), torch.randn(4, 30))
    pids: list[int] = []

    def note() -> None:
        pids.append(os.getpid())

    before = children()
    with beside_busy_processes(note, 2):
        pass
    assert not pids  # they have memory of their own
    assert children() <= before  # those of other tests may end meanwhile
    times = measure_profile(graph, torch.randn(4, 30), rows=(4,), busy_processes=1, budget=0.5)
    assert times.forward(0, 4) > 0


def test_estimates_follow_operations() -> None:
    graph = trace_layers(networks.chain(10, 20, 5), torch.randn(2, 10))
    times = estimate_profile(graph, operations_per_second=1e6)
    assert times.forward(0, 3) == pytest.approx(3 * 2 * 10 * 20 / 1e6)
    assert times.backward(2, 3) == pytest.approx(2 * times.forward(2, 3))


def test_times_lie_on_lines() -> None:
    times = Profile(
        device="", measured=True, rows=(4, 8, 16), layers=(LayerTimes("0", (1.0, 2.0, 6.0), (0.0, 0.0, 0.0)),)
    )
    assert [times.forward(0, rows) for rows in (4, 6, 8, 12, 24)] == [1.0, 1.5, 2.0, 4.0, 10.0]
    assert 0 < times.forward(0, 1) <= 1.0


def test_saved_and_read_back(tmp_path: Path) -> None:
    graph = trace_layers(networks.chain(10, 20, 5), torch.randn(2, 10))
    times = estimate_profile(graph)
    times.save(tmp_path / "times.json")
    assert Profile.load(tmp_path / "times.json") == times
    with pytest.raises(PlaceError, match="of another network"):
        times.check(trace_layers(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PlaceError, match="not a profile"):
        Profile.load(tmp_path / "other.json")


def test_the_meta_device_cannot_be_timed() -> None:
    with torch.device("meta"):
        graph = trace_layers(networks.chain(4, 2), torch.empty(2, 4))
        with pytest.raises(PlaceError, match="meta device"):
            measure_profile(graph, torch.empty(2, 4), rows=(2,))


def test_rows_are_repeated() -> None:
    assert repeat_rows(torch.tensor([1, 2, 3]), 7).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert repeat_rows(torch.tensor(5), 7).item() == 5


@pytest.mark.parametrize("busy", [False, True])
def test_layers_are_timed_with_one_thread_on_busy_cores(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()

    class Looks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(input)

    graph = trace_layers(nn.Sequential(Looks(4, 4), nn.Linear(4, 2)), torch.randn(4, 4))
    monkeypatch.setattr("shoal.engine.tiers.threads.busy", lambda threads: busy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen.clear()
        profile = measure_profile(graph, torch.randn(4, 4), rows=(4,))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {profile.threads} == {1 if busy else 2}


def compute(seconds: float) -> None:
    """Use a core for so long, as the thread's own time counts."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


SLOW_ROWS: list[int] = []
QUICK_ROWS: list[int] = []


class Slow(nn.Linear):
    """A layer that takes long for each row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        SLOW_ROWS.append(len(input))
        compute(0.01 * len(input))
        return super().forward(input)


class Quick(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        QUICK_ROWS.append(len(input))
        return super().forward(input)


def test_slow_layers_are_timed_on_few_rows_and_quick_ones_on_all() -> None:
    sample = torch.randn(64, 8)
    graph = trace_layers(nn.Sequential(Slow(8, 8), Slow(8, 8), nn.ReLU(), nn.Flatten(), Quick(8, 4)), sample)
    SLOW_ROWS.clear()
    QUICK_ROWS.clear()
    times = measure_profile(graph, sample, rows=(16, 32, 64), budget=0.3)
    assert times.rows == (2, 32, 64)
    assert set(SLOW_ROWS) == {2} and set(QUICK_ROWS) == {2, 32, 64}
    assert times.forward(0, 64) == pytest.approx(32 * times.forward(0, 2))
    assert times.forward(0, 64) > 0.6


def test_rows_that_cannot_be_repeated_are_not_invented() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            compute(0.01 * len(x))
            return x.T

    class TurnedBack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.T * self.weight

    sample = torch.randn(16, 8)
    graph = trace_layers(nn.Sequential(Slow(8, 8), Turned(), TurnedBack()), sample)
    times = measure_profile(graph, sample, rows=(4, 16), budget=0.05)
    assert all(times.forward(i, 16) > 0 for i in range(3))


@pytest.mark.parametrize("make", [networks.bert, networks.gpt2, networks.recurrent], ids=["bert", "gpt2", "lstm"])
def test_layers_of_other_networks_are_timed_by_themselves(make: object) -> None:
    model, sample, _ = make()  # type: ignore[operator]
    graph = trace_layers(model, sample)
    timer = LayerTimer(graph, model.train(), sample, torch.device("cpu"))
    earlier = timer.run(timer.batch(2), 0.1)
    last = len(graph.layers) - 1
    for chosen in ({last}, set(range(last + 1)), set(range(0, last, 2))):
        forward, backward = timer.extend(earlier, 2, 6, chosen, most=1.0)
        assert len(forward) == len(backward) == last + 1
        assert all(t > 0 for t in forward)


@pytest.mark.parametrize(("most", "passes"), [(60.0, 2), (0.0, 1)])
def test_a_pass_that_takes_long_is_not_repeated(most: float, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample, _ = networks.bert()
    graph = trace_layers(model, sample)
    timer = LayerTimer(graph, model.train(), sample, torch.device("cpu"))
    earlier, runs, one_pass = timer.run(timer.batch(2), 0.1), [], timer._one_pass

    def counted(*arguments: object) -> object:
        runs.append(1)
        return one_pass(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(timer, "_one_pass", counted)
    forward, _ = timer.extend(earlier, 2, 6, set(range(len(graph.layers))), most)
    assert len(runs) == passes and all(t > 0 for t in forward)
