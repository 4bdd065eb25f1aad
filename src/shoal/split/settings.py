"""What a run by several processes is asked to do: settings of the coordinator, which workers read from it."""

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
    """Which method, with how many workers, and the method's own settings."""

    method: str = "ist"
    workers: int = 4
    codec: str = "exact"
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of the method, as on the command line: `shares` and `cuts` as text, `variant` as "heads", "A" or "B"."""

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
        """All settings as one table, for workers to read."""
        plain = {name: getattr(self, name) for name in ("method", "workers", "codec", "seed")}
        return {name: value for name, value in {**plain, **self.options}.items() if value is not None}

    @staticmethod
    def read(offer: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
        """A coordinator's settings; those given to this process itself replace them."""
        names = {"method", "workers", "codec", "seed"}
        both = {**offer, **given}
        options = {name: value for name, value in both.items() if name not in names}
        return Settings(**{name: value for name, value in both.items() if name in names}, options=options)

    def job(self, job: Job) -> Job:
        """The job with this seed."""
        return job if self.seed is None else dataclasses.replace(job, seed=self.seed)

    def build(self, job: Job) -> Method:
        """The method, for this job."""
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
    return names - {"scale"} if method == "sil" else names  # there it is a number, on the command line yes or no


def parse_shares(text: str) -> Any:
    """From "speed", "equal", or a number for each worker as "1,1,2"."""
    if text in ("speed", "equal"):
        return "speed" if text == "speed" else None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise SplitError(f"shares is {text!r}; use 'speed', or a number for each worker as 1,1,2") from None
