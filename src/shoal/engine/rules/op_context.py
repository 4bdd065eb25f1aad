"""One operator call of a traced step, as seen by the rule that gives it a member axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.engine.rules._per_member import layout_of, rows, together
from shoal.engine.tracing.signature import PerMember, liftable
from shoal.utils.randomness import Draw, DrawSource


class NotStackable(Exception):
    """Raised if an operator cannot be given an exact member axis; the message says why."""


Run = Callable[..., Any]
"""The function that a rule returns. It is called with the node's arguments, which have the member axis first if
`OpContext.stacked` says so."""
Rule = Callable[["OpContext"], Run]


@dataclass(slots=True)
class OpContext:
    """What a rule knows before the first step: the operator, the shapes of its arguments for one member, and which of
    them have a member axis."""

    node: Node
    args: tuple[Any, ...]
    """The node's arguments, including keyword arguments, in the order of the schema; missing ones have their
    default."""
    members: int
    device: torch.device
    carries: Callable[[Node], bool]
    """Returns whether a node's value has the member axis."""
    draws: list[Draw] = field(default_factory=list)
    noise: Callable[[int], Tensor] = field(default=lambda index: torch.empty(0))
    source: Callable[[int], DrawSource | None] = field(default=lambda index: None)
    deterministic: bool = False
    """Whether a member's bits must depend on that member alone."""

    @property
    def op(self) -> Any:
        return self.node.target

    @property
    def call(self) -> Run:
        """The operator as a function that takes all arguments by position, including keyword-only ones."""
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
        """Return whether this argument, or anything in it, has the member axis."""
        leaves = pytree.tree_leaves(self.args[index], is_leaf=lambda v: isinstance(v, Node))
        return any(isinstance(leaf, Node) and self.carries(leaf) for leaf in leaves)

    def meta(self, index: int) -> Tensor:
        """Return the argument's fake tensor, with shape, strides and dtype for one member alone."""
        return meta_of(self.args[index])

    def ndim(self, index: int) -> int:
        return self.meta(index).dim()

    @property
    def out(self) -> Tensor:
        """The fake tensor of the operator's first result, for one member alone."""
        value = self.node.meta["val"]
        first: Tensor = value[0] if isinstance(value, list | tuple) else value
        return first

    @property
    def varies(self) -> bool:
        """Whether a number differs between members."""
        leaves = pytree.tree_leaves(self.args, is_leaf=lambda v: isinstance(v, PerMember | Node))
        return any(isinstance(leaf, PerMember) for leaf in leaves)

    @property
    def could_vary(self) -> bool:
        """Whether there is a number that may differ between members of some stack, even if it does not in this one."""
        return any(
            isinstance(leaf, PerMember) or liftable(leaf, str(argument.type))
            for argument, value in zip(self.op._schema.arguments, self.args, strict=True)
            for leaf in pytree.tree_leaves(value, is_leaf=lambda v: isinstance(v, PerMember | Node))
        )

    def column(self, value: PerMember, ndim: int, dtype: torch.dtype) -> Tensor:
        """Return a number per member as [M, 1, ...], to broadcast against a stacked tensor with `ndim` further
        dimensions."""
        return torch.tensor(value.values, dtype=dtype, device=self.device).view(-1, *[1] * ndim)

    def draw(self, draw: Draw) -> Drawn:
        """Register a random draw. Calling the result gives its value, members first, while the step runs."""
        self.draws.append(draw)
        return Drawn(self, len(self.draws) - 1)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random draw of a step that runs."""

    ctx: OpContext
    index: int

    def __call__(self) -> Tensor:
        return self.ctx.noise(self.index)

    def source(self) -> DrawSource | None:
        """Return what the elements of a mask are made of, if a kernel can make them itself."""
        return self.ctx.source(self.index)


def one_by_one(ctx: OpContext) -> bool:
    """Return whether large kernels run once per member. They do on a CPU, where each is long enough, and its bits do
    not depend on the pack."""
    return ctx.device.type == "cpu"


def meta_of(value: Any) -> Tensor:
    assert isinstance(value, Node), value
    meta = value.meta["val"]
    assert isinstance(meta, Tensor), meta
    return meta


def dims(value: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Convert dimensions of one member's tensor to those of the stacked tensor; None means all of them."""
    if value is None or (not isinstance(value, int) and len(value) == 0):
        return list(range(1, ndim + 1))
    return [d % max(ndim, 1) + 1 for d in ([value] if isinstance(value, int) else value)]


def pad_dims(x: Tensor, ndim: int, wanted: int) -> Tensor:
    """Insert dimensions of size 1 after the member axis until there are `wanted` instead of `ndim`, so that it
    broadcasts."""
    for _ in range(wanted - ndim):
        x = x.unsqueeze(1)
    return x


def fold(x: Tensor) -> Tensor:
    """[M, B, ...] -> [M*B, ...]."""
    return x.flatten(0, 1)


def unfold(x: Tensor, members: int) -> Tensor:
    """[M*B, ...] -> [M, B, ...]."""
    unfolded: Tensor = x.unflatten(0, (members, -1))  # type: ignore[no-untyped-call]
    return unfolded


def per_member(op: Run, ctx: OpContext) -> Run:
    """Return a function that calls the operator once for every member: always exact, and as slow as running alone.

    Stacked arguments are unbound and results stacked, so autograd needs one copy each way. With `deterministic` they
    are copied to separate memory, see `_per_member`.
    """
    members, target = ctx.members, ctx.op._schema.arguments[:1]
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in target)
    pickers = [_picker(ctx, value) for value in ctx.args]

    def run(*args: Any) -> Any:
        if writes and isinstance(args[0], Tensor):
            others = zip(pickers[1:], args[1:], strict=True)
            return _run_in_place(op, args[0], [pick(value) for pick, value in others], ctx)
        columns = [pick(value) for pick, value in zip(pickers, args, strict=True)]
        results = [op(*[column[m] for column in columns]) for m in range(members)]
        leaves = [pytree.tree_flatten(result) for result in results]
        join = together if ctx.deterministic else torch.stack
        stacked = [
            join(parts) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(x for x, _ in leaves), strict=True)
        ]
        return pytree.tree_unflatten(stacked, leaves[0][1])

    return run


def _picker(ctx: OpContext, value: Any) -> Callable[[Any], Sequence[Any]]:
    """Return a function that splits one argument into a value for each member."""
    members = ctx.members
    if isinstance(value, PerMember):
        return lambda _: value.values
    if isinstance(value, Node) and ctx.carries(value):
        if not ctx.deterministic:
            return lambda x: x.unbind(0)
        layout = layout_of(meta_of(value))
        return lambda x: rows(x, layout)
    if isinstance(value, list | tuple):
        pickers = [_picker(ctx, item) for item in value]

        def pick_all(values: Any) -> Sequence[Any]:
            columns = [pick(item) for pick, item in zip(pickers, values, strict=True)]
            return [type(value)(column[m] for column in columns) for m in range(members)]

        return pick_all
    return lambda x: (x,) * members


def _run_in_place(op: Run, target: Tensor, others: Sequence[Sequence[Any]], ctx: OpContext) -> Tensor:
    """Call an operator that changes its first argument in place, once for every member.

    If autograd records it, each member's part is copied, and written back when all are done: autograd does not allow
    writing to one of several views, nor to memory next to what it has saved.
    """
    member_args = [[column[m] for column in others] for m in range(ctx.members)]
    tensors = [target, *pytree.tree_leaves(member_args)]
    records_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    if not records_grad and not ctx.deterministic:
        for row, arguments in zip(target.unbind(0), member_args, strict=True):
            op(row, *arguments)
        return target
    copies = rows(target, layout_of(meta_of(ctx.args[0])))
    for copy, arguments in zip(copies, member_args, strict=True):
        op(copy, *arguments)
    return target.copy_(together(copies))
