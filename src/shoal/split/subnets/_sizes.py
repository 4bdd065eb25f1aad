"""Replace sizes in the user's own code by those of the narrow network while its forward pass runs.

`x.view(batch, tokens, self.heads, width // self.heads)` is right for the whole network. In a narrow one the same call
is made with the sizes that its tensors have. A call is identified by its place in the module's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.errors import SplitError
from shoal.split.subnets._record import SIZED, SUMS

Factor = float | tuple[float, ...]
Size = int | Fraction | None
FIRST = {"einsum": 1, "addmm": 1, "baddbmm": 1}
"""The place of the first operand, for calls where it is not the first argument."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call in a module's forward pass."""

    name: str
    dim: int
    sizes: tuple[tuple[Size, ...], ...] = ()
    """For each result its sizes: None where the caller's own size is right, a fraction of it where rows and units share
    it. Empty if all are right."""
    factor: Factor | None = None
    """What the first operand is multiplied by."""


class _Active(local):
    def __init__(self) -> None:
        self.modes: list[Any] = []


_ACTIVE = _Active()


@contextmanager
def own_code() -> Iterator[None]:
    """Mark calls inside this context as Shoal's own, so that their sizes are not replaced."""
    _ACTIVE.modes.append(None)
    try:
        yield
    finally:
        _ACTIVE.modes.pop()


def times(x: Tensor, factor: Factor, dim: int = -1) -> Tensor:
    """Multiply a tensor by a factor, or by one for each place of a dimension."""
    if isinstance(factor, float):
        return x * factor
    with own_code():
        return x * x.new_tensor(factor).view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])


class Sizes(TorchFunctionMode):
    """One run of a module's forward pass."""

    def __init__(self, module: str, table: Sequence[Entry]) -> None:
        super().__init__()
        self.module = module
        self.table = table
        self.place = 0

    def __enter__(self) -> Any:
        _ACTIVE.modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ACTIVE.modes.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _ACTIVE.modes[-1] is not self or name not in SIZED | SUMS:
            return func(*args, **kwargs)
        if self.place >= len(self.table) or self.table[self.place].name != name:
            raise SplitError(
                f"{self.module or 'the network'} calls {name} where it did not when it was traced: a split needs a "
                "forward pass that is the same every time"
            )
        entry = self.table[self.place]
        self.place += 1
        if entry.sizes:
            args, kwargs = _resized(entry, args, kwargs)
        if entry.factor is not None:
            args = _scaled(entry, args)
        return func(*args, **kwargs)


def _resized(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with the narrow network's sizes."""
    name, new_sizes = entry.name, entry.sizes[0]
    x, rest = args[0], args[1:]
    if name in ("view", "reshape", "expand"):
        old_sizes = rest if rest else next(iter(kwargs.values()))
        old_sizes = (
            old_sizes[0] if len(old_sizes) == 1 and isinstance(old_sizes[0], Sequence | torch.Size) else old_sizes
        )
        if any(not isinstance(n, int) for n in old_sizes):
            return args, kwargs
        return (x, _merged(old_sizes, new_sizes, infer=name != "expand")), {}
    if name == "unflatten":
        dim, old_sizes = (*rest, *(kwargs[k] for k in ("dim", "sizes") if k in kwargs))
        at = dim % x.dim()
        return (x, dim, _merged(old_sizes, new_sizes[at : at + len(old_sizes)], infer=True)), {}
    if name in ("split", "split_with_sizes"):
        pieces = [out[entry.dim] for out in entry.sizes]
        known = all(isinstance(n, int) for n in pieces)
        return ((x, pieces, entry.dim), {}) if known else (args, kwargs)
    if name in ("layer_norm", "rms_norm"):
        old_sizes = rest[0] if rest else kwargs["normalized_shape"]
        kwargs = {key: value for key, value in kwargs.items() if key != "normalized_shape"}
        return (x, list(new_sizes[len(new_sizes) - len(old_sizes) :]), *rest[1:]), kwargs
    return args, kwargs


def _merged(old_sizes: Sequence[int], new_sizes: Sequence[Size], *, infer: bool) -> list[int]:
    """Replace the caller's sizes by the narrow network's. A size that rows and units share is inferred if possible."""
    infer = infer and -1 not in old_sizes and sum(isinstance(new, Fraction) for new in new_sizes) == 1
    merged = []
    for size, new in zip(old_sizes, new_sizes, strict=True):
        if isinstance(new, Fraction):
            new = -1 if infer or size == -1 else int(size * new)
        merged.append(size if new is None else new)
    return merged


def _scaled(entry: Entry, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the call's arguments with the first operand multiplied by its factor."""
    assert entry.factor is not None
    at = FIRST.get(entry.name, 0)
    dim = 1 if entry.name.startswith("conv") else -1
    if entry.name == "einsum" and not isinstance(entry.factor, float):
        raise SplitError("einsum sums over units of which some are whole and some are cut: use a Linear there")
    operand = args[at]
    if isinstance(operand, list | tuple):
        operand = [times(operand[0], entry.factor), *operand[1:]]
    else:
        operand = times(operand, entry.factor, dim)
    return (*args[:at], operand, *args[at + 1 :])
