"""The cost model against arithmetic by hand, and what it prefers where."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.place.networks import chain
from torch import nn

from shoal.place.cost import CostModel, Transfer
from shoal.place.devices import Cluster, Device, Overhead, rows_for
from shoal.place.explanation import pays_below
from shoal.place.graph import LayerGraph, trace_layers
from shoal.place.links import Link
from shoal.place.profile import LayerTimes, Profile
from shoal.place.timeline import LayerSync, StepTimes, follow, in_buckets

MBIT = 1e6


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    """Few parameters and much compute first, then many parameters and little compute."""
    layers = [nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 1000)]
    return trace_layers(nn.Sequential(*layers), torch.randn(4, 64))


def profile(graph: LayerGraph, seconds: float = 0.001, update: float = 0.0) -> Profile:
    """Every layer takes so long for each row, and twice that backwards."""
    times = tuple(LayerTimes(layer.name, (seconds,), (2 * seconds,)) for layer in graph.layers)
    return Profile(device="made up", measured=False, rows=(1,), layers=times, update_seconds=update)


def cluster(workers: int = 4, rate: float = 100 * MBIT, server: float | None = None, **more: Any) -> Cluster:
    link = Link(rate, rate, more.pop("latency", 0.0))
    return Cluster(
        workers=(Device(memory=more.pop("memory", None)),) * workers,
        server=Device(memory=more.pop("server_memory", None)),
        link=link,
        server_link=Link(server, server) if server is not None else link,
        overhead=more.pop("overhead", Overhead(message=0.0, exchange=0.0, step=0.0, parameter=0.0, both_ways=1.0)),
        **more,
    )


def test_one_cut_by_hand(graph: LayerGraph) -> None:
    """worker + network + server, as they are added up without pipelining."""
    model = CostModel(graph, cluster(), [4] * 4, profile(graph), sync="server")
    made = model.placed_at(graph.cuts[1], 1)
    front = 4 * (64 * 8 + 8)  # bytes of the first layer
    at_cut = 4 * 8 * 4
    assert (made.bytes_up, made.bytes_down) == (front + at_cut, front + at_cut)
    worker = 4 * 2 * 0.003
    server = 16 * 3 * 0.003
    network = 4 * (front + at_cut) * 8 / (100 * MBIT)
    assert made.worker_seconds == pytest.approx(worker)
    assert made.server_seconds == pytest.approx(server)
    assert made.network_seconds == pytest.approx(network)
    overlapped = 8 * front / (100 * MBIT)  # nothing is computed after the first layer's gradient
    assert made.seconds == pytest.approx(worker + server + 2 * network)
    assert overlapped < network


def test_the_servers_link_is_shared_by_all_workers(graph: LayerGraph) -> None:
    narrow = CostModel(graph, cluster(), [4] * 4, profile(graph), sync="server").placed_at(graph.cuts[1], 1)
    wide = CostModel(graph, cluster(server=400 * MBIT), [4] * 4, profile(graph), sync="server").placed_at(
        graph.cuts[1], 1
    )
    assert narrow.network_seconds == pytest.approx(4 * wide.network_seconds)
    assert narrow.bytes_both == wide.bytes_both


@pytest.mark.parametrize(
    ("way", "moved"),
    [("server", 100.0), ("allreduce", 150.0), ("sharded", 150.0), ("factors", None)],
)
def test_ways_to_synchronise(way: Any, moved: float | None) -> None:
    graph = trace_layers(chain(30, 20), torch.randn(2, 30))
    model = CostModel(graph, cluster(), [2] * 4, profile(graph))
    (layer,) = graph.layers
    transfer = model.transfer(layer, way)
    expected = 3 * 2 * (30 + 20) * 4 if moved is None else int(layer.trained_bytes * moved / 100)
    assert transfer == Transfer(expected, expected, peers=way != "server")


def test_each_layer_gets_the_cheapest_way(graph: LayerGraph) -> None:
    through_server = CostModel(graph, cluster(server=10_000 * MBIT), [4] * 4, profile(graph, 0.0))
    assert through_server.ways(5)[0] == "server"  # 1 P against 1.5 P
    shared = CostModel(graph, cluster(), [4] * 4, profile(graph, 0.0))
    assert shared.ways(5) == {0: "allreduce", 2: "allreduce", 4: "factors"} or shared.ways(5)[4] == "factors"
    large = CostModel(graph, cluster(), [4000] * 4, profile(graph, 0.0))
    assert large.ways(5)[4] == "allreduce"
    two = CostModel(graph, cluster(workers=1), [4], profile(graph, 0.0))
    assert set(two.ways(5).values()) == {"server"}


def test_micro_batches_overlap_compute_and_traffic(graph: LayerGraph) -> None:
    model = CostModel(graph, cluster(rate=1 * MBIT), [64] * 4, profile(graph, 1e-4))
    one, many = (model.placed_at(graph.cuts[1], count) for count in (1, 8))
    assert many.seconds < one.seconds
    assert many.seconds >= max(many.worker_seconds, many.network_seconds, many.server_seconds) - 1e-9
    assert many.bytes_both == one.bytes_both


def test_batch_norm_keeps_the_batch_whole_and_exchanges_statistics() -> None:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)]
    graph = trace_layers(nn.Sequential(*layers), torch.randn(4, 8))
    made = CostModel(graph, cluster(), [8] * 4, profile(graph), sync="server").placed_at(graph.cuts[2])
    apart = CostModel(graph, cluster(), [8] * 4, profile(graph), sync="server", joins_batch_norm=False)
    assert made.micro_batches == 1
    assert made.bytes_up - apart.placed_at(graph.cuts[2]).bytes_up == 3 * 4 * (2 * 16 + 1 + 2 * 16)


def test_one_machine_where_the_link_is_slow_and_not_where_it_is_fast(graph: LayerGraph) -> None:
    slow = CostModel(graph, cluster(rate=0.1 * MBIT), [4] * 4, profile(graph)).alternatives()[0]
    fast = CostModel(graph, cluster(rate=1e12), [4] * 4, profile(graph)).alternatives()[0]
    assert slow.mode == "one machine" and fast.mode != "one machine"
    assert fast.seconds < slow.seconds


def test_a_link_in_both_directions_at_once_is_slower(graph: LayerGraph) -> None:
    """An exchange among workers sends and receives at once, and so do several micro-batches; one goes up, then down."""
    overhead = Overhead(message=0.0, exchange=0.0, step=0.0, parameter=0.0, both_ways=1.5)
    ideal, real = (
        CostModel(graph, cluster(**more), [4] * 4, profile(graph, 0.0)) for more in ({}, {"overhead": overhead})
    )
    data_parallel = [next(a for a in m.alternatives() if a.mode == "data parallel") for m in (ideal, real)]
    assert data_parallel[1].seconds == pytest.approx(1.5 * data_parallel[0].seconds)
    assert data_parallel[1].bytes_both == data_parallel[0].bytes_both
    server = [next(a for a in m.alternatives() if a.mode == "parameter server") for m in (ideal, real)]
    assert server[1].seconds == pytest.approx(server[0].seconds)
    ideal, real = (
        CostModel(graph, cluster(**more), [4] * 4, profile(graph, 0.0), sync="server")
        for more in ({}, {"overhead": overhead})
    )
    assert real.placed_at(graph.cuts[1], 1).seconds == pytest.approx(ideal.placed_at(graph.cuts[1], 1).seconds)
    assert real.placed_at(graph.cuts[1], 4).seconds > ideal.placed_at(graph.cuts[1], 4).seconds


def test_one_machine_spends_time_on_each_parameter(graph: LayerGraph) -> None:
    overhead = Overhead(message=0.0, exchange=0.0, step=0.0, parameter=0.01)
    ideal, real = (CostModel(graph, cluster(**more), [4] * 4, profile(graph)) for more in ({}, {"overhead": overhead}))
    assert real.one_machine().seconds == pytest.approx(ideal.one_machine().seconds + 6 * 0.01)


def test_shared_cores_take_turns(graph: LayerGraph) -> None:
    alone = CostModel(graph, cluster(rate=1e12), [4] * 4, profile(graph))
    shared = CostModel(graph, cluster(rate=1e12, cores=2), [4] * 4, profile(graph))
    assert shared.placed_at(graph.cuts[1], 1).worker_seconds == pytest.approx(
        2 * alone.placed_at(graph.cuts[1], 1).worker_seconds
    )
    total = 16 * 5 * 0.003
    assert all(other.seconds >= total / 2 - 1e-9 for other in shared.alternatives() if other.mode != "one machine")


def test_a_slow_worker_gets_fewer_rows() -> None:
    uneven = Cluster(
        workers=(Device(1.0), Device(0.5), Device(0.5)),
        server=Device(),
        link=Link(1e9, 1e9),
        server_link=Link(1e9, 1e9),
    )
    assert rows_for(16, uneven) == (8, 4, 4)
    assert sum(rows_for(17, uneven)) == 17
    graph = trace_layers(chain(6, 5, 4), torch.randn(2, 6))
    even = CostModel(graph, uneven, [6, 5, 5], profile(graph)).placed_at(graph.cuts[0], 1)
    fair = CostModel(graph, uneven, [8, 4, 4], profile(graph)).placed_at(graph.cuts[0], 1)
    assert fair.worker_seconds < even.worker_seconds


def test_latency_counts_for_each_message(graph: LayerGraph) -> None:
    near = CostModel(graph, cluster(), [4] * 4, profile(graph), sync="server").placed_at(graph.cuts[1], 1)
    far = CostModel(graph, cluster(latency=0.1), [4] * 4, profile(graph), sync="server").placed_at(graph.cuts[1], 1)
    assert far.seconds - near.seconds == pytest.approx(0.2)  # there and back at the cut, and for the update


def test_memory_limits_take_cuts_out(graph: LayerGraph) -> None:
    free = CostModel(graph, cluster(), [4] * 4, profile(graph))
    small, whole = free.placed_at(graph.cuts[1]), free.one_machine()
    assert small.worker_memory < small.server_memory < whole.worker_memory + small.worker_memory
    limit = small.worker_memory + 1000
    tight = CostModel(graph, cluster(memory=limit), [4] * 4, profile(graph))
    usable = [other for other in tight.alternatives() if not other.problem and other.mode != "one machine"]
    assert usable and all(other.worker_memory <= limit for other in usable)
    assert all("a worker needs" in other.problem for other in tight.alternatives() if other.mode == "data parallel")


def test_messages_take_time_at_the_server(graph: LayerGraph) -> None:
    free = cluster()
    busy = replace(free, overhead=Overhead(message=0.01, exchange=0.0, step=0.5, parameter=0.0))
    one, other = (
        CostModel(graph, c, [4] * 4, profile(graph), sync="server").placed_at(graph.cuts[1], 1) for c in (free, busy)
    )
    assert other.server_seconds - one.server_seconds == pytest.approx(4 * 4 * 0.01 + 0.5)  # four for each worker
    assert other.seconds > one.seconds + 2 * 0.5


def test_pays_below(graph: LayerGraph) -> None:
    behind = 4 * (8 * 1000 + 1000 + 1000 * 1000 + 1000)
    assert pays_below(graph, graph.cuts[1]) == 2 * behind // (2 * 8 * 4)


def test_a_step_of_one_micro_batch_is_a_sum() -> None:
    step = StepTimes(
        micro_batches=1, forward=1.0, backward=(0.5, 1.5), syncs=(LayerSync(way="server", up=0.25), None), server=3.0,
        cut_up=0.5, cut_down=0.25, late_update=0.1, parameters_down=0.2, half_trip=0.01,
    )  # fmt: skip
    assert follow(step).seconds == pytest.approx(1 + 0.5 + 3 + 0.25 + 2 + 0.25 + 0.1 + 0.2 + 4 * 0.01)


def test_gradients_leave_while_the_backward_pass_runs() -> None:
    step = StepTimes(
        micro_batches=1, forward=1.0, backward=(1.0, 1.0), half_trip=0.0,
        syncs=(LayerSync(way="allreduce", up=0.5), LayerSync(way="allreduce", up=0.5)),
    )  # fmt: skip
    assert follow(step).seconds == pytest.approx(3.5)  # the last layer's are there when the first one's are made
    late = replace(step, syncs=tuple(LayerSync(way="sharded", up=0.5) for _ in range(2)))
    assert follow(late).seconds == pytest.approx(4.0)


def test_many_micro_batches_are_bound_by_the_slowest_resource() -> None:
    step = StepTimes(
        micro_batches=100, forward=0.01, backward=(0.01,), syncs=(None,), server=0.05, cut_up=0.02, cut_down=0.02
    )
    assert follow(step).seconds == pytest.approx(100 * 0.05, rel=0.03)


def test_gradients_wait_for_the_others_of_their_bucket() -> None:
    def sent(num_bytes: list[int], ways: str = "aaa") -> list[float | None]:
        names: dict[str, Any] = {"a": "allreduce", "s": "server", "f": "factors"}
        syncs = [LayerSync(way=names[way], up=float(size)) for way, size in zip(ways, num_bytes, strict=True)]
        return [sync.up if sync is not None else None for sync in in_buckets(syncs, num_bytes, 10)]

    assert sent([2, 3, 4]) == [9.0, None, None]  # one message, after the backward pass of the first layer
    assert sent([2, 30, 4]) == [2.0, 30.0, 4.0]
    assert sent([7, 6, 4]) == [7.0, 10.0, None]
    assert sent([2, 3, 4], "asa") == [6.0, 3.0, None]  # each way has buckets of its own
    assert sent([2, 3, 4], "aff") == [2.0, 3.0, 4.0]
    assert in_buckets([None, LayerSync(way="server", up=1.0)], [0, 4], 10)[0] is None


FREE = Overhead(message=0.0, exchange=0.0, step=0.0, parameter=0.0, both_ways=1.0)


def test_small_gradients_do_not_overlap_with_the_backward_pass() -> None:
    """All gradients of this network fit into one bucket, which leaves when the last of them is made."""
    graph = trace_layers(chain(20, 40, 40, 5), torch.randn(4, 20))
    model = CostModel(graph, cluster(rate=1 * MBIT, overhead=FREE), [4] * 4, profile(graph), sync="allreduce")
    made = next(other for other in model.alternatives() if other.mode == "data parallel")
    assert made.seconds == pytest.approx(made.worker_seconds + made.network_seconds)


def test_shards_must_be_clearly_faster_since_a_lost_worker_takes_their_state_along() -> None:
    graph = trace_layers(chain(20, 40, 40, 5), torch.randn(4, 20))

    def chosen(update: float) -> Any:
        model = CostModel(graph, cluster(overhead=FREE), [4] * 4, profile(graph, 0.001, update))
        return model.placed_at(graph.cuts[2]).peer_sync

    assert chosen(1e-7) == "allreduce"  # 0.5 % slower
    assert chosen(1e-5) == "sharded"  # 32 % faster
