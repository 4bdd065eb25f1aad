"""`import shoal`, and training, need torch and numpy alone."""

import subprocess
import sys

SCRIPT = """
import sys
from importlib.machinery import PathFinder

ABSENT = {"typer", "rich", "safetensors", "matplotlib", "sklearn", "scipy", "pydantic", "cloudpickle", "yaml", "pytest",
          "tensorboard", "optuna", "sqlalchemy", "pandas", "ray"}

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder

import shoal
assert "torch" not in sys.modules, "the names of shoal load torch when they are used"
for name in shoal.__all__:
    getattr(shoal, name)

import torch
x, y = torch.randn(16, 2), torch.randn(16, 1)
jobs = [
    shoal.Job(model=lambda: torch.nn.Linear(2, 1), data=(x, y), loss=torch.nn.functional.mse_loss,
              hparams={"lr": lr}, epochs=1, name=f"{lr}")
    for lr in (0.1, 0.2)
]
results = shoal.train(jobs, device="cpu", progress=True)
assert [r.status for r in results] == ["done", "done"]
print(results.table())
"""


def test_core_runs_with_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_what_only_linux_has() -> None:
    """Windows has no forks, and macOS does not tell on which cores a process may run."""
    taken = "import os, torch, torch.utils.data; del os.register_at_fork, os.sched_getaffinity"
    script = f"{taken}; import shoal; [getattr(shoal, name) for name in shoal.__all__]"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
