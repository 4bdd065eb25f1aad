"""CUDA kernels from source text, compiled in a fraction of a second by NVRTC, which comes with torch.

A source may contain many kernels (`extern "C"`). It is compiled once for each process and device type, and the result
is stored on disk for the next process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.environment import usable_cores
from shoal.utils.caches import cache_folder

Kernel = Callable[..., None]
"""A kernel, called with `grid=`, `block=` and `args=` (tensors and integers of 32 bits)."""

MOST_AT_ONCE = 8
"""How many parts of a source are compiled at the same time."""
_LOCK = threading.Lock()
_LOADED: dict[tuple[str, int], dict[str, Kernel]] = {}
_CONTEXTS: dict[int, ctypes.c_void_p] = {}
"""The CUDA context of each device on which kernels are loaded."""
_THREAD = threading.local()
"""`has_context`: whether this thread has a CUDA context, without which it cannot launch a kernel."""
_COMPILED: dict[tuple[str, ...], Future[bytes | None]] = {}
"""Parts of sources with their compiler options, which are compiled or being compiled."""
_pool: ThreadPoolExecutor | None = None
_BEGIN = 'extern "C" __global__ void '
_NAMES = re.compile(re.escape(_BEGIN) + r"(\w+)")


@cache
def available() -> bool:
    """Return whether kernels can be compiled here."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.version.cuda is None or not (in_use or torch.cuda.is_available()):  # asking takes a quarter of a second
        return False
    try:
        from torch.cuda._utils import _cuda_load_module, _get_nvrtc_library

        nvrtc = _get_nvrtc_library()
        return callable(_cuda_load_module) and (not in_use or _compiles_for_this_device(nvrtc))
    except (ImportError, OSError, AttributeError):
        return False


def _compiles_for_this_device(nvrtc: Any) -> bool:
    """Return whether this NVRTC supports the current device, which may be newer."""
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor in known


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Load and launch kernels on this device inside this context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, over which blocks are distributed."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def load(source: str, names: Sequence[str]) -> list[Kernel]:
    """Return the kernels of these names, for the current device.

    Raises:
        RuntimeError: If the source does not compile, or there is no NVRTC.
    """
    key = source, torch.cuda.current_device()
    _bind_context(key[1])
    if key not in _LOADED:
        compiled = _begin(source)
        with _LOCK:
            torch.cuda.current_stream()  # creates the CUDA context, which loading a module needs
            kernels: dict[str, Kernel] = {}
            for part, binary in compiled.items():
                module = _module(part, _options(), binary.result())
                kernels |= {name: getattr(module, name) for name in _NAMES.findall(part)}
            _CONTEXTS[key[1]] = _current_context()
            _LOADED[key] = kernels
    return [_LOADED[key][name] for name in names]


def _bind_context(device: int) -> None:
    """Give this thread the CUDA context of a device if it has none, as a thread of the backward pass which has not
    called the CUDA runtime yet."""
    if device in _CONTEXTS and not getattr(_THREAD, "has_context", False):
        _THREAD.has_context = True
        if not _current_context().value:
            _driver().cuCtxSetCurrent(_CONTEXTS[device])


def _driver() -> Any:
    """Return the library of the CUDA driver."""
    from torch.cuda._utils import _get_cuda_library

    return _get_cuda_library()


def _current_context() -> ctypes.c_void_p:
    """Return this thread's CUDA context, which is null if it has none."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    return context


def compile_ahead(source: str) -> None:
    """Start compiling in other threads what `load` will need; `load` reports any error."""
    if torch.cuda.is_initialized() and available():  # type: ignore[no-untyped-call]
        _begin(source)


def _begin(source: str) -> dict[str, Future[bytes | None]]:
    """Return the parts of a source, each being compiled or done."""
    global _pool
    options = _options()
    with _LOCK:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST_AT_ONCE)
        parts = _parts(source, min(MOST_AT_ONCE, usable_cores()))
        for part in parts:
            if (part, *options) not in _COMPILED:
                _COMPILED[part, *options] = _pool.submit(_binary, part, options)
        return {part: _COMPILED[part, *options] for part in parts}


def _options() -> list[str]:
    major, minor = torch.cuda.get_device_capability()
    return [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]


def _forget_threads() -> None:
    """Reset the thread pool in a forked process, which has none of its parent's threads."""
    global _pool, _LOCK
    _pool, _LOCK = None, threading.Lock()
    _COMPILED.clear()


def constants(values: Mapping[str, object]) -> str:
    """Return the beginning of a source that defines these names as these values."""
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def _parts(source: str, count: int) -> list[str]:
    """Split a source with many kernels into several sources, which are compiled at the same time."""
    shared, *kernels = source.split(_BEGIN)
    count = max(1, min(count, len(kernels)))
    return [_BEGIN.join([shared, *kernels[place::count]]) for place in range(count)]


def _binary(source: str, options: Sequence[str]) -> bytes | None:
    """Return a compiled source, or None if an earlier process has stored it."""
    try:
        _checked(_place(source, options).read_bytes())
        return None
    except (OSError, RuntimeError):  # the file is missing or damaged, or there is no home folder
        return _compile(source, options)


def _module(source: str, options: Sequence[str], compiled: bytes | None) -> Any:
    """Load a compiled source, stored or new, and store a new one."""
    from torch.cuda._utils import _cuda_load_module

    if compiled is None:
        try:
            return _cuda_load_module(_checked(_place(source, options).read_bytes()))
        except (OSError, RuntimeError):  # it may have been compiled for another driver
            compiled = _compile(source, options)
    module = _cuda_load_module(compiled)
    _store(source, options, compiled)
    return module


def _place(source: str, options: Sequence[str]) -> Path:
    """Return the path where the compiled source is stored."""
    text = "\0".join([torch.version.cuda or "", *options, source])
    return cache_folder() / "kernels" / hashlib.sha256(text.encode()).hexdigest()


def _checked(content: bytes) -> bytes:
    """Return what was stored if it is complete: the driver gets no length, and would read beyond the end of a
    partial file."""
    digest, compiled = content[:32], content[32:]
    if hashlib.sha256(compiled).digest() != digest:
        raise OSError("a damaged file")
    return compiled


def _store(source: str, options: Sequence[str], content: bytes) -> None:
    with suppress(OSError, RuntimeError):  # without a writable folder, the next process compiles again
        path = _place(source, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(hashlib.sha256(content).digest() + content)
        fresh.replace(path)


def _compile(source: str, options: Sequence[str]) -> bytes:
    """Compile a source with NVRTC."""
    from torch.cuda._utils import _get_nvrtc_library

    nvrtc = _get_nvrtc_library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"shoal.cu", 0, None, None)
    if made:
        raise RuntimeError(f"NVRTC cannot make a program (error {made})")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), flags):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"a kernel does not compile: {log.value.decode()[:2000]}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def has_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has data to read and write; a fake tensor has only a shape."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def aligned(tensor: Tensor) -> Tensor:
    """Return the same values at an address from which 16 bytes can be read at a time."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.preserve_format)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
