"""A tensor of which every part is selected is taken apart once."""

from __future__ import annotations

from typing import Any

import torch
from tests.engine.equality import assert_as_alone
from tests.engine.rules.layers import INPUTS
from tests.engine.rules.test_layers import jobs
from torch import Tensor, nn

from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.rules import _shape
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.preparation.checks import prepare


class Parts(nn.Module):
    """All parts, in an order of their own; some twice; some of another dimension; some that are written to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).unflatten(-1, (3, 4))
        a, c, b = parts[:, 0], parts[:, -1], parts.select(1, 1)
        if self.kind == "twice":
            c = c + parts[:, 0] * 2
        elif self.kind == "two ways":
            c = c + parts[:, :, 0].sum(1, keepdim=True)
        elif self.kind == "written":
            parts[:, 0].mul_(2.0)
        elif self.kind == "some":
            b = a
        out: Tensor = torch.tanh(a) * b + c * c
        return out


def test_every_way_trains_as_alone() -> None:
    for kind in ("all", "twice", "two ways", "written", "some"):
        assert_as_alone(jobs(lambda kind=kind: Parts(kind), INPUTS["rows"], steps=10), tier=None)  # type: ignore[misc]


def test_nothing_is_kept_and_gradients_are_joined_once() -> None:
    job = jobs(lambda: Parts("all"), INPUTS["rows"])[0]
    members, trace_cache = prepare([job], torch.device("cpu")), TraceCache()
    unit = StackedUnit([trace_cache.recipe(member) for member in members], trace_cache)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.long)
    (losses, _), _ = unit.program(8, [True, True])(unit.stack.state, [x, y], lambda _: x)
    assert not _shape._PARTS
    found: set[Any] = set()
    pending: list[Any] = [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [before for before, _ in node.next_functions]
    names = [node.name() for node in found]
    assert "UnbindBackward0" in names and not any("Select" in name for name in names)
