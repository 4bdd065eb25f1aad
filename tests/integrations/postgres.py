"""A PostgreSQL server of the tests' own, on loopback, from the binaries of the machine."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def binaries() -> Path | None:
    """Where initdb and pg_ctl are: the newest version that is installed."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in folders), key=lambda folder: int(folder.parent.name), default=None)


def ordinary_user() -> str | None:
    """A user that the server may run as, which root may not be; None: this one."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), "nobody")


@contextmanager
def server() -> Iterator[str]:
    """A server with an empty database; its URL. The test is skipped where PostgreSQL or its driver is missing."""
    folder = binaries()
    if folder is None:
        pytest.skip("needs PostgreSQL: apt install postgresql")
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    user = ordinary_user()
    with tempfile.TemporaryDirectory(prefix="shoal-pg-") as home:
        data = Path(home, "data")
        if user is not None:
            shutil.chown(home, user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def run(*command: Any) -> None:
            done = subprocess.run(
                [str(part) for part in command], user=user, cwd=home, capture_output=True, text=True, check=False,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr

        run(folder / "initdb", "-D", data, "-U", "shoal", "--auth=trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {home} -c fsync=off"
        run(folder / "pg_ctl", "-D", data, "-w", "-l", Path(home, "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://shoal@127.0.0.1:{port}/postgres"
        finally:
            run(folder / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
