"""is the member axis, always first; a column is [M] and broadcasts as [M, 1, ...]. A clock is a rule's [M] state, such
as the step counter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.compile_fence import hold, is_traced

PIECE = 2**18
"""Elements that a CPU processes at a time, in whole members. The temporaries of a large stack would not fit the cache
and need new pages from the system, which takes several times as long as the arithmetic. The bits of an element do not
depend on it."""

HALF = (torch.float16, torch.bfloat16)

State = dict[str, Tensor]
Column = Mapping[str, Tensor]
Flags = frozenset[str]
"""The names of the settings of a rule that are switched on."""


def scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim keeps its scalars (step, mu_product, eta); their rounding is part of the
    arithmetic."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def coefficient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's kernels hold a Python number: the parameter's, or float32 for half
    precision."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.float32 if dtype in HALF else dtype


_LANES = 16
"""Float64 columns whose size is a multiple of this have no remainder in a vectorised loop."""


def power(base: Tensor | float, exponent: Tensor) -> Tensor:
    """Return `base ** exponent` of columns, members last, with bits that do not depend on the number of members.

    On a CPU the remainder of a vectorised loop would have other bits than the rest, so columns are padded.
    """
    size = exponent.shape[-1]
    missing = -size % _LANES
    if exponent.device.type != "cpu" or is_traced() or not missing:
        return torch.pow(base, exponent)
    if isinstance(base, Tensor):
        base = torch.nn.functional.pad(base, (0, missing))
    return torch.pow(base, torch.nn.functional.pad(exponent, (0, missing)))[..., :size]


def lerp_(start: Tensor, end: Tensor, weight: Tensor) -> None:
    """Compute `start.lerp_(end, weight)`, in float32 for half precision, since lerp requires equal dtypes."""
    if start.dtype == weight.dtype:
        start.lerp_(end, weight)
    else:
        start.copy_(torch.lerp(start.to(weight.dtype), end.to(weight.dtype), weight))


def _in_memory_order(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[Mapping[str, Tensor]]]:
    """Return views of the tensors with their dimensions in memory order, members first.

    For filters with channels last, a compiler would otherwise give temporaries another order, and need a pass over
    memory to convert.
    """
    orders = [
        [0, *sorted(range(1, p.dim()), key=lambda d, p=p: (-p.stride(d), d))] if p.dim() > 2 else None  # type: ignore[misc]
        for p in params
    ]
    is_ordered = [order is None or order == sorted(order) for order in orders]

    def view(value: Tensor, index: int, shape: torch.Size) -> Tensor:
        order = orders[index]
        return value if is_ordered[index] or order is None or value.shape != shape else value.permute(order)

    return (
        [view(p, i, p.shape) for i, p in enumerate(params)],
        [view(g, i, g.shape) for i, g in enumerate(grads)],
        [{k: view(v, i, params[i].shape) for k, v in state.items()} for i, state in enumerate(states)],
    )


class Rule(ABC):
    """One torch.optim class for a whole pack, with the arithmetic of that class and a column for every hyper-parameter.

    Subclasses declare their columns and flags, allocate their state, and implement `tick_` and `apply_`.
    """

    torch_class: ClassVar[type[Optimizer]]
    columns: ClassVar[tuple[str, ...]]
    """Hyper-parameters with one number per member."""
    structural: ClassVar[tuple[str, ...]] = ("maximize",)
    """Settings that change the arithmetic; they are equal for all members of one rule."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Columns whose term is left out if every member has zero. With the term, a member with zero gets the same bits as
    without it, so members that differ here still share a rule (see `merge_flags`)."""
    clock: ClassVar[tuple[str, ...]] = ("step",)
    """Names of the [M] state entries, which are the same for all parameters of a group that step together."""
    per_element: ClassVar[tuple[str, ...]] = ()
    """Torch's names of the state entries shaped like the parameter, without those of optional terms (see `buffers`)."""

    added: ClassVar[tuple[str, ...]] = ("weight_decay", "eps")
    """Coefficients that torch passes to `add`, the only kernel that rounds its number to half precision on a CPU."""

    def __init__(self, flags: Flags) -> None:
        assert flags <= {*self.structural, *self.optional}, f"{type(self).__name__} has no {sorted(flags)}"
        self.flags = flags

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.flags))})"

    def buffers(self) -> tuple[str, ...]:
        """Return the names of the state entries shaped like the parameter, for the rule's flags."""
        return self.per_element

    def init_clock(self, size: int, device: torch.device) -> State:
        """Return a new clock of [M] tensors."""
        return {"step": torch.zeros(size, dtype=torch.float64, device=device)}

    def init(self, param: Tensor, h: Column | None = None, *, clock: Mapping[str, Tensor] | None = None) -> State:
        """Return new state for one stacked parameter [M, ...]. `clock` shares the [M] entries of another state."""
        state: State = dict(clock) if clock is not None else self.init_clock(param.shape[0], param.device)
        for name in self.buffers():
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def init_all(self, params: Sequence[Tensor], h: Column | None = None) -> list[State]:
        """Return new state for the parameters of one group. Those of one dtype share a clock, so that `tick_` runs once
        a step."""
        clocks: dict[tuple[torch.device, torch.dtype], State] = {}
        states: list[State] = []
        for param in params:
            key = (param.device, param.dtype)
            if key not in clocks:
                clocks[key] = self.init_clock(param.shape[0], param.device)
            states.append(self.init(param, h, clock=clocks[key]))
        return states

    @abstractmethod
    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        """Advance the clock in place by one step, and return the coefficients of this step, [M] in `dtype`."""

    @abstractmethod
    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        """Update one stacked parameter in place. `c` has the coefficients of `tick_`, already shaped [M, 1, ...]."""

    @torch.no_grad()
    def update_all_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        h: Column,
        active: Tensor | None = None,
    ) -> None:
        """Take one step for the parameters of a group. States that share a clock tick once.

        Members outside `active` are restored from a copy. That is free in a compiled step, where it fuses into the same
        loops, but one more pass per tensor in eager mode, so pass `active` there only if a member takes no step.
        """
        if is_traced():
            params, grads, states = _in_memory_order(params, grads, states)
        copies = [] if active is None else self._copies(params, states)
        coefficients: dict[tuple[int, torch.dtype], State] = {}
        for param, grad, state in zip(params, grads, states, strict=True):
            key = (id(state["step"]), param.dtype)
            if key not in coefficients:
                assert all(other[0] != key[0] for other in coefficients), "one clock serves parameters of one dtype"
                coefficients[key] = self.coefficients_(param, state, h, active)
                active = coefficients[key].pop("active", active)
            self.apply_shaped_(param, grad, state, coefficients[key])
        for tensor, copy in copies:
            assert active is not None
            tensor.copy_(torch.where(active.view(-1, *[1] * (tensor.ndim - 1)), tensor, copy))

    def coefficients_(self, param: Tensor, state: Mapping[str, Tensor], h: Column, active: Tensor | None) -> State:
        """Return the coefficients of `tick_` for parameters like this one, rounded as torch rounds them, and fenced
        from the compiler.

        `active` is fenced with them, since the compiler would otherwise read the loss again for every element.
        """
        dtype = coefficient_dtype(param.dtype)
        c = self.tick_(state, h, dtype)
        if param.dtype in HALF and param.device.type == "cpu":
            c |= {name: c[name].to(param.dtype).to(dtype) for name in self.added if name in c}
        return hold(c if active is None else {**c, "active": active}, dtype)

    def apply_shaped_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        """Call `apply_` with [M] coefficients, on complex parameters as pairs of real numbers, as torch does."""
        if param.is_complex():
            param, grad = torch.view_as_real(param), torch.view_as_real(grad)
            state = {**state, **{name: torch.view_as_real(state[name]) for name in self.buffers()}}
        ones = [1] * (param.ndim - 1)
        c = {name: value.view(-1, *ones) for name, value in c.items()}
        size = param.shape[0]
        rows_at_once = max(1, PIECE * size // max(1, param.numel()))
        if rows_at_once >= size or param.device.type != "cpu" or is_traced():
            self.apply_(param, grad, state, c)
            return
        for start in range(0, size, rows_at_once):
            rows = slice(start, start + rows_at_once)
            piece = {name: value[rows] for name, value in state.items()}
            self.apply_(param[rows], grad[rows], piece, {name: value[rows] for name, value in c.items()})

    def _copies(self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor once, with a copy of it."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in [*params, *(value for state in states for value in state.values())]:
            if id(tensor) not in seen:
                seen[id(tensor)] = (tensor, tensor.clone())
        return list(seen.values())

    def signed(self, grad: Tensor) -> Tensor:
        """Return the gradient to descend along."""
        return grad.neg() if "maximize" in self.flags else grad

    def decayed(self, param: Tensor, grad: Tensor, c: Column) -> Tensor:
        """Return the gradient to descend along, with the L2 term if some member has one."""
        grad = self.signed(grad)
        if "weight_decay" in self.flags:
            return torch.addcmul(grad, param, c["weight_decay"]).to(grad.dtype)
        return grad

    def fresh_entry(self, param: Tensor, h: Mapping[str, float]) -> State:
        """Return the state that torch has for a parameter that never had a gradient: nothing for most classes."""
        return {}

    def torch_entry(self, entry: State, h: Mapping[str, float]) -> State:
        """Drop from one member's state what torch would not have, given that member's hyper-parameters."""
        return entry

    def from_entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add to torch's state of a parameter what this rule stores in addition."""
        return dict(entry)
