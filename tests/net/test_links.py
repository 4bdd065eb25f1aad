"""A connection whose network fails: both sides notice it in bounded time."""

import socket
import subprocess
import threading

import pytest

from shoal.evidence.reproduce import namespaces
from shoal.net import links
from shoal.net.links import Link, LinkLost
from shoal.net.messages import probe_message


def connect_from_namespace(shaped: namespaces.Links, port: int) -> socket.socket:
    """A connection to this machine, made in a namespace: the thread that makes it enters, this one stays."""
    made: list[socket.socket] = []

    def make() -> None:
        shaped.enter(0)
        made.append(socket.create_connection((shaped.host, port), timeout=10))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def test_a_dead_network_with_unsent_data_is_noticed_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = namespaces.missing()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(links, "_LOST_SECONDS", 1)
    with namespaces.shaped(1, "100mbit") as shaped, socket.create_server((shaped.host, 0)) as server:
        worker = Link(connect_from_namespace(shaped, server.getsockname()[1]))
        coordinator = Link(server.accept()[0])
        worker.send(probe_message(10), 5)
        assert coordinator.receive(5).num_bytes == 42
        outer = shaped.names[0].replace("shoal", "sh").replace("-", "v")
        subprocess.run(["ip", "link", "set", outer, "down"], check=True)
        lost: list[str] = []

        def wait(link: Link) -> None:
            link.send(probe_message(10), 5)  # into the buffer of the socket
            with pytest.raises(LinkLost) as error:
                link.receive(3600)
            lost.append(str(error.value))

        waiting = [threading.Thread(target=wait, args=(link,), daemon=True) for link in (worker, coordinator)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(20)
        assert lost == ["it did not answer in time"] * 2
        worker.close()
        coordinator.close()
