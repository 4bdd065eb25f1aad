"""Record a network's forward pass: every operator that it calls, on tensors with shapes and no data.

The network runs once, in training mode, on fake copies of its parameters: nothing is computed and no memory is used.
Two levels are recorded: operators (`aten.addmm`), from which the couplings follow, and calls in the user's own code
that name sizes (`x.view(batch, tokens, self.heads, 32)`), which a narrow network must make with other numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import SplitError, describe
from shoal.split.core.state import named_state

SIZED = frozenset(
    {"view", "reshape", "unflatten", "split", "split_with_sizes", "expand", "layer_norm", "rms_norm", "group_norm"}
)
"""Calls whose arguments are sizes."""
SUMS = frozenset(
    {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{n}d" for n in (1, 2, 3)}
)
"""Calls that sum over their first operand's features."""


@dataclass(slots=True, eq=False)
class Call:
    """A call in the user's code that names sizes or sums over features."""

    name: str
    modules: tuple[str, ...]
    """Names of the modules whose forward passes were running, the innermost last."""
    runs: tuple[int, ...] = ()
    """For each of these modules, the number of its run."""
    dim: int = 0
    """The dimension of a split."""
    outs: list[Tensor] = field(default_factory=list)

    @property
    def sized(self) -> bool:
        return self.name in SIZED


@dataclass(slots=True, eq=False)
class Op:
    """One call of an operator."""

    name: str
    pointwise: bool
    args: dict[str, Any]
    outs: list[Tensor]
    modules: tuple[str, ...]
    call: Call | None

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(list(self.args.values())) if isinstance(leaf, Tensor)]


@dataclass(slots=True, eq=False)
class Run:
    """One run of a module."""

    module: str
    given: Any
    """The first argument."""
    made: Any = None


@dataclass(slots=True, eq=False)
class Record:
    """A whole forward pass."""

    state: dict[str, Tensor]
    """Fake parameters and buffers by name."""
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    recurrent: frozenset[str] = frozenset()
    """Names of torch's recurrent layers."""

    def live(self) -> list[Op]:
        """List the operators that the output depends on."""
        needed = {_storage(t) for t in self.outputs}
        live_ops = []
        for op in reversed(self.ops):
            if any(_storage(t) in needed for t in op.outs):
                live_ops.append(op)
                needed.update(_storage(t) for t in op.tensors)
        return live_ops[::-1]


def shell(model: nn.Module, made: Callable[[str, Tensor], Tensor | None]) -> nn.Module:
    """Copy the network around other tensors. Its own tensors are not copied."""
    memo: dict[int, Any] = {}
    for name, tensor in named_state(model).items():
        memo[id(tensor)] = made(name, tensor)
    return copy.deepcopy(model, memo)


def record(model: nn.Module, inputs: Sequence[Any]) -> Record:
    """Run the network once on fake tensors."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        with fakes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def fake_state(_: str, tensor: Tensor) -> Tensor:
        made = fake(tensor)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    try:
        copied = shell(model, fake_state)
    except Exception as error:
        raise SplitError(
            f"{type(model).__name__} cannot be copied ({describe(error)}): a split needs copies"
        ) from error
    fake_inputs = pytree.tree_map_only(Tensor, fake, tuple(inputs))
    recorded = Record(named_state(copied), [t for t in pytree.tree_leaves(fake_inputs) if isinstance(t, Tensor)])
    stack: list[tuple[str, int]] = []
    recorded.recurrent = frozenset(n for n, m in copied.named_modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase))
    for name, module in copied.named_modules():
        _watch(module, name, recorded, stack)
    copied.train()
    calls = _Calls(recorded, stack)
    try:
        with torch.no_grad(), fakes, _Ops(recorded, stack, calls), calls:
            outputs = copied(*fake_inputs)
    except Exception as error:
        raise SplitError(
            f"{type(model).__name__} cannot be traced: {describe(error)}; its forward pass may depend on shapes, not "
            "on the values of tensors (no .item(), no branches on data)"
        ) from error
    recorded.outputs = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
    if not recorded.outputs:
        raise SplitError(f"{type(model).__name__} returns no tensor: nothing to train")
    return recorded


def _watch(module: nn.Module, name: str, recorded: Record, stack: list[tuple[str, int]]) -> None:
    """Keep the stack of running modules, and note the inputs and outputs of each."""
    count = itertools.count()
    open_runs: list[Run] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        stack.append((name, next(count)))
        open_runs.append(Run(name, args[0] if args else None))

    def leave(_: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        stack.pop()
        recorded.runs.append(open_runs.pop())
        recorded.runs[-1].made = made

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Calls(TorchFunctionMode):
    """Records calls that name sizes or sum over features."""

    def __init__(self, recorded: Record, stack: list[tuple[str, int]]) -> None:
        super().__init__()
        self.record = recorded
        self.stack = stack
        self.current: Call | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in SIZED | SUMS:
            return func(*args, **kwargs)
        call = Call(name, tuple(name for name, _ in self.stack), tuple(run for _, run in self.stack))
        self.record.calls.append(call)
        before, self.current = self.current, call
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = before
        call.outs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if name.startswith("split"):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            call.dim = dim % call.outs[0].dim()
        return result


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator."""

    def __init__(self, recorded: Record, stack: list[tuple[str, int]], calls: _Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = recorded
        self.stack = stack
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if outs:
            name = func.overloadpacket.__name__
            bound = dict(_bound(func, args, kwargs or {}))
            modules = tuple(module for module, _ in self.stack)
            pointwise = torch.Tag.pointwise in func.tags
            self.record.ops.append(Op(name, pointwise, bound, outs, modules, self.calls.current))
        return result


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the arguments by their names in the operator's schema."""
    for index, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        yield argument.name, args[index] if index < len(args) else kwargs.get(argument.name, default)
