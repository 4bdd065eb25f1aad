"""Check groups of units numerically before they are used, because tracing alone is not trusted.

A narrow network must compute what the whole one does when the weights that read the missing units are zero. Where a
layer norm is taken over the units, both are compared with norms that only apply their weights. The narrow network must
also run forward and backward. A group that fails stays whole, and the reason is noted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.engine.processes.child import compute_in_fork
from shoal.errors import describe
from shoal.split.core.state import named_state
from shoal.split.subnets._record import shell
from shoal.split.subnets.assignment import shuffled
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import Units

MANY = 20_000_000
"""With more parameters than this, the check runs in float32 to save memory."""


def verified(model: nn.Module, units: Units, inputs: Sequence[Any]) -> Units:
    """Return the units with the groups that pass; the others are listed in `whole` with the reason."""
    if not units.groups:
        return units
    with quiet():
        probe = Probe(model, inputs)
        first = _failing(probe, units)
        if not first:
            return units
        resizing = replace(units, resize=True)
        second = _failing(probe, resizing)
        best, failing = (resizing, second) if len(second) < len(first) else (units, first)
        while failing:
            best = best.only([name for name in best.groups if name not in failing], failing)
            together = probe.fault(best) if best.groups else ""
            failing = dict.fromkeys(best.groups, together) if together else {}
        return best


def _failing(probe: Probe, units: Units) -> dict[str, str]:
    """Return each failing group with the reason. Groups are tried all at once first, and one by one only if that
    fails."""
    if not probe.fault(units):
        return {}
    failing = {}
    for name in units.groups:
        if fault := probe.fault(units.only([name], {})):
            failing[name] = fault
    return failing or dict.fromkeys(units.groups, "groups that hold alone do not hold together")


class Probe:
    """A network of the same shapes with weights that are nowhere zero, to compare it with narrow versions of itself."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        total = sum(t.numel() for t in named_state(model).values())
        self.dtype = torch.float64 if total < MANY else torch.float32
        self._noise = torch.Generator().manual_seed(0)
        self.inputs = pytree.tree_map_only(Tensor, self._stirred, tuple(inputs))
        self.whole = shell(model, lambda _, tensor: self._stirred(tensor))

    def _stirred(self, tensor: Tensor) -> Tensor:
        """Copy a tensor and add noise. Biases grow, so that few units are silent: a check sees nothing of those."""
        copied = tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else None, copy=True)
        if copied.is_floating_point():
            drawn = torch.rand(copied.shape, generator=self._noise, dtype=copied.dtype)
            copied += drawn * 0.2 - 0.1 if isinstance(tensor, nn.Parameter) and copied.dim() > 1 else drawn * 0.5
        return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied

    def run(self, model: nn.Module) -> Any:
        """Return the network's outputs. Random draws are the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model(*self.inputs)

    def fault(self, units: Units) -> str:
        """Return what is wrong when these groups are cut at once; empty if nothing is."""
        for number, share in ((0, 2), (1, 3), (2, 1_000_000)):  # a half of the units, a third, and one
            keep = {
                name: torch.from_numpy(shuffled(name, group.size, 0, number)[: 1 + (group.size - 1) // share]).sort()[0]
                for name, group in units.groups.items()
            }
            try:
                exact = {name: rows for name, rows in keep.items() if units.groups[name].exact}
                problem = self._differs(units, exact) if exact else ""
                if not problem and len(exact) < len(keep):
                    with _PlainNorms():
                        problem = self._differs(units, keep)
                small = narrow(self.whole, units, keep, scale=True)
                problem = problem or compute_in_fork(partial(self._trains, small))
            except Exception as error:
                return f"the narrow network does not run ({describe(error)})"
            if problem:
                return problem
        return ""

    def _differs(self, units: Units, keep: dict[str, Tensor]) -> str:
        small = narrow(self.whole, units, keep, scale=False).eval()
        silenced = self._without(units, keep).eval()
        with torch.no_grad():
            expected, got = _leaves(self.run(silenced)), _leaves(self.run(small))
        for a, b in zip(expected, got, strict=True):
            if a.shape != b.shape:
                return f"the narrow network's output has shape {tuple(b.shape)}, not {tuple(a.shape)}"
            if a.is_floating_point() and not bool(a.isfinite().any()):
                return "its outputs are not finite, so that nothing can be compared"
            bound = 1e-9 if a.dtype == torch.float64 else 1e-3
            if a.is_floating_point() and not _close(a, b, bound):
                return "the narrow network does not compute what the whole one does without the other units"
        return ""

    def _without(self, units: Units, keep: dict[str, Tensor]) -> nn.Module:
        """Return the whole network, with the weights that read units which are not kept set to zero."""
        readers = {(r.tensor, r.dim): r.span for r in units.readers}

        def silent(name: str, tensor: Tensor) -> Tensor:
            rows_by_dim = {
                dim: readers[name, dim].rows_of(keep) for dim in range(tensor.dim()) if (name, dim) in readers
            }
            if all(rows is None for rows in rows_by_dim.values()):
                return tensor
            silenced = tensor.detach().clone()
            for dim, rows in rows_by_dim.items():
                if rows is not None:
                    removed = torch.ones(silenced.shape[dim], dtype=torch.bool)
                    removed[rows] = False
                    silenced[(slice(None),) * dim + (removed,)] = 0
            return nn.Parameter(silenced, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else silenced

        return shell(self.whole, silent)

    def _trains(self, small: nn.Module) -> str:
        small.train()
        outs = [t for t in _leaves(self.run(small)) if t.requires_grad]
        if not outs:
            return "" if not any(p.requires_grad for p in small.parameters()) else "nothing of it can be trained"
        torch.autograd.backward([t.sum() for t in outs])
        small.zero_grad()
        self.run(small.eval())
        return ""


class _PlainNorms(TorchFunctionMode):
    """Inside, norms over units only apply their weights, so that their output does not depend on which units are
    there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("layer_norm", "rms_norm", "group_norm"):
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "over", "weight", "bias"), args, strict=False)) | (kwargs or {})
        x = given["input"]
        for key, apply in (("weight", torch.mul), ("bias", torch.add)):
            if isinstance(value := given.get(key), Tensor):
                x = apply(x, value.view([-1, *(1 for _ in x.shape[2:])]) if name == "group_norm" else value)
        return x


def _close(a: Tensor, b: Tensor, bound: float) -> bool:
    scale = a.abs().nan_to_num(0, 0, 0).max() if a.numel() else torch.zeros(())
    return bool(torch.isclose(a, b, rtol=bound, atol=float(scale) * bound + 1e-30, equal_nan=True).all())


def _leaves(outputs: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
