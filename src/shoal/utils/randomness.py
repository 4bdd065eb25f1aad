"""Random numbers inside networks, with one stream per member.

On a CPU a member draws from its own generator, in the order and layout of its solo run, so that its draws are those of
the plain loop after `torch.manual_seed`. On a GPU a draw is a pure function of (seed, step, call site, element),
computed by `counter_bits`, so that it fuses into compiled code, does not depend on the pack, and can be recomputed
anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.utils import cuda_kernels


@dataclass(frozen=True, slots=True)
class Draw:
    """One random call of a step: its distribution, and its layout in one member's solo run."""

    kind: str
    """bernoulli, dropout (a bernoulli of the kept fraction, divided by it), uniform, normal, exponential, integer or
    permutation."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    numbers: tuple[tuple[float, ...], ...] = ((),)
    """The parameters of the distribution: one tuple for all members, or one for each."""

    def of(self, member: int) -> tuple[float, ...]:
        return self.numbers[member if len(self.numbers) > 1 else 0]


def draw_members(draws: Sequence[Draw], generators: Sequence[torch.Generator], device: torch.device) -> list[Tensor]:
    """Return every draw of one step on a CPU, for every member, members first. Each member draws in its solo order."""
    masks = all(draw.kind in ("dropout", "bernoulli") and draw.dtype == draws[0].dtype in _WHOLE for draw in draws)
    if draws and masks and device.type == "cpu" and _coins_are_comparisons():
        return _draw_masks(draws, generators)
    out = [torch.empty((len(generators), *draw.shape), dtype=draw.dtype, device=device) for draw in draws]
    for m, generator in enumerate(generators):
        for value, draw in zip(out, draws, strict=True):
            plain = value.device.type == "cpu" and (draw.stride is None or value[m].stride() == draw.stride)
            target = value[m] if plain else _empty_like_draw(draw)
            _fill(target, draw.kind, draw.of(m), generator)
            if not plain:
                value[m].copy_(target)
    return out


def draw_step(
    draws: Sequence[Draw],
    generators: Sequence[torch.Generator],
    seeds: Sequence[int],
    batches: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    """Return every draw of one step, members first: from generators on a CPU, or from seed and batch count on a GPU."""
    if device.type == "cpu" or not draws:
        return draw_members(draws, generators, device)
    seed = torch.tensor([signed(seed) for seed in seeds], device=device)
    count = torch.tensor(list(batches), device=device)
    sites = torch.tensor(site_numbers(draws, len(seeds)), device=device)
    return [counter_draw(draw, seed, count, site) for draw, site in zip(draws, sites, strict=True)]


_WHOLE = (torch.float32, torch.float64)


@cache
def _coins_are_comparisons() -> bool:
    """Return whether torch draws a bernoulli by comparing a uniform double with the probability, which MKL does not."""
    for dtype in _WHOLE:
        our_generator, torch_generator = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
        drawn = torch.empty(999, dtype=dtype).bernoulli_(0.3, generator=torch_generator)
        compared = torch.empty(999, dtype=torch.float64).uniform_(generator=our_generator) < 0.3
        if not torch.equal(drawn, compared.to(dtype)) or not torch.equal(
            our_generator.get_state(), torch_generator.get_state()
        ):
            return False
    return True


def _draw_masks(draws: Sequence[Draw], generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Draw only masks, with all uniform numbers of a member's masks drawn at once."""
    ends = list(accumulate(math.prod(draw.shape) for draw in draws))
    members, total = len(generators), ends[-1]
    flat = torch.empty(members, total, dtype=draws[0].dtype)
    runs = _runs(tuple(draws), members)
    members_at_once = max(1, _TOGETHER // total) if len(runs) == 1 else 1
    uniform = torch.empty(min(members_at_once, members), total, dtype=torch.float64)
    for first in range(0, members, members_at_once):
        member_runs, rows = runs[first if len(runs) > 1 else 0], flat[first : first + members_at_once]
        drawn = uniform[: len(rows), : sum(run.count for run in member_runs if run.drawn)]
        for row, generator in zip(drawn.unbind(0), generators[first : first + members_at_once], strict=True):
            row.uniform_(generator=generator)
        used = 0
        for run in member_runs:
            target = rows[:, run.start : run.start + run.count]
            if run.drawn:
                torch.lt(drawn[:, used : used + run.count], run.share, out=target)
                target.mul_(run.scale)
                used += run.count
            else:
                target.fill_(run.share)
    return [
        flat[:, start:end].view(-1, *draw.shape)
        if draw.stride is None
        else flat.as_strided((members, *draw.shape), (total, *draw.stride), start)
        for draw, start, end in zip(draws, [0, *ends], ends, strict=False)
    ]


_TOGETHER = 1 << 16
"""How many numbers are compared at once."""


@dataclass(slots=True)
class _Run:
    """Consecutive mask elements with the same probability."""

    start: int
    count: int
    share: float
    """The fraction of ones."""
    scale: float
    """The value that replaces a one."""
    drawn: bool


@lru_cache(256)
def _runs(draws: tuple[Draw, ...], members: int) -> list[list[_Run]]:
    """Return each member's masks as runs, or only those of the first member if all have the same."""
    all_runs = [_runs_of(draws, member) for member in range(members)]
    return all_runs[:1] if all(runs == all_runs[0] for runs in all_runs) else all_runs


def _runs_of(draws: tuple[Draw, ...], member: int) -> list[_Run]:
    """Return one member's masks as runs."""
    runs: list[_Run] = []
    start = 0
    for draw in draws:
        (number,), count, drops = draw.of(member), math.prod(draw.shape), draw.kind == "dropout"
        share = 1 - number if drops else number
        drawn = not drops or number not in (0.0, 1.0)  # torch draws nothing for a dropout of 0 or 1
        scale = torch.ones((), dtype=draw.dtype).div_(share).item() if drops and drawn else 1.0
        if runs and (runs[-1].share, runs[-1].scale, runs[-1].drawn) == (share, scale, drawn):
            runs[-1].count += count
        else:
            runs.append(_Run(start, count, share, scale, drawn))
        start += count
    return runs


def _empty_like_draw(draw: Draw) -> Tensor:
    """Return an empty tensor with the layout of the draw."""
    if draw.stride is None:
        return torch.empty(draw.shape, dtype=draw.dtype)
    return torch.empty_strided(draw.shape, draw.stride, dtype=draw.dtype)


def _fill(target: Tensor, kind: str, numbers: tuple[float, ...], generator: torch.Generator) -> None:
    """Fill a tensor with draws from the generator, as torch would."""
    if kind == "dropout":
        (p,) = numbers
        if p in (0.0, 1.0):
            target.fill_(1.0 - p)  # torch draws nothing for a dropout of 0 or 1
        else:
            target.bernoulli_(1 - p, generator=generator).div_(1 - p)
    elif kind == "bernoulli":
        target.bernoulli_(numbers[0], generator=generator)
    elif kind == "uniform":
        target.uniform_(*numbers, generator=generator)
    elif kind == "normal":
        target.normal_(*numbers, generator=generator)
    elif kind == "exponential":
        target.exponential_(*numbers, generator=generator)
    elif kind == "integer":
        target.random_(int(numbers[0]), int(numbers[1]), generator=generator)
    elif kind == "permutation":
        target.copy_(torch.randperm(target.numel(), generator=generator))
    else:
        raise AssertionError(kind)


# --- counter-based draws -------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF
MASKS = ("dropout", "bernoulli")
"""Kinds of draws whose elements are zero or one other number."""


def counter_bits(seed: Tensor, step: Tensor, site: Tensor, count: int) -> Tensor:
    """Return [M, count] values in [0, 2**32), as int64: a hash of (seed, step, site, element) and nothing else.

    `seed`, `step` and `site` are [M] int64; `step` counts the batches that a member has had, `site` the random calls
    within one. The hash applies rounds of a 32-bit multiply-xorshift mixer to the key and the element. The element
    meets the key twice, so that the sequences of two keys are not permutations of each other. Elements are mixed before
    they are multiplied, because a compiler may hold an index in 32 bits.
    """
    key = _mix((seed & _WORD) ^ _mix((seed >> 32) & _WORD))
    key = _mix(key ^ _mix((step & _WORD) + 0x9E3779B9 & _WORD))
    key = _mix(key ^ _mix((site + 1) * 0x85EBCA6B & _WORD))
    again = _mix(key + 0x9E3779B9 & _WORD)
    element = torch.arange(count, device=seed.device, dtype=torch.int64)
    return _mix(_mix(element ^ key.unsqueeze(1)) ^ again.unsqueeze(1))


def _mix(x: Tensor) -> Tensor:
    """Map a value in [0, 2**32) to another."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def site_numbers(draws: Sequence[Draw], members: int) -> list[list[int]]:
    """Return for every draw its number in each member; a dropout of rate 0 or 1 draws nothing and is not counted."""
    counts = [0] * members
    numbers = []
    for draw in draws:
        numbers.append(list(counts))
        counts = [n + (draw.kind != "dropout" or draw.of(m)[0] not in (0.0, 1.0)) for m, n in enumerate(counts)]
    return numbers


def draw_columns(draw: Draw, members: int, device: torch.device) -> list[Any]:
    """Return the parameters of the distribution on the device, ready to broadcast; for a mask its limits and scales,
    [M]."""
    rows = [draw.of(m) for m in range(members)]
    if draw.kind in MASKS:
        shares = [1.0 - row[0] if draw.kind == "dropout" else row[0] for row in rows]
        ones = [1.0 / share if draw.kind == "dropout" and share > 0 else 1.0 for share in shares]
        limits = torch.tensor([int(share * 2.0**32) for share in shares], device=device)
        return [limits, torch.tensor(ones, dtype=torch.float64).to(device, draw.dtype)]
    return [_column([row[i] for row in rows], len(draw.shape), device) for i in range(len(rows[0]))]


@dataclass(frozen=True, slots=True)
class DrawSource:
    """What the elements of a counter-based mask are made of, for kernels that make them where they use them.

    All are [M] on the device, `int64` but for the scales, which have the mask's dtype. An element of a member is its
    scale where `counter_bits` of (seed, step, site, element) are below its limit, and zero elsewhere.
    """

    seeds: Tensor
    steps: Tensor
    sites: Tensor
    limits: Tensor
    scales: Tensor


def counter_draw(draw: Draw, seed: Tensor, step: Tensor, site: Tensor, columns: Sequence[Any] | None = None) -> Tensor:
    """Return the values of one draw for members with these seeds at these steps, members first.

    Args:
        columns: The result of `draw_columns` for these members, for code that must not use the host.
    """
    count, members = math.prod(draw.shape), seed.shape[0]
    shape = (members, *draw.shape)
    columns = draw_columns(draw, members, seed.device) if columns is None else columns
    kind = draw.kind
    if kind in MASKS:
        return draw_mask(DrawSource(seed, step, site, columns[0], columns[1]), count).view(shape)
    if kind == "permutation":
        return counter_bits(seed, step, site, count).argsort(dim=1, stable=True).to(draw.dtype)
    unit = ((counter_bits(seed, step, site, count).view(shape)).double() + 0.5) * 2.0**-32
    if kind == "uniform":
        value = columns[0] + unit * (columns[1] - columns[0])
    elif kind == "exponential":
        value = -torch.log(unit) / columns[0]
    elif kind == "normal":
        second = (counter_bits(seed, step, site + (1 << 20), count).view(shape).double() + 0.5) * 2.0**-32
        value = columns[0] + columns[1] * torch.sqrt(-2 * torch.log(unit)) * torch.cos(2 * math.pi * second)
    elif kind == "integer":
        value = torch.floor(columns[0] + unit * (columns[1] - columns[0]))
    else:
        raise AssertionError(kind)
    result: Tensor = value.to(draw.dtype)
    return result


def _column(values: Sequence[float], ndim: int, device: torch.device) -> Any:
    """Return the members' numbers as [M, 1, ...], or one number if all agree, which stays a constant in compiled
    code."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, device=device, dtype=torch.float64).view(-1, *[1] * ndim)


def draw_mask(source: DrawSource, count: int) -> Tensor:
    """Return a mask [M, count]: each member's scale where its bits are below its limit, zero elsewhere."""
    seed, step, site, limits, scales = source.seeds, source.steps, source.sites, source.limits, source.scales
    fits = count < 2**31 and len(seed) < 2**16 and scales.dtype.itemsize <= 8
    if seed.is_cuda and fits and cuda_kernels.available():
        from shoal.utils.mask_kernel import counter_mask, write_mask

        plain = (
            not torch.compiler.is_compiling()
            and cuda_kernels.has_memory(seed)
            and not torch._C._len_torch_dispatch_stack()
        )
        mask: Tensor = (write_mask if plain else counter_mask)(seed, step, site, limits, scales, count)
        return mask
    below = counter_bits(seed, step, site, count) < limits.unsqueeze(1)
    return torch.where(below, scales.unsqueeze(1), torch.zeros_like(scales).unsqueeze(1))


def signed(seed: int) -> int:
    """Return a 64-bit seed as the int64 that a tensor can hold."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def generator_at(state: Any) -> torch.Generator:
    """Return a CPU generator that continues from a saved state."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator
