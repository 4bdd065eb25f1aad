"""The hardware and the code with which a number was measured."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.evidence.bench.memory import host_cores


def source_hash() -> str:
    """Return a hash of the source code, for copies that have no git history."""
    root = Path(__file__).resolve().parents[2]
    total = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:12]


def commit() -> str | None:
    """Return the commit of the working tree, with a "+" if files have changed since, or None outside of git."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def stamp(device: str, threads: int | None) -> dict[str, Any]:
    """Return hardware, versions and commit."""
    import torch

    from shoal.environment import environment

    known = environment(torch.device(device))
    return known | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "source": source_hash(),
        "gpu": known.get("device_name"),
        "processor": _processor(),
        "cores": host_cores(),
        "threads": threads if threads is not None else known["threads"],
    }
