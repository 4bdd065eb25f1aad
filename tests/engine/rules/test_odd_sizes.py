"""Every operator that has a rule, and many that have none, at sizes that nothing divides: one step of each, alone and
with companions, on the same and on other rows, against the network itself in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.equality import TOLERANCE, distance
from tests.engine.rules.odd_sizes import KINDS, number, sizes
from tests.engine.rules.stacking import stacked_state
from torch import Tensor, nn

from shoal.engine.recipes.program import Program
from shoal.engine.tracing.trace import trace
from shoal.utils.randomness import draw_members

CPU = torch.device("cpu")


def call(model: nn.Module, batch: Any) -> Tensor:
    return number(model(*batch))


def built(name: str, size: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[name].make(size).double().train()


def assert_step(name: str, size: int, members: int, shared: bool, deterministic: bool) -> None:
    models = [built(name, size, seed) for seed in range(members)]
    batches = [KINDS[name].inputs(size, 100 if shared else 100 + seed) for seed in range(members)]
    graph = trace(models[0], call, [batches[0]], twice=False)
    program = Program([graph] * members, device=CPU, stacked_batch=[not shared], deterministic=deterministic)
    state = stacked_state(models, graph)
    generators = [torch.Generator().manual_seed(seed) for seed in range(members)]
    noise = draw_members(program.draws, generators, CPU)
    losses, buffers = program(state, batches[:1] if shared else [torch.stack(batches)], noise.__getitem__)
    grads = torch.autograd.grad(losses.sum(), state[: len(graph.params)], allow_unused=True)
    for seed, (model, x) in enumerate(zip(models, batches, strict=True)):
        torch.manual_seed(seed)
        loss = call(model, [x])
        own = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        where = f"{name}, size {size}, {seed} of {members}, shared rows: {shared}, deterministic: {deterministic}"
        assert distance(losses[seed], loss) <= TOLERANCE, f"{where}: loss"
        scale = max((float(g.abs().max()) for g in own if g is not None), default=0.0)
        for key, grad, wide in zip(graph.params, own, grads, strict=True):
            assert (grad is None) == (wide is None), f"{where}: gradient of {key}"
            if grad is not None and wide is not None:
                far = float((wide[seed] - grad).abs().max())  # one that is zero but for rounding has no size of its own
                assert far <= TOLERANCE * scale, f"{where}: gradient of {key} off by {far}"
        for key, buffer in model.named_buffers():
            assert distance(buffers[key][seed], buffer) <= TOLERANCE, f"{where}: buffer {key}"


def sampled() -> list[tuple[str, int, bool]]:
    """Every kind at one size, on shared and on other rows by turns."""
    return [
        (name, ([s for s in sizes(kind) if s in (3, 5)] or sizes(kind)[-1:])[0], bool(place % 2))
        for place, (name, kind) in enumerate(KINDS.items())
    ]


@pytest.mark.parametrize(("name", "size", "shared"), sampled())
def test_one_step(name: str, size: int, shared: bool) -> None:
    for deterministic in (False, True):
        assert_step(name, size, 3, shared, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, kind in KINDS.items() for size in sizes(kind)])
def test_one_step_at_every_size(name: str, size: int) -> None:
    for members, shared in ((2, False), (7, False), (7, True), (33, False)):
        for deterministic in (False, True):
            assert_step(name, size, members, shared, deterministic)
