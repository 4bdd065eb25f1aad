"""Predict the memory that a pack takes, measure what is free, and so decide how many rows fit.

The computed part is exact for tensors (see `liveness`). Added to it are fragmentation of the heap on a CPU, and on a
GPU a second copy of the state while a captured step warms up and the workspaces of libraries. If a peak of the same
recipe was measured before, the prediction is corrected by it: scaled from one point, interpolated between several.
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
"""The share of the free memory that is used unless a budget is given."""
PIECE = 32 << 20
"""From so many bytes on, the C library maps a tensor by itself, and returns it to the system when it is freed."""
HOLES, PIECE_HOLES = 0.23, 0.42
"""Fragmentation of the heap: the share of a step's live bytes that is added, and the share of those in smaller tensors;
see benchmarks."""
STREAMS = 16
"""The most branches of a captured graph."""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_analytic: dict[tuple[str, str], tuple[Curve, Curve]] = {}


def footprint(
    recipe: Recipe, tier: str = "stacked", *, exact: bool = True, compiled: bool = False
) -> tuple[Curve, Curve]:
    """Return (state, working) bytes as functions of the rows, corrected by measurements.

    Args:
        exact: Compute them from a step on fake tensors; otherwise estimate them, which is faster.
    """
    key = perf_cache.digest(recipe)
    if (key, tier) not in _analytic:
        if not exact:
            return Curve.line(0.0, float(rough_bytes(recipe))), Curve(((1, 0.0),))
        try:
            _analytic[key, tier] = analytic(recipe, tier)
        except Exception:  # an operator without support for fake tensors; a prediction must not stop a run
            _analytic[key, tier] = Curve.line(0.0, float(rough_bytes(recipe))), Curve(((1, 0.0),))
    state, working = _analytic[key, tier]
    entry = perf_cache.lookup(key)
    measured = entry.curve("bytes", tier + perf_cache.COMPILED) if compiled else None
    return state, corrected(state, working, measured or entry.curve("bytes", tier))


class StepBytes(NamedTuple):
    """The parts of one member's memory."""

    weights: int
    gradients: int
    optimizer: int
    """Optimizer state, and the average of the weights if the job has one."""
    activations: int
    """Activations of its largest batch, all held at once."""


def step_bytes(member: Member, recipe: Recipe | None) -> StepBytes:
    """Estimate one member's memory without running anything.

    Without a recipe (its step is not traced) activations are not known, and the optimizer is assumed to keep two
    numbers per weight.
    """
    gradients = sum(nbytes(p) for p in member.model.parameters() if p.requires_grad and not is_lazy(p))
    if recipe is None:
        return StepBytes(model_bytes(member), gradients, 2 * gradients + average_bytes(member), 0)
    activations = activation_bytes(recipe.steps[max(recipe.steps)])
    return StepBytes(model_bytes(member), gradients, optimizer_bytes(recipe) + average_bytes(member), activations)


def rough_bytes(recipe: Recipe) -> int:
    """Estimate one member's bytes, with two spare numbers for each weight."""
    parts = step_bytes(recipe.member, recipe)
    return sum(parts) + 2 * parts.gradients


def activation_bytes(graph: Trace) -> int:
    """Return the bytes of all results of a step that are not views: the most that backward may need."""
    total = 0
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or any(r.alias_info is not None for r in schema.returns):
            continue
        total += sum(nbytes(v) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    return total


def corrected(state: Curve, working: Curve, measured: Curve | None) -> Curve:
    """Return working bytes such that state plus working matches the measurements.

    One measured point scales all values. Between several, the difference is interpolated; beyond them it is constant,
    since small packs are fragmented more.
    """
    if measured is None:
        return working
    pairs = [(rows, value, state.at(rows) + working.at(rows)) for rows, value in measured.points if rows]
    if not pairs:
        return working
    if len(pairs) == 1:
        _, value, predicted = pairs[0]
        ratio = value / predicted if predicted else 1.0
        points = [(rows, ratio * (state.at(rows) + extra) - state.at(rows)) for rows, extra in working.points]
    else:
        differences = [(rows, value - predicted) for rows, value, predicted in pairs]
        all_rows = sorted({rows for rows, _ in (*working.points, *measured.points)})
        interpolated = np.interp(all_rows, [rows for rows, _ in differences], [value for _, value in differences])
        sums = [working.at(rows) + extra for rows, extra in zip(all_rows, interpolated.tolist(), strict=True)]
        rising = np.minimum.accumulate(sums[::-1])[::-1]  # a curve never falls: the values of larger packs are used
        points = list(zip(all_rows, rising.tolist(), strict=True))
    return Curve.of((rows, max(0.0, value)) for rows, value in points) or working


def analytic(recipe: Recipe, tier: str) -> tuple[Curve, Curve]:
    """Return (state, working) bytes as functions of the rows, computed from the traced step alone."""
    gpu = recipe.member.device.type == "cuda"
    if tier == "stacked":
        held, rows = stacked_step(recipe, LEAST), LEAST
    else:
        held, rows = solo_step(recipe), 1
    return _on_gpu(recipe, held, rows, tier) if gpu else _on_cpu(recipe, held, rows, tier)


def _on_cpu(recipe: Recipe, held: Held, rows: int, tier: str) -> tuple[Curve, Curve]:
    """Return the bytes on a CPU. A member's own model stays beside the stack, and its optimizer state is copied when it
    leaves."""
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
    """Return the working bytes of `times` the rows, with fragmentation of the heap."""
    pieces = sum(size * times for size in held.sizes if size * times < PIECE)
    return held.working * times * (1 + HOLES) + pieces * PIECE_HOLES


def _on_gpu(recipe: Recipe, held: Held, rows: int, tier: str) -> tuple[Curve, Curve]:
    """Return the bytes on a GPU. While a captured step warms up, its state exists twice.

    On streams each branch has its own working memory, and the matrix library has a workspace for the forward and for
    the backward pass.
    """
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
    """Return the bytes that a stack keeps once for all its members."""
    trace, model = next(iter(recipe.steps.values())), recipe.member.model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return float(
        sum(nbytes(named[name]) for i, name in enumerate((*trace.params, *trace.buffers)) if i in recipe.shared)
    )


def workspace_bytes(device: torch.device) -> int:
    """Return the bytes that the matrix library allocates for each stream."""
    if device.type != "cuda":
        return 0
    return 32 << 20 if torch.cuda.get_device_capability(device)[0] >= 9 else 8_519_680


def lone_bytes(member: Member) -> int:
    """Estimate the bytes of a member whose step is not traced."""
    return sum(step_bytes(member, None))


def data_bytes(members: Iterable[Member]) -> int:
    """Return the bytes of the members' data, each tensor counted once."""
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for member in members:
        for view in (member.data, member.val):
            if view is not None and isinstance(view.source, TensorSource):
                tensors = [part for leaf in view.source.leaves for part in parts(leaf)]
                sizes |= {(part.data_ptr(), tuple(part.shape)): nbytes(part) for part in tensors}
    return sum(sizes.values())


def keep_heap() -> None:
    """Make the C library keep freed memory for the next step instead of returning it to the system.

    Allocating and freeing one large block raises the threshold above which it returns memory (by default 128 kB, at
    most 32 MB).
    """
    torch.empty(PIECE - (1 << 20), dtype=torch.uint8)


# --- free memory ------------------------------------------------------------------------------------------------------


def memory_budget(device: torch.device, given: int | None = None) -> int:
    """Return the bytes that a run may take: what was given, else 90 % of what is free now."""
    return given if given is not None else int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes on the device, including memory that the caching allocator holds unused."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(unreserved(device) + spare)
    limits = [value for value in (_available(), _cgroup_free()) if value is not None]
    return min(limits) if limits else 8 << 30


def unreserved(device: torch.device) -> int:
    """Return the bytes of a GPU that the allocator can still reserve, within the share that this process may use."""
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


def _cgroup_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free bytes in this process's control group (a container); None if it sets no limit."""
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
    """Read one value of memory.stat. Cached files that can be dropped count as free."""
    try:
        return next((int(x.split()[1]) for x in file.read_text().splitlines() if x.split()[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
