"""Memory: what a pack will take, what there is, and how many rows of a recipe fit.

The analytic part is exact for tensors (see `liveness`). Around it lie the allocator's holes on a CPU, a second copy of
the state while a captured step warms up and the libraries' workspaces on a GPU. Where a peak of the same recipe was
measured before, the difference is carried over: scaled from one point, as a line through two or more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.data.source import TensorSource, parts
from shoal.engine.members.member import Member
from shoal.engine.planning import perf_cache
from shoal.engine.planning.liveness import (
    Held,
    average_bytes,
    model_bytes,
    nbytes,
    optimizer_bytes,
    solo_step,
    stacked_step,
)
from shoal.engine.planning.planner import LEAST, Curve
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.tracing.trace import Trace

SHARE = 0.9
"""The part of what is free that is used unless a budget is given."""
PIECE = 32 << 20
"""Bytes from which the C library maps a tensor by itself, and gives it back when it is freed."""
HOLES, PIECE_HOLES = 0.23, 0.42
"""What the heap keeps on top of a step's live bytes, and on top of those in smaller tensors; see benchmarks."""
STREAMS = 16
"""Branches of a captured graph at the most."""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_analytic: dict[tuple[str, str], tuple[Curve, Curve]] = {}


def footprint(
    recipe: Recipe, tier: str = "stacked", *, exact: bool = True, compiled: bool = False
) -> tuple[Curve, Curve]:
    """(state, working) bytes over rows, with what was learned put in. `exact=False`: by rule of thumb, at once."""
    key = perf_cache.digest(recipe)
    if (key, tier) not in _analytic:
        if not exact:
            return Curve.line(0.0, float(rough(recipe))), Curve(((1, 0.0),))
        try:
            _analytic[key, tier] = analytic(recipe, tier)
        except Exception:  # an operator that knows no fake tensors: a prediction is not worth a run
            _analytic[key, tier] = Curve.line(0.0, float(rough(recipe))), Curve(((1, 0.0),))
    state, working = _analytic[key, tier]
    known = perf_cache.lookup(key)
    seen = known.curve("bytes", tier + perf_cache.COMPILED) if compiled else None
    return state, corrected(state, working, seen or known.curve("bytes", tier))


class StepBytes(NamedTuple):
    """What one member's memory is made of."""

    weights: int
    gradients: int
    optimizer: int
    """Its state, and the average of the weights where the job has one."""
    activations: int
    """Of its largest batch, all of them held at once."""


def step_bytes(member: Member, recipe: Recipe | None) -> StepBytes:
    """One member's memory by rule of thumb, without running anything.

    Without a recipe (its step is not traced) activations are not known, and the optimizer is taken to have two numbers
    for each weight.
    """
    gradients = sum(nbytes(p) for p in member.model.parameters() if p.requires_grad and not is_lazy(p))
    if recipe is None:
        return StepBytes(model_bytes(member), gradients, 2 * gradients + average_bytes(member), 0)
    activations = activation_bytes(recipe.steps[max(recipe.steps)])
    return StepBytes(model_bytes(member), gradients, optimizer_bytes(recipe) + average_bytes(member), activations)


def rough(recipe: Recipe) -> int:
    """One member by rule of thumb, with two numbers to spare for each weight."""
    parts = step_bytes(recipe.member, recipe)
    return sum(parts) + 2 * parts.gradients


def activation_bytes(graph: Trace) -> int:
    """All that a step computes and that is no view of something else: what backward may need at most."""
    total = 0
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or any(r.alias_info is not None for r in schema.returns):
            continue
        total += sum(nbytes(v) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    return total


def corrected(state: Curve, working: Curve, seen: Curve | None) -> Curve:
    """Working bytes such that the sum goes through what was measured. One measured point scales all of them; between
    several the difference is interpolated, and beyond them it stays the same, since small packs leave larger holes."""
    if seen is None:
        return working
    pairs = [(rows, value, state.at(rows) + working.at(rows)) for rows, value in seen.points if rows]
    if not pairs:
        return working
    if len(pairs) == 1:
        _, value, said = pairs[0]
        ratio = value / said if said else 1.0
        points = [(rows, ratio * (state.at(rows) + extra) - state.at(rows)) for rows, extra in working.points]
    else:
        rest = [(rows, value - said) for rows, value, said in pairs]
        wide = sorted({rows for rows, _ in (*working.points, *seen.points)})
        more = np.interp(wide, [rows for rows, _ in rest], [value for _, value in rest])
        sums = [working.at(rows) + extra for rows, extra in zip(wide, more.tolist(), strict=True)]
        rising = np.minimum.accumulate(sums[::-1])[::-1]  # a curve never falls: the larger packs are right then
        points = list(zip(wide, rising.tolist(), strict=True))
    return Curve.of((rows, max(0.0, value)) for rows, value in points) or working


def analytic(recipe: Recipe, tier: str) -> tuple[Curve, Curve]:
    """(state, working) bytes over rows, from the traced step alone."""
    gpu = recipe.member.device.type == "cuda"
    if tier == "stacked":
        held, rows = stacked_step(recipe, LEAST), LEAST
    else:
        held, rows = solo_step(recipe), 1
    return _on_gpu(recipe, held, rows, tier) if gpu else _on_cpu(recipe, held, rows, tier)


def _on_cpu(recipe: Recipe, held: Held, rows: int, tier: str) -> tuple[Curve, Curve]:
    """A member's own model stays beside the stack, and its optimizer state is copied out when it leaves."""
    model, out = model_bytes(recipe.member), optimizer_bytes(recipe) + average_bytes(recipe.member)
    if tier == "stacked":
        once = shared_bytes(recipe)
        state = Curve.line(once, (held.state - once) / rows + model)
        working = [(n, max(_with_holes(held, n / rows), float(n * out))) for n in _ROWS]
    else:
        state = Curve.line(0.0, float(held.state))
        working = [(n, _with_holes(held, 1.0)) for n in (1, 2)]
    return state, Curve(tuple(working))


def _with_holes(held: Held, times: float) -> float:
    pieces = sum(size * times for size in held.sizes if size * times < PIECE)
    return held.working * times * (1 + HOLES) + pieces * PIECE_HOLES


def _on_gpu(recipe: Recipe, held: Held, rows: int, tier: str) -> tuple[Curve, Curve]:
    """While a captured step warms up, its state is there twice. Side by side on streams each branch has its own; the
    matrix library has one workspace for the forward pass and one for the backward pass on each."""
    once = shared_bytes(recipe) if tier == "stacked" else 0.0
    state = Curve.line(once, (held.state - once) / rows)
    space = workspace_bytes(recipe.member.device)
    if tier == "stacked":
        working = [(n, n * (held.working + held.state - once) / rows + 2 * space) for n in _ROWS]
    elif tier == "streams":
        working = [(n, min(n, STREAMS) * (held.working + 2 * space) + held.state) for n in _ROWS]
    else:
        working = [(n, float(held.working + space)) for n in (1, 2)]
    return state, Curve(tuple((n, float(value)) for n, value in working))


def shared_bytes(recipe: Recipe) -> float:
    """What a stack keeps once for all its members."""
    trace, model = next(iter(recipe.steps.values())), recipe.member.model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return float(
        sum(nbytes(named[name]) for i, name in enumerate((*trace.params, *trace.buffers)) if i in recipe.shared)
    )


def workspace_bytes(device: torch.device) -> int:
    """What the matrix library takes for each stream."""
    if device.type != "cuda":
        return 0
    return 32 << 20 if torch.cuda.get_device_capability(device)[0] >= 9 else 8_519_680


def lone_bytes(member: Member) -> int:
    """A guess for a member whose step is not traced."""
    return sum(step_bytes(member, None))


def data_bytes(members: Iterable[Member]) -> int:
    """Every tensor of the data once."""
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    for member in members:
        for view in (member.data, member.val):
            if view is not None and isinstance(view.source, TensorSource):
                held = [part for leaf in view.source.leaves for part in parts(leaf)]
                seen |= {(part.data_ptr(), tuple(part.shape)): nbytes(part) for part in held}
    return sum(seen.values())


def keep_heap() -> None:
    """Have the C library keep what is freed for the next step, which would otherwise ask the system for it again: one
    large block, freed, moves the line above which it gives memory back (by default 128 kB, 32 MB at the most)."""
    torch.empty(PIECE - (1 << 20), dtype=torch.uint8)


# --- what there is ----------------------------------------------------------------------------------------------------


def memory_budget(device: torch.device, given: int | None = None) -> int:
    """Bytes that a run may take: what was given, else 90 % of what is free now."""
    return given if given is not None else int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """What is free on the device, the caching allocator's own spare room included."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(unreserved(device) + spare)
    limits = [value for value in (_available(), _group_free()) if value is not None]
    return min(limits) if limits else 8 << 30


def unreserved(device: torch.device) -> int:
    """What the allocator can still get of a GPU, or of the share of it that this process may have."""
    free, total = torch.cuda.mem_get_info(device)
    most = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, most - torch.cuda.memory_reserved(device)))


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _group_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group of this process leaves us, where it sets a limit (a container does)."""
    free = []
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
            if most == "max" or int(most) >= 1 << 60:
                continue
            free.append(max(0, int(most) - now + _stat((root / limit).parent / "memory.stat", files)))
        except (OSError, ValueError):
            continue
    return min(free) if free else None


def _stat(file: Path, name: str) -> int:
    """Files that are cached and can be dropped count as free."""
    try:
        return next((int(x.split()[1]) for x in file.read_text().splitlines() if x.split()[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
