"""Record the operators that a part of a step calls on a device, below autograd, while it runs.

A warm-up runs the step anyway; this mode observes it. Tensors are identified by their memory and their layout in it, so
that what autograd saves for its backward pass is recognised later. If that is not certain, the recording is abandoned
and the step runs unfused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_BATCH_NORMS = (aten.cudnn_batch_norm, aten.native_batch_norm, aten.miopen_batch_norm)
"""Operators that write their running averages without declaring it."""

_MADE_OF_NUMBERS = {
    aten.ones_like, aten.zeros_like, aten.full_like, aten.scalar_tensor, aten.ones, aten.zeros, aten.full, aten.arange,
    aten.new_ones, aten.new_zeros, aten.new_full,
}  # fmt: skip
"""Operators whose result is the same at each call."""
MOST_ELEMENTS = 1 << 16
"""The largest number of elements of such a result that is kept."""


class NotRecordable(RuntimeError):
    """The operators cannot be replayed from a recording; the message says why."""


class Ref(int):
    """The number of a value, in place of a tensor among the arguments of a call."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the recording: an input, a constant, or the result of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    address: int
    storage: int
    call: int = -1
    """The call that returns it, or -1 if there is none."""
    root: int = -1
    """The value whose memory it shares, element by element in the same order, or itself."""
    constant: Tensor | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True, eq=False)
class Call:
    """One operator, with the values that it reads and returns."""

    func: Any
    args: list[Any]
    """All arguments, flat; see `spec`."""
    spec: pytree.TreeSpec
    reads: list[int]
    gives: list[int | None]
    """The returned values, flat; None for what is not a tensor."""
    gives_spec: pytree.TreeSpec
    after: list[int] = field(default_factory=list)
    """Calls that must be done before this one writes, besides those whose values it reads."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """What it writes to: the value before, and the value after."""

    @property
    def is_view(self) -> bool:
        """Whether the call returns another view of memory and does nothing else."""
        return not self.written and any(given.alias_info is not None for given in self.func._schema.returns)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records everything that is called on tensors inside this context, while it runs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.written: set[int] = set()
        """Storages that some call writes to."""
        self._keys: dict[int, dict[Any, int]] = {}
        """The values of each storage's tensors, by address."""
        self._number: dict[int, int] = {}
        """Each storage's number by address; an address may belong to another storage later."""
        self._readers: dict[int, list[int]] = {}
        """The calls that read a storage since it was last written to."""
        self._storages = 0
        self._numbers: dict[int, Tensor] = {}
        """Values that no tensor's content enters."""
        self._held = list(inputs)
        for tensor in inputs:
            self._enter(tensor, None)
        self.inputs = [self._find(tensor) for tensor in inputs]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, out)
        return out

    @property
    def floating(self) -> set[torch.dtype]:
        """The floating-point dtypes of the recording."""
        return {value.dtype for value in self.values if value.dtype.is_floating_point}

    def find(self, tensor: Tensor) -> int:
        """Return the number of a tensor's current value."""
        return self._find(tensor)

    def before_cast(self, number: int) -> int:
        """Return the value in half precision of which this one is a copy in float32, or its own number."""
        value = self.values[number]
        call = self.calls[value.call] if value.call >= 0 else None
        if call is None or call.func is not aten._to_copy.default or value.storage in self.written:
            return number
        half = self.values[call.reads[0]]
        same = (half.shape, half.stride, half.device) == (value.shape, value.stride, value.device)
        exact = half.dtype in (torch.bfloat16, torch.float16) and value.dtype == torch.float32
        return call.reads[0] if same and exact and half.storage not in self.written else number

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a call, with the values it reads, writes and returns."""
        if torch.Tag.data_dependent_output in func.tags:
            raise NotRecordable(f"a number is read out of a tensor ({func})")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        flat = [Ref(self._find(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        reads = [leaf for leaf in flat if isinstance(leaf, Ref)]
        index = len(self.calls)
        given, gives_spec = pytree.tree_flatten(out)
        call = Call(func, flat, spec, list(map(int, reads)), [], gives_spec)
        self.calls.append(call)
        for tensor in _written(func, args, kwargs):
            self._write(tensor, index, call)
        for value in reads:
            self._readers.setdefault(self.values[value].storage, []).append(index)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for tensor in given:
            call.gives.append(self._give(tensor, index, call, addresses) if isinstance(tensor, Tensor) else None)

        if func.overloadpacket in _MADE_OF_NUMBERS and call.gives[0] is not None and out.numel() <= MOST_ELEMENTS:
            self._numbers[call.gives[0]] = out.detach()

    def keep_numbers(self, outputs: Sequence[int | None]) -> None:
        """Make constants of results that are the same at each call, unless they are written to or returned."""
        others = self.written | {self.values[number].storage for number in outputs if number is not None}
        for number, tensor in self._numbers.items():
            if self.values[number].storage not in others:
                self.values[number].constant, self.values[number].call = tensor, -1

    def _write(self, tensor: Tensor, index: int, call: Call) -> None:
        address = tensor.untyped_storage().data_ptr()
        number, before = self._number[address], self._find(tensor)
        call.after += self._readers.pop(number, [])
        self.written.add(number)
        self._keys[address] = {}  # other views of it are not tracked
        call.written.append((before, self._enter(tensor, index)))

    def _give(self, tensor: Tensor, index: int, call: Call, addresses: set[int]) -> int:
        address = tensor.untyped_storage().data_ptr()
        if address not in addresses:  # new memory: the former storage at this address is gone
            self._number.pop(address, None)
            self._keys.pop(address, None)
        elif _key(tensor) in self._keys[address]:
            known = self._keys[address][_key(tensor)]
            if self.values[known].call == index:  # it was written to
                return known
        number = self._enter(tensor, index)
        for read in call.reads:
            if address in addresses and _same_memory(self.values[read], self.values[number]):
                self.values[number].root = self.values[read].root
        return number

    def _find(self, tensor: Tensor) -> int:
        """Return the number of a tensor's value; a tensor of unknown memory is a constant."""
        if tensor.layout != torch.strided:
            raise NotRecordable(f"a tensor of layout {tensor.layout}")
        address = tensor.untyped_storage().data_ptr()
        if address not in self._number or not tensor.numel():
            self._held.append(tensor)
            number = self._enter(tensor, None)
            self.values[number].constant = tensor.detach()
            return number
        known = self._keys[address].get(_key(tensor))
        if known is None:
            raise NotRecordable("a tensor that no operator gave")
        return known

    def _enter(self, tensor: Tensor, call: int | None) -> int:
        """Add a value for a tensor and return its number."""
        if tensor.is_conj() or tensor.is_neg():  # its memory contains the conjugate or the negative
            raise NotRecordable("a tensor whose sign is not in memory")
        address = tensor.untyped_storage().data_ptr()
        if address not in self._number:
            self._number[address] = self._storages
            self._storages += 1
        value = Value(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_contiguous(),
            tensor.data_ptr(), self._number[address], -1 if call is None else call, len(self.values),
        )  # fmt: skip
        self.values.append(value)
        self._keys.setdefault(address, {})[_key(tensor)] = len(self.values) - 1
        return len(self.values) - 1


def _key(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _same_memory(value: Value, given: Value) -> bool:
    """Return whether a view has all elements of its base in the same order."""
    if (value.address, value.dtype, value.numel) != (given.address, given.dtype, given.numel):
        return False
    return (value.contiguous and given.contiguous) or (value.shape, value.stride) == (given.shape, given.stride)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    if func.overloadpacket in _BATCH_NORMS:
        written += [value for value in args[3:5] if isinstance(value, Tensor)]
    return written
