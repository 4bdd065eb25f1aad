"""Independent subnet training (IST): each round, hidden units are distributed over workers, which train narrow
networks.

Inputs and outputs are never cut. A block with one owner is written back as it is; what several workers have is
averaged. The gradient of a narrow network is biased; each correction is a setting of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from shoal.engine.members.member import Member, seeded
from shoal.engine.members.step import autocast, run_step
from shoal.errors import SplitError, describe
from shoal.jobs.job import Job
from shoal.split.core.checks import check_choice, check_count
from shoal.split.core.method import Worker
from shoal.split.core.parts import Part, Slice, Tensors
from shoal.split.methods.averaging import WholeNetwork
from shoal.split.methods.renorm import device_of, renormalise
from shoal.split.subnets.assignment import WHOLE_LAYER, Layers, assign_units, distributed_layers, neighbours
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import WHOLE_STREAM, Units, find_units, without_streams

FEW = 4
"""How many rows a network is traced with."""
MANY_ROUNDS = 5
"""With at least this many rounds, one of them is spent on recovery if weights lie between two distributed layers."""

Shares = Sequence[float] | Literal["speed"] | None


@dataclass(slots=True)
class ISTSettings:
    """The settings of `shoal.split.ist`."""

    workers: int = 4
    local_steps: int = 50
    _: KW_ONLY
    shares: Shares = None
    overlap: float = 0.0
    scale: bool = True
    renormalise: bool = True
    backward_only: bool = False
    recovery: int | None = None
    blocks: bool | Literal["auto"] = "auto"
    streams: bool | Literal["auto"] = "auto"
    layers: Layers = "auto"
    moments: Literal["travel", "fresh"] = "travel"

    def __post_init__(self) -> None:
        check_choice("moments", self.moments, ("travel", "fresh"))
        self.shares = _checked_shares(self.shares, self.workers)
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, (int, float)) or not 0 <= self.overlap <= 1:
            raise SplitError(f"overlap is {self.overlap!r}; use a share of the units, from 0 to 1")
        if self.recovery is not None:
            check_count("recovery", self.recovery, least=0)
        for name in ("blocks", "streams"):
            if getattr(self, name) not in (True, False, "auto"):
                raise SplitError(f"{name} is {getattr(self, name)!r}; use True, False or 'auto'")
        if self.layers == "auto" and (self.overlap or self.backward_only):
            self.layers = "all"  # another remedy was chosen


class IST(WholeNetwork):
    """Distributes units anew in every round, from (seed, round) alone, so every process makes the same choice."""

    name = "ist"
    options = ISTSettings

    def __init__(self, job: Job | Member, *args: Any, **kwargs: Any) -> None:
        settings = self.given = ISTSettings(*args, **kwargs)
        super().__init__(job, settings.workers, settings.local_steps)
        self._part_slices: dict[int, tuple[Part, Mapping[str, Slice]]] = {}
        self.moments = settings.moments
        batch = self.data.take(0, min(FEW, len(self.data)))
        units = units_of(self.member.job, self.model, batch, settings.blocks, settings.streams)
        self.units = distributed_layers(units, settings.layers)
        recovery = settings.recovery
        if recovery is None:
            recovery = int(settings.workers > 1 and self.rounds >= MANY_ROUNDS and any(neighbours(self.units).values()))
        self.recovery = min(recovery, self.rounds)
        # A trial, which raises an error now if there are too many workers.
        assign_units(self.units, [1.0] * settings.workers, seed=0, round=0, overlap=settings.overlap)
        decided = {
            "blocks": self.units.blocks is not None,
            "streams": WHOLE_STREAM not in self.units.whole.values(),
            "layers": "alternate" if WHOLE_LAYER in self.units.whole.values() else "all",
            "recovery": self.recovery,
        }
        self.settings = MappingProxyType({"method": self.name, **asdict(settings), **decided})

    # --- the parts ------------------------------------------------------------------------------------------------

    def parts(self, number: int, workers: Sequence[Worker]) -> list[Part]:
        parts = super().parts(number, workers)
        if number >= self.rounds - self.recovery:
            return parts
        seed, shares = self.member.job.seed, self._shares_of(workers)
        assigned = assign_units(self.units, shares, seed=seed, round=number, overlap=self.given.overlap)
        which = "learn" if self.given.backward_only else "keep"
        return [replace(part, **{which: units}) for part, units in zip(parts, assigned, strict=True)]  # type: ignore[arg-type]

    def _shares_of(self, workers: Sequence[Worker]) -> list[float]:
        shares = self.given.shares
        if shares == "speed":
            return [worker.speed for worker in workers]
        return [1.0 if shares is None else float(shares[worker.number % len(shares)]) for worker in workers]

    def network(self, part: Part) -> nn.Module:
        if not part.keep:
            return super().network(part)
        return narrow(self.model, self.units, part.keep, scale=self.given.scale)

    def slices(self, part: Part) -> Mapping[str, Slice]:
        """Return the part's slices. They are found once for a part, so that equal rows are the same tensors."""
        cached = self._part_slices.get(part.number)
        if cached is None or cached[0] is not part:
            cached = self._part_slices[part.number] = (part, self.units.slices(part.keep))
        return cached[1]

    def returns(self, part: Part) -> Mapping[str, Slice]:
        return self.slices(part) if part.learn is None else self.units.slices(part.learn)

    # --- the whole ------------------------------------------------------------------------------------------------

    def finish_merge(self, model: nn.Module, tensors: Tensors) -> None:
        if self.given.renormalise and self.given.workers > 1:
            renormalise(self.member.job, model, self.data_on(device_of(model)))


def units_of(
    job: Job, model: nn.Module, batch: Any, blocks: bool | str = "auto", streams: bool | str = "auto"
) -> Units:
    """Find the network's units, on the inputs that the job's own step calls it with.

    "auto" for `blocks`: use residual blocks if there are no other units. "auto" for `streams`: keep residual streams
    whole if enough weights are cut without them.
    """
    inputs = inputs_of(job, model, batch)
    try:
        return without_streams(find_units(model, inputs, blocks=blocks is True, streams=streams is True), streams)
    except SplitError:
        if blocks != "auto":
            raise
        try:
            return find_units(model, inputs, blocks=True)
        except SplitError:
            pass
        raise


def inputs_of(job: Job, model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """Return the inputs that the job's step calls its network with."""
    calls: list[tuple[Any, ...]] = []

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise SplitError(
                f"the step calls its network by keyword ({', '.join(kwargs)}); a network is traced by position: "
                "pass its inputs without names"
            )
        calls.append(args)

    copied = copy.deepcopy(model)
    copied.register_forward_pre_hook(record_call, with_kwargs=True)
    try:
        with seeded(job.seed, torch.device("cpu")), torch.no_grad(), autocast(job, torch.device("cpu")):
            run_step(job, copied, batch)
    except SplitError:
        raise
    except Exception as error:
        if not calls:
            raise SplitError(
                f"the step raised {describe(error)} on {FEW} rows; a network is traced with them"
            ) from error
    if not calls:
        raise SplitError("the step never calls its network; a network is traced by its call: call model(...)")
    return calls[0]


def _checked_shares(shares: Any, workers: int) -> Shares:
    if shares is None:
        return None
    if isinstance(shares, str) and shares == "speed":
        return "speed"
    try:
        numbers = [float(share) for share in shares]
    except (TypeError, ValueError):
        numbers = []
    if isinstance(shares, str) or len(numbers) != workers or not all(0 < share < float("inf") for share in numbers):
        raise SplitError(f"shares is {shares!r}; use a positive number for each of {workers} workers, 'speed' or None")
    return numbers
