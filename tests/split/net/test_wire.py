"""Tasks and outcomes as bytes: what comes back is what was sent, and what was changed on the way is told."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net.messages import (
    END,
    HEADER_BYTES,
    RAISED,
    VERSION,
    Header,
    Message,
    WireError,
    probe_message,
    text_message,
)
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.net._codec import CODECS
from shoal.split.net._wire import message_bytes, read_outcome, read_task, to_message

KEEP = torch.tensor([0, 3, 4, 9, 31])


def tensors() -> Tensors:
    return {"fc.weight": torch.randn(5, 3), "fc.bias": torch.randn(5).double(), "count": torch.tensor(7)}


def a_task() -> Task:
    part = Part(
        number=2, keep={"fc": KEEP}, learn={"fc": KEEP[:2], "none": KEEP[:0]}, role="left", shard=(1, 3), start=12,
        steps=50, seed=2**64 - 1,
    )  # fmt: skip
    moments = {"fc.weight/exp_avg": torch.randn(5, 3), "fc.weight/step": torch.tensor(4.0)}
    return Task(round=9, part=part, tensors=tensors(), moments=moments, extras={"h": torch.randn(2, 2)})


def an_outcome() -> Outcome:
    return Outcome(
        round=9, number=2, tensors=tensors(), moments={"fc.bias/momentum_buffer": torch.randn(5)},
        extras={"log/acc": torch.rand(2).double()}, losses=(0.1, 0.30000000000000004), rows=64, seconds=1.5,
        peak_bytes=2**33,
    )  # fmt: skip


def same(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def same_groups(a: object, b: object) -> bool:
    if a is None or b is None:
        return a is b
    assert isinstance(a, dict) and isinstance(b, dict)
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)


def test_a_task_comes_back_bit_for_bit() -> None:
    task = a_task()
    found = read_task(to_message(task))
    assert found.round == 9 and replace(found.part, keep={}, learn=None) == replace(task.part, keep={}, learn=None)
    assert same_groups(found.part.keep, task.part.keep) and same_groups(found.part.learn, task.part.learn)
    assert same(found.tensors, task.tensors) and same(found.moments, task.moments) and same(found.extras, task.extras)


def test_an_outcome_comes_back_bit_for_bit() -> None:
    sent = an_outcome()
    found = read_outcome(to_message(sent))
    for section in ("tensors", "moments", "extras"):
        assert same(getattr(found, section), getattr(sent, section))
    plain: dict[str, Any] = {"tensors": {}, "moments": {}, "extras": {}}
    assert replace(found, **plain) == replace(sent, **plain)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 300)), st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_any_part_comes_back(kept: set[int], seed: int, start: int) -> None:
    keep = {"a group": torch.tensor(sorted(kept), dtype=torch.int64), "ünits": torch.arange(3)}
    task = Task(round=0, part=Part(number=0, keep=keep, seed=seed, start=start), tensors={})
    found = read_task(to_message(task)).part
    assert same_groups(found.keep, keep) and (found.seed, found.start) == (seed, start)


def test_units_cost_a_bit_each() -> None:
    many = Part(number=0, keep={"fc": torch.arange(0, 8000, 2)})
    sizes = [
        to_message(Task(round=n, part=many, tensors={"weight": torch.zeros(100)})).num_bytes - 400 for n in range(3)
    ]
    assert sizes[0] == sizes[1] == sizes[2] < 1000 + 256


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("content", [a_task(), an_outcome()], ids=["task", "outcome"])
def test_the_length_of_a_message_is_known_from_its_shapes(content: Task | Outcome, name: str) -> None:
    empty = {s: {n: t.to("meta") for n, t in getattr(content, s).items()} for s in ("tensors", "moments", "extras")}
    assert message_bytes(replace(content, **empty), CODECS[name]) == to_message(content, CODECS[name]).num_bytes


@pytest.mark.parametrize("name", CODECS)
def test_the_message_says_how_it_was_encoded(name: str) -> None:
    task = a_task()
    found = read_task(to_message(task, CODECS[name]))
    expected = CODECS[name].decode(CODECS[name].encode(task.tensors["fc.weight"]), (5, 3), torch.float32)
    assert torch.equal(found.tensors["fc.weight"], expected) and found.tensors["count"] == 7
    if name != "exact":
        assert torch.equal(found.moments["fc.weight/exp_avg"], task.moments["fc.weight/exp_avg"].bfloat16().float())


def test_headers() -> None:
    header = Header(END, 3, 4, 5, 6, 7, 1)
    assert len(header.to_bytes()) == HEADER_BYTES == 32 and Header.from_bytes(header.to_bytes()) == header
    assert text_message(RAISED, "größer").text == "größer"
    assert probe_message(100).num_bytes == 132


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.com"[:32], "it is not from Shoal"),
        (Header(END).to_bytes()[:20], "it is not from Shoal"),
        (changed(Header(END).to_bytes(), 4, VERSION + 1), "use one version of Shoal"),
        (changed(Header(END).to_bytes(), 6, 99), "which do not exist"),
        (changed(Header(END).to_bytes(), 7, 9), "which do not exist"),
        (changed(Header(END).to_bytes(), 27, 255), "it was changed"),
    ],
)
def test_a_wrong_header_is_told(data: bytes, line: str) -> None:
    with pytest.raises(WireError, match=line):
        Header.from_bytes(data)


def test_a_message_cut_short_or_changed_is_told() -> None:
    message = to_message(an_outcome())
    message.check()
    with pytest.raises(WireError, match="the rest was lost"):
        Message(message.header, message.payload[:-1]).check()
    for at in range(0, message.payload.numel(), 7):
        wrong = message.payload.clone()
        wrong[at] ^= 1
        with pytest.raises(WireError, match="its checksum is wrong"):
            Message(message.header, wrong).check()


def test_a_message_of_the_wrong_length_is_told() -> None:
    message = to_message(an_outcome())
    with pytest.raises(WireError, match="ends inside"):
        read_outcome(Message(message.header, message.payload[:-1]))
    with pytest.raises(WireError, match="bytes too many"):
        read_outcome(Message(message.header, torch.cat([message.payload, message.payload[:1]])))
    with pytest.raises(WireError, match="does not fit this job"):
        read_task(message)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_do_anything_but_raise(junk: bytes, description: int) -> None:
    payload = torch.frombuffer(bytearray(junk), dtype=torch.uint8) if junk else torch.empty(0, dtype=torch.uint8)
    message = Message(Header(2, 0, 0, min(description, len(junk)), len(junk) - min(description, len(junk))), payload)
    with pytest.raises(WireError):
        read_outcome(message)
    with pytest.raises(WireError):
        read_task(message)
