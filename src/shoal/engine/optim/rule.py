"""What every rule shares: one torch.optim class as plain tensor arithmetic over a member axis.

Why a split into `tick_` and `apply_`: what torch computes once a step in Python float64 (bias corrections, decayed
learning rates) is a [M] column here, in float64 as well, and is computed once for all parameters that share a clock;
only the finished coefficient is cast to the parameter's dtype. `apply_` is then a few passes over memory, in place.
A traced step fences them (see `_hold`), so that the compiler never inlines a float64 power into the loop over the
elements.

M is the pack axis, always first; a column is [M] and broadcasts as [M, 1, ...].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.compile_fence import hold, is_traced

PIECE = 2**18
"""Elements a CPU works on at a time, in whole members: the temporaries of a large stack would leave the cache and cost
fresh pages from the system, several times the arithmetic itself. Each element's bits are the same in any piece."""

HALF = (torch.float16, torch.bfloat16)

State = dict[str, Tensor]
Column = Mapping[str, Tensor]
Flags = frozenset[str]
"""The settings of a rule that are switched on, by their names."""


def scalar_dtype() -> torch.dtype:
    """The dtype torch.optim keeps its scalars (step, mu_product, eta) in; their rounding is part of the arithmetic."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def coefficient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype torch's kernels hold a Python number in: the parameter's own, float32 for half precision."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.float32 if dtype in HALF else dtype


_LANES = 16
"""Float64 columns of a multiple of this have no remainder in a vectorised loop."""


def power(base: Tensor | float, exponent: Tensor) -> Tensor:
    """`base ** exponent` of columns, members last, with the same bits for a member whatever their number: on a CPU the
    remainder of the loop over them would have other bits than the rest."""
    size = exponent.shape[-1]
    missing = -size % _LANES
    if exponent.device.type != "cpu" or is_traced() or not missing:
        return torch.pow(base, exponent)
    if isinstance(base, Tensor):
        base = torch.nn.functional.pad(base, (0, missing))
    return torch.pow(base, torch.nn.functional.pad(exponent, (0, missing)))[..., :size]


def lerp_(start: Tensor, end: Tensor, weight: Tensor) -> None:
    """`start.lerp_(end, weight)`, in float32 for half precision (lerp alone insists on equal dtypes)."""
    if start.dtype == weight.dtype:
        start.lerp_(end, weight)
    else:
        start.copy_(torch.lerp(start.to(weight.dtype), end.to(weight.dtype), weight))


def _in_memory_order(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[Mapping[str, Tensor]]]:
    """The same tensors, seen with their dimensions as they lie in memory, members first.

    A compiler that lays out a temporary for filters with channels last would give it another order than the filters
    have, and pay a pass over memory to get back.
    """
    orders = [
        [0, *sorted(range(1, p.dim()), key=lambda d, p=p: (-p.stride(d), d))] if p.dim() > 2 else None  # type: ignore[misc]
        for p in params
    ]
    plain = [order is None or order == sorted(order) for order in orders]

    def seen(value: Tensor, index: int, shape: torch.Size) -> Tensor:
        order = orders[index]
        return value if plain[index] or order is None or value.shape != shape else value.permute(order)

    return (
        [seen(p, i, p.shape) for i, p in enumerate(params)],
        [seen(g, i, g.shape) for i, g in enumerate(grads)],
        [{k: seen(v, i, params[i].shape) for k, v in state.items()} for i, state in enumerate(states)],
    )


class Rule(ABC):
    """One torch.optim class for a whole pack: a column of every hyper-parameter, the arithmetic of the class itself.

    Subclasses state their columns and flags, allocate their state, and write `tick_` and `apply_`.
    """

    torch_class: ClassVar[type[Optimizer]]
    columns: ClassVar[tuple[str, ...]]
    """Hyper-parameters that are one number per member."""
    structural: ClassVar[tuple[str, ...]] = ("maximize",)
    """Settings that change the arithmetic: equal for all members of one rule."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Columns whose term is left out when every member has zero. With the term in, a member with zero gets the same
    bits as without it, so members that differ here still share a rule (see `merge_flags`)."""
    clock: ClassVar[tuple[str, ...]] = ("step",)
    """State entries that are [M]: the same for all parameters of a group that step together."""
    per_element: ClassVar[tuple[str, ...]] = ()
    """State entries shaped like the parameter, by torch's names (those of an optional term come by `buffers`)."""

    added: ClassVar[tuple[str, ...]] = ("weight_decay", "eps")
    """Coefficients that torch passes to `add`: the one kernel that, on a CPU, rounds its number to half precision."""

    def __init__(self, flags: Flags) -> None:
        assert flags <= {*self.structural, *self.optional}, f"{type(self).__name__} has no {sorted(flags)}"
        self.flags = flags

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.flags))})"

    def buffers(self) -> tuple[str, ...]:
        """Names of the state entries shaped like the parameter, given the flags."""
        return self.per_element

    def init_clock(self, size: int, device: torch.device) -> State:
        """A fresh clock of [M] tensors."""
        return {"step": torch.zeros(size, dtype=torch.float64, device=device)}

    def init(self, param: Tensor, h: Column | None = None, *, clock: Mapping[str, Tensor] | None = None) -> State:
        """Fresh state for one stacked parameter [M, ...]; `clock` shares another state's [M] entries."""
        state: State = dict(clock) if clock is not None else self.init_clock(param.shape[0], param.device)
        for name in self.buffers():
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def init_all(self, params: Sequence[Tensor], h: Column | None = None) -> list[State]:
        """Fresh state for the parameters of one group, sharing one clock a dtype, so that `tick_` runs once a step."""
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
        """Advance the clock in place by one step; the coefficients of this step, [M] in `dtype`."""

    @abstractmethod
    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        """The update of one stacked parameter in place; `c` comes from `tick_`, already shaped [M, 1, ...]."""

    @torch.no_grad()
    def update_all_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        h: Column,
        active: Tensor | None = None,
    ) -> None:
        """One step for the parameters of a group. States that share a clock (by identity) tick once.

        With `active`, inactive members are restored from a copy: free when compiled (it fuses into the same loops),
        one more pass a tensor in eager mode, so pass it there only when a member takes no step.
        """
        if is_traced():
            params, grads, states = _in_memory_order(params, grads, states)
        before = [] if active is None else self._copies(params, states)
        ticked: dict[tuple[int, torch.dtype], State] = {}
        for param, grad, state in zip(params, grads, states, strict=True):
            key = (id(state["step"]), param.dtype)
            if key not in ticked:
                assert all(other[0] != key[0] for other in ticked), "one clock serves parameters of one dtype"
                ticked[key] = self.coefficients_(param, state, h, active)
                active = ticked[key].pop("active", active)
            self.apply_shaped_(param, grad, state, ticked[key])
        for tensor, copy in before:
            assert active is not None
            tensor.copy_(torch.where(active.view(-1, *[1] * (tensor.ndim - 1)), tensor, copy))

    def coefficients_(self, param: Tensor, state: Mapping[str, Tensor], h: Column, active: Tensor | None) -> State:
        """`tick_` for parameters like this one: rounded where torch rounds, and fenced from the compiler; with them
        goes `active`, or the compiler would look at the loss again for every element."""
        dtype = coefficient_dtype(param.dtype)
        c = self.tick_(state, h, dtype)
        if param.dtype in HALF and param.device.type == "cpu":
            c |= {name: c[name].to(param.dtype).to(dtype) for name in self.added if name in c}
        return hold(c if active is None else {**c, "active": active}, dtype)

    def apply_shaped_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        """`apply_` with the coefficients as [M]; complex parameters as pairs of real numbers, as torch does."""
        if param.is_complex():
            param, grad = torch.view_as_real(param), torch.view_as_real(grad)
            state = {**state, **{name: torch.view_as_real(state[name]) for name in self.buffers()}}
        ones = [1] * (param.ndim - 1)
        c = {name: value.view(-1, *ones) for name, value in c.items()}
        size = param.shape[0]
        at_once = max(1, PIECE * size // max(1, param.numel()))
        if at_once >= size or param.device.type != "cpu" or is_traced():
            self.apply_(param, grad, state, c)
            return
        for start in range(0, size, at_once):
            rows = slice(start, start + at_once)
            piece = {name: value[rows] for name, value in state.items()}
            self.apply_(param[rows], grad[rows], piece, {name: value[rows] for name, value in c.items()})

    def _copies(self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in [*params, *(value for state in states for value in state.values())]:
            if id(tensor) not in seen:
                seen[id(tensor)] = (tensor, tensor.clone())
        return list(seen.values())

    def signed(self, grad: Tensor) -> Tensor:
        """The gradient to descend along."""
        return grad.neg() if "maximize" in self.flags else grad

    def decayed(self, param: Tensor, grad: Tensor, c: Column) -> Tensor:
        """The gradient to descend along, with the L2 term when some member has one."""
        grad = self.signed(grad)
        if "weight_decay" in self.flags:
            return torch.addcmul(grad, param, c["weight_decay"]).to(grad.dtype)
        return grad

    def fresh_entry(self, param: Tensor, h: Mapping[str, float]) -> State:
        """What torch has for a parameter that never had a gradient: mostly nothing."""
        return {}

    def torch_entry(self, entry: State, h: Mapping[str, float]) -> State:
        """Drop from one member's state what torch would not have, given that member's numbers."""
        return entry

    def from_entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add to torch's entry what this rule keeps beyond it."""
        return dict(entry)
