"""Make networks that run operator by operator on a GPU draw the same random numbers as the engine does there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.utils.randomness import MASKS, Draw, counter_draw, draw_columns, signed

T = TypeVar("T")

MOST_AHEAD = 32
"""For how many batches a mask is drawn at once."""
AHEAD_BYTES = 1 << 24
"""The bytes that masks of later batches may take; larger masks are drawn batch by batch."""


@dataclass(slots=True)
class _Masks:
    """The masks of one random call in successive batches."""

    key: Any
    first: int
    """The number of batches before the first mask's."""
    count: int
    bytes: int
    """The bytes of `rows`."""
    rows: tuple[Tensor, ...]
    """One mask for each batch; empty if there was only one, which is not kept."""


class CounterMode:
    """Makes random operators on a GPU draw what the engine draws there, for networks that run operator by operator.

    `begin(count)` sets how many batches the member has had; random calls within a batch are then numbered in their
    order. The number is in the GPU's generator: activation checkpointing, which computes a part of the network again in
    the backward pass, resets the generator to where that part began, and so draws the same numbers.

    Only random operators are intercepted, by a dispatch key for which no other operator has a kernel. The key is on in
    this thread and in the threads of its backward passes. Recurrent layers with dropout between them use torch's own
    implementation instead of cuDNN, which draws internally.
    """

    _active: list[CounterMode] = []  # noqa: RUF012  # shared by all threads: one trains at a time

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = torch.tensor([signed(seed)], device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._batches = self._filled = 0
        """The number of batches that the member has had, and the number in `_count`."""
        self._columns: dict[Any, list[Any]] = {}
        """The parameters of distributions, on the device."""
        self._sites: dict[int, Tensor] = {}
        """The numbers of calls, on the device."""
        self._masks: dict[int, _Masks] = {}
        """Masks that were drawn together, by the numbers of their calls."""
        self.device = device
        self.native = device.type == "cuda"
        """Whether torch's dropout calls `native_dropout` on this device."""
        self._generator = _generator_of(device)
        self._index = 0 if self._generator is None else int(self._generator.device.index)
        self._number = 0
        self._outside = 0
        self._guard: Any = None

    def __enter__(self) -> CounterMode:
        self._outside = self._site
        self._guard = torch._C._IncludeDispatchKeyGuard(_intercepting())
        self._guard.__enter__()
        self._active.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.pop()
        self._guard.__exit__(*error)
        self._site = self._outside

    def begin(self, count: int) -> None:
        """Start a new batch."""
        self._batches = count
        self._site = 0

    @property
    def _site(self) -> int:
        """The number of the next random call."""
        if self._generator is None:
            return self._number
        return int(self._generator.get_offset()) // _OFFSET

    @_site.setter
    def _site(self, number: int) -> None:
        if self._generator is not None:
            self._generator.set_offset(number * _OFFSET)
        self._number = number

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of a random operator."""
        name = str(func)
        if name == _DROPOUT:
            if args[2] is False or not 0.0 < args[1] < 1.0:
                return func(*args, **kwargs)
            mask = self.mask("dropout", args[0], (args[1],))
            return args[0] * mask, mask != 0
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kind = _IN_PLACE.get(name)
        if kind is not None:
            numbers = (
                tuple(args[1:])
                or {"uniform": (0.0, 1.0), "normal": (0.0, 1.0), "exponential": (1.0,), "bernoulli": (0.5,)}[kind]
            )
            if kind in ("uniform", "normal") and len(numbers) == 1:
                numbers = (*numbers, 1.0)
            return args[0].copy_((self.mask if kind in MASKS else self._value)(kind, args[0], numbers))
        at = self._site
        like = func(*args, **kwargs)
        self._site = at
        return self._value(_MADE[name], like, _numbers(name, args))

    def mask(self, kind: str, like: Tensor, numbers: tuple[float, ...]) -> Tensor:
        """Return the mask with the next number, with the shape and dtype of `like`. Do not write to it."""
        if torch._C._len_torch_dispatch_stack():  # such as a tracer's, whose tensors have no data
            return self._value(kind, like, numbers)
        number = self._site
        key = kind, like.dtype, like.shape, like.device, numbers, torch.is_inference_mode_enabled(), self._stream()
        known = self._masks.get(number)
        if known is not None and known.key == key:
            place = self._batches - known.first
            rows = known.rows[place : place + 1] if place >= 0 else ()
            if place == known.count:
                draw = Draw(kind, tuple(like.shape), like.dtype, None, (numbers,))
                rows = self._draw_ahead(known, draw, like)
            if rows:
                self._site = number + 1
                return rows[0]
        self._masks[number] = _Masks(key, self._batches, 1, 0, ())
        return self._value(kind, like, numbers)

    def _draw_ahead(self, before: _Masks, draw: Draw, like: Tensor) -> tuple[Tensor, ...]:
        """Draw the mask of this batch and the next ones: twice as many as before, or none if they would be large."""
        number = self._site
        spare = AHEAD_BYTES + before.bytes - sum(masks.bytes for masks in self._masks.values())
        count = min(2 * before.count, MOST_AHEAD, spare // max(1, like.nbytes))
        if count < 2:
            return ()
        seed, site = (tensor.expand(count) for tensor in (self._seed, self._site_tensor(number)))
        columns = [column.expand(count) for column in self._columns_of(draw)]
        batches = torch.arange(self._batches, self._batches + count, device=self._seed.device)
        rows = counter_draw(draw, seed, batches, site, columns).to(like.device).unbind(0)
        self._masks[number] = _Masks(before.key, self._batches, count, count * like.nbytes, tuple(rows))
        return self._masks[number].rows

    def _stream(self) -> int:
        """Return the current stream of the GPU, in whose order masks are written and read."""
        return 0 if self._generator is None else torch._C._cuda_getCurrentRawStream(self._index)

    def _value(self, kind: str, like: Tensor, numbers: tuple[float, ...]) -> Tensor:
        """Return the draw with the next number, with the shape and dtype of `like`."""
        draw = Draw(kind, tuple(like.shape), like.dtype, None, (numbers,))
        if self._filled != self._batches:
            self._filled = self._batches
            self._count.fill_(self._batches)
        number = self._site
        self._site = number + 1
        site, columns = self._site_tensor(number), self._columns_of(draw)
        value = counter_draw(draw, self._seed, self._count, site, columns)[0]
        return value if value.device == like.device else value.to(like.device)

    def _site_tensor(self, number: int) -> Tensor:
        return self._held(self._sites, number, lambda: torch.full((1,), number, device=self._seed.device))

    def _columns_of(self, draw: Draw) -> list[Any]:
        key = (draw.kind, draw.dtype, len(draw.shape), draw.numbers)
        return self._held(self._columns, key, lambda: draw_columns(draw, 1, self._seed.device))

    def _held(self, known: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
        """Return what is known under a key, made if needed; what a tracer would make has no data and is not kept."""
        if key in known:
            return known[key]
        value = make()
        if not torch._C._len_torch_dispatch_stack():
            known[key] = value
        return value


def _generator_of(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def uncounted() -> AbstractContextManager[Any]:
    """Let random operators draw as usual inside this context, even in a CounterMode."""
    if not CounterMode._active:
        return nullcontext()
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_intercepting()))


@cache
def _intercepting() -> Any:
    """Return the dispatch key at which random operators are intercepted, and register their kernels once."""
    key = torch._C._dispatch_key_parse(_KEY)
    library: Any = torch.library.Library
    everything, random = library("_", "IMPL", _KEY), library("aten", "IMPL", _KEY)
    everything.fallback(torch.library.fallthrough_kernel)
    for name in (*RANDOM, *_RECURRENT):
        kernel = (_drawn if name in RANDOM else _opened)(_operator(name), key)
        random.impl(name.removeprefix("aten.").removesuffix(".default"), kernel, _KEY, with_keyset=True)
    random.impl("dropout", _dropout(_operator("aten.dropout.default"), key), _KEY, with_keyset=True)
    _libraries.extend((everything, random))
    return key


_KEY = "TESTING_ONLY_GenericMode"
"""A key above autograd and autocast, which torch uses only in tests of the dispatcher."""
_libraries: list[Any] = []
"""Libraries that must stay alive, since kernels exist only as long as their library."""


def _operator(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _drawn(func: Any, key: Any) -> Callable[..., Any]:
    """Return a kernel that draws from the active CounterMode."""
    below, here = torch._C._dispatch_keyset_full_after(key), torch._C.DispatchKeySet(key)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap calls it again for all rows
            return func.redispatch(keyset & below, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(here):
            return CounterMode._active[-1].draw(func, args, kwargs)

    return kernel


def _dropout(func: Any, key: Any) -> Callable[..., Any]:
    """Return a kernel of dropout that multiplies by a mask on a GPU, where torch would call `native_dropout`; without
    that call's second result, which nobody uses."""
    below = torch._C._dispatch_keyset_full_after(key)

    def kernel(keyset: Any, x: Tensor, p: float, train: bool) -> Any:
        mode = CounterMode._active[-1]
        native = train and mode.native and x.device.type == mode.device.type and 0.0 < p < 1.0 and x.numel() > 0
        if not native or torch._C._functorch.peek_interpreter_stack() is not None:
            return func.redispatch(keyset & below, x, p, train)
        return x * mode.mask("dropout", x, (p,))

    return kernel


def _opened(func: Any, key: Any) -> Callable[..., Any]:
    """Return a kernel of a recurrent layer that avoids cuDNN if cuDNN would draw."""
    below = torch._C._dispatch_keyset_full_after(key)

    def kernel(keyset: Any, *args: Any) -> Any:
        # The dropout rate is the only float among the arguments; the flag for training follows it.
        draws = any(isinstance(rate, float) and rate > 0 and bool(on) for rate, on in pairwise(args))
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not draws):
            return func.redispatch(keyset & below, *args)

    return kernel


_OFFSET = 4
"""The offset of a GPU's generator is a multiple of four."""


def _numbers(name: str, args: Any) -> tuple[float, ...]:
    """Return the parameters of the distribution that a call draws from."""
    if name == "aten.randperm.default":
        return ()
    if "randint" not in name:
        return (0.0, 1.0)
    bounds = args[1 if "like" in name else 0 :]
    return tuple(bounds[:2]) if "low" in name else (0, bounds[0])


_DROPOUT = "aten.native_dropout.default"
_IN_PLACE = {
    "aten.bernoulli_.float": "bernoulli",
    "aten.uniform_.default": "uniform",
    "aten.normal_.default": "normal",
    "aten.exponential_.default": "exponential",
}
_MADE = {
    "aten.rand.default": "uniform",
    "aten.rand_like.default": "uniform",
    "aten.randn.default": "normal",
    "aten.randn_like.default": "normal",
    "aten.randint.default": "integer",
    "aten.randint.low": "integer",
    "aten.randint_like.default": "integer",
    "aten.randint_like.low_dtype": "integer",
    "aten.randperm.default": "permutation",
}
RANDOM = {_DROPOUT, *_IN_PLACE, *_MADE}
_RECURRENT = [f"aten.{name}.{of}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for of in ("input", "data")]
