"""The example for Ray Tune, on a local Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'shoal[ray]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_packs.py"


@pytest.mark.slow
def test_packs_of_configurations_in_trials_of_ray_tune(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 configurations in 3 trials of Ray Tune" in done.stdout
    best = [float(value) for value in re.findall(r"accuracy ([0-9.]+) after 10 epochs", done.stdout)]
    assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] > 0.7
