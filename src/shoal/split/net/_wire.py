"""A task or an outcome as bytes, and back.

    header        32 bytes: magic, version, kind, codec, round, part, bytes of description and body, checksum
    description   JSON: the numbers of the part or of the outcome, and each tensor's section, name, type and shape
    body          the tensors' bytes, one after another; units that a part keeps are one bit each

There is no pickle in it: a message can be wrong, but it cannot run anything.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.net._codec import CODECS, EXACT, Codec, for_moments, for_weights

MAGIC = b"SHOL"
VERSION = 2
"""Of this format. Processes with different ones do not work together."""
_HEADER = struct.Struct("<4sHBBIIIQI")
HEADER_BYTES = _HEADER.size
MOST_DESCRIPTION, MOST_BODY = 1 << 28, 1 << 40
"""A header that asks for more than this is not one."""

TASK, OUTCOME, RAISED, END, PROBE, ASK, ANSWER = 1, 2, 3, 4, 5, 6, 7
"""Kinds of messages. Those after OUTCOME hold text, a probe bytes of no meaning."""
_PART_FIELDS = ("role", "shard", "start", "steps", "seed")
_OUTCOME_FIELDS = ("rows", "seconds", "peak_bytes")


class WireError(ShoalError):
    """Bytes that are no message of ours, or not whole."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed beginning of a message."""

    kind: int
    round: int = 0
    number: int = 0
    description_bytes: int = 0
    body_bytes: int = 0
    checksum: int = 0
    codec: int = 0

    def to_bytes(self) -> bytes:
        return _HEADER.pack(
            MAGIC, VERSION, self.kind, self.codec, self.round, self.number,
            self.description_bytes, self.body_bytes, self.checksum,
        )  # fmt: skip

    @staticmethod
    def from_bytes(data: bytes) -> Header:
        if len(data) != HEADER_BYTES or data[:4] != MAGIC:
            raise WireError(f"a message begins with {data[:4]!r}; it is not from Shoal, or its beginning was lost")
        _, version, kind, codec, number, part, description, body, checksum = _HEADER.unpack(data)
        if version != VERSION:
            raise WireError(f"a message has format {version}, this is format {VERSION}; use one version of Shoal")
        if not TASK <= kind <= ANSWER or codec >= len(CODECS):
            raise WireError(f"a message has kind {kind} and codec {codec}, which do not exist; it was changed")
        if description > MOST_DESCRIPTION or body > MOST_BODY:
            raise WireError(f"a message says that it has {description + body:,} bytes; it was changed")
        return Header(kind, number, part, description, body, checksum, codec)


@dataclass(slots=True)
class Message:
    """What travels: a header, and description and body in one piece."""

    header: Header
    payload: Tensor
    """uint8, one dimension."""

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.payload.numel()

    def check(self) -> None:
        """WireError where the payload is not what was sent."""
        wanted = self.header.description_bytes + self.header.body_bytes
        if self.payload.numel() != wanted:
            raise WireError(f"a message has {self.payload.numel():,} of {wanted:,} bytes; the rest was lost")
        if _checksum(self.payload) != self.header.checksum:
            raise WireError(f"a message of round {self.header.round} was changed on its way (its checksum is wrong)")

    @property
    def text(self) -> str:
        return bytes(self.payload.numpy()).decode(errors="replace")


def text_message(kind: int, text: str) -> Message:
    """A message of words alone."""
    return _message(Header(kind), text.encode(), [])


def probe_message(num_bytes: int) -> Message:
    """A message to measure a link with."""
    return _message(Header(PROBE), b"", [torch.zeros(num_bytes, dtype=torch.uint8)])


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data)


def _message(header: Header, description: bytes, body: list[Tensor]) -> Message:
    payload = torch.cat([torch.from_numpy(np.frombuffer(bytearray(description), np.uint8)), *body])
    sizes = (len(description), payload.numel() - len(description))
    return Message(Header(header.kind, header.round, header.number, *sizes, _checksum(payload), header.codec), payload)


def to_message(content: Task | Outcome, codec: Codec = EXACT) -> Message:
    """A task or an outcome as a message."""
    kind, number = (TASK, content.part.number) if isinstance(content, Task) else (OUTCOME, content.number)
    header = Header(kind, content.round, number, codec=list(CODECS).index(codec.name))
    body = [_codec_for(codec, section, t.dtype).encode(t) for section, _, t in _tensors(content)]
    return _message(header, _description(content), body)


def message_bytes(content: Task | Outcome, codec: Codec = EXACT) -> int:
    """How long the message will be, from types and shapes alone: tensors may be on the meta device."""
    sizes = (_codec_for(codec, section, t.dtype).size(tuple(t.shape), t.dtype) for section, _, t in _tensors(content))
    return HEADER_BYTES + len(_description(content)) + sum(sizes)


def _description(content: Task | Outcome) -> bytes:
    named = (content.part, _PART_FIELDS) if isinstance(content, Task) else (content, _OUTCOME_FIELDS)
    numbers: dict[str, Any] = {name: getattr(named[0], name) for name in named[1]}
    if isinstance(content, Task):
        numbers["learns"] = content.part.learn is not None
    tensors = [
        [section, name, str(t.dtype).removeprefix("torch."), list(t.shape)] for section, name, t in _tensors(content)
    ]
    return json.dumps([numbers, tensors], separators=(",", ":")).encode()


def _tensors(content: Task | Outcome) -> Iterator[tuple[str, str, Tensor]]:
    """All tensors of a message: section, name, tensor."""
    for section in ("tensors", "moments", "extras"):
        for name, tensor in getattr(content, section).items():
            yield section, name, tensor
    if isinstance(content, Outcome):
        yield "losses", "", torch.tensor(content.losses, dtype=torch.float64)
        return
    for section, groups in (("keep", content.part.keep), ("learn", content.part.learn or {})):
        for name, units in groups.items():
            yield section, name, _to_bits(units)


def _codec_for(codec: Codec, section: str, dtype: torch.dtype) -> Codec:
    if section in ("tensors", "extras"):
        return for_weights(codec, dtype)
    return for_moments(codec, dtype) if section == "moments" else EXACT


def _to_bits(units: Tensor) -> Tensor:
    """A bit for each unit up to the last that is kept."""
    bits = np.zeros(int(units[-1]) + 1 if len(units) else 0, dtype=bool)
    bits[units.numpy()] = True
    return torch.from_numpy(np.packbits(bits))


def _from_bits(groups: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy()))) for name, bits in groups.items()}


def read_task(message: Message) -> Task:
    """The task in a message; WireError where it is none."""
    with _reading():
        numbers, sections = _unpack(message)
        numbers["shard"] = tuple(numbers["shard"])
        part = Part(
            number=message.header.number, keep=_from_bits(sections["keep"]),
            learn=_from_bits(sections["learn"]) if numbers["learns"] else None,
            **{name: numbers[name] for name in _PART_FIELDS},
        )  # fmt: skip
        return Task(
            round=message.header.round, part=part, tensors=sections["tensors"], moments=sections["moments"],
            extras=sections["extras"],
        )  # fmt: skip


def read_outcome(message: Message) -> Outcome:
    """The outcome in a message; WireError where it is none."""
    with _reading():
        numbers, sections = _unpack(message)
        losses: list[float] = sections["losses"][""].tolist()
        return Outcome(
            round=message.header.round, number=message.header.number, losses=tuple(losses),
            tensors=sections["tensors"], moments=sections["moments"], extras=sections["extras"],
            **{name: numbers[name] for name in _OUTCOME_FIELDS},
        )  # fmt: skip


@contextmanager
def _reading() -> Iterator[None]:
    """Inside: whatever a changed message breaks is a WireError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise WireError(f"a message does not fit this job ({type(error).__name__}: {error})") from error


def _unpack(message: Message) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """The numbers of a message, and its tensors by section and name."""
    split = message.header.description_bytes
    numbers, entries = json.loads(bytes(message.payload[:split].numpy()))
    body, codec, at = message.payload[split:], list(CODECS.values())[message.header.codec], 0
    sections: dict[str, Tensors] = {name: {} for name in ("tensors", "moments", "extras", "keep", "learn", "losses")}
    for section, name, kind, shape in entries:
        dtype = getattr(torch, kind)
        how = _codec_for(codec, section, dtype)
        size = how.size(tuple(shape), dtype)
        if at + size > body.numel():
            raise WireError(f"a message ends inside {name!r}; the rest was lost")
        sections[section][name] = how.decode(body[at : at + size], tuple(shape), dtype)
        at += size
    if at != body.numel():
        raise WireError(f"a message has {body.numel() - at:,} bytes too many; it was changed")
    return numbers, sections
