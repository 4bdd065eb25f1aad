"""Workers that die, stall, return, come late, or have another job: the run continues and waits for none of them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.split.net.jobs import Between, a_job
from torch import nn

import shoal
from shoal.errors import SplitError
from shoal.net.links import Address, Link, LinkLost, connect
from shoal.net.messages import END, OUTCOME, TASK, Header, Message
from shoal.split import LocalSGD, train_split
from shoal.split.core.parts import Outcome
from shoal.split.net._wire import to_message
from shoal.split.net.coordinator import Distributed
from shoal.split.net.job_description import describe_job
from shoal.split.net.launch import fork_workers, local_workers
from shoal.split.net.worker import serve_worker


class Sick:
    """A step that does something to its own process, in the worker whose pid is in a file."""

    def __init__(self, file: Path, do: Callable[[], object]) -> None:
        self.file, self.do, self.home = file, do, os.getpid()

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if os.getpid() != self.home and self._chosen() in (str(os.getpid()), "all"):
            self.file.unlink(missing_ok=self.do is stop)
            self.do()
        return F.cross_entropy(model(batch[0]), batch[1])

    def _chosen(self) -> str:
        try:
            return self.file.read_text()
        except FileNotFoundError:  # nobody is chosen, or the worker that was has removed it
            return ""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("the step is broken")


def sick_job(file: Path, do: Callable[[], object], **fields: Any) -> shoal.Job:
    return a_job(loss=None, step=Sick(file, do), **fields)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_worker_killed_in_its_step_costs_its_part_of_that_round(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", kill)
    method, lines = LocalSGD(job, 3, local_steps=4), list[str]()
    with local_workers(job, method, 3, log=lines.append) as (executor, local):
        between = Between(executor, lambda n: (tmp_path / "who").write_text(str(local[1].pid)) if n == 2 else None)  # type: ignore[arg-type]
        result = train_split(job, method, between)
    assert result.status == "done" and between.sizes == [3, 3, 3, 2, 2]
    (lost,) = executor.lost
    assert lost.round == 2 and lost.waited < lost.allowed and "closed" in lost.why
    assert any("lost worker" in line for line in lines)
    assert result.split is not None and result.split.lost == 1


def test_a_stopped_worker_is_left_behind_at_the_deadline_and_returns(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", stop, steps=40)
    method = LocalSGD(job, 3, local_steps=4)
    with local_workers(job, method, 3, deadline=1.5) as (executor, local):

        def act(number: int) -> None:
            if number == 1:
                (tmp_path / "who").write_text(str(local[2].pid))
            if number == 4:
                os.kill(local[2].pid, signal.SIGCONT)
                until(lambda: executor._admission.num_waiting == 1)

        between = Between(executor, act)
        result = train_split(job, method, between)
    assert result.status == "done" and between.sizes == [3, 3, 2, 2, 3, 3, 3, 3, 3, 3]
    (lost,) = executor.lost
    assert lost.round == 1 and "more than 1.5 s" in lost.why
    assert 1.5 <= lost.waited < 2.5  # it was waited for until the deadline, and not for ever


def test_those_who_finish_set_the_time_of_those_who_do_not(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", stop, steps=8)
    method = LocalSGD(job, 3, local_steps=4)
    with local_workers(job, method, 3) as (executor, local):
        (tmp_path / "who").write_text(str(local[0].pid))  # in the very first round: nothing has been measured
        executor.deadline.margin = 2.0
        between = Between(executor, lambda number: None)
        result = train_split(job, method, between)
        os.kill(local[0].pid, signal.SIGKILL)
    (lost,) = executor.lost
    assert result.status == "done" and between.sizes == [3, 2]
    assert lost.waited < 0.5 * executor.deadline.first and lost.allowed < 0.5 * executor.deadline.first


def test_a_worker_joins_in_the_middle() -> None:
    job = a_job(steps=20)
    method = LocalSGD(job, 3, local_steps=4)
    late = fork_workers(1, job, method)[0]
    with local_workers(job, method, 2) as (executor, _):

        def act(number: int) -> None:
            if number == 2:
                late.go(executor.address)
                until(lambda: bool(executor._admission.num_waiting))

        between = Between(executor, act)
        result = train_split(job, method, between)
    late.end(time.monotonic() + 5)
    assert between.sizes == [2, 2, 3, 3, 3] and result.status == "done"


def test_all_are_lost_and_one_comes_back(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", kill)
    method, lines = LocalSGD(job, 1, local_steps=4), list[str]()
    late = fork_workers(1, job, method)[0]
    with local_workers(job, method, 1, log=lines.append) as (executor, local):

        def act(number: int) -> None:
            if number == 1:
                (tmp_path / "who").write_text(str(local[0].pid))
            if number == 2:
                late.go(executor.address)

        result = train_split(job, method, Between(executor, act))
    late.end(time.monotonic() + 5)
    assert result.status == "done" and len(executor.lost) == 1
    assert any("no worker is left; waiting" in line for line in lines)


def test_nobody_comes() -> None:
    job = a_job()
    method = LocalSGD(job, 1)
    with (
        Distributed(job, method, workers=1, start_seconds=0.2) as executor,
        pytest.raises(SplitError, match=r"no worker came to 127.0.0.1:\d+ in 0.2 s; start one with `shoal split FILE"),
    ):
        executor.workers_of_round(0)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"hparams": {"lr": 0.5}}, "hparams (lr) is 0.5 there and 0.01 here"),
        ({"width": 25}, "there and"),
        ({"rows": 90}, "data (rows) is 90 there and 215 here"),
        ({"batch_size": 4}, "batch_size is 4 there and 8 here"),
        ({"loss": F.nll_loss}, "loss is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_worker_with_another_job_is_told_and_so_is_the_coordinator(
    other: dict[str, Any], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job, wrong = a_job(steps=8), a_job(**{"steps": 8, **other})
    method, lines = LocalSGD(job, 2, local_steps=4), list[str]()
    with local_workers(job, method, 1, others=1, log=lines.append) as (executor, _):
        stranger = fork_workers(1, wrong, LocalSGD(wrong, 2, local_steps=4))[0]
        stranger.go(executor.address)
        result = train_split(job, method, executor)  # begins without it, at once: 60 s are not waited for
        stranger.end(time.monotonic() + 5)
    assert result.status == "done" and not executor.lost
    (told,) = [text for text in lines if "another job" in text]
    assert line in told and "\n" not in told
    (heard,) = [text for text in capfd.readouterr().err.splitlines() if "another job" in text]
    assert heard == f"shoal: worker: {told}"


def test_a_wrong_worker_that_comes_first_does_not_end_the_run() -> None:
    job, wrong = a_job(steps=8), a_job(steps=8, hparams={"lr": 0.5})
    method, lines = LocalSGD(job, 1, local_steps=4), list[str]()
    stranger = fork_workers(1, wrong, LocalSGD(wrong, 1, local_steps=4), log=lambda line: None)[0]
    right = fork_workers(1, job, method)[0]
    with Distributed(job, method, workers=1, log=lines.append) as executor:
        stranger.go(executor.address)
        stranger.end(time.monotonic() + 20)
        assert "another job" in lines[0]
        right.go(executor.address)
        assert train_split(job, method, executor).status == "done"
    right.end(time.monotonic() + 5)


def test_where_all_are_refused_the_run_ends() -> None:
    job, wrong = a_job(), a_job(hparams={"lr": 0.5})
    method = LocalSGD(job, 1)
    stranger = fork_workers(1, wrong, LocalSGD(wrong, 1), log=lambda line: None)[0]
    with Distributed(job, method, workers=1, start_seconds=3.0) as executor:
        stranger.go(executor.address)
        with pytest.raises(SplitError, match=r"no worker could join in 3 s: worker .* has another job"):
            train_split(job, method, executor)
    stranger.end(time.monotonic() + 5)


def test_a_step_that_raises_everywhere_ends_the_run_with_its_words(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", fail)
    method = LocalSGD(job, 1, local_steps=4)
    (tmp_path / "who").write_text("all")
    with (
        local_workers(job, method, 1) as (executor, _),
        pytest.raises(SplitError, match=r"worker 0 .*RuntimeError: the step is broken"),
    ):
        train_split(job, method, executor)


def test_a_step_that_raises_on_one_machine_costs_that_machine(tmp_path: Path) -> None:
    job = sick_job(tmp_path / "who", fail)
    method = LocalSGD(job, 2, local_steps=4)
    with local_workers(job, method, 2) as (executor, local):
        between = Between(executor, lambda n: (tmp_path / "who").write_text(str(local[0].pid)) if n == 1 else None)  # type: ignore[arg-type]
        assert train_split(job, method, between).status == "done"
    assert [lost.why for lost in executor.lost] == ["RuntimeError: the step is broken"]


def junk(link: Link, task: Message) -> None:
    link._socket.sendall(bytes([7] * 32))


def shortened(link: Link, task: Message) -> None:
    header = Header(OUTCOME, task.header.round, task.header.number, 10, 10)
    link._socket.sendall(header.to_bytes())


def corrupt(link: Link, task: Message) -> None:
    header = Header(OUTCOME, task.header.round, task.header.number, 4, 4, checksum=1)
    link.send(Message(header, torch.zeros(8, dtype=torch.uint8)), 5)


def another_round(link: Link, task: Message) -> None:
    link.send(to_message(Outcome(round=99, number=0, tensors={})), 5)


def another_network(link: Link, task: Message) -> None:
    outcome = Outcome(round=task.header.round, number=task.header.number, tensors={"0.weight": torch.zeros(2, 2)})
    link.send(to_message(outcome), 5)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (junk, "not from Shoal"),
        (shortened, "closed"),
        (corrupt, "checksum"),
        (another_round, "does not belong to the task"),
        (another_network, "does not fit this job"),
    ],
)
def test_a_worker_that_answers_nonsense_is_let_go(answer: Callable[[Link, Message], None], line: str) -> None:
    job = a_job(steps=8)
    method = LocalSGD(job, 2, local_steps=4)
    with local_workers(job, method, 1, others=1) as (executor, _):

        def pretend() -> None:
            link = connect(executor.address, {"name": "odd", "job": describe_job(job, method)}, 5)
            message = link.receive(20)
            assert message.header.kind == TASK
            answer(link, message)
            link.close()

        odd = threading.Thread(target=pretend)
        odd.start()
        between = Between(executor, lambda number: None)
        result = train_split(job, method, between)
        odd.join(10)
    assert result.status == "done" and between.sizes == [2, 1]
    (lost,) = executor.lost
    assert line in lost.why


def test_no_coordinator_is_told() -> None:
    job = a_job()
    with pytest.raises(SplitError, match=r"no coordinator at 127.0.0.1:1 for 0.1 s .*; start it first"):
        serve_worker(job, LocalSGD(job, 1), Address("127.0.0.1", 1), patience=0.1)


def test_a_lost_coordinator_is_looked_for_and_then_given_up() -> None:
    job = a_job()
    method, lines = LocalSGD(job, 1), list[str]()
    executor = Distributed(job, method, workers=1)

    def lose() -> None:
        executor.workers_of_round(0)
        executor._workers[0].link.close()
        executor._admission.close()

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(SplitError, match=r"lost the coordinator at .* and did not find it again in 0.5 s"):
        serve_worker(job, method, executor.address, patience=0.5, log=lines.append)
    thread.join()
    assert any("joining again, for 0.5 s" in line for line in lines)


def test_workers_hear_why_the_coordinator_ended() -> None:
    job = a_job()
    method = LocalSGD(job, 1)
    executor = Distributed(job, method, workers=1)

    def give_up() -> None:
        executor.workers_of_round(0)
        executor.close("the coordinator ended: disk full")

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(SplitError, match="the coordinator ended: disk full"):
        serve_worker(job, method, executor.address, patience=5)
    thread.join()


def test_addresses() -> None:
    assert Address.parse("a.b:80") == Address("a.b", 80) and str(Address("a", 1)) == "a:1"
    for text in ("a", ":80", "a:", "a:x", "a:0", "a:70000"):
        with pytest.raises(SplitError, match="is not an address; give HOST:PORT"):
            Address.parse(text)


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    job = a_job()
    with pytest.raises(SplitError, match="cannot listen at"):
        Distributed(job, LocalSGD(job, 1), workers=1, address=Address("203.0.113.1", 29123))


def test_rows_of_a_private_shard_stay_and_are_read() -> None:
    job = a_job(steps=8)
    x, y = job.data
    own = [a_job(steps=8, data=(x[s::2][:50], y[s::2][:50])) for s in range(2)]
    method = LocalSGD(job, 2, local_steps=4)
    private = [fork_workers(1, mine, LocalSGD(mine, 2, local_steps=4), shard=s)[0] for s, mine in enumerate(own)]
    with Distributed(job, method, workers=2) as executor:
        for worker in private:
            worker.go(executor.address)
        assert sorted(worker.shard for worker in executor.workers_of_round(0) if worker.shard is not None) == [0, 1]
        result = train_split(job, method, executor)
    for worker in private:
        worker.end(time.monotonic() + 5)
    assert result.status == "done" and not executor.lost


def test_lost_link_raises_at_once() -> None:
    job = a_job()
    method = LocalSGD(job, 1)
    with Distributed(job, method, workers=1) as executor:
        link = connect(executor.address, {"name": "me", "job": describe_job(job, method)}, 5)
        executor.workers_of_round(0)
        link.cut()
        with pytest.raises(LinkLost, match="closed"):
            link.receive(60)
        link.close()
        with pytest.raises(LinkLost, match="closed"):
            link.send(Message(Header(END), torch.empty(0, dtype=torch.uint8)), 1)
