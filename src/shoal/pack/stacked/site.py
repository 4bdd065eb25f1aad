"""One operator call of a traced step, seen by the rule that gives it a member axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.pack.signature import PerMember
from shoal.randomness import Draw


class NotStackable(Exception):
    """This operator cannot be given a member axis exactly; the message says why."""


Run = Callable[..., Any]
"""What a rule returns: called with the node's arguments, members first wherever `Site.stacked` says so."""
Rule = Callable[["Site"], Run]


@dataclass(slots=True)
class Site:
    """What is known before the first step: the operator, its arguments' shapes alone, which of them carry members."""

    node: Node
    args: tuple[Any, ...]
    """The node's arguments, also the keyword ones, in the order of its schema; missing ones have their default."""
    members: int
    device: torch.device
    carries: Callable[[Node], bool]
    draws: list[Draw] = field(default_factory=list)
    noise: Callable[[int], Tensor] = field(default=lambda index: torch.empty(0))

    @property
    def op(self) -> Any:
        return self.node.target

    @property
    def call(self) -> Run:
        """The operator, taking all its arguments by position, those that are keyword-only too."""
        op, schema = self.node.target, self.op._schema.arguments
        named = [(i, argument.name) for i, argument in enumerate(schema) if argument.kwarg_only]
        count = len(schema) - len(named)
        named = [(i, name) for i, name in named if self.args[i] is not schema[i].default_value]
        if not named:
            return lambda *args: op(*args[:count])  # type: ignore[operator]
        return lambda *args: op(*args[:count], **{name: args[i] for i, name in named})  # type: ignore[operator]

    @property
    def name(self) -> str:
        return str(self.node.target).removeprefix("aten.")

    def stacked(self, index: int) -> bool:
        """Does this argument (or anything in it) have the member axis?"""
        leaves = pytree.tree_leaves(self.args[index], is_leaf=lambda v: isinstance(v, Node))
        return any(isinstance(leaf, Node) and self.carries(leaf) for leaf in leaves)

    def meta(self, index: int) -> Tensor:
        """The argument's fake tensor: shape, strides and dtype as they are for one member alone."""
        return meta_of(self.args[index])

    def ndim(self, index: int) -> int:
        return self.meta(index).dim()

    @property
    def out(self) -> Tensor:
        value = self.node.meta["val"]
        first: Tensor = value[0] if isinstance(value, list | tuple) else value
        return first

    @property
    def varies(self) -> bool:
        """Does a number differ between members?"""
        leaves = pytree.tree_leaves(self.args, is_leaf=lambda v: isinstance(v, PerMember | Node))
        return any(isinstance(leaf, PerMember) for leaf in leaves)

    def column(self, value: PerMember, ndim: int, dtype: torch.dtype) -> Tensor:
        """A number per member as [M, 1, ...], ready to broadcast against a stacked tensor of `ndim` own dimensions."""
        return torch.tensor(value.values, dtype=dtype, device=self.device).view(-1, *[1] * ndim)

    def draw(self, draw: Draw) -> Callable[[], Tensor]:
        """Register a random draw; the returned function gives its value, members first, while the step runs."""
        self.draws.append(draw)
        index = len(self.draws) - 1
        return lambda: self.noise(index)


def one_by_one(site: Site) -> bool:
    """Whether large kernels run once per member: on a CPU, where each is long enough and its bits are then its own."""
    return site.device.type == "cpu"


def meta_of(value: Any) -> Tensor:
    assert isinstance(value, Node), value
    meta = value.meta["val"]
    assert isinstance(meta, Tensor), meta
    return meta


def dims(value: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dimensions of one member's tensor as dimensions of the stacked one; None means all of them."""
    if value is None or (not isinstance(value, int) and len(value) == 0):
        return list(range(1, ndim + 1))
    return [d % max(ndim, 1) + 1 for d in ([value] if isinstance(value, int) else value)]


def pad_dims(x: Tensor, own: int, wanted: int) -> Tensor:
    """[M, ...] with `own` dimensions after M, as [M, 1, ..., ...] with `wanted` of them, so that it broadcasts."""
    for _ in range(wanted - own):
        x = x.unsqueeze(1)
    return x


def fold(x: Tensor) -> Tensor:
    """[M, B, ...] -> [M*B, ...]."""
    return x.flatten(0, 1)


def unfold(x: Tensor, members: int) -> Tensor:
    """[M*B, ...] -> [M, B, ...]."""
    wide: Tensor = x.unflatten(0, (members, -1))  # type: ignore[no-untyped-call]
    return wide


def per_member(op: Run, site: Site) -> Run:
    """The operator itself, once for every member: exact for whatever the operator is, and as slow as running alone.

    Stacked arguments are unbound and results stacked, so that autograd pays one copy each way.
    """
    flags = [site.stacked(i) for i in range(len(site.args))]
    members = site.members
    mutates = site.op._schema.is_mutable

    def pick(value: Any, flag: bool) -> list[Any]:
        if isinstance(value, PerMember):
            return list(value.values)
        if isinstance(value, Tensor):
            return list(value.unbind(0)) if flag else [value] * members
        if isinstance(value, list | tuple):
            columns = [pick(item, flag) for item in value]
            return [type(value)(column[m] for column in columns) for m in range(members)]
        return [value] * members

    nested = [flag and not isinstance(site.args[i], Node) for i, flag in enumerate(flags)]
    if any(nested):
        inner = [
            [isinstance(a, Node) and site.carries(a) for a in site.args[i]] if nested[i] else []
            for i in range(len(flags))
        ]

    def run(*args: Any) -> Any:
        columns: list[list[Any]] = []
        for i, value in enumerate(args):
            if nested[i]:
                parts = [pick(item, inner[i][j]) for j, item in enumerate(value)]
                columns.append([[part[m] for part in parts] for m in range(members)])
            else:
                columns.append(pick(value, flags[i]))
        if mutates and isinstance(args[0], Tensor):
            # autograd does not let one of many views be written to, nor a view from before its base had a gradient
            for m in range(members):
                op(args[0].select(0, m), *[column[m] for column in columns[1:]])
            return args[0]
        results = [op(*[column[m] for column in columns]) for m in range(members)]
        leaves = [pytree.tree_flatten(result) for result in results]
        stacked = [
            torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(x for x, _ in leaves), strict=True)
        ]
        return pytree.tree_unflatten(stacked, leaves[0][1])

    return run
