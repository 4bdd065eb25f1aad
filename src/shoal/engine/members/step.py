"""A job's step on a batch, in the parts that training, validation and the reference loop share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.engine.python_state.module_modes import own_train_methods
from shoal.engine.tracing.trace import PRECISIONS
from shoal.errors import JobError
from shoal.jobs.job import Job


def autocast(job: Job, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of the job's precision, for forward and loss."""
    return torch.autocast(device.type, PRECISIONS[job.precision]) if job.precision is not None else nullcontext()


def run_step(job: Job, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Run the job's step on one batch, and return its loss and its logs."""
    if job.step is None:
        assert job.loss is not None
        return job.loss(call_model(model, batch), targets_of(batch)), {}
    out = job.step(model, batch)
    logged = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)
    return (out[0], out[1]) if logged else (out, {})


TARGETS = ("labels", "label", "targets", "target", "y")
"""The names under which the targets of a dict batch are looked for, in this order."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch's inputs: all but the last of a tuple, or by name all but the targets of a dict."""
    if not isinstance(batch, Mapping):
        return model(*batch[:-1])
    name = _name_of_targets(batch)
    return model(**{key: value for key, value in batch.items() if key != name})


def targets_of(batch: Any) -> Any:
    """Return a batch's targets: the last of a tuple, or the entry of a dict with one of the names in `TARGETS`."""
    return batch[_name_of_targets(batch)] if isinstance(batch, Mapping) else batch[-1]


def _name_of_targets(batch: Mapping[str, Any]) -> str:
    for name in TARGETS:
        if name in batch:
            return name
    raise JobError(
        f"a batch has {', '.join(map(str, batch))} and none of {', '.join(TARGETS)}: name its targets so, or set step="
    )


def number(value: Any) -> float:
    """Convert a metric or log to a float, from a number, or a tensor or array of one element."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients inside this context. Afterwards every module has its previous mode, and `train()`
    methods of the user's own were called."""
    modes = [(module, module.training) for module in model.modules()]
    modules = [module for _, module in own_train_methods(model) if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.train()
        for module, training in modes:
            module.training = training
