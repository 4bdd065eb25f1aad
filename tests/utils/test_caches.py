"""What is kept for the next process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
{before}
from shoal.utils import caches
{patched}
caches.import_tracer()
print("torch._dynamo" in sys.modules, sys.pycache_prefix, sys.dont_write_bytecode)
"""


def _run(tmp_path: Path, *flags: str, before: str = "", patched: str = "") -> str:
    code = SCRIPT.format(before=before, patched=patched)
    env = {"SHOAL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("cores", ["{0}", "{0, 1, 2, 3}"])
def test_bytecode_is_kept_where_python_keeps_none(tmp_path: Path, cores: str) -> None:
    """As in a container whose packages came without bytecode, with PYTHONDONTWRITEBYTECODE."""
    elsewhere = f"-Xpycache_prefix={tmp_path / 'none'}"
    patched = f"caches._PACKAGES = ('mpmath',); caches.os.sched_getaffinity = lambda _: {cores}"
    assert _run(tmp_path, "-B", elsewhere, patched=patched) == f"True {tmp_path / 'none'} True"
    kept = {path.name.split(".")[0] for path in (tmp_path / "cache" / "bytecode").rglob("*.pyc")}
    assert {"symbolic_shapes", "eval_frame", "libmpf"} <= kept and not (tmp_path / "none").exists()


def test_nothing_is_done_where_python_has_its_own(tmp_path: Path) -> None:
    prefix = tmp_path / "own"
    assert _run(tmp_path, f"-Xpycache_prefix={prefix}") == f"True {prefix} False"
    assert _run(tmp_path, "-B", before="import torch._dynamo").startswith("True")
    assert not (tmp_path / "cache").exists()
