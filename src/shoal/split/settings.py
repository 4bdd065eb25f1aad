"""The settings of a run by several processes, which workers read from the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.methods.sil_method import SILMethod

METHODS: dict[str, Any] = {"ist": IST, "local-sgd": LocalSGD, "data-parallel": DataParallel, "sil": SILMethod}
VARIANTS = ("heads", "A", "B")


@dataclass(kw_only=True, slots=True)
class Settings:
    """The method, the number of workers, and the method's own settings."""

    method: str = "ist"
    workers: int = 4
    codec: str = "exact"
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the method as on the command line: `shares` and `cuts` as text, `variant` as "heads", "A" or "B"."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SplitError(f"method is {self.method!r}; use one of {', '.join(METHODS)}")
        for name in self.options:
            methods = [m for m in METHODS if name in _option_names(m)]
            if self.method not in methods:
                flag = "--" + name.replace("_", "-")
                raise SplitError(
                    f"{flag} has no effect on {self.method}; it is for {' and '.join(methods)}: leave it out"
                )
        if self.options.get("variant", "A") not in VARIANTS:
            raise SplitError(f"variant is {self.options['variant']!r}; use one of {', '.join(VARIANTS)}")

    def given(self) -> dict[str, Any]:
        """Return all settings as one dict, for workers to read."""
        plain = {name: getattr(self, name) for name in ("method", "workers", "codec", "seed")}
        return {name: value for name, value in {**plain, **self.options}.items() if value is not None}

    @staticmethod
    def read(offer: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
        """Return a coordinator's settings, replaced by those that were given to this process."""
        names = {"method", "workers", "codec", "seed"}
        merged = {**offer, **given}
        options = {name: value for name, value in merged.items() if name not in names}
        return Settings(**{name: value for name, value in merged.items() if name in names}, options=options)

    def job(self, job: Job) -> Job:
        """Return the job with the seed of these settings."""
        return job if self.seed is None else dataclasses.replace(job, seed=self.seed)

    def build(self, job: Job) -> Method:
        """Return the method for this job."""
        options = dict(self.options)
        if self.method != "sil":
            options["workers"] = self.workers
        if "shares" in options:
            options["shares"] = parse_shares(options["shares"])
        if "cuts" in options:
            text = str(options["cuts"])
            options["cuts"] = int(text) if text.isdigit() else [name.strip() for name in text.split(",")]
        if "variant" in options:
            variant = options.pop("variant")
            options |= {"method": "heads"} if variant == "heads" else {"method": "labels", "variant": variant}
        method: Method = METHODS[self.method](job, **options)
        return method


def _option_names(method: str) -> set[str]:
    names = {f.name for f in dataclasses.fields(METHODS[method].options)}
    return names - {"scale"} if method == "sil" else names  # for sil it is a number, on the command line a flag


def parse_shares(text: str) -> Any:
    """Parse "speed", "equal", or a number for each worker such as "1,1,2"."""
    if text in ("speed", "equal"):
        return "speed" if text == "speed" else None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise SplitError(f"shares is {text!r}; use 'speed', or a number for each worker as 1,1,2") from None
