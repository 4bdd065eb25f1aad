"""Predict the cost of a step for every cut of a network: seconds, bytes at a worker's socket, memory.

To the server all workers are alike: it waits for the slowest. `timeline.py` says how the parts of a step overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.errors import PlaceError
from shoal.place._message_bytes import message_bytes
from shoal.place.devices import BUCKET_BYTES, Cluster
from shoal.place.graph import Cut, Layer, LayerGraph
from shoal.place.placement import (
    DATA_PARALLEL,
    ONE_MACHINE,
    PARAMETER_SERVER,
    PLACED,
    SERVER,
    WORKERS,
    Alternative,
    Mode,
    PlacedLayer,
    Sync,
)
from shoal.place.profile import Profile
from shoal.place.timeline import LayerSync, StepTimes, follow, in_buckets
from shoal.utils.tables import size

MICRO_BATCHES = (1, 2, 4, 8)
"""Numbers of micro-batches that are compared."""
SUM_SHARE = 0.5
"""Adding one worker's gradient takes this share of the seconds of an update of the same size."""
SHARDED_GAIN = 1.05
"""Shards must be so many times as fast as an all-reduce, since optimizer state is lost with a worker."""
Ways = Mapping[int, Sync]
"""How the parameters of each layer stay equal, by layer index."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The bytes that one worker sends and receives for some purpose."""

    up: int
    down: int
    peers: bool = False
    """Whether it is among workers; otherwise it is with the server, whose link all of them share."""


class CostModel:
    """Predicts the costs of one network on one cluster."""

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        rows: Sequence[int],
        profile: Profile,
        server_profile: Profile | None = None,
        *,
        state_factor: float = 1.0,
        joins_batch_norm: bool = True,
        sync: Sync | None = None,
    ) -> None:
        """`rows` are those of each worker in a step, and `state_factor` is bytes of optimizer state per byte of a
        parameter. With `joins_batch_norm`, batch norm layers on the workers use the joined batch's statistics. `sync`
        is how all layers on the workers are synchronised; None: the cheapest way for each."""
        self.graph, self.cluster, self.rows = graph, cluster, tuple(rows)
        self.profile, self.server_profile = profile, server_profile if server_profile is not None else profile
        self.state_factor, self.joins_batch_norm, self.sync = state_factor, joins_batch_norm, sync
        for each in (self.profile, self.server_profile):
            each.check(graph)
        self._speeds = [device.speed for device in cluster.workers]
        self._ways: dict[Sync, dict[int, Sync]] = {}
        self._syncs: dict[tuple[int, Sync], LayerSync] = {}
        self._known_times: dict[tuple[int, float], tuple[list[float], list[float]]] = {}
        self._activations: dict[int, list[int]] = {}

    def over_faster_links(self, times: float) -> CostModel:
        """Return the same model with the links' speed multiplied by a factor."""
        link, server_link = self.cluster.link.faster(times), self.cluster.server_link.faster(times)
        cluster = replace(self.cluster, link=link, server_link=server_link)
        return CostModel(
            self.graph, cluster, self.rows, self.profile, self.server_profile,
            state_factor=self.state_factor, joins_batch_norm=self.joins_batch_norm, sync=self.sync,
        )  # fmt: skip

    # --- what is compared -------------------------------------------------------------------------------------------

    def alternatives(self, micro_batches: int | None = None) -> list[Alternative]:
        """Return every way to train the network here, the fastest first; those that do not fit come last."""
        result = [self.one_machine(), *self._fixed_ways(), *self.placed(micro_batches)]
        return sorted(result, key=lambda other: (bool(other.problem), other.seconds, other.bytes_both))

    def placed(self, micro_batches: int | None = None) -> Iterator[Alternative]:
        """Yield the best of each cut, and all layers on the workers with the best way for each."""
        for cut in self.graph.cuts:
            if not cut.problem:
                yield self.placed_at(cut, micro_batches)
        num_layers = len(self.graph.layers)
        for peer in self._peers:
            ways = self.ways(num_layers, peer)
            if len(set(ways.values())) > 1:
                yield self._alternative(PLACED, num_layers, 1, ways, peer)

    def placed_at(self, cut: Cut, micro_batches: int | None = None) -> Alternative:
        """Return a cut with the best way to synchronise each layer before it and the best number of micro-batches."""
        if cut.problem:
            raise PlaceError(f"cut after {cut.name!r}: {cut.problem}")
        options = [
            self._alternative(PLACED, cut.index, count, self.ways(cut.index, peer), peer)
            for count in self._micro_batches(micro_batches)
            for peer in self._peers
        ]
        gain = {"sharded": SHARDED_GAIN}
        return min(options, key=lambda other: (bool(other.problem), other.seconds * gain.get(other.peer_sync, 1.0)))

    def _fixed_ways(self) -> list[Alternative]:
        num_layers = len(self.graph.layers)
        modes: list[tuple[Mode, Sync]] = [(PARAMETER_SERVER, "server")]
        if self.cluster.size > 1:
            modes.append((DATA_PARALLEL, "allreduce"))
        return [self._alternative(mode, num_layers, 1, self._all(num_layers, way)) for mode, way in modes]

    def fastest_of(self, cuts: Sequence[Cut]) -> Alternative:
        """Return the fastest of a few cuts and of the usual modes."""
        return min([*self._fixed_ways(), *map(self.placed_at, cuts)], key=lambda other: other.seconds)

    def _all(self, cut: int, way: Sync) -> dict[int, Sync]:
        return {i: way for i, layer in enumerate(self.graph.layers[:cut]) if layer.trained_bytes}

    def _micro_batches(self, given: int | None) -> list[int]:
        if given is not None:
            return [given]
        if any(layer.channels for layer in self.graph.layers):
            return [1]  # batch norm needs the statistics of all rows
        return [count for count in MICRO_BATCHES if count <= min(self.rows)] or [1]

    # --- how replicated layers stay equal ---------------------------------------------------------------------------

    @property
    def _peers(self) -> tuple[Sync, ...]:
        """The ways among workers: an all-reduce starts during the backward pass, shards are updated sooner."""
        if self.sync is not None:
            return (self.sync,)
        return ("allreduce", "sharded") if self.cluster.size > 1 else ("allreduce",)

    def ways(self, cut: int, peer: Sync = "allreduce") -> dict[int, Sync]:
        """Return for each layer on the workers the way that keeps the links busy for the shortest time."""
        if peer not in self._ways:
            self._ways[peer] = {
                i: min(self._possible(layer, peer), key=partial(self._way_seconds, i))
                for i, layer in enumerate(self.graph.layers)
                if layer.trained_bytes
            }
        return {i: way for i, way in self._ways[peer].items() if i < cut}

    def _possible(self, layer: Layer, peer: Sync) -> list[Sync]:
        if self.sync is not None:
            return ["allreduce"] if self.sync == "factors" and not layer.factors else [self.sync]
        if self.cluster.size == 1:
            return ["server"]
        return ["server", peer, "factors"] if layer.factors else ["server", peer]

    def _way_seconds(self, index: int, way: Sync) -> float:
        sync, count = self._layer_sync(index, way), self.cluster.size
        update = self.profile.update_seconds * self.graph.layers[index].trained_bytes
        factor = {"server": 1 + SUM_SHARE * count, "sharded": 1 / count}.get(way, 1.0)
        delay = sync.hops * self.cluster.link.latency / 2 + sync.overhead
        return sync.up + sync.compute + factor * update + delay

    def transfer(self, layer: Layer, way: Sync) -> Transfer:
        """Return what one worker sends and receives so that a layer's parameters stay equal."""
        others, count = self.cluster.size - 1, self.cluster.size
        if way == "server":
            return Transfer(layer.trained_bytes, layer.trained_bytes)
        if way == "factors":
            most = layer.factor_bytes(max(self.rows)) * others
            return Transfer(most, most, peers=True)
        both = 2 * layer.trained_bytes * others // count
        return Transfer(both, both, peers=True)

    def _factor_seconds(self, index: int) -> float:
        """Return the seconds to multiply the factors of all workers."""
        return self.cluster.crowding * self.profile.backward(index, sum(self.rows)) / 2

    def _statistics(self, cut: int) -> list[Transfer]:
        """Return what batch norm layers on the workers exchange, in the forward and in the backward pass."""
        if not self.joins_batch_norm or self.cluster.size == 1:
            return []
        others = self.cluster.size - 1
        sizes = [
            4 * count for layer in self.graph.layers[:cut] if (c := layer.channels) for count in (2 * c + 1, 2 * c)
        ]
        return [Transfer(others * count, others * count, peers=True) for count in sizes]

    # --- seconds ----------------------------------------------------------------------------------------------------

    def _seconds(self, transfer: Transfer) -> tuple[float, float]:
        """Return how long the links up and down are busy if every worker transfers as much."""
        link, server, count = self.cluster.link, self.cluster.server_link, self.cluster.size
        up, down = link.seconds_up(transfer.up), link.seconds_down(transfer.down)
        if transfer.peers:
            return self.cluster.overhead.both_ways * up, self.cluster.overhead.both_ways * down
        return max(up, server.seconds_up(count * transfer.up)), max(down, server.seconds_down(count * transfer.down))

    def _at_cut(self, cut: int, micro: int = 1) -> Transfer:
        """Return the transfer of one micro-batch at the cut, averaged over workers."""
        where, rows = self.graph.cuts[cut - 1], round(sum(self.rows) / len(self.rows))
        return Transfer(where.bytes_up(rows) // micro, where.bytes_down(rows) // micro)

    def _layer_times(self, profile: Profile, rows: float) -> tuple[list[float], list[float]]:
        """Return the seconds of every layer's forward and backward pass."""
        key = (id(profile), rows)
        if key not in self._known_times:
            layers = range(len(self.graph.layers))
            times = [profile.forward(i, rows) for i in layers], [profile.backward(i, rows) for i in layers]
            self._known_times[key] = times
        return self._known_times[key]

    def _worker_times(self, cut: int, micro: int) -> tuple[float, list[float]]:
        """Return the seconds of a micro-batch's forward pass and each layer's backward pass on the slowest worker."""
        best: tuple[float, float, list[float]] = (-1.0, 0.0, [])
        for device, rows in sorted(set(zip(self._speeds, self.rows, strict=True))):
            factor, (forward, backward) = self.cluster.crowding / device, self._layer_times(self.profile, rows / micro)
            times = factor * sum(forward[:cut]), [factor * t for t in backward[:cut]]
            best = max(best, (times[0] + sum(times[1]), *times))
        return best[1], best[2]

    def _server_time(self, cut: int, micro: int) -> float:
        forward, backward = self._layer_times(self.server_profile, sum(self.rows) / micro)
        return (sum(forward[cut:]) + sum(backward[cut:])) / self.cluster.server.speed

    def _alternative(self, mode: Mode, cut: int, micro: int, ways: Ways, peer: Sync = "allreduce") -> Alternative:
        busy = follow(self._times(cut, micro, ways))
        if self.cluster.cores is not None:  # all processes share these cores
            compute = busy.worker / self.cluster.crowding * self.cluster.size + busy.server
            busy.seconds = max(busy.seconds, compute / self.cluster.cores)
        transfers = self.transfers(cut, ways)
        worker, server = self._memory(cut, micro, ways)
        return Alternative(
            mode=mode, cut=cut, cut_name=self.graph.layers[cut - 1].name if cut < len(self.graph.layers) else "",
            micro_batches=micro, peer_sync=peer, seconds=busy.seconds, worker_seconds=busy.worker,
            network_seconds=max(busy.up, busy.down), server_seconds=busy.server,
            bytes_up=sum(t.up for t in transfers), bytes_down=sum(t.down for t in transfers),
            message_bytes=message_bytes(
                self.graph.layers[:cut], ways, self.graph.cuts[cut - 1] if cut < len(self.graph.layers) else None,
                sum(self.rows) / len(self.rows), micro,
            ),
            worker_memory=worker, server_memory=server, problem=self._too_small(worker, server),
        )  # fmt: skip

    def transfers(self, cut: int, ways: Ways) -> list[Transfer]:
        """Return all that one worker sends and receives in a step."""
        result = [self.transfer(self.graph.layers[i], way) for i, way in ways.items()] + self._statistics(cut)
        return [*result, self._at_cut(cut)] if cut < len(self.graph.layers) else result

    def _times(self, cut: int, micro: int, ways: Ways) -> StepTimes:
        """Return the parts of a step, for `follow`."""
        layers, latency = self.graph.layers, self.cluster.link.latency
        forward, backward = self._worker_times(cut, micro)
        crowding, count, overhead = self.cluster.crowding, self.cluster.size, self.cluster.overhead
        syncs = [self._layer_sync(i, ways[i]) if i in ways else None for i in range(cut)]
        held = {way: sum(layers[i].trained_bytes for i, w in ways.items() if w == way) for way in set(ways.values())}
        through_server = held.pop("server", 0)
        local = sum(held.values()) - held.get("sharded", 0) * (1 - 1 / self.cluster.size)
        server_update = self.server_profile.update_seconds / self.cluster.server.speed
        sent, applied = _count(layers, ways), _count(layers, [i for i, way in ways.items() if way != "server"])
        each, placed = overhead.parameter, cut < len(layers)
        cut_up, cut_down = self._seconds(self._at_cut(cut, micro)) if placed else (0.0, 0.0)
        if micro > 1:  # the next one's tensors go up while gradients come down
            cut_up, cut_down = overhead.both_ways * cut_up, overhead.both_ways * cut_down
        at_end = overhead.step + 2 * count * overhead.message  # for each worker its last message and its next task
        around = (count - 1) * latency / 2 + overhead.exchange
        statistics = [max(self._seconds(t)) + around for t in self._statistics(cut)]
        return StepTimes(
            micro_batches=micro, forward=forward + overhead.message * crowding, backward=tuple(backward),
            syncs=in_buckets(syncs, [layer.trained_bytes for layer in layers[:cut]], BUCKET_BYTES),
            server=self._server_time(cut, micro) + 2 * count * overhead.message if placed else None,
            cut_up=cut_up, cut_down=cut_down, statistics=tuple(statistics),
            worker_update=crowding
            * (local * self.profile.update_seconds + overhead.step + overhead.message + each * (sent + applied)),
            server_update=server_update * sum(layer.trained_bytes for layer in layers[cut:])
            + each * _count(layers, range(cut, len(layers))),
            late_update=server_update * through_server * (1 + SUM_SHARE * count) + at_end
            + each * (sent - applied) * (1 + count),
            parameters_down=self._seconds(Transfer(0, through_server))[1], half_trip=latency / 2,
            shares_cores=self.cluster.cores is not None and self.cluster.cores <= count,
        )  # fmt: skip

    def _layer_sync(self, index: int, way: Sync) -> LayerSync:
        if (index, way) not in self._syncs:
            transfer, count = self.transfer(self.graph.layers[index], way), self.cluster.size
            up, down = self._seconds(transfer)
            hops = {"server": 0, "allreduce": 2 * (count - 1), "sharded": 4, "factors": count - 1}
            share = self.graph.layers[index].trained_bytes / BUCKET_BYTES if way != "factors" else 1.0
            compute = self._factor_seconds(index) if way == "factors" else 0.0
            busy = max(up, down) if transfer.peers else up
            costs = self.cluster.overhead
            overhead = share * self.cluster.crowding * (costs.exchange if transfer.peers else costs.message)
            self._syncs[index, way] = LayerSync(
                way=way, up=busy, hops=share * hops[way], compute=compute, overhead=overhead
            )
        return self._syncs[index, way]

    def one_machine(self) -> Alternative:
        """Return the cost of the whole batch on the best of the devices."""
        layers, rows = self.graph.layers, sum(self.rows)
        weights = sum(layer.trained_bytes for layer in layers)
        overhead = self.cluster.overhead.parameter * _count(layers, range(len(layers)))
        memory, options = self._training_bytes(slice(None), rows, self.state_factor), []
        choices = [(self.profile, device) for device in self.cluster.workers]
        for profile, device in [*choices, (self.server_profile, self.cluster.server)]:
            forward, backward = self._layer_times(profile, rows)
            seconds = (sum(forward) + sum(backward) + profile.update_seconds * weights) / device.speed + overhead
            fits = device.memory is None or memory <= device.memory
            why = "" if fits else _too_small_message("the machine", memory, device.memory or 0)
            options.append((not fits, seconds, why))
        _, seconds, problem = min(options)
        return Alternative(
            mode=ONE_MACHINE, cut=0, cut_name="", micro_batches=1, seconds=seconds, worker_seconds=seconds,
            network_seconds=0.0, server_seconds=0.0, bytes_up=0, bytes_down=0, worker_memory=memory, server_memory=0,
            problem=problem,
        )  # fmt: skip

    # --- memory -----------------------------------------------------------------------------------------------------

    def _training_bytes(self, layers: slice, rows: int, state_factor: float) -> int:
        """Return bytes of weights, gradients, optimizer state (per byte of a parameter) and activations."""
        if rows not in self._activations:
            self._activations[rows] = [layer.activation_bytes(rows) for layer in self.graph.layers]
        total = sum(self._activations[rows][layers])
        for layer in self.graph.layers[layers]:
            total += layer.parameter_bytes + layer.buffer_bytes + round((1 + state_factor) * layer.trained_bytes)
        return total

    def _memory(self, cut: int, micro: int, ways: Ways) -> tuple[int, int]:
        """Return the bytes of the largest worker and of the server."""
        layers, factor = self.graph.layers, self.state_factor
        states = {"server": 0.0, "allreduce": 1.0, "factors": 1.0, "sharded": 1 / self.cluster.size}
        worker = self._training_bytes(slice(0, cut), max(self.rows), 0.0)
        worker += round(sum(factor * states[way] * layers[i].trained_bytes for i, way in ways.items()))
        server = self._training_bytes(slice(cut, None), -(-sum(self.rows) // micro), factor)
        server += round(sum((2 + factor) * layers[i].trained_bytes for i, way in ways.items() if way == "server"))
        if cut < len(layers):
            server += self.graph.cuts[cut - 1].bytes_up(sum(self.rows))
        return worker, server

    def _too_small(self, worker: int, server: int) -> str:
        least = min((d.memory for d in self.cluster.workers if d.memory is not None), default=None)
        if least is not None and worker > least:
            return _too_small_message("a worker", worker, least)
        if self.cluster.server.memory is not None and server > self.cluster.server.memory:
            return _too_small_message("the server", server, self.cluster.server.memory)
        return ""

    # --- a placement's layers ---------------------------------------------------------------------------------------

    def placed_layers(self, chosen: Alternative, ways: Ways) -> tuple[PlacedLayer, ...]:
        """Return each layer with its costs in a step."""
        micro, rows = chosen.micro_batches, sum(self.rows)
        layers = []
        for i, layer in enumerate(self.graph.layers):
            on_worker = i < chosen.cut or chosen.mode == ONE_MACHINE
            way = ways.get(i) if i < chosen.cut else None
            layer_transfer = self.transfer(layer, way) if way is not None else Transfer(0, 0)
            if chosen.mode == ONE_MACHINE or not on_worker:
                layer_profile, count, factor = self.server_profile, rows, 1 / self.cluster.server.speed
            else:
                layer_profile, count, factor = self.profile, max(self.rows), self.cluster.crowding
            layers.append(
                PlacedLayer(
                    name=layer.name, kind=layer.kind, where=WORKERS if on_worker else SERVER, sync=way,
                    parameters=layer.parameters, parameter_bytes=layer.parameter_bytes,
                    output_bytes=layer.output_bytes(1),
                    forward_seconds=factor * micro * layer_profile.forward(i, count / micro),
                    backward_seconds=factor * micro * layer_profile.backward(i, count / micro),
                    bytes_up=layer_transfer.up, bytes_down=layer_transfer.down,
                )
            )  # fmt: skip
        return tuple(layers)

    def ways_of(self, chosen: Alternative) -> dict[int, Sync]:
        """Return how the layers on the workers are synchronised in an alternative of this model."""
        if chosen.mode == PLACED:
            return self.ways(chosen.cut, chosen.peer_sync)
        if chosen.mode == ONE_MACHINE:
            return {}
        return self._all(chosen.cut, "server" if chosen.mode == PARAMETER_SERVER else "allreduce")


def _count(layers: Sequence[Layer], indices: Iterable[int]) -> int:
    """Count the parameters of some of the layers."""
    return sum(len(layers[i].parameters) for i in indices)


def _too_small_message(which: str, needed: int, available: int) -> str:
    return f"{which} needs {size(needed)} and has {size(available)}"
