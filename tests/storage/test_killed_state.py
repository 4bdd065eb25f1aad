"""SIGKILL and resume: jobs with state that no state_dict has end with the bits of a run that was left alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engine.stateful import KINDS, job

import shoal
from shoal.errors import OutError

ONE_IN_A_PROCESS = ("global counter", "class attribute")
"""Kinds of which only one job can be in a run."""
TOGETHER = [kind for kind in KINDS if kind not in ONE_IN_A_PROCESS]
EIGHT = ["counter", "list", "hidden state", "target network", "buffer that is not persistent", "optimizer's attribute",
         "torch generator", "dict in a closure"]  # fmt: skip
EPOCHS = 20


def hashes(results: Sequence[shoal.Result]) -> dict[str, str]:
    """Of each job's weights, buffers and history."""
    found = {}
    for result in results:
        assert result.status == "done", result.error
        seen = hashlib.sha256()
        for name, tensor in sorted(result.model.state_dict().items()):
            seen.update(name.encode() + tensor.numpy().tobytes())
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
        seen.update(json.dumps(rows).encode())
        found[result.name] = seen.hexdigest()
    return found


def trained(kinds: Sequence[str], out: Path | None = None, kill_after: int = 0) -> dict[str, str]:
    """Train jobs of these kinds; with `kill_after`, until so many checkpoints were written."""
    written = 0

    def kill(event: shoal.Event) -> None:
        nonlocal written
        written += event.kind == "checkpoint"
        if event.kind == "epoch":
            time.sleep(0.05)  # so that checkpoints become due, and are written, however fast the training is
        if written == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    jobs = [job(kind, epochs=EPOCHS) for kind in kinds]
    return hashes(
        shoal.train(jobs, device="cpu", threads=1, out=out, checkpoint_every=0.01, events=kill if kill_after else None)
    )


def killed(kinds: Sequence[str], out: Path, kill_after: int) -> None:
    """A forked process that trains them, and is killed on the way."""
    pid = os.fork()
    if pid == 0:
        try:
            trained(kinds, out, kill_after)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def places(out: Path) -> list[int]:
    """How many batches each job had had when it was last saved."""
    from shoal.storage import _store

    newest = []
    for folder in sorted((out / "members").iterdir()):
        files = sorted(folder.glob("*.ckpt"))
        newest.append(_store.load(files[-1])["batches"] if files else 0)
    return newest


@pytest.mark.slow
def test_eight_kinds_of_state_survive_two_kills(tmp_path: Path) -> None:
    alone = trained(EIGHT)
    killed(EIGHT, tmp_path, 3)
    first = places(tmp_path)
    assert any(0 < batches < 5 * EPOCHS for batches in first)
    killed(EIGHT, tmp_path, 4)
    assert all(new >= old for new, old in zip(places(tmp_path), first, strict=True)) and places(tmp_path) != first
    assert trained(EIGHT, tmp_path) == alone


SCRIPT = """
import json, sys
from pathlib import Path
from tests.storage.test_killed_state import trained
kinds, out, kill_after = json.loads(sys.argv[1])
print(json.dumps(trained(kinds, Path(out) if out else None, kill_after)))
"""


def in_a_process(kinds: Sequence[str], out: str | None, kill_after: int = 0) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps([list(kinds), out, kill_after])]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [TOGETHER, *([kind] for kind in ONE_IN_A_PROCESS)], ids=lambda kinds: kinds[0])
def test_all_kinds_of_state_survive_kills_of_real_processes(kinds: list[str], tmp_path: Path) -> None:
    """New interpreters each time: other addresses, another order of sets."""
    alone = in_a_process(kinds, None)
    assert alone.returncode == 0, alone.stderr
    out = str(tmp_path / "run")
    for kill_after in (1, 2):
        assert in_a_process(kinds, out, kill_after).returncode == -signal.SIGKILL
    assert any(places(tmp_path / "run"))
    resumed = in_a_process(kinds, out)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == json.loads(alone.stdout)


def test_jobs_that_were_interrupted_go_on_in_the_same_process(tmp_path: Path) -> None:
    """Their closures are not as they were when the run began; those of other jobs are another matter."""
    kinds = ["dict in a closure", "counter", "nonlocal counter"]
    alone = trained(kinds)
    jobs = [job(kind, epochs=EPOCHS) for kind in kinds]

    def stop(event: shoal.Event) -> None:
        if event.kind == "epoch" and event.member is not None and event.member.epoch == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="run the same lines again to resume"):
        shoal.train(jobs, device="cpu", threads=1, out=tmp_path, events=stop)
    assert hashes(shoal.train(jobs, device="cpu", threads=1, out=tmp_path)) == alone
    assert hashes(shoal.train(jobs, device="cpu", threads=1, out=tmp_path)) == alone, "and are at their end"
    cell = jobs[0].step.__closure__[0]  # type: ignore[union-attr]
    cell.cell_contents["n"] += 1
    with pytest.raises(OutError, match=r"state in the closure of step is dict of 2 there and dict of 5 here"):
        shoal.train(jobs, device="cpu", threads=1, out=tmp_path)
