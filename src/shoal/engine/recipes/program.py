"""A traced step with a member axis: the graph with every operator replaced by its stacking rule, ready to run.

A value is either shared by all members or has the member axis first. Which one is decided once, when the program is
made. With `solo=True` the graph runs as it was traced, for one member, with only its random draws replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Sequence
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
from shoal.utils.randomness import Draw, DrawSource

MOST_PROGRAMS = 256
"""The most programs that `Programs` keeps."""
Noise = Callable[[int], Tensor]
"""Returns the value of the step's n-th random draw, members first. It may have a method `source`, see `DrawSource`."""


@dataclass(slots=True)
class _Instruction:
    """One call: it reads `args`, and its result becomes value number `out`."""

    run: Callable[..., Any]
    args: list[Any]
    out: int
    dead: tuple[int, ...]
    """Positions of values that no later instruction reads."""


class _Value(int):
    """The index of a computed value, as an argument of an instruction."""


class Program:
    """Runs the common step of `traces` (one per member) on stacked parameters, buffers and batches.

    Raises:
        NotStackable: If an operator has no exact member axis; the message names it.
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
        """Check that the traces are alike, and translate them into instructions.

        Args:
            stacked_batch: For each tensor of a batch, whether it has a member axis.
            solo: Run the graph for one member, without a member axis.
            deterministic: On a CPU with one thread, no bit of a member depends on the other traces, on their number, or
                on whether they share a batch.
            shared: Indices into parameters, then buffers, of those that all members share. They are passed with a
                member axis like the others, and the program reads the first row.
        """
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
        written, num_params = _written_inputs(self.trace), len(self.trace.params)
        self.written = [index for index in written if index < num_params]
        """Indices of the parameters that the step itself writes to."""
        self._written_batch = [i for i in written if i >= num_params + len(self.trace.buffers)]
        """Indices of inputs that are tensors of the batch, which the step writes to. It gets copies of them."""
        self._carries = self._find_stacked(stacked_batch)
        self._shared_inputs = [i for i in self._shared if self.members and self._inputs[i] not in self._carries]
        self._instructions = self._build()

    def __call__(self, state: Sequence[Tensor], batch: Sequence[Tensor], noise: Noise) -> tuple[Any, dict[str, Tensor]]:
        """Run the step and return (what it returned, the buffers afterwards).

        Args:
            state: Parameters, then buffers, in the trace's order.
            noise: Gives the random draws.
        """
        values: list[Any] = [None] * len(self._position)
        values[: len(state) + len(batch)] = self._prepare_inputs(state, batch)
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
        flat = [self._output(node, values) for node in self._outputs]
        outputs, buffers = pytree.tree_unflatten(flat, self.trace.out_spec)
        return outputs, buffers

    # --- which values carry members ---------------------------------------------------------------------------------

    def _find_stacked(self, stacked_batch: Sequence[bool]) -> set[Node]:
        """Return the nodes whose values have a member axis.

        A value that a step writes members' values into needs the axis too, so this repeats until nothing changes.
        """
        if not self.members:
            return set()
        num_state = len(self.trace.params) + len(self.trace.buffers)
        widened = self._always_stacked() if self.deterministic else set()
        while True:
            stacked = [*(i not in self._shared for i in range(num_state)), *stacked_batch]
            carries = {node for node, carried in zip(self._inputs, stacked, strict=True) if carried} | widened
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
            widened |= {origin(node) for node in written} | written

    def _always_stacked(self) -> set[Node]:
        """Return the nodes that always get a member axis in a deterministic program, whether or not members share
        them."""
        num_state = len(self.trace.params) + len(self.trace.buffers)
        constants = [node for node in self.trace.nodes if node.op == "get_attr"]
        return {*self._inputs[num_state:], *(n for n in constants if self.trace.constant(n).is_floating_point())}

    def _gets_axis(self, node: Node) -> bool:
        """Return whether a value gets a member axis although it depends on no member's own data."""
        varies = self._varies(self._position[node], node)
        return node in self._carries and not varies and not any(n in self._carries for n in node.all_input_nodes)

    def _varies(self, index: int, node: Node) -> bool:
        """Return whether a node reads members' own numbers, constants or random draws."""
        return any(path[0] == index for path in self._scalars) or index in self._constants or self._is_random(node)

    def _prepare_inputs(self, state: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
        """Return the program's inputs, with the member axis removed from shared ones and added where it is needed."""
        values = [*state, *batch]
        for index in self._shared_inputs:
            values[index] = values[index][0]
        for index in self._written_batch:
            values[index] = values[index].clone()
        for index in self._copied_inputs:
            values[index] = values[index].unsqueeze(0).repeat(self.members, *[1] * values[index].dim())
        return values

    def _output(self, node: Any, values: list[Any]) -> Any:
        """Return an output of the program, always with a member axis."""
        if not isinstance(node, Node):
            return node
        value = values[self._position[node]]
        if self.members and node not in self._carries and isinstance(value, Tensor):
            return value.unsqueeze(0).expand(self.members, *value.shape)
        return value

    # --- from nodes to instructions ---------------------------------------------------------------------------------

    def _build(self) -> list[_Instruction]:
        """Translate the nodes into instructions."""
        num_state = len(self.trace.params) + len(self.trace.buffers)
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
            if index >= num_state and node in self._carries and self._is_forced_input(node, index - num_state):
                self._copied_inputs.append(index)
        return instructions

    def _is_forced_input(self, node: Node, leaf: int) -> bool:
        return self._gets_axis(node) and not self._stacked_batch[leaf]

    def _constant(self, index: int, node: Node) -> Tensor:
        """Return the value of a constant of the graph, stacked if members differ in it."""
        if any(rules.mutates(user) and user.all_input_nodes[0] is node for user in node.users) and node.users:
            raise NotStackable("it changes a tensor that is neither a parameter nor a buffer")
        if index in self._constants:
            return torch.stack([value.detach().to(self.device) for value in self._constants[index]])
        value = self.trace.constant(node).detach().to(self.device)
        return value.unsqueeze(0).repeat(self.members, *[1] * value.dim()) if self._gets_axis(node) else value

    def _instruction(self, index: int, node: Node) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function of a node's instruction, and its arguments."""
        if node.target is operator.getitem or not hasattr(node.target, "_schema"):
            return node.target, self._slots(node.args)  # type: ignore[return-value]
        rules.refuse_side_writes(node.target)
        arguments = self._arguments(index, node)
        needs_rule = self._is_random(node) or node.target in rules.ALONE
        if not needs_rule and (node not in self._carries or self._gets_axis(node)):
            run = _call_shared(node.target, node, self.members if self._gets_axis(node) else 0)
            return run, [*self._slots(node.args), *self._slots(tuple(node.kwargs.values()))]
        ctx = OpContext(
            node, arguments, self.members, self.device, self._carries.__contains__, self.draws, self._draw,
            self._source, self.deterministic,
        )  # fmt: skip
        return rules.find(ctx), self._slots(arguments)

    def _is_random(self, node: Node) -> bool:
        return hasattr(node.target, "_schema") and _draws(node, self._arguments(self._position[node], node))

    def _draw(self, index: int) -> Tensor:
        return self._noise(index)

    def _source(self, index: int) -> DrawSource | None:
        source = getattr(self._noise, "source", None)
        return None if source is None else source(index)

    def _arguments(self, index: int, node: Node) -> tuple[Any, ...]:
        """Return all arguments in the schema's order, with members' own numbers filled in."""
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
        """Return, for each node, the values that are read there for the last time."""
        needed = {node for node in self._outputs if isinstance(node, Node)} | set(self._inputs)
        last_user = {
            node: max(node.users, key=self._position.__getitem__)
            for node in self.trace.nodes
            if node.users and node not in needed
        }
        last_uses: dict[Node, list[Node]] = {}
        for node, user in last_user.items():
            last_uses.setdefault(user, []).append(node)
        return last_uses


class _Nested(list[Any]):
    """A list argument that contains computed values."""


class Programs:
    """The stacked programs of a run, each made once for each composition of a stack."""

    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic
        self._programs: dict[Hashable, Program] = {}

    def get(
        self,
        traces: Sequence[Trace],
        stacked_batch: Sequence[bool],
        device: torch.device,
        shared: frozenset[int] = frozenset(),
    ) -> Program:
        """Return the program of these traces; see `Program` for the arguments and what it raises."""
        key = (tuple(trace.number for trace in traces), tuple(stacked_batch), device, shared)
        if key not in self._programs:
            while len(self._programs) >= MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = Program(
                traces, device=device, stacked_batch=stacked_batch, deterministic=self.deterministic, shared=shared
            )
        return self._programs[key]


def _resolve(arg: Any, values: list[Any]) -> Any:
    if type(arg) is _Nested:
        return [values[a] if type(a) is _Value else _resolve(a, values) for a in arg]
    return arg


def _call_shared(op: Any, node: Node, widen: int) -> Callable[..., Any]:
    """Return a function that calls an operator on shared values.

    Args:
        widen: Repeat the result for so many members, since the step writes to it later; 0: do not.
    """
    count, keys = len(node.args), list(node.kwargs)

    def run(*args: Any) -> Any:
        out = op(*args[:count], **dict(zip(keys, args[count:], strict=True)))
        return out.unsqueeze(0).repeat(widen, *[1] * out.dim()) if widen else out

    return run


# The indices of the rate and of the training flag among the arguments of operators that may draw random numbers.
_RATES = {
    "dropout": (1, 2), "dropout_": (1, 2), "feature_dropout": (1, 2), "feature_dropout_": (1, 2),
    "alpha_dropout": (1, 2), "feature_alpha_dropout": (1, 2), "alpha_dropout_": (1, 2),
    "feature_alpha_dropout_": (1, 2),
    "scaled_dot_product_attention": (4, None), "lstm": (5, 6), "gru": (5, 6), "rnn_tanh": (5, 6), "rnn_relu": (5, 6),
}  # fmt: skip


def _draws(node: Node, arguments: tuple[Any, ...]) -> bool:
    """Return whether this call draws random numbers, with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    rate_at, training_at = _RATES.get(str(node.target).split(".")[1], (None, None))
    if rate_at is None:
        return True
    if training_at is not None and not arguments[training_at]:
        return False
    return isinstance(arguments[rate_at], PerMember) or arguments[rate_at] != 0


def _check_alike(traces: Sequence[Trace]) -> None:
    """Raise NotStackable unless the graphs are alike. Equal training steps may still differ in eval mode or on other
    shapes."""
    distinct = list({id(other): other for other in traces}.values())
    first = skeleton(distinct[0]) if len(distinct) > 1 else None
    for other in distinct[1:]:
        if skeleton(other) != first:
            raise NotStackable(f"members do different things here: {difference(distinct[0], other)}")


def _written_inputs(recorded: Trace) -> list[int]:
    """Return the indices of the inputs (parameters, buffers, tensors of the batch) that the graph itself writes to."""
    place = {node: index for index, node in enumerate(n for n in recorded.nodes if n.op == "placeholder")}
    written: set[int] = set()
    for node in recorded.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            written |= {place[root] for root in map(origin, node.all_input_nodes[:1]) if root in place}
    return sorted(written)


def as_column(value: Any, rows: int) -> Tensor:
    """Return a logged value as one number for each row of the stack."""
    if isinstance(value, Tensor) and value.dim():
        return value.detach().reshape(rows, -1).mean(1) if value.dim() > 1 else value.detach()
    return torch.full((rows,), float(value), dtype=torch.float64)


def _no_noise(index: int) -> Tensor:
    raise AssertionError("a random draw outside a step")
