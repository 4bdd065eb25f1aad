"""Choose where to cut a network so that its parts are of similar size, by measured bytes and operations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import SplitError, describe
from shoal.graphs.recording import make_fake
from shoal.graphs.symbolic import Recorded
from shoal.jobs.job import Job
from shoal.split.core.memory import count_bytes
from shoal.split.core.report import optimizer_state
from shoal.split.methods._cuts import candidates, weights_before


@dataclass(frozen=True, slots=True)
class Profile:
    """For each place between two calls, how much of the network comes before it."""

    memory: list[float]
    """Bytes of weights, gradients, optimizer state and activations."""
    operations: list[float]

    def share(self, low: int, high: int) -> float:
        """Return a part's share of memory or its share of operations, whichever is larger."""
        return max((what[high] - what[low]) / what[-1] if what[-1] else 0.0 for what in (self.memory, self.operations))


class _Costing(fx.Interpreter):
    """Runs the calls one by one, and notes the bytes and operations of each."""

    def __init__(self, module: fx.GraphModule, state_factor: float) -> None:
        super().__init__(module)
        self.state_factor = state_factor
        self.bytes: list[float] = []
        self.operations: list[float] = []
        self._weighed: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            out = super().run_node(n)
        weights = 0
        if n.op in ("call_module", "get_attr"):
            target = self.fetch_attr(str(n.target))
            params = list(target.parameters()) if isinstance(target, nn.Module) else [target]
            fresh = [p for p in params if isinstance(p, Tensor) and id(p) not in self._weighed]
            self._weighed |= {id(p) for p in fresh}
            weights = count_bytes(fresh)
        fresh = [] if n.op in ("get_attr", "output") else [x for x in pytree.tree_leaves(out) if not _view(x)]
        self.bytes.append(weights * self.state_factor + count_bytes(fresh))
        self.operations.append(float(counter.get_total_flops()))
        return out


def _view(value: Any) -> bool:
    return isinstance(value, Tensor) and value._base is not None


def profile(recorded: Recorded, job: Job, inputs: Sequence[Any]) -> Profile:
    """Measure the recorded network on a batch like this one."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = make_fake(recorded.model, fake)
    runner = _Costing(fx.GraphModule(model, recorded.nodes[0].graph), _state_factor(job))
    try:
        with warnings.catch_warnings(), fake, torch.no_grad():
            warnings.simplefilter("ignore")
            runner.run(*pytree.tree_map_only(Tensor, fake.from_tensor, tuple(inputs)))
    except Exception as error:
        raise SplitError(
            f"the network's calls cannot be measured ({describe(error)}); name the cuts yourself"
        ) from error
    return Profile([0.0, *accumulate(runner.bytes)], [0.0, *accumulate(runner.operations)])


def _state_factor(job: Job) -> float:
    """Return the bytes that training holds for each byte of a weight: the weight, its gradient and its optimizer
    state."""
    probe = nn.Linear(16, 16, bias=False)
    state = optimizer_state(replace(job, params=None), probe)
    return 2.0 + count_bytes(state) // probe.weight.nbytes


def choose(recorded: Recorded, job: Job, inputs: Sequence[Any], parts: int) -> tuple[list[str], list[float]]:
    """Choose the cuts that make the largest part as small as possible.

    Also returns each part's share of memory or of operations, whichever is larger.

    Raises:
        SplitError: when the network has too few places to cut.
    """
    places = candidates(recorded)
    weights = weights_before(recorded)
    if len({weights[border] for _, border in places}) < parts - 1:
        cut_names = ", ".join(repr(name) for name, _ in places) or "none"
        raise SplitError(f"{parts} parts need {parts - 1} cuts; the network can be cut at: {cut_names}")
    measured = profile(recorded, job, inputs)
    ends = [0, *(border for _, border in places), len(recorded.nodes)]

    @cache
    def best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Divide what comes before `end` into so many parts: the smallest possible share of the largest part, and the
        ends."""
        if not parts:
            return (math.inf, ()) if end else (0.0, ())
        options: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for start in range(end):
            if weights[ends[start]] < weights[ends[end]]:
                worst, taken = best(start, parts - 1)
                options.append((max(worst, measured.share(ends[start], ends[end])), (*taken, end)))
        return min(options)

    worst, taken = best(len(ends) - 1, parts)
    assert math.isfinite(worst)
    borders = [0, *(ends[i] for i in taken)]
    shares = [measured.share(low, high) for low, high in pairwise(borders)]
    return [places[i - 1][0] for i in taken[:-1]], shares
