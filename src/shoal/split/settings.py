"""What a run by several processes is asked to do: settings that the coordinator has, and workers read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST

METHODS = ("ist", "local-sgd", "data-parallel", "sil")
DEFAULT_STEPS = {"ist": 50, "local-sgd": 20}
VARIANTS = ("heads", "A", "B")


@dataclass(kw_only=True, slots=True)
class Settings:
    """Which method, and how; None: the method's own default."""

    method: str = "ist"
    workers: int = 4
    local_steps: int | None = None
    overlap: float | None = None
    recovery: int | None = None
    layers: str | None = None
    """Of ist: which hidden layers are dealt, "all", "alternate" or "auto"."""
    scale: bool | None = None
    """Of ist: whether what a layer reads of cut units is multiplied by size / kept."""
    moments: str | None = None
    """Whether optimizer state travels with its weights ("travel"), or starts anew in every round ("fresh")."""
    shares: str | None = None
    """Of ist: "speed", or a number for each worker as "1,1,2"."""
    cuts: str | None = None
    """Of sil: modules before which to cut, as "fc3,fc5"; or how many parts."""
    variant: str | None = None
    """Of sil: "heads", or labels "A" or "B"."""
    codec: str = "exact"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SplitError(f"method is {self.method!r}; use one of {', '.join(METHODS)}")
        for name, methods in _ONLY.items():
            if getattr(self, name) is not None and self.method not in methods:
                flag = "--" + name.replace("_", "-")
                raise SplitError(
                    f"{flag} says nothing to {self.method}; it is for {' and '.join(methods)}: leave it out"
                )
        if self.variant is not None and self.variant not in VARIANTS:
            raise SplitError(f"variant is {self.variant!r}; use one of {', '.join(VARIANTS)}")

    def given(self) -> dict[str, Any]:
        """All that is set, for workers to read."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @staticmethod
    def read(offer: Mapping[str, Any], own: Mapping[str, Any]) -> Settings:
        """A coordinator's settings, with what this process was told itself on top."""
        known = {f.name for f in dataclasses.fields(Settings)}
        return Settings(**{name: value for name, value in {**offer, **own}.items() if name in known})

    def job(self, job: Job) -> Job:
        """The job with this seed."""
        return job if self.seed is None else dataclasses.replace(job, seed=self.seed)

    def build(self, job: Job, device: str | torch.device = "cpu", rows: int | None = None) -> Method:
        """The method, for this job."""
        if self.method == "sil":
            return self._sil(job)
        if self.method == "data-parallel":
            return DataParallel(job, self.workers, rows=rows)
        steps = self.local_steps if self.local_steps is not None else DEFAULT_STEPS[self.method]
        if self.method == "local-sgd":
            return LocalSGD(job, self.workers, steps, moments=self.moments or "travel", rows=rows)
        return IST(
            job, self.workers, steps, shares=self._shares(), overlap=self.overlap or 0.0, recovery=self.recovery,
            scale=self.scale is not False, moments=self.moments or "travel", rows=rows, device=device,
            layers=self.layers or "auto",  # type: ignore[arg-type]
        )  # fmt: skip

    def _shares(self) -> Any:
        if self.shares in (None, "equal"):
            return None
        if self.shares == "speed":
            return "speed"
        try:
            return [float(share) for share in str(self.shares).split(",")]
        except ValueError:
            raise SplitError(f"shares is {self.shares!r}; use 'speed', or a number for each worker as 1,1,2") from None

    def _sil(self, job: Job) -> Method:
        from shoal.split.methods.sil_method import SILMethod

        cuts: Any = None
        if self.cuts is not None:
            cuts = int(self.cuts) if self.cuts.isdigit() else [name.strip() for name in self.cuts.split(",")]
        way: Any = {"method": "heads"}
        if self.variant in ("A", "B"):
            way = {"method": "labels", "variant": self.variant}
        moments: Any = self.moments or "travel"
        return SILMethod(job, cuts, recovery=self.recovery or 0, local_steps=self.local_steps, moments=moments, **way)


_ONLY = {
    "local_steps": ("ist", "local-sgd", "sil"),
    "overlap": ("ist",),
    "scale": ("ist",),
    "layers": ("ist",),
    "moments": ("ist", "local-sgd", "sil"),
    "shares": ("ist",),
    "recovery": ("ist", "sil"),
    "cuts": ("sil",),
    "variant": ("sil",),
}
