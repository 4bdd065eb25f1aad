"""Run a recording with its elementwise operators fused into a few kernels, each of which reads and writes memory
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.tiers.captured import _kernel_source as source
from shoal.engine.tiers.captured._casting import absorb_casts
from shoal.engine.tiers.captured._grouping import Group, Grouping, offset, same_order
from shoal.engine.tiers.captured._joining import joined_parts, joining_source
from shoal.engine.tiers.captured._recording import Call, NotRecordable, Recording, Ref
from shoal.utils.cuda_kernels import Kernel, aligned, current_device

THREADS, MOST_BLOCKS = 256, 4096

Load = Callable[[str, Sequence[str]], Sequence[Kernel]]
"""A function that compiles a source and returns the kernels of these names."""


@dataclass(slots=True)
class _Kernel:
    name: str
    loads: list[int]
    in_order: set[int]
    """Those that are read several elements at a time, whose addresses must be multiples of 16 bytes."""
    stores: list[int]
    numel: int


class Fused:
    """Repeats what was recorded, from inputs of the same shapes to the same outputs."""

    def __init__(self, recording: Recording, outputs: Sequence[int | None], device: torch.device, load: Load) -> None:
        absorb_casts(recording, outputs)
        self.values, self.calls = recording.values, recording.calls
        self.inputs, self.outputs = recording.inputs, list(outputs)
        self._device, self._grouping = device, Grouping(recording, device)
        self._group_of = self._grouping.group_of
        self._steps = list(self._order(self._needed()))
        bodies: dict[str, str] = {}
        made = {id(step): self._kernel_of(step, bodies) for step in self._steps}
        self._kernels = {key: kernel for key, kernel in made.items() if kernel is not None}
        text = source.PRELUDE + "".join(body.replace("NAME", name) for body, name in bodies.items())
        self.source = text
        with current_device(device):
            kernels = load(text, list(bodies.values())) if bodies else []
        self._loaded = dict(zip(bodies.values(), kernels, strict=True))
        self._last_uses = self._find_last_uses()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        held: list[Any] = [value.constant for value in self.values]
        for number, tensor in zip(self.inputs, inputs, strict=True):
            held[number] = tensor
        device = self._device
        with torch.no_grad(), torch.autocast(device.type, enabled=False), current_device(device):
            for step, dead in zip(self._steps, self._last_uses, strict=True):
                kernel = self._kernels.get(id(step))
                if kernel is not None:
                    self._launch(kernel, held)
                else:
                    assert isinstance(step, Call)
                    self._call(step, held)
                for number in dead:
                    held[number] = None
        return [None if number is None else held[number] for number in self.outputs]

    def _call(self, call: Call, held: list[Any]) -> None:
        flat = [held[leaf] if isinstance(leaf, Ref) else leaf for leaf in call.args]
        args, kwargs = pytree.tree_unflatten(flat, call.spec)
        out = call.func(*args, **kwargs)
        for before, after in call.written:
            held[after] = held[before]
        for number, given in zip(call.gives, pytree.tree_leaves(out), strict=True):
            if number is not None:
                held[number] = given

    def _launch(self, kernel: _Kernel, held: list[Any]) -> None:
        """Allocate a kernel's results and launch it, after checking the layout of its operands."""
        for number in kernel.stores:
            value = self.values[number]
            held[number] = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=self._device)
        loaded = [aligned(held[n]) if n in kernel.in_order else held[n] for n in kernel.loads]
        for number, tensor in zip(kernel.loads, loaded, strict=True):
            value = self.values[number]
            if (tuple(tensor.shape), tensor.stride(), tensor.dtype) != (value.shape, value.stride, value.dtype):
                raise NotRecordable(  # the kernel would read other elements
                    f"a tensor lies otherwise than when it was recorded: {tensor.stride()}, {tensor.dtype}"
                )
        tensors = [*loaded, *(held[number] for number in kernel.stores)]
        blocks = min(-(-kernel.numel // (4 * THREADS)), MOST_BLOCKS)
        self._loaded[kernel.name](grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=[*tensors, kernel.numel])

    # --- in which order ---------------------------------------------------------------------------------------------

    def _needed(self) -> set[int]:
        """Return the calls outside of groups that are needed, and mark what the groups store."""
        needed: set[int] = set()
        seen: set[int] = set()
        waiting = [number for number in self.outputs if number is not None]
        for index, call in enumerate(self.calls):
            if call.written:
                needed.add(index)
                waiting += call.reads
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            index = self.values[number].call
            if index in self._group_of:
                group = self._group_of[index]
                group.stored.add(number)
                waiting += [n for n, _ in self._grouping.inside(group, {number})[1]]
            elif index >= 0:
                needed.add(index)
                waiting += self.calls[index].reads
        return needed

    def _order(self, needed: set[int]) -> Iterator[Call | Group]:
        """Yield the calls in their own order, and each group as late as possible."""
        done: set[int] = set()

        def before(step: int | Group) -> Iterator[int | Group]:
            if isinstance(step, Group):
                numbers = [number for number, _ in self._grouping.inside(step, step.stored)[1]]
            else:
                numbers = self.calls[step].reads
                for index in self.calls[step].after:
                    group = self._group_of.get(index)
                    if group is not None and group.stored:
                        yield group
                    elif index in needed:
                        yield index
            for number in numbers:
                index = self.values[number].call
                if index >= 0:
                    yield self._group_of.get(index, index)

        def emit(step: int | Group) -> Iterator[Call | Group]:
            key = id(step) if isinstance(step, Group) else step
            if key in done:
                return
            done.add(key)
            for other in before(step):
                yield from emit(other)
            yield step if isinstance(step, Group) else self.calls[step]

        for index in sorted(needed):
            yield from emit(index)
        for number in self.outputs:
            if number is not None and self.values[number].call >= 0:
                call = self.values[number].call
                yield from emit(self._group_of.get(call, call))

    def _find_last_uses(self) -> list[list[int]]:
        """Return for each step the values that are not used after it."""
        last: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            if isinstance(step, Group):
                kernel = self._kernels[id(step)]
                numbers = [*kernel.loads, *kernel.stores]
            else:
                numbers = [*step.reads, *(n for n in step.gives if n is not None), *(n for _, n in step.written)]
            last.update(dict.fromkeys(numbers, place))
        outputs = {number for number in self.outputs if number is not None}
        dead: list[list[int]] = [[] for _ in self._steps]
        for number, place in last.items():
            if number not in outputs:
                dead[place].append(number)
        return dead

    # --- source -----------------------------------------------------------------------------------------------------

    def _kernel_of(self, step: Call | Group, bodies: dict[str, str]) -> _Kernel | None:
        """Return the kernel of a group, or of a call that has one here, else None."""
        return self._kernel(step, bodies) if isinstance(step, Group) else self._joining(step, bodies)

    def _joining(self, call: Call, bodies: dict[str, str]) -> _Kernel | None:
        """Return a kernel that joins tensors, if that is what the call does."""
        joined = joined_parts(call, self.values, self._device)
        if joined is None or call.gives[0] is None:
            return None
        parts, dim = joined
        loads, out = list(dict.fromkeys(parts)), call.gives[0]
        pointers = [f"a{loads.index(number)}" for number in parts]
        body = joining_source([self.values[number] for number in parts], pointers, self.values[out], dim)
        in_order = {number for number in loads if self.values[number].contiguous}
        return _Kernel(bodies.setdefault(body, f"shoal_{len(bodies)}"), loads, in_order, [out], self.values[out].numel)

    def _kernel(self, group: Group, bodies: dict[str, str]) -> _Kernel:
        """Return a group's kernel; groups with the same code share one."""
        calls, loads = self._grouping.inside(group, group.stored)
        wide = 4 if group.numel % 4 == 0 else 1
        pointers = {number: f"a{i}" for i, number in enumerate(dict.fromkeys(number for number, _ in loads))}
        stores = sorted(group.stored)
        names: dict[Any, str] = {}
        setup, body = [], []
        linear = {number for number, out in loads if same_order(self.values[number], out)}
        for number in sorted(linear, key=list(pointers).index) if wide == 4 else ():
            kind = source.STORED[self.values[number].dtype]
            setup.append(f"vec_{kind} w{pointers[number]} = *(const vec_{kind}*)({pointers[number]} + base);")
        for place, (number, out) in enumerate(loads):
            value, pointer = self.values[number], pointers[number]
            if not same_order(value, out):
                element = f"{pointer}[{offset(value, out)}]"
            else:
                element = f"w{pointer}.v[j]" if wide == 4 else f"{pointer}[i]"
            names[number, out.shape, out.stride] = f"x{place}"
            body.append(f"{source.COMPUTED[value.dtype]} x{place} = {source.load(value.dtype, element)};")
        for place, index in enumerate(sorted(calls)):
            body.append(self._statement(index, f"y{place}", calls, names))
            names[index] = f"y{place}"
        results = [names[self.values[number].call] for number in stores]
        return self._finish(group, bodies, pointers, linear, stores, setup, body, results, wide)

    def _finish(
        self, group: Group, bodies: dict[str, str], pointers: dict[int, str], linear: set[int], stores: list[int],
        setup: list[str], body: list[str], results: list[str], wide: int,
    ) -> _Kernel:  # fmt: skip
        """Write the source of a kernel from its statements."""
        kinds = [self.values[number].dtype for number in stores]
        parameters = [f"const {source.STORED[self.values[n].dtype]}* __restrict__ {p}" for n, p in pointers.items()]
        parameters += [f"{source.STORED[dtype]}* __restrict__ o{i}" for i, dtype in enumerate(kinds)]
        end = []
        for i, (dtype, result) in enumerate(zip(kinds, results, strict=True)):
            kind, stored = source.STORED[dtype], source.store(dtype, result)
            if wide == 4:
                setup.append(f"vec_{kind} r{i};")
                body.append(f"r{i}.v[j] = {stored};")
                end.append(f"*(vec_{kind}*)(o{i} + base) = r{i};")
            else:
                body.append(f"o{i}[i] = {stored};")
        lines = [
            f'extern "C" __global__ void NAME({", ".join([*parameters, "int n"])}) {{',
            f"  for (unsigned base = (blockIdx.x * blockDim.x + threadIdx.x) * {wide}u; base < (unsigned)n;",
            f"       base += gridDim.x * blockDim.x * {wide}u) {{",
            *(f"    {line}" for line in setup),
            "    #pragma unroll",
            f"    for (unsigned j = 0; j < {wide}u; ++j) {{",
            "      const unsigned i = base + j;",
            *(f"      {line}" for line in body),
            "    }",
            *(f"    {line}" for line in end),
            "  }",
            "}\n",
        ]
        name = bodies.setdefault("\n".join(lines), f"shoal_{len(bodies)}")
        return _Kernel(name, list(pointers), linear, stores, group.numel)

    def _statement(self, index: int, name: str, calls: set[int], names: dict[Any, str]) -> str:
        """Return the C statement of one call."""
        call, out = self.calls[index], self._grouping.out(index)
        kind = source.kind_of(call.func, [self.values[n].dtype for n in call.reads], out.dtype)
        condition = source.condition_at(call.func)
        arguments = []
        for place, argument in enumerate(self._grouping.arguments[index]):
            if isinstance(argument, Ref):
                inner = self._grouping.source(argument, out)
                held = names[inner] if inner in calls else names[int(argument), out.shape, out.stride]
                argument = source.Operand(held if place == condition else f"({kind}){held}")
            elif type(argument) in (int, float) and call.func.overloadpacket in source.ROUNDED_FIRST:
                read = self.values[call.reads[0]].dtype
                argument = torch.tensor(argument, dtype=read).item() if read.itemsize == 2 else argument
            arguments.append(argument)
        value = source.rounded(out.dtype, source.expression(call.func, arguments, kind))
        return f"{source.COMPUTED[out.dtype]} {name} = {value};"
