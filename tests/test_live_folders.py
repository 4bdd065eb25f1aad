"""Jobs that are added to a live run, and clones, in its folder: they continue when they are added again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_live import LONG, job, ordered, same, trained

import shoal
from shoal.errors import OutError


def test_added_jobs_and_clones_are_in_the_folder(tmp_path: Path) -> None:
    jobs = [job("a"), job("b", seed=1, epochs=LONG), job("c", seed=2, epochs=LONG)]
    out, orders = tmp_path / "run", [lambda run: run.add(job("d", seed=3)), lambda run: run.clone("a", "e")]
    ends = [lambda run: run.stop("b"), lambda run: run.cancel("c")]
    _, found = ordered(jobs, 3, *orders, *ends, out=out, checkpoint_every="0.01s")
    statuses = ["done", "stopped", "cancelled", "done", "done"]
    assert [r.status for r in found.values()] == statuses
    for folder in ("members", "history", "weights"):
        assert sorted(path.stem for path in (out / folder).iterdir()) == ["0000", "0001", "0002", "0003", "0004"]
    assert [r.name for r in shoal.load(out)] == ["a", "b", "c", "d", "e"]
    for again in (shoal.start(jobs, device="cpu", out=out).wait(60), shoal.train(jobs, device="cpu", out=out)):
        assert [r.status for r in again] == statuses[:3], "they had ended, and have"
        assert all(same(r, found[r.name]) for r in again)
    run = shoal.start(jobs, device="cpu", out=out, keep_open=True)
    run.clone("a", "e")  # the source has ended meanwhile; the clone has too
    run.add(job("d", seed=3))
    run.add(job("f", seed=4, epochs=1))
    results = run.wait(60)
    assert [r.name for r in results] == ["a", "b", "c", "e", "d", "f"]
    assert all(same(results[name], found[name]) for name in found) and results["f"].status == "done"
    assert sorted(path.stem for path in (out / "members").iterdir()) == ["0000", "0001", "0002", "0003", "0004", "0005"]
    assert [r.name for r in shoal.load(out)] == ["a", "b", "c", "d", "e", "f"]


def test_another_job_under_the_name_of_an_added_one(tmp_path: Path) -> None:
    jobs, out = [job("a")], tmp_path / "run"
    ordered(jobs, 3, lambda run: run.add(job("d", seed=3)), lambda run: run.clone("a", "e"), out=out)
    run = shoal.start(jobs, device="cpu", out=out, keep_open=True)
    with pytest.raises(OutError, match=r"job 'd' has seed 3 there and 4 here; add it unchanged, or under another name"):
        run.add(job("d", seed=4))
    with pytest.raises(OutError, match=r"job 'e' has hparams \{'lr': 0.01\} there and \{'lr': 0.5\} here"):
        run.clone("a", "e", hparams={"lr": 0.5})
    run.add(job("d", seed=3, epochs=9))
    found = run.wait(60)
    assert [r.name for r in found] == ["a", "d"], "orders with mistakes left nothing behind"
    assert same(found["d"], trained(job("d", seed=3, epochs=9))[0]), "a longer one continues"


PROGRAM = """
import os, signal, sys
import shoal
from tests.test_live import job

kill, out, size = sys.argv[1] == "kill", sys.argv[2], int(sys.argv[3])


def halt(view):
    if kill and view.name == "e" and view.epoch == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def order(event):  # in the middle of the second epoch: val_every_steps=10 makes the run come by there
    members = run._controls.run.all_members if event.kind == "turn" and run._controls.run else []
    if len(members) == 2 and members[0].first_step + members[0].place == 10:
        run.clone("a", "e", batch_size=size, epochs=8)
        run.add(job("d", seed=3, epochs=8))


import threading
begun = threading.Event()
again = bool(os.path.exists(out))
more = {"val": job().data, "val_every_steps": 10}
jobs = [job("a", **more), job("b", seed=1, **more)]
listen = lambda event: begun.wait(60) and not again and order(event)
run = shoal.start(jobs, "cpu", out=out, deterministic=True, checkpoint_every=0.001, callbacks=[halt], events=listen,
                  keep_open=True)
begun.set()
if again:
    run.clone("a", "e", batch_size=size, epochs=8)
    run.add(job("d", seed=3, epochs=8))
while len(run.status()) < 4:
    pass
print([(r.name, r.status, r.steps, len(r.history)) for r in run.wait(60)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 20])
def test_a_killed_run_continues_its_clones(tmp_path: Path, size: int) -> None:
    """A clone that changed its batches within an epoch has the same bits as without the kill."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        here = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        command = [sys.executable, "-c", PROGRAM, *arguments, str(size)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=here)

    killed = call("kill", str(tmp_path / "killed"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again, straight = call("no", str(tmp_path / "killed")), call("no", str(tmp_path / "straight"))
    assert again.returncode == straight.returncode == 0, again.stderr + straight.stderr
    assert sorted(again.stdout) == sorted(straight.stdout)
    one, other = shoal.load(tmp_path / "killed"), shoal.load(tmp_path / "straight")
    assert {r.name for r in one} == {"a", "b", "d", "e"}
    for result in one:
        assert [row["loss"] for row in result.history] == [row["loss"] for row in other[result.name].history]
    for index in range(4):
        files = [tmp_path / folder / "weights" / f"000{index}.safetensors" for folder in ("killed", "straight")]
        assert files[0].read_bytes() == files[1].read_bytes()
