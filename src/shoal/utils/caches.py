"""Shoal's cache folder, for measurements, compiled kernels and bytecode."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from shoal.environment import usable_cores
from shoal.utils.garbage_collection import paused

_PACKAGES = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "mpmath")
"""Packages that torch imports when the first optimizer is made, which takes most of that time."""
_FEW_CORES = 4
_COMPILE = """
import py_compile, sys
sys.pycache_prefix = sys.argv[1]
for path in sys.stdin.read().splitlines():
    try:
        py_compile.compile(path, doraise=True)
    except (OSError, py_compile.PyCompileError):
        pass
"""


def cache_folder() -> Path:
    """Return $SHOAL_CACHE, or ~/.cache/shoal."""
    folder = os.environ.get("SHOAL_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "shoal"


def import_tracer() -> None:
    """Import what torch needs to trace, which torch itself does when an optimizer is made."""
    if "torch._dynamo" not in sys.modules:
        with bytecode_kept(compile_all=True), paused():
            importlib.import_module("torch._dynamo")


@contextmanager
def bytecode_kept(compile_all: bool = False) -> Iterator[None]:
    """Import modules from bytecode inside this context, even if Python stores none.

    In many containers Python neither has torch's bytecode nor writes any, and large imports take five seconds instead
    of one, in every process. Bytecode is then stored in Shoal's own cache.

    Args:
        compile_all: Compile it on all cores the first time.
    """
    if not _without_bytecode():
        yield
        return
    folder = cache_folder() / "bytecode"
    old_settings = sys.pycache_prefix, sys.dont_write_bytecode
    try:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        if compile_all and usable_cores() >= _FEW_CORES:
            _compile_all(folder)
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = old_settings


def _without_bytecode() -> bool:
    """Return whether Python neither has torch's bytecode (or Shoal's, if torch is not imported yet) nor would write
    it."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None) or __spec__
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return False
    return sys.dont_write_bytecode or not os.access(os.path.dirname(os.path.dirname(spec.cached)), os.W_OK)


def _compile_all(folder: Path) -> None:
    """Compile the packages with one process per core; files that fail are compiled when they are imported."""
    done = folder / "compiled"
    with suppress(OSError, subprocess.SubprocessError):
        folder.mkdir(parents=True, exist_ok=True)
        done.touch(exist_ok=False)
        locations = [spec.submodule_search_locations for name in _PACKAGES if (spec := find_spec(name)) is not None]
        sources = [path for location in locations for root in location or () for path in Path(root).rglob("*.py")]
        files = sorted((f for f in sources if "tests" not in f.parts), key=lambda path: -path.stat().st_size)
        count = usable_cores()
        command = [sys.executable, "-I", "-S", "-c", _COMPILE, str(folder)]
        workers = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(count)]
        for index, worker in enumerate(workers):
            assert worker.stdin is not None
            worker.stdin.write("\n".join(map(str, files[index::count])))
            worker.stdin.close()
        for worker in workers:
            worker.wait(timeout=30)
