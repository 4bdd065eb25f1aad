"""The layers that a worker computes, and how their gradients are sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.place.devices import BUCKET_BYTES
from shoal.place.training.group import WorkerGroup

Push = Callable[[dict[str, Tensor]], None]


class Bucket:
    """Parameters whose gradients are sent together."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.missing = set(names)


def make_buckets(parameters: dict[str, nn.Parameter], names: Sequence[str]) -> list[Bucket]:
    """Make buckets of these parameters, in the order in which the backward pass computes their gradients."""
    buckets: list[list[str]] = [[]]
    size, dtype = 0, None
    for name in reversed(names):
        parameter = parameters[name]
        if buckets[-1] and (size + parameter.nbytes > BUCKET_BYTES or parameter.dtype != dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size, dtype = size + parameter.nbytes, parameter.dtype
    return [Bucket(bucket) for bucket in buckets if bucket]


class GradientSender:
    """Sends gradients as soon as the last backward pass of a batch has computed them."""

    def __init__(self, network: nn.Module, to_server: Sequence[str], summed: Sequence[str], push: Push) -> None:
        self.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._push = push
        self._group: WorkerGroup | None = None
        self._to_server, self._summed = list(to_server), list(summed)
        self._armed = False
        self._pushed: list[Bucket] = []
        self._sums: list[Bucket] = []
        self._waits: list[Callable[[], None]] = []
        for name in [*self._to_server, *self._summed]:
            self.parameters[name].register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def begin(self, group: WorkerGroup | None) -> None:
        """Prepare for the last backward pass of this batch."""
        self._group = group
        self._pushed, self._sums = (make_buckets(self.parameters, names) for names in (self._to_server, self._summed))
        self._waits, self._armed = [], True

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def made(parameter: Tensor) -> None:
            if self._armed:
                for bucket in (*self._pushed, *self._sums):
                    bucket.missing.discard(name)
                self._send(only_whole=True)

        return made

    def _send(self, *, only_whole: bool) -> None:
        """Send buckets whose gradients are complete. Sums start in the same order on every worker."""
        for bucket in [b for b in self._pushed if not (only_whole and b.missing)]:
            self._pushed.remove(bucket)
            self._push({name: self._gradient(name) for name in bucket.names})
        while self._sums and not (only_whole and self._sums[0].missing):
            bucket = self._sums.pop(0)
            if self._group is not None:
                self._waits.append(self._group.begin_sum([self._gradient(name) for name in bucket.names]))

    def _gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None:  # these rows did not use it
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def finish(self) -> dict[str, Tensor]:
        """Send what is left, wait for the sums, and return the summed gradients by name."""
        self._armed = False
        self._send(only_whole=False)
        for wait in self._waits:
            wait()
        return {name: self._gradient(name) for name in self._summed}

    def stop(self) -> None:
        """Drop the batch."""
        self._armed = False
        for parameter in self.parameters.values():
            parameter.grad = None


def _note_gradient(pair: list[Tensor], gradient: Tensor) -> None:
    pair.append(gradient.detach().reshape(-1, gradient.shape[-1]))


class Factors:
    """Sufficient factors of linear layers: their inputs and the gradients of their outputs, whose product is the
    gradient of the weight. If a share has few rows, they are smaller than the gradient."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        """`names` are the parameters that are synchronised this way."""
        modules = dict(network.named_modules())
        self.layers: dict[str, nn.Linear] = {}
        for name in names:
            module = modules.get(name.rpartition(".")[0])
            assert isinstance(module, nn.Linear), f"{name} is not of a linear layer"
            self.layers[name.rpartition(".")[0]] = module
        self._pairs: dict[str, list[list[Tensor]]] = {name: [] for name in self.layers}
        """For each call of a layer: its input, and the gradient of its output once the backward pass has computed
        it."""
        for name, module in self.layers.items():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def computed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                pair = [inputs[0].detach().reshape(-1, inputs[0].shape[-1])]
                self._pairs[name].append(pair)
                output.register_hook(partial(_note_gradient, pair))  # type: ignore[no-untyped-call]

        return computed

    def clear(self) -> None:
        for pairs in self._pairs.values():
            pairs.clear()

    def gather(self, group: WorkerGroup | None, rows: int, most_rows: int) -> dict[str, Tensor]:
        """Return the gradients over all workers. `rows` are those of this worker's share, `most_rows` of the largest
        one."""
        summed: dict[str, Tensor] = {}
        for name, module in self.layers.items():
            pairs = [pair for pair in self._pairs[name] if len(pair) == 2]
            x, g = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
            if group is not None and group.size > 1:
                factors = torch.zeros(
                    most_rows * (len(x) // rows), x.shape[1] + g.shape[1], dtype=x.dtype, device=x.device
                )
                factors[: len(x)] = torch.cat([x, g.to(x.dtype)], 1)
                every = group.gather(factors).flatten(0, 1)
                x, g = every[:, : x.shape[1]], every[:, x.shape[1] :]
            summed[f"{name}.weight"] = (g.mT @ x).to(module.weight.dtype)
            if module.bias is not None:
                summed[f"{name}.bias"] = g.sum(0).to(module.bias.dtype)
        self.clear()
        return summed


class Shards:
    """Parameters that are each updated by one of the workers, which then sends them to the others."""

    def __init__(self, parameters: dict[str, nn.Parameter], names: Sequence[str], group: WorkerGroup) -> None:
        self.group, self.parameters = group, parameters
        self.dtype = functools.reduce(torch.promote_types, (parameters[name].dtype for name in names))
        """The dtype in which all of them are sent; every worker must use the same, even one that owns nothing."""
        self.by_owner: list[list[str]] = [[] for _ in range(group.size)]
        sizes = [0] * group.size
        for name in sorted(names, key=lambda name: (-parameters[name].numel(), name)):
            owner = sizes.index(min(sizes))
            self.by_owner[owner].append(name)
            sizes[owner] += parameters[name].numel()

    @property
    def own(self) -> list[str]:
        """The names of the parameters that this worker updates."""
        return self.by_owner[self.group.rank]

    def reduce(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send gradients to their owners, and return the sums of this worker's own parameters, added in the order of
        workers."""
        outgoing = [self._flat([gradients[name] for name in names]) for names in self.by_owner]
        incoming = self.group.exchange(outgoing, [len(outgoing[self.group.rank])] * self.group.size)
        total = incoming[0].clone()
        for other in incoming[1:]:
            total += other
        return _parts(total, {name: gradients[name] for name in self.own})

    @torch.no_grad()
    def spread(self) -> None:
        """Send this worker's own parameters to the others, and receive theirs."""
        flat_own = self._flat([self.parameters[name].detach() for name in self.own])
        sizes = [sum(self.parameters[name].numel() for name in names) for names in self.by_owner]
        for names, flat in zip(self.by_owner, self.group.exchange([flat_own] * self.group.size, sizes), strict=True):
            for name, value in _parts(flat, {n: self.parameters[n] for n in names}).items():
                self.parameters[name].copy_(value)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.group.device)
        return torch.cat([empty, *(tensor.reshape(-1).to(self.dtype) for tensor in tensors)])


def _parts(flat: Tensor, like: dict[str, Any]) -> dict[str, Tensor]:
    sizes = [tensor.numel() for tensor in like.values()]
    return {
        name: part.view(like[name].shape).to(like[name].dtype)
        for name, part in zip(like, torch.split(flat, sizes) if sizes else (), strict=True)
    }
