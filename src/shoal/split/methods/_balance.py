"""Choose where to cut a network so that its parts are of similar size, by measured bytes and operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from shoal.errors import SplitError
from shoal.graphs.calls import Calls, rows_of
from shoal.graphs.parts import Parts
from shoal.jobs.job import Job
from shoal.split.core.memory import count_bytes
from shoal.split.core.report import optimizer_state
from shoal.split.methods._cuts import candidates, weights_before, weights_of


@dataclass(frozen=True, slots=True)
class Profile:
    """For each position between two calls, how much of the network comes before it."""

    memory: list[float]
    """Bytes of weights, gradients, optimizer state and activations."""
    operations: list[float]

    def share(self, low: int, high: int) -> float:
        """Return a part's share of memory or its share of operations, whichever is larger."""
        return max((what[high] - what[low]) / what[-1] if what[-1] else 0.0 for what in (self.memory, self.operations))


def profile(calls: Calls, job: Job, rows: int) -> Profile:
    """Return what the recorded calls hold and compute before each position, for a batch of `rows` rows."""
    factor, counted = _state_factor(job), set[int]()
    memory, operations = [0.0], [0.0]
    for node in calls.nodes:
        fresh = [weight for weight in weights_of(calls, node) if id(weight) not in counted]
        counted |= {id(weight) for weight in fresh}
        num_bytes = count_bytes(fresh) * factor
        if "value" in node.meta and node.op != "get_attr" and node.meta["storage"] not in counted:
            counted.add(node.meta["storage"])
            num_bytes += node.meta["value"].bytes_at(rows)
        memory.append(memory[-1] + num_bytes)
        operations.append(operations[-1] + (node.meta["operations"].at(rows) if "operations" in node.meta else 0))
    return Profile(memory, operations)


def _state_factor(job: Job) -> float:
    """Return the bytes that training holds for each byte of a weight: the weight, its gradient and its optimizer
    state."""
    probe = nn.Linear(16, 16, bias=False)
    state = optimizer_state(replace(job, params=None), probe)
    return 2.0 + count_bytes(state) // probe.weight.nbytes


def choose(recorded: Parts, job: Job, inputs: Sequence[Any], parts: int) -> tuple[list[str], list[float]]:
    """Choose the cuts that make the largest part as small as possible.

    Also returns each part's share of memory or of operations, whichever is larger.

    Raises:
        SplitError: when the network has too few places to cut.
    """
    positions = candidates(recorded)
    weights = weights_before(recorded.calls)
    if len({weights[border] for _, border in positions}) < parts - 1:
        cut_names = ", ".join(repr(name) for name, _ in positions) or "none"
        raise SplitError(f"{parts} parts need {parts - 1} cuts; the network can be cut at: {cut_names}")
    measured = profile(recorded.calls, job, rows_of(tuple(inputs)))
    ends = [0, *(border for _, border in positions), len(recorded.calls.nodes)]

    @cache
    def best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Divide what comes before `end` into so many parts: the smallest possible share of the largest part, and the
        ends."""
        if not parts:
            return (math.inf, ()) if end else (0.0, ())
        options: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for start in range(end):
            if weights[ends[start]] < weights[ends[end]]:
                worst, chosen = best(start, parts - 1)
                options.append((max(worst, measured.share(ends[start], ends[end])), (*chosen, end)))
        return min(options)

    worst, chosen = best(len(ends) - 1, parts)
    assert math.isfinite(worst)
    borders = [0, *(ends[i] for i in chosen)]
    shares = [measured.share(low, high) for low, high in pairwise(borders)]
    return [positions[i - 1][0] for i in chosen[:-1]], shares
