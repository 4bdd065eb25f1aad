"""The pieces by themselves: what the kernel counted, how long may be waited, how fast a link is, whether it pays."""

import socket
import struct
import threading

import pytest
import torch
from tests.split.net.jobs import a_job

from shoal.errors import SplitError
from shoal.net.deadline import Deadline
from shoal.net.handshake import difference
from shoal.net.link_speed import LinkSpeed
from shoal.net.links import Address, Link, LinkLost, Traffic
from shoal.net.messages import probe_message
from shoal.net.torchrun import Torchrun
from shoal.split import IST, LocalSGD
from shoal.split.net._advice import advise
from shoal.split.net.job_description import describe_job
from shoal.split.net.launch import local_workers
from shoal.split.net.run import ProcessRole
from shoal.split.settings import Settings


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux")
def test_a_link_counts_what_the_kernel_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Link(socket.create_connection(server.getsockname()))
        theirs = Link(server.accept()[0])
        for size in (0, 100_000, 7):
            sending = threading.Thread(target=ours.send, args=(probe_message(size), 5))
            sending.start()
            assert theirs.receive(5).num_bytes == size + 32
            sending.join()
        theirs.send(probe_message(45), 5)
        ours.receive(5)
        info = ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acknowledged, received = struct.unpack_from("<QQ", info, 120)  # tcpi_bytes_acked, tcpi_bytes_received
        assert ours.traffic == Traffic(3 * 32 + 100_007, 77) and received == 77
        assert acknowledged in (ours.traffic.sent, ours.traffic.sent + 1)  # opening a connection is confirmed as well
        assert theirs.traffic == Traffic(77, 3 * 32 + 100_007)
        lost: list[str] = []

        def wait() -> None:
            with pytest.raises(LinkLost) as error:
                ours.receive(60)
            lost.append(str(error.value))

        waiting = threading.Thread(target=wait)
        waiting.start()
        ours.cut()
        waiting.join(10)
        assert lost == ["the connection was closed"]  # the wait has ended, and so has the connection
        ours.close()
        theirs.close()


def test_a_deadline_follows_what_was_measured() -> None:
    deadline = Deadline()
    assert deadline.limit("a") == 300.0
    assert deadline.limit("a", [1.0]) == 5.0  # somebody has finished this very round
    for seconds in (1.0, 1.0, 2.0, 1.0):
        deadline.observe("a", seconds)
    deadline.observe("slow", 10.0)
    assert deadline.limit("a") == 5.0 and deadline.limit("slow") == 32.0
    deadline.missed("a")
    assert deadline.limit("a") == 10.0  # it gets a second chance, and twice the time
    deadline.missed("a")
    assert deadline.limit("a") == 20.0
    deadline.observe("a", 1.0)
    assert deadline.limit("a") == 5.0
    assert Deadline(fixed=7.0).limit("a", [100.0]) == 7.0
    with pytest.raises(SplitError, match="deadline is -1; use seconds above 0"):
        Deadline(fixed=-1)


@pytest.mark.parametrize(
    ("text", "bits", "latency"),
    [
        ("100Mbit", 1e8, 0.0),
        ("10mbit", 1e7, 0.0),
        ("1 Gbit/s", 1e9, 0.0),
        ("64kbit 20ms", 64e3, 0.02),
        ("2.5Gbps, 10us", 2.5e9, 1e-5),
    ],
)
def test_speeds_are_read(text: str, bits: float, latency: float) -> None:
    found = LinkSpeed.parse(text)
    assert found.bits == bits and found.latency == pytest.approx(latency)
    assert LinkSpeed(1e8).seconds(12_500_000) == 1.0 and str(LinkSpeed(1e8, 0.005)).startswith("100 Mbit/s, 5 ms")


@pytest.mark.parametrize("text", ["", "fast", "100", "100MB", "0Mbit", "-1Mbit", "1..2Mbit", "1Mbit 3"])
def test_what_is_no_speed_is_told(text: str) -> None:
    with pytest.raises(SplitError, match="give its speed, such as 100Mbit"):
        LinkSpeed.parse(text)


def test_a_link_is_measured_through_the_pair() -> None:
    job = a_job(steps=5)
    method = LocalSGD(job, 1)
    with local_workers(job, method, 1) as (executor, _):
        executor.workers_of_round(0)
        before = executor.traffic
        speed = executor.probe()
        assert executor.traffic.sent - before.sent > 1 << 16
        executor.forget_traffic()
        assert executor.traffic.both < 1000
    assert speed.bits > 1e6 and 0 < speed.latency < 1


def test_advice_weighs_bytes_against_compute() -> None:
    job = a_job(width=64, steps=100)
    method = IST(job, 4, local_steps=10)
    fast = advise(job, method, 4, LinkSpeed.parse("1Tbit"))
    assert [f.method for f in fast.forecasts] == ["ist", "local_sgd", "data_parallel"]
    ist, whole, every = fast.forecasts
    assert ist.round_bytes < whole.round_bytes and ist.step_bytes == ist.round_bytes / 10
    assert every.local_steps == 1 and every.step_bytes > 5 * whole.step_bytes * every.round_bytes / whole.round_bytes
    slow = advise(job, method, 4, LinkSpeed.parse("10kbit"))
    assert slow.sentence.startswith("Splitting does not pay here: ist with 4 workers over 10 kbit/s")
    assert slow.forecasts[0].link_seconds == pytest.approx(8 * ist.round_bytes / 1e4)
    assert "does not pay" in str(slow) and slow.to_dict()["workers"] == 4
    rough = advise(job, LocalSGD(job, 4, 10), 4, LinkSpeed.parse("1Mbit"), codec="bf16").forecasts[0]
    assert rough.round_bytes < 0.6 * whole.round_bytes


def test_what_differs_between_two_jobs_is_found() -> None:
    job = a_job()
    plan = describe_job(job, LocalSGD(job, 2))
    assert difference(plan, describe_job(a_job(), LocalSGD(a_job(), 2))) is None
    assert difference(plan, describe_job(job, LocalSGD(job, 2, local_steps=3))) is not None
    assert "method is" in str(difference(plan, describe_job(job, IST(job, 2))))
    deeper = a_job(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.1)))
    assert "layers is" in str(difference(plan, describe_job(deeper, LocalSGD(deeper, 2))))
    fewer = a_job(rows=100)
    theirs = describe_job(fewer, LocalSGD(fewer, 2), private=True)
    assert difference(plan, theirs) is None  # rows of its own: their number is its own matter
    assert "wire format is 0 there" in str(difference(plan, {**plan, "wire format": 0}))
    assert "there and" in str(difference(plan, {}))


def test_places() -> None:
    started = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert Torchrun.read({}) is None
    assert Torchrun.read(started) == Torchrun(2, 4, Address("10.0.0.1", 29501))
    assert ProcessRole(environment=started).worker_of == Address("10.0.0.1", 29501)
    lead = ProcessRole(environment={**started, "RANK": "0"})
    assert lead.worker_of is None and lead.address == Address("10.0.0.1", 29501) and lead.local_of(4) == 1
    assert ProcessRole(environment={}).local_of(4) == 4 and ProcessRole(environment={}, local=2).local_of(4) == 2
    assert ProcessRole(environment=started, coordinator="0.0.0.0:80").local_of(4) == 0
    assert ProcessRole(environment=started, join="a:80").worker_of == Address("a", 80)
    with pytest.raises(SplitError, match="start this with torchrun"):
        Torchrun.read({**started, "RANK": "x"})


def test_settings_are_offered_and_read() -> None:
    asked = Settings.read({}, {"method": "ist", "workers": 3, "overlap": 0.2, "codec": "bf16", "seed": 5})
    assert Settings.read(asked.given(), {}) == asked
    assert Settings.read(asked.given(), {"overlap": 0.5}).options["overlap"] == 0.5
    job = asked.job(a_job())
    assert job.seed == 5 and asked.build(job).settings["overlap"] == 0.2
    shares = Settings.read({}, {"method": "ist", "shares": "1,2", "workers": 2}).build(a_job()).settings["shares"]
    assert shares == [1.0, 2.0]
    assert Settings.read({}, {"method": "sil", "cuts": "2"}).build(a_job()).name == "sil"
