"""Independent subnet training: each round the hidden units are dealt to the workers, who train narrow networks.

Input and output are never cut. A block with one owner is written back as it is; what all of them have is averaged. The
gradient of a narrow network is biased; the corrections are settings, each by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from shoal.data import Pool, View
from shoal.engine.members.member import autocast, open_data, run_step, seeded
from shoal.engine.members.ownership import build_model
from shoal.errors import SplitError, describe
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Part, Slice
from shoal.split.methods.averaging import Plan, check_count, check_moments
from shoal.split.methods.renorm import renormalise
from shoal.split.subnets.deal import WHOLE_LAYER, Layers, deal, dealt_layers, neighbours
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import WHOLE_STREAM, Units, find_units, without_streams

FEW = 4
"""Rows that a network is traced with."""
MANY_ROUNDS = 5
"""Rounds from which one of them is spent on recovery, where weights lie between two dealt layers."""

Shares = Sequence[float] | Literal["speed"] | None


class IST(Method):
    """Units dealt anew every round, from (seed, round): pure, so that every process makes the same deal.

    The settings are those of `shoal.split.ist`; `rows` is how many rows all workers have together, where that is not
    the length of the job's data.
    """

    name = "ist"

    def __init__(
        self,
        job: Job,
        workers: int = 4,
        local_steps: int = 50,
        *,
        shares: Shares = None,
        overlap: float = 0.0,
        scale: bool = True,
        renormalise: bool = True,
        backward_only: bool = False,
        recovery: int | None = None,
        blocks: bool | Literal["auto"] = "auto",
        streams: bool | Literal["auto"] = "auto",
        layers: Layers = "auto",
        moments: str = "travel",
        rows: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._job, self._device = job, torch.device(device)
        self._data: View | None = None
        self._slices: dict[int, tuple[Part, Mapping[str, Slice]]] = {}
        self.moments = check_moments(moments)
        self.plan = Plan(job, len(self.data) if rows is None else rows, workers, local_steps)
        self.rounds, self.local_steps, self.shards = self.plan.rounds, local_steps, workers
        self.scale, self.renormalise, self.backward_only = scale, renormalise, backward_only
        self.shares, self.overlap = _checked_shares(shares, workers), _checked_overlap(overlap)
        with seeded(job.seed, torch.device("cpu")):
            self.model = build_model(job)
        if layers == "auto" and (self.overlap or backward_only):
            layers = "all"  # another remedy was chosen
        self.units = dealt_layers(units_of(job, self.model, first_batch(job), blocks, streams), layers)
        if recovery is None:
            recovery = int(workers > 1 and self.rounds >= MANY_ROUNDS and any(neighbours(self.units).values()))
        check_count("recovery", recovery, least=0)
        self.recovery = min(recovery, self.rounds)
        self._check_width(workers)
        self.settings = MappingProxyType(
            {
                "method": self.name, "workers": workers, "local_steps": local_steps, "overlap": overlap, "scale": scale,
                "shares": list(self.shares) if isinstance(self.shares, tuple) else self.shares,
                "renormalise": renormalise, "backward_only": backward_only, "recovery": self.recovery,
                "blocks": self.units.blocks is not None, "moments": moments,
                **_streams(self.units), **_layers(self.units),
            }
        )  # fmt: skip

    @property
    def data(self) -> View:
        """The job's rows, where the whole network is evaluated."""
        if self._data is None:
            self._data = open_data(Pool(self._device), self._job, "data")
        return self._data

    def _check_width(self, workers: int) -> None:
        """Too many workers are told now, not in the first round."""
        deal(self.units, [1.0] * workers, seed=0, round=0, overlap=self.overlap)

    # --- the parts ------------------------------------------------------------------------------------------------

    def parts(self, number: int, executor: Sequence[Worker]) -> list[Part]:
        parts = self.plan.parts(number, executor, self._job.seed)
        if number >= self.rounds - self.recovery:
            return parts
        shares = self._shares_of(executor)
        hands = deal(self.units, shares, seed=self._job.seed, round=number, overlap=self.overlap)
        if self.backward_only:
            return [replace(part, learn=hand) for part, hand in zip(parts, hands, strict=True)]
        return [replace(part, keep=hand) for part, hand in zip(parts, hands, strict=True)]

    def _shares_of(self, executor: Sequence[Worker]) -> list[float]:
        if self.shares == "speed":
            return [worker.speed for worker in executor]
        if self.shares is None:
            return [1.0] * len(executor)
        return [self.shares[worker.number % len(self.shares)] for worker in executor]

    def network(self, part: Part) -> nn.Module:
        if not part.keep:
            return copy.deepcopy(self.model)
        return narrow(self.model, self.units, part.keep, scale=self.scale)

    def slices(self, part: Part) -> Mapping[str, Slice]:
        """Found once for a part: the same rows are the same tensors then, there and back."""
        known = self._slices.get(part.number)
        if known is None or known[0] is not part:
            known = self._slices[part.number] = (part, self.units.slices(part.keep))
        return known[1]

    def returns(self, part: Part) -> Mapping[str, Slice]:
        return self.slices(part) if part.learn is None else self.units.slices(part.learn)

    # --- the whole ------------------------------------------------------------------------------------------------

    def settled(self, number: int, model: nn.Module) -> None:
        if self.renormalise and self.plan.workers > 1:
            renormalise(self._job, model, self.data)


def units_of(
    job: Job, model: nn.Module, batch: Any, blocks: bool | str = "auto", streams: bool | str = "auto"
) -> Units:
    """The network's units, on the inputs that the job's own step calls it with; "auto": blocks where there are no
    others, and residual streams whole where the rest is enough."""
    for name, value in (("blocks", blocks), ("streams", streams)):
        if value not in (True, False, "auto"):
            raise SplitError(f"{name} is {value!r}; use True, False or 'auto'")
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


def _streams(units: Units) -> dict[str, bool]:
    """What was decided about residual streams, where it is not what all runs had before there was a choice."""
    if WHOLE_STREAM in units.whole.values():
        return {"streams": False}
    return {"streams": True} if any(g.stream and not g.exact for g in units.groups.values()) else {}


def _layers(units: Units) -> dict[str, str]:
    """What was decided about layers, where it is not what all runs had before there was a choice."""
    return {"layers": "alternate"} if WHOLE_LAYER in units.whole.values() else {}


def first_batch(job: Job) -> Any:
    """A few rows, as a step takes them."""
    data = open_data(Pool(torch.device("cpu")), job, "data")
    return data.take(0, min(FEW, len(data)))


def inputs_of(job: Job, model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """What the job's step calls its network with."""
    seen: list[tuple[Any, ...]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise SplitError(
                f"the step calls its network by keyword ({', '.join(kwargs)}); a network is traced by position: "
                "pass its inputs without names"
            )
        seen.append(args)

    twin = copy.deepcopy(model)
    twin.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with seeded(job.seed, torch.device("cpu")), torch.no_grad(), autocast(job, torch.device("cpu")):
            run_step(job, twin, batch)
    except SplitError:
        raise
    except Exception as error:
        if not seen:
            raise SplitError(
                f"the step raised {describe(error)} on {FEW} rows; a network is traced with them"
            ) from error
    if not seen:
        raise SplitError("the step never calls its network; a network is traced by its call: call model(...)")
    return seen[0]


def _checked_shares(shares: Any, workers: int) -> tuple[float, ...] | Literal["speed"] | None:
    if shares is None or (isinstance(shares, str) and shares == "speed"):
        return shares  # type: ignore[return-value]
    try:
        found = tuple(float(share) for share in shares)
    except (TypeError, ValueError):
        found = ()
    if isinstance(shares, str) or len(found) != workers or not all(0 < share < float("inf") for share in found):
        raise SplitError(f"shares is {shares!r}; use a positive number for each of {workers} workers, 'speed' or None")
    return found


def _checked_overlap(overlap: Any) -> float:
    if isinstance(overlap, bool) or not isinstance(overlap, (int, float)) or not 0 <= overlap <= 1:
        raise SplitError(f"overlap is {overlap!r}; use a share of the units, from 0 to 1")
    return float(overlap)
