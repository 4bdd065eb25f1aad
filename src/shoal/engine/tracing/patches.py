"""What torch does differently while a step is traced, in the thread that traces it and in no other.

Some things that Python can do to torch leave no operator behind, and a graph would silently lose them: they raise
`Untraceable`. Others have an equivalent that a graph can carry. Functions of torch are replaced for the whole process,
so one step is traced at a time, and every other thread gets the original.
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
    """The step cannot be written down as a graph; the message says why, in the user's words."""


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
"""The second is in `Function.apply` itself: `apply` often has another name, long before it is patched."""


@contextmanager
def patched(checks: list[Tensor] | None = None, params: Sequence[Tensor] = ()) -> Iterator[None]:
    """Inside, this thread's torch is one that can be traced.

    `params`: those of the model, whose gradients may not be switched; they may be filled in later. `checks`: where to
    note what torch.distributions would have looked at before it continues; None: it may not look.
    """
    from torch.fx.experimental import symbolic_shapes

    with one_at_a_time, ExitStack() as stack:
        thread = threading.get_ident()

        def replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
            original = inspect.getattr_static(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _in_thread(thread, original, instead)))

        for owner, name, reason in _REFUSED:
            replace(owner, name, functools.partial(_refuse, reason))
        # laying weights side by side for cuDNN asks for their addresses, which fake tensors do not have
        replace(nn.RNNBase, "flatten_parameters", lambda _: None)
        replace(torch._C, "_InferenceMode", _NoGrad)
        replace(torch.jit.ScriptFunction, "__call__", _in_python)
        # for the line of a `.item()` in an error message torch imports its exporter, which takes a second
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
    """A function that is replaced for calls from one thread."""
    function = original.__func__ if isinstance(original, classmethod) else original

    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == thread else function)(*args, **kwargs)

    return classmethod(call) if isinstance(original, classmethod) else call


def _refuse(reason: str, *_: Any, **__: Any) -> None:
    raise Untraceable(f"it uses {reason}")


def _in_python(script: Any, *args: Any, **kwargs: Any) -> Any:
    """A TorchScript function as it was written: once it has been profiled, it records a detach and has no gradient."""
    function = getattr(script, "_torchdynamo_inline", None)
    if function is None:
        raise Untraceable(f"it calls a TorchScript function ({script.name})")
    return function(*args, **kwargs)


def _note(checks: list[Tensor], valid: Tensor) -> bool:
    checks.append(valid)
    return True


class _NoGrad:
    """Stands for inference mode, which a graph does not carry: without gradients it computes the same."""

    def __init__(self, mode: bool = True) -> None:
        self._mode: Any = torch.no_grad() if mode else nullcontext()

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class _Generator:
    """Stands for torch's own generator, which a step may look at (checkpointing does) but not turn back."""

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
"""Code of torch that makes fake tensors of real ones, and gives them their flags."""


def _caller() -> str:
    """The module that called a torch function, past the modes that it went through."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


class _Switches(TorchFunctionMode):
    """Refuses what leaves nothing behind in a graph: to switch a parameter's gradient, and to look at gradients."""

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
"""What comparing a number from 0 to 1 with zero, or with a negative number, gives."""


class _NeverNegative(TorchFunctionMode):
    """Answers `if torch.rand([]) < rate:` for a rate of zero, as in networks whose LayerDrop is off.

    The answer is known before the number is drawn, and the draw is recorded as any other. Tensors that were written to
    since are not answered for.
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
