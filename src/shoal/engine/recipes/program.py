"""A traced step with a member axis: the graph, every operator replaced by its stacking rule, ready to run.

A value is either shared by all members or has the member axis first; which one is decided once, here, before any step.
With `members=0` the same graph runs as it was traced, for one member alone, with only its random draws replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from shoal.engine import rules
from shoal.engine.rules.op_context import NotStackable, OpContext
from shoal.engine.tracing.signature import PerMember, arguments_of, difference, lift, skeleton
from shoal.engine.tracing.trace import Trace, origin
from shoal.utils.randomness import Draw

Noise = Callable[[int], Tensor]
"""The value of the step's n-th random draw, members first."""


@dataclass(slots=True)
class _Instruction:
    run: Callable[..., Any]
    args: list[Any]
    out: int
    dead: tuple[int, ...]
    """Values that are not read after this instruction."""


class _Value(int):
    """The position of a computed value among an instruction's arguments."""


class Program:
    """Runs the common step of `traces` (one per member) on stacked parameters, buffers and batches.

    Raises:
        NotStackable: when an operator has no exact member axis; the message names it.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        *,
        device: torch.device,
        stacked_batch: Sequence[bool],
        solo: bool = False,
        deterministic: bool = False,
        shared: Collection[int] = (),
    ) -> None:
        """`deterministic`: on a CPU with one thread, no bit of a member depends on the other traces, on their number or
        on whether they share a batch. `shared`: of parameters, then buffers, those that all members have in common;
        the program is given them with a member axis all the same, and reads the first of them."""
        _check_alike(traces)
        self.trace = traces[0]
        self.members = 0 if solo else len(traces)
        self.device = device
        self.deterministic = deterministic and device.type == "cpu"
        self.draws: list[Draw] = []
        self._noise: Noise = _no_noise
        self._position = {node: index for index, node in enumerate(self.trace.nodes)}
        self._scalars, self._constants = lift(traces)
        if solo and (self._scalars or self._constants):
            raise NotStackable("members of their own numbers cannot share one solo step")
        self._inputs = [node for node in self.trace.nodes if node.op == "placeholder"]
        self._stacked_batch = list(stacked_batch)
        self._shared = frozenset(shared)
        self.written = _written_params(self.trace)
        """Parameters that the step itself writes to, by their place."""
        self._carries = self._propagate(stacked_batch)
        self._shared_inputs = [i for i in self._shared if self.members and self._inputs[i] not in self._carries]
        self._instructions = self._build()

    def __call__(self, state: Sequence[Tensor], batch: Sequence[Tensor], noise: Noise) -> tuple[Any, dict[str, Tensor]]:
        """(what the step returned, buffers afterwards), from parameters and buffers in the trace's order."""
        values: list[Any] = [None] * len(self._position)
        values[: len(state) + len(batch)] = self._enter(state, batch)
        self._noise = noise
        grad = torch.is_grad_enabled()
        try:
            for step in self._instructions:
                args = [values[a] if type(a) is _Value else _resolve(a, values) for a in step.args]
                values[step.out] = step.run(*args)
                for index in step.dead:
                    values[index] = None
        finally:
            torch.set_grad_enabled(grad)
            self._noise = _no_noise
        flat = [self._leave(node, values) for node in self._outputs]
        outputs, buffers = pytree.tree_unflatten(flat, self.trace.out_spec)
        return outputs, buffers

    # --- which values carry members ---------------------------------------------------------------------------------

    def _propagate(self, stacked_batch: Sequence[bool]) -> set[Node]:
        if not self.members:
            return set()
        owned = len(self.trace.params) + len(self.trace.buffers)
        forced = self._never_shared() if self.deterministic else set()
        while True:
            stacked = [*(i not in self._shared for i in range(owned)), *stacked_batch]
            carries = {node for node, carried in zip(self._inputs, stacked, strict=True) if carried} | forced
            for index, node in enumerate(self.trace.nodes):
                if self._varies(index, node) or any(n in carries for n in node.all_input_nodes):
                    carries.add(node)
            written = {
                node.all_input_nodes[0]
                for node in self.trace.nodes
                if rules.mutates(node) and node in carries and node.all_input_nodes[0] not in carries
            }
            if not written:
                return carries
            forced |= {origin(node) for node in written} | written

    def _never_shared(self) -> set[Node]:
        """What members may or may not have in common, and is given to each of them so that it makes no difference."""
        owned = len(self.trace.params) + len(self.trace.buffers)
        constants = [node for node in self.trace.nodes if node.op == "get_attr"]
        return {*self._inputs[owned:], *(n for n in constants if self.trace.constant(n).is_floating_point())}

    def _widened(self, node: Node) -> bool:
        """Must a value that no member's own data went into be given the member axis all the same?"""
        varies = self._varies(self._position[node], node)
        return node in self._carries and not varies and not any(n in self._carries for n in node.all_input_nodes)

    def _varies(self, index: int, node: Node) -> bool:
        """Do members' own numbers, constants or draws go in here?"""
        return any(path[0] == index for path in self._scalars) or index in self._constants or self._is_random(node)

    def _enter(self, state: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
        values = [*state, *batch]
        for index in self._shared_inputs:
            values[index] = values[index][0]
        for index in self._copied_inputs:
            values[index] = values[index].unsqueeze(0).repeat(self.members, *[1] * values[index].dim())
        return values

    def _leave(self, node: Any, values: list[Any]) -> Any:
        if not isinstance(node, Node):
            return node
        value = values[self._position[node]]
        if self.members and node not in self._carries and isinstance(value, Tensor):
            return value.unsqueeze(0).expand(self.members, *value.shape)
        return value

    # --- from nodes to instructions ---------------------------------------------------------------------------------

    def _build(self) -> list[_Instruction]:
        owned = len(self.trace.params) + len(self.trace.buffers)
        self._outputs: list[Any] = list(self.trace.nodes[-1].args[0])  # type: ignore[arg-type]
        for (node_index, _, path), number in self._scalars.items():
            if node_index == len(self.trace.nodes) - 1:  # a plain number that the step returns, such as a log
                self._outputs[path[0].idx] = torch.tensor(number.values, dtype=torch.float64, device=self.device)
        instructions = []
        last_use = self._last_use()
        self._copied_inputs: list[int] = []
        for index, node in enumerate(self.trace.nodes):
            if node.op == "get_attr":
                value = self._constant(index, node)
                instructions.append(_Instruction(lambda value=value: value, [], index, ()))
            elif node.op == "call_function":
                run, args = self._instruction(index, node)
                dead = tuple(self._position[n] for n in last_use.get(node, ()))
                instructions.append(_Instruction(run, args, index, dead))
        for index, node in enumerate(self._inputs):
            if index >= owned and node in self._carries and self._is_forced_input(node, index - owned):
                self._copied_inputs.append(index)
        return instructions

    def _is_forced_input(self, node: Node, leaf: int) -> bool:
        return self._widened(node) and not self._stacked_batch[leaf]

    def _constant(self, index: int, node: Node) -> Tensor:
        if any(rules.mutates(user) and user.all_input_nodes[0] is node for user in node.users) and node.users:
            raise NotStackable("it changes a tensor that is neither a parameter nor a buffer")
        if index in self._constants:
            return torch.stack([value.detach().to(self.device) for value in self._constants[index]])
        value = self.trace.constant(node).detach().to(self.device)
        return value.unsqueeze(0).repeat(self.members, *[1] * value.dim()) if self._widened(node) else value

    def _instruction(self, index: int, node: Node) -> tuple[Callable[..., Any], list[Any]]:
        if node.target is operator.getitem or not hasattr(node.target, "_schema"):
            return node.target, self._slots(node.args)  # type: ignore[return-value]
        rules.refuse_side_writes(node.target)
        arguments = self._arguments(index, node)
        ruled = self._is_random(node) or node.target in rules.ALONE
        if not ruled and (node not in self._carries or self._widened(node)):
            run = _plain(node.target, node, self.members if self._widened(node) else 0)
            return run, [*self._slots(node.args), *self._slots(tuple(node.kwargs.values()))]
        ctx = OpContext(
            node, arguments, self.members, self.device, self._carries.__contains__, self.draws, self._draw,
            self.deterministic,
        )  # fmt: skip
        return rules.find(ctx), self._slots(arguments)

    def _is_random(self, node: Node) -> bool:
        return hasattr(node.target, "_schema") and _draws(node, self._arguments(self._position[node], node))

    def _draw(self, index: int) -> Tensor:
        return self._noise(index)

    def _arguments(self, index: int, node: Node) -> tuple[Any, ...]:
        """All arguments in the schema's order, with members' own numbers put in."""
        values = []
        for slot, value in arguments_of(node):
            for (position, name, path), number in self._scalars.items():
                if (position, name) == (index, slot.key):
                    if path:
                        raise NotStackable("a list of numbers differs between members")
                    value = number
            values.append(value)
        return tuple(values)

    def _slots(self, args: Any) -> list[Any]:
        return [self._slot(value) for value in args]

    def _slot(self, value: Any) -> Any:
        if isinstance(value, Node):
            return _Value(self._position[value])
        if isinstance(value, list | tuple) and any(isinstance(item, Node) for item in value):
            return _Nested(self._slots(value))
        return value

    def _last_use(self) -> dict[Node, list[Node]]:
        """For every node, the values that are read there for the last time."""
        needed = {node for node in self._outputs if isinstance(node, Node)} | set(self._inputs)
        last = {
            node: max(node.users, key=self._position.__getitem__)
            for node in self.trace.nodes
            if node.users and node not in needed
        }
        last_uses: dict[Node, list[Node]] = {}
        for node, user in last.items():
            last_uses.setdefault(user, []).append(node)
        return last_uses


class _Nested(list[Any]):
    """A list argument with computed values in it."""


def _resolve(arg: Any, values: list[Any]) -> Any:
    if type(arg) is _Nested:
        return [values[a] if type(a) is _Value else _resolve(a, values) for a in arg]
    return arg


def _plain(op: Any, node: Node, widen: int) -> Callable[..., Any]:
    """An operator on shared values, with its keyword arguments; repeated for each member when written to later."""
    count, keys = len(node.args), list(node.kwargs)

    def run(*args: Any) -> Any:
        out = op(*args[:count], **dict(zip(keys, args[count:], strict=True)))
        return out.unsqueeze(0).repeat(widen, *[1] * out.dim()) if widen else out

    return run


# Where operators that may draw keep their rate and their training flag.
_RATES = {
    "dropout": (1, 2), "dropout_": (1, 2), "feature_dropout": (1, 2), "feature_dropout_": (1, 2),
    "alpha_dropout": (1, 2), "feature_alpha_dropout": (1, 2), "alpha_dropout_": (1, 2),
    "feature_alpha_dropout_": (1, 2),
    "scaled_dot_product_attention": (4, None), "lstm": (5, 6), "gru": (5, 6), "rnn_tanh": (5, 6), "rnn_relu": (5, 6),
}  # fmt: skip


def _draws(node: Node, arguments: tuple[Any, ...]) -> bool:
    """Does this call draw random numbers, with these arguments?"""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    rate_at, training_at = _RATES.get(str(node.target).split(".")[1], (None, None))
    if rate_at is None:
        return True
    if training_at is not None and not arguments[training_at]:
        return False
    return isinstance(arguments[rate_at], PerMember) or arguments[rate_at] != 0


def _check_alike(traces: Sequence[Trace]) -> None:
    """Graphs of one training step may still differ in eval mode, or on batches of another shape."""
    distinct = list({id(other): other for other in traces}.values())
    first = skeleton(distinct[0]) if len(distinct) > 1 else None
    for other in distinct[1:]:
        if skeleton(other) != first:
            raise NotStackable(f"members do different things here: {difference(distinct[0], other)}")


def _written_params(recorded: Trace) -> list[int]:
    """The parameters that the graph itself writes to, by their place."""
    place = {node: index for index, node in enumerate(recorded.nodes[: len(recorded.params)])}
    written: set[int] = set()
    for node in recorded.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            written |= {place[root] for root in map(origin, node.all_input_nodes[:1]) if root in place}
    return sorted(written)


def as_column(value: Any, rows: int) -> Tensor:
    """A step's log as one number per row of the stack."""
    if isinstance(value, Tensor) and value.dim():
        return value.detach().reshape(rows, -1).mean(1) if value.dim() > 1 else value.detach()
    return torch.full((rows,), float(value), dtype=torch.float64)


def _no_noise(index: int) -> Tensor:
    raise AssertionError("a random draw outside a step")
