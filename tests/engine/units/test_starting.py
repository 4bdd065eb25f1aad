"""What is loaded while a GPU starts."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_loaded_while_a_gpu_starts_is_what_the_first_trace_needs() -> None:
    """In a new process: afterwards planning imports nothing, and random numbers are as they were."""
    program = """
import sys, torch, shoal
from shoal.engine.units import starting
assert shoal.Job
state = torch.get_rng_state()
starting._make_context = lambda index: None
starting.start_while_loading(torch.device("cuda"))
assert torch.equal(state, torch.get_rng_state()) and not torch.cuda.is_initialized()
starting.load()
before = set(sys.modules)
import shoal.engine.tiers.captured.executor
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import trace
class Reading(torch.nn.Linear):
    def forward(self, x):
        if x.abs().max().item() > 1e6:
            raise ValueError
        return super().forward(x)
try:
    trace(Reading(3, 2), lambda model, x: model(x).sum(), torch.ones(4, 3), precision="bf16")
except Untraceable as error:
    print("depends on the data" in str(error), sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True []", done.stderr
