"""Patch functions of torch while a step is traced, with effect only in the thread that traces it.

Some calls leave no operator in a graph, which would silently lose their effect: they raise `Untraceable`. Others are
replaced by an equivalent that a graph can contain. The patches are set for the whole process, so only one step is
traced at a time, and calls from other threads go to the original functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.utils.locks import one_at_a_time


class Untraceable(Exception):
    """Raised if a step cannot be recorded as a graph. The message is the reason, in terms of the user's code."""


_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd.Function, "apply", "a custom autograd.Function (its own backward is not in the graph)"),
    (
        torch.autograd.function,
        "_is_setup_context_defined",
        "a custom autograd.Function (its own backward is not in the graph)",
    ),
    (torch.autograd, "grad", "torch.autograd.grad inside the step"),
    (torch.autograd, "backward", "a backward pass inside the step"),
    (torch.Tensor, "backward", "a backward pass inside the step"),
    (torch.Tensor, "register_hook", "a gradient hook on a tensor"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "a gradient hook on a parameter"),
    (torch, "manual_seed", "torch.manual_seed inside the step"),
)
"""Functions that raise `Untraceable`: owner, name and reason. `Function.apply` calls `_is_setup_context_defined`, which
catches calls of `apply` under another name that was assigned before the patch."""


@contextmanager
def patched(checks: list[Tensor] | None = None, params: Sequence[Tensor] = ()) -> Iterator[None]:
    """Patch torch for this thread inside this context, so that a step can be traced.

    Args:
        checks: Receives the conditions that torch.distributions checks before it continues; they pass during the
            tracing. If None, these checks are not patched.
        params: The model's parameters, whose `requires_grad` the step may not change. They may be added later.
    """
    from torch.fx.experimental import symbolic_shapes

    with one_at_a_time, ExitStack() as stack:
        thread = threading.get_ident()

        def replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
            original = inspect.getattr_static(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _in_thread(thread, original, instead)))

        for owner, name, reason in _REFUSED:
            replace(owner, name, functools.partial(_refuse, reason))
        # flattening weights for cuDNN needs their addresses, which fake tensors do not have
        replace(nn.RNNBase, "flatten_parameters", lambda _: None)
        replace(torch._C, "_InferenceMode", _NoGrad)
        replace(torch.jit.ScriptFunction, "__call__", _in_python)
        # to find the line of a `.item()` for its error message, torch imports its exporter, which takes a second
        replace(symbolic_shapes, "uninteresting_files", lambda: set())
        if checks is not None:
            replace(torch, "_is_all_true", functools.partial(_note, checks))
        stack.enter_context(
            mock.patch.object(torch.random, "default_generator", _Generator(thread, torch.default_generator))
        )
        stack.enter_context(_Switches(params))
        stack.enter_context(_NeverNegative())
        yield


def _in_thread(thread: int, original: Any, instead: Callable[..., Any]) -> Any:
    """Return a function that calls `instead` in this thread and `original` in all others."""
    function = original.__func__ if isinstance(original, classmethod) else original

    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == thread else function)(*args, **kwargs)

    return classmethod(call) if isinstance(original, classmethod) else call


def _refuse(reason: str, *_: Any, **__: Any) -> None:
    raise Untraceable(f"it uses {reason}")


def _in_python(script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a TorchScript function's Python source, since a profiled script records a detach and loses the gradient."""
    function = getattr(script, "_torchdynamo_inline", None)
    if function is None:
        raise Untraceable(f"it calls a TorchScript function ({script.name})")
    return function(*args, **kwargs)


def _note(checks: list[Tensor], valid: Tensor) -> bool:
    checks.append(valid)
    return True


class _NoGrad:
    """Replaces inference mode, which a graph cannot contain, by `no_grad`, which computes the same."""

    def __init__(self, mode: bool = True) -> None:
        self._mode: Any = torch.no_grad() if mode else nullcontext()

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class _Generator:
    """Replaces torch's default generator: a step may read its state, as checkpointing does, but not set it."""

    def __init__(self, thread: int, original: torch.Generator) -> None:
        self._thread, self._original = thread, original

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread and name in ("set_state", "manual_seed", "seed", "initial_seed"):
            raise Untraceable("it seeds torch's random numbers inside the step, or asks for their seed")
        return getattr(self._original, name)


_SWITCHES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_GRAD: Any = inspect.getattr_static(torch.Tensor, "grad")
_GRADIENTS = (_GRAD.__get__, _GRAD.__set__)


_TRACER = ("torch._", "torch.fx", "torch.utils._")
"""Modules of torch that make fake tensors and set their `requires_grad`."""


def _caller() -> str:
    """Return the name of the module that called a torch function, ignoring torch function modes in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


class _Switches(TorchFunctionMode):
    """Raises `Untraceable` if a step changes a parameter's `requires_grad` or uses `.grad`: these leave no operator."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._params = params

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SWITCHES and not _caller().startswith(_TRACER):
            wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
            if bool(wanted) != args[0].requires_grad and any(args[0] is param for param in self._params):
                raise Untraceable("it switches requires_grad inside the step")
        if func in _GRADIENTS and not _caller().startswith(_TRACER):
            raise Untraceable("it reads or sets gradients (.grad) inside the step")
        return func(*args, **(kwargs or {}))


_NEVER_NEGATIVE = {torch.Tensor.lt: False, torch.Tensor.ge: True}
"""The result of comparing a number in [0, 1) with zero or a negative number."""


class _NeverNegative(TorchFunctionMode):
    """Answers `if torch.rand([]) < rate:` for a rate of zero, as in networks whose LayerDrop is off.

    The result of the comparison does not depend on the number, which is drawn and recorded as usual. Comparisons of
    tensors that were written to since are not answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[tuple[Tensor, int]] = []
        self._answers: list[tuple[Tensor, int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            for result, version, answer in self._answers:
                if result is args[0] and result._version == version:
                    return answer
        out = func(*args, **(kwargs or {}))
        if func is torch.rand and out.numel() == 1:
            self._draws.append((out, out._version))
        elif func in _NEVER_NEGATIVE and self._is_draw(args[0]) and isinstance(args[-1], int | float) and args[-1] <= 0:
            self._answers.append((out, out._version, _NEVER_NEGATIVE[func]))
        return out

    def _is_draw(self, value: Tensor) -> bool:
        return any(draw is value and draw._version == version for draw, version in self._draws)
