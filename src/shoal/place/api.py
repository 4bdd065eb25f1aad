"""`shoal.place`: decide which layers are computed where."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from shoal.engine.processes.child import compute_in_fork
from shoal.errors import PlaceError
from shoal.graphs.calls import rows_of
from shoal.place.cost import CostModel
from shoal.place.devices import Cluster, Device, rows_for
from shoal.place.explanation import explain
from shoal.place.graph import LayerGraph, trace_layers
from shoal.place.links import Link
from shoal.place.placement import (
    DATA_PARALLEL,
    ONE_MACHINE,
    PARAMETER_SERVER,
    PLACED,
    Alternative,
    Mode,
    Placement,
    Sync,
)
from shoal.place.profile import DEFAULT_SPEED, Profile, estimate_profile, measure_profile
from shoal.utils.torch_flags import torch_flags

STATE_FACTORS = {"none": 0.0, "sgd": 1.0, "adam": 2.0, "adamw": 2.0}
"""Bytes of optimizer state for each byte of a parameter: SGD with momentum, Adam."""
MOST_ALTERNATIVES = 40
"""The most alternatives that a placement stores."""
MOST_PER_CORE = 2
"""While a worker's layers are timed, at most so many processes compute on each core; more slow them down no further."""
MODES = (PLACED, PARAMETER_SERVER, DATA_PARALLEL, ONE_MACHINE)
SYNCS: tuple[Sync, ...] = ("server", "allreduce", "sharded", "factors")
ProfileLike = Profile | Placement | str | os.PathLike[str]


def place(
    model: nn.Module | LayerGraph,
    sample: Any,
    workers: int | Sequence[float] = 4,
    link: str | Link = "1Gbit",
    *,
    batch_size: int | None = None,
    server_link: str | Link | None = None,
    cut: int | str | None = None,
    mode: Mode | None = None,
    micro_batches: int | None = None,
    sync: Sync | None = None,
    memory: int | str | None = None,
    server_memory: int | str | None = None,
    server_speed: float = 1.0,
    cores: int | None = None,
    optimizer: str | float = "sgd",
    batch_norm: Literal["joined", "own"] = "joined",
    device: str | torch.device = "cpu",
    measure: bool | None = None,
    profile: ProfileLike | None = None,
    server_profile: ProfileLike | None = None,
    speed: float = DEFAULT_SPEED,
) -> Placement:
    """Decide which layers of a network run on the workers and which on the server, for the shortest step.

    Nothing is trained, and no other process is needed: layers are timed here, or estimated.

    Args:
        model: The network, or its layers as `trace_layers` lists them. It is not changed. On the meta device it is not
            timed.
        sample: A sample input: a tensor, a tuple of arguments or a dict of them; rows first.
        workers: The number of workers, or the speed of each relative to the profiled device: [1, 1, 0.5].
        link: The link of each worker: "1Gbit", "100Mbit 5ms", or a measured Link.
        batch_size: Rows of one worker in a step; None: those of the sample.
        server_link: The link that all workers share on their way to the server; None: the same as a worker's.
        cut: The last layer on the workers, or the number of layers there; None: the best.
        mode: "placed", "parameter server", "data parallel" or "one machine"; None: the fastest.
        micro_batches: The number of parts in which a worker's rows are computed; None: the best of 1, 2, 4 and 8, or 1
            if the network has batch norm.
        sync: How the workers' layers are synchronised: "server", "allreduce", "sharded", "factors" (linear layers
            only); None: the cheapest way for each.
        memory: The memory limit of each worker: bytes, or a size such as "8GB"; None: no limit.
        server_memory: The memory limit of the server.
        server_speed: The speed of the server relative to the profiled device. If that is a GPU and this is 1, the
            server is timed too, on the CPU, since it computes there.
        cores: If all processes are on one machine, the number of cores that they share.
        optimizer: "sgd" (with momentum), "adam", "none", or bytes of its state per byte of a parameter.
        batch_norm: Statistics on the workers: "joined", over all rows, or "own".
        device: Where the layers are timed.
        measure: Whether to time the layers; None: unless the network is on the meta device.
        profile: Earlier times: a Profile, a Placement, or a file with them; if the file does not exist, the times are
            saved to it.
        server_profile: Times of the server, if it has another kind of device.
        speed: Operations per second of a device that is not timed.

    Raises:
        PlaceError: If the network cannot be traced, or no placement fits the devices.
    """
    if batch_norm not in ("joined", "own"):
        raise PlaceError(f"batch_norm is {batch_norm!r}; use 'joined' or 'own'")
    if sync not in (None, *SYNCS):
        raise PlaceError(f"sync is {sync!r}; use {', '.join(repr(s) for s in SYNCS)}, or None for the cheapest")
    _check_mode(mode)
    cluster = _cluster(workers, link, server_link, server_speed, memory, server_memory, cores)
    graph = model if isinstance(model, LayerGraph) else trace_layers(model, sample)
    _check_trains(graph)
    rows = _rows(batch_size, sample, cluster)
    make_profile = partial(_profile, graph, sample, rows, measure, speed)
    worker_profile, server = _profiles(profile, server_profile, make_profile, cluster, device)
    costs = CostModel(
        graph, cluster, rows, worker_profile, server,
        state_factor=_state_factor(optimizer), joins_batch_norm=batch_norm == "joined", sync=sync,
    )  # fmt: skip
    return decide(costs, cut=cut, mode=mode, micro_batches=micro_batches)


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise PlaceError(f"mode is {mode!r}; use {', '.join(repr(m) for m in MODES)}, or None for the fastest")


def decide(
    costs: CostModel, *, cut: int | str | None = None, mode: Mode | None = None, micro_batches: int | None = None
) -> Placement:
    """Return the fastest placement of a cost model, or the best one with this cut or of this mode."""
    _check_mode(mode)
    _check_micro_batches(costs, micro_batches)
    all_alternatives = costs.alternatives(micro_batches)
    chosen = _choose(costs, all_alternatives, cut, mode, micro_batches)
    saved = [other for i, other in enumerate(all_alternatives) if i < MOST_ALTERNATIVES or other.mode != PLACED]
    cluster = costs.cluster
    return Placement(
        mode=chosen.mode,
        cut=chosen.cut,
        cut_name=chosen.cut_name,
        layers=costs.placed_layers(chosen, costs.ways_of(chosen)),
        workers=cluster.size,
        batch_size=round(sum(costs.rows) / cluster.size),
        rows=costs.rows,
        micro_batches=chosen.micro_batches,
        link=cluster.link,
        server_link=cluster.server_link,
        predicted=chosen,
        batch_norm="joined" if costs.joins_batch_norm else "own",
        alternatives=tuple(saved),
        explanation=explain(costs, chosen, all_alternatives),
        profile={
            "device": costs.profile.device,
            "measured": costs.profile.measured,
            "cores": cluster.cores,
            "worker": costs.profile.to_dict(),
            "server": costs.server_profile.to_dict() if costs.server_profile is not costs.profile else None,
        },
    )


def _choose(
    costs: CostModel,
    all_alternatives: Sequence[Alternative],
    cut: int | str | None,
    mode: Mode | None,
    micro: int | None,
) -> Alternative:
    if cut is not None:
        if mode not in (None, PLACED):
            raise PlaceError(f"cut is {cut!r} and mode {mode!r}, which has no cut; leave one of them out")
        return _alternative_at(costs, cut, micro)
    options = [other for other in all_alternatives if mode is None or other.mode == mode]
    if not options and mode == DATA_PARALLEL:
        raise PlaceError(f"mode is {mode!r} with one worker; use 2 workers or more, or another mode")
    if not options:
        raise PlaceError(f"mode is {mode!r}, but {_no_cut(costs.graph)}")
    if options[0].problem:
        least = min(options, key=lambda other: other.worker_memory)
        raise PlaceError(
            f"no placement fits: with {least.describe()}, which needs the least memory, {least.problem}; "
            "use more memory or a smaller batch"
        )
    return options[0]


def _alternative_at(costs: CostModel, cut: int | str, micro: int | None) -> Alternative:
    graph = costs.graph
    if isinstance(cut, str):
        where = graph.cut_named(cut)
    elif isinstance(cut, bool) or not isinstance(cut, int) or not 1 <= cut < len(graph.layers):
        raise PlaceError(
            f"cut is {cut!r}; the network has {len(graph.layers)} layers: use 1 to {len(graph.layers) - 1}"
        )
    else:
        where = graph.cuts[cut - 1]
    chosen = costs.placed_at(where, micro)
    if chosen.problem:
        raise PlaceError(f"the cut after {where.name!r} does not fit: {chosen.problem}; use another cut or more memory")
    return chosen


def _no_cut(graph: LayerGraph) -> str:
    problem = next((cut.problem for cut in graph.cuts if cut.problem), "it has a single layer")
    return f"the network cannot be cut: {problem}"


def _cluster(
    workers: int | Sequence[float],
    link: str | Link,
    server_link: str | Link | None,
    server_speed: float,
    memory: int | str | None,
    server_memory: int | str | None,
    cores: int | None,
) -> Cluster:
    from shoal.settings import parse_bytes

    try:
        if isinstance(workers, (bool, str)):
            raise TypeError
        speeds = [1.0] * workers if isinstance(workers, int) else [float(speed) for speed in workers]
        if not speeds:
            raise ValueError
    except (TypeError, ValueError):
        line = f"workers is {workers!r}; use 1 or more, or the speed of each, such as [1, 1, 0.5]"
        raise PlaceError(line) from None
    limit = parse_bytes(memory) if memory is not None else None
    worker_link = Link.parse(link)
    return Cluster(
        workers=tuple(Device(speed, limit) for speed in speeds),
        server=Device(server_speed, parse_bytes(server_memory) if server_memory is not None else None),
        link=worker_link,
        server_link=Link.parse(server_link) if server_link is not None else worker_link,
        cores=cores,
    )


def _rows(batch_size: int | None, sample: Any, cluster: Cluster) -> tuple[int, ...]:
    if batch_size is not None and not _is_count(batch_size):
        raise PlaceError(f"batch_size is {batch_size!r}; use the rows of one worker in a step, 1 or more")
    return rows_for((batch_size if batch_size is not None else rows_of(sample)) * cluster.size, cluster)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_micro_batches(costs: CostModel, count: int | None) -> None:
    if count is None:
        return
    if not _is_count(count):
        raise PlaceError(f"micro_batches is {count!r}; use 1 or more, or None for the best")
    if count > min(costs.rows):
        raise PlaceError(f"micro_batches is {count}, but a worker has {min(costs.rows)} rows; use no more than those")
    if count > 1 and any(layer.channels for layer in costs.graph.layers):
        raise PlaceError(
            f"micro_batches is {count}, but the network has batch norm, whose statistics are of all rows; use 1 or None"
        )


def _check_trains(graph: LayerGraph) -> None:
    if not any(value.has_gradient for value in graph.outputs):
        raise PlaceError(
            "no output of the network has a gradient, so it cannot be trained; return numbers such as logits, "
            "and leave parameters trainable"
        )


def _profiles(
    profile: ProfileLike | None,
    server_profile: ProfileLike | None,
    make_profile: Callable[..., Profile],
    cluster: Cluster,
    device: str | torch.device,
) -> tuple[Profile, Profile | None]:
    """Return the times of a worker, and those of the server if they differ: as given, or timed here.

    Args:
        make_profile: `_profile` of this network; called with device, threads and the number of busy processes.
    """
    worker, server = _given_profiles(profile)
    if worker is None:
        threads = None if cluster.cores is None else 1  # workers that share a CPU have a thread each
        worker = make_profile(device, threads)
        if worker.measured and cluster.cores is not None and cluster.size > 1:
            busy_processes = min(cluster.size, MOST_PER_CORE * cluster.cores) - 1
            worker, server = make_profile(device, threads, busy_processes), worker
        on_gpu = worker.measured and worker.device != "cpu"
        if on_gpu and cluster.server.speed == 1.0 and server_profile is None:
            server = make_profile("cpu")
        if isinstance(profile, str | os.PathLike):
            _save(profile, worker, server)
    if server_profile is not None:
        server = _given_profiles(server_profile, must_exist=True)[0]
    return worker, server


def _given_profiles(profile: ProfileLike | None, *, must_exist: bool = False) -> tuple[Profile | None, Profile | None]:
    """Return the given times of a worker, and those of the server if it has its own; None if they are not known.

    Args:
        must_exist: Whether a file that does not exist is an error.
    """
    if profile is None or isinstance(profile, Profile):
        return profile, None
    if isinstance(profile, Placement):
        server = profile.profile["server"]
        return Profile.from_dict(profile.profile["worker"]), None if server is None else Profile.from_dict(server)
    if not isinstance(profile, str | os.PathLike):
        raise PlaceError(f"profile is a {type(profile).__name__}; pass a Profile, a Placement, or a file with them")
    if not must_exist and not os.path.exists(profile):
        return None, None
    server_file = _server_path(profile)
    return Profile.load(profile), Profile.load(server_file) if os.path.exists(server_file) else None


def _server_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the file of the server's times, next to that of a worker's."""
    return f"{os.path.splitext(path)[0]}.server.json"


def _save(path: str | os.PathLike[str], worker: Profile, server: Profile | None) -> None:
    try:
        worker.save(path)
        if server is not None:
            server.save(_server_path(path))
    except OSError as error:
        raise PlaceError(f"profile is {str(path)!r}, which cannot be written ({error})") from None


def _profile(
    graph: LayerGraph,
    sample: Any,
    rows: Sequence[int],
    measure: bool | None,
    speed: float,
    device: str | torch.device,
    threads: int | None = None,
    busy_processes: int = 0,
) -> Profile:
    """Time the layers at a worker's rows and at those of all workers, or estimate their times.

    Args:
        threads: Torch's threads on a CPU; None: those in use.
        busy_processes: See `measure_profile`.
    """
    if measure is None:
        measure = not any(p.is_meta for p in graph.model.parameters())
    if not measure:
        if not isinstance(speed, int | float) or not speed > 0:
            raise PlaceError(f"speed is {speed!r}; give operations a second, such as 1e12")
        return estimate_profile(graph, operations_per_second=speed)
    from shoal.settings import pick_device

    counts = max(2, min(rows) // 4), max(2, *rows), max(2, sum(rows))  # batch norm needs two rows
    chosen = pick_device(device)
    with torch_flags(torch.device("cpu"), threads):
        profile: Profile = compute_in_fork(
            partial(measure_profile, graph, sample, rows=counts, device=chosen, busy_processes=busy_processes)
        )
    return profile


def _state_factor(optimizer: str | float) -> float:
    if isinstance(optimizer, str) and optimizer.lower() in STATE_FACTORS:
        return STATE_FACTORS[optimizer.lower()]
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool) and optimizer >= 0:
        return float(optimizer)
    raise PlaceError(
        f"optimizer is {optimizer!r}; use {', '.join(STATE_FACTORS)}, or bytes for each byte of a parameter"
    )
