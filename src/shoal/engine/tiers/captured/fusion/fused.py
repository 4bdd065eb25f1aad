"""Run a recording with its elementwise operators fused into a few kernels, each of which reads and writes memory
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.kernels import parts
from shoal.engine.tiers.captured.fusion import kernel_source as source
from shoal.engine.tiers.captured.fusion.casting import absorb_casts
from shoal.engine.tiers.captured.fusion.grouping import Group, Grouping, offset, same_order
from shoal.engine.tiers.captured.fusion.joining import joined_parts, joining_source
from shoal.engine.tiers.captured.fusion.launches import Code, Launch, Plan, Size
from shoal.engine.tiers.captured.fusion.recording import Call, NotRecordable, Recording, Ref
from shoal.utils.cuda_kernels import Kernel, aligned, current_device

THREADS, MOST_BLOCKS = 256, 4096

Load = Callable[[str, Sequence[str]], Sequence[Kernel]]
"""A function that compiles a source and returns the kernels of these names."""


@dataclass(slots=True)
class _Kernel:
    code: Code | str
    """That of a group, or the source of a kernel that joins tensors."""
    loads: list[int]
    in_order: set[int]
    """Those that are read several elements at a time, whose addresses must be multiples of 16 bytes."""
    stores: list[int]
    numel: int


class Fused:
    """Repeats what was recorded, from inputs of the same shapes to the same outputs."""

    def __init__(self, recording: Recording, outputs: Sequence[int | None], device: torch.device, load: Load) -> None:
        recording.keep_numbers(outputs)
        absorb_casts(recording, outputs)
        self.values, self.calls = recording.values, recording.calls
        self.inputs, self.outputs = recording.inputs, list(outputs)
        self._device, self._grouping = device, Grouping(recording, device)
        self._group_of = self._grouping.group_of
        self._needed = self._find_needed()
        self._kernels = {group: self._kernel(group) for group in self._group_of.values() if group.stored}
        ordered = list(self._order())
        self._steps = Plan(ordered, self._before, self._code_of, self._size).joined()
        made = {step: self._joining(step) for step in self._steps if isinstance(step, Call)}
        self._joinings = {call: kernel for call, kernel in made.items() if kernel is not None}
        self._load_kernels(load)
        self._last_uses = self._find_last_uses()

    def _load_kernels(self, load: Load) -> None:
        """Write and compile one kernel for each code and number of places."""
        launches = [step for step in self._steps if isinstance(step, Launch)]
        wanted = dict.fromkeys(map(self._code, launches))
        names: dict[Any, str] = {key: f"shoal_{i}" for i, key in enumerate(wanted)}
        joining = dict.fromkeys(kernel.code for kernel in self._joinings.values())
        names |= {code: f"shoal_join_{i}" for i, code in enumerate(joining)}
        written = [
            key.replace("NAME", name) if isinstance(key, str) else key[0].written(name, key[1])
            for key, name in names.items()
        ]
        self.source = source.PRELUDE + "".join(written)
        with current_device(self._device):
            kernels = load(self.source, list(names.values())) if names else []
        self._loaded = dict(zip(names, kernels, strict=True))

    def _code_of(self, group: Group) -> Code:
        code = self._kernels[group].code
        assert isinstance(code, Code)
        return code

    def _code(self, launch: Launch) -> tuple[Code, int]:
        """Return the code of a launch, and for how many groups its kernel has room."""
        code = self._code_of(launch.groups[0])
        return code, parts.places(len(launch.groups), len(code.pointers))

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        held: list[Any] = [value.constant for value in self.values]
        for number, tensor in zip(self.inputs, inputs, strict=True):
            held[number] = tensor
        device = self._device
        with torch.no_grad(), torch.autocast(device.type, enabled=False), current_device(device):
            for step, dead in zip(self._steps, self._last_uses, strict=True):
                if isinstance(step, Launch):
                    self._launch(step, held)
                elif step in self._joinings:
                    self._join(self._joinings[step], held)
                else:
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

    def _launch(self, launch: Launch, held: list[Any]) -> None:
        """Compute the groups of a launch."""
        given = [self._part(self._kernels[group], held) for group in launch.groups]
        key = self._code(launch)
        arguments, blocks = parts.arguments(given, key[1])
        self._loaded[key](grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=arguments)

    def _join(self, kernel: _Kernel, held: list[Any]) -> None:
        """Join tensors with a kernel of their own."""
        part = self._part(kernel, held)
        self._loaded[kernel.code](grid=(part.blocks, 1, 1), block=(THREADS, 1, 1), args=[*part.tensors, part.n])

    def _part(self, kernel: _Kernel, held: list[Any]) -> parts.Part:
        """Allocate a kernel's results, and return its arguments after checking the layout of its operands."""
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
        return parts.Part(tensors, kernel.numel, min(-(-kernel.numel // (4 * THREADS)), MOST_BLOCKS))

    # --- in which order ---------------------------------------------------------------------------------------------

    def _find_needed(self) -> set[int]:
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

    def _order(self) -> Iterator[Call | Group]:
        """Yield the calls in their own order, and each group as late as possible."""
        done: set[Call | Group] = set()

        def emit(step: Call | Group) -> Iterator[Call | Group]:
            if step in done:
                return
            done.add(step)
            for other in self._before(step):
                yield from emit(other)
            yield step

        for index in sorted(self._needed):
            yield from emit(self.calls[index])
        for number in self.outputs:
            if number is not None and self.values[number].call >= 0:
                yield from emit(self._step_of(self.values[number].call))

    def _before(self, step: Call | Group) -> Iterator[Call | Group]:
        """Yield what must be done before a step."""
        numbers = self._kernels[step].loads if isinstance(step, Group) else step.reads
        for index in () if isinstance(step, Group) else step.after:
            group = self._group_of.get(index)
            if group is not None and group.stored:
                yield group
            elif index in self._needed:
                yield self.calls[index]
        for number in numbers:
            if self.values[number].call >= 0:
                yield self._step_of(self.values[number].call)

    def _step_of(self, index: int) -> Call | Group:
        return self._group_of.get(index, self.calls[index])

    def _size(self, group: Group) -> Size:
        kernel = self._kernels[group]
        read, written = (
            sum(self._grouping.bytes_of(number) for number in numbers) for numbers in (kernel.loads, kernel.stores)
        )
        return Size(read, written)

    def _find_last_uses(self) -> list[list[int]]:
        """Return for each step the values that are not used after it."""
        last: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            if isinstance(step, Launch):
                kernels = [self._kernels[group] for group in step.groups]
                numbers = [number for kernel in kernels for number in (*kernel.loads, *kernel.stores)]
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

    def _joining(self, call: Call) -> _Kernel | None:
        """Return a kernel that joins tensors, if that is what the call does."""
        joined = joined_parts(call, self.values, self._device)
        if joined is None or call.gives[0] is None:
            return None
        numbers, dim = joined
        loads, out = list(dict.fromkeys(numbers)), call.gives[0]
        pointers = [f"a{loads.index(number)}" for number in numbers]
        code = joining_source([self.values[number] for number in numbers], pointers, self.values[out], dim)
        in_order = {number for number in loads if self.values[number].contiguous}
        return _Kernel(code, loads, in_order, [out], self.values[out].numel)

    def _kernel(self, group: Group) -> _Kernel:
        """Return a group's code and what it reads and writes."""
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
        return self._finish(group, pointers, linear, stores, setup, body, results, wide)

    def _finish(
        self, group: Group, pointers: dict[int, str], linear: set[int], stores: list[int],
        setup: list[str], body: list[str], results: list[str], wide: int,
    ) -> _Kernel:  # fmt: skip
        """Add the statements that store the results."""
        kinds = [source.STORED[self.values[number].dtype] for number in stores]
        all_pointers = [(f"const {source.STORED[self.values[n].dtype]}*", pointer) for n, pointer in pointers.items()]
        all_pointers += [(f"{kind}*", f"o{i}") for i, kind in enumerate(kinds)]
        end = []
        for i, (number, kind, result) in enumerate(zip(stores, kinds, results, strict=True)):
            stored = source.store(self.values[number].dtype, result)
            if wide == 4:
                setup.append(f"vec_{kind} r{i};")
                body.append(f"r{i}.v[j] = {stored};")
                end.append(f"*(vec_{kind}*)(o{i} + base) = r{i};")
            else:
                body.append(f"o{i}[i] = {stored};")
        code = Code(tuple(all_pointers), wide, tuple(setup), tuple(body), tuple(end))
        return _Kernel(code, list(pointers), linear, stores, group.numel)

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
