"""A message between two processes: a header, a description and the bytes of tensors.

    header        32 bytes: magic, version, kind, codec, round, part, bytes of description and body, checksum
    description   JSON: numbers, and each tensor's name, type and shape
    body          the tensors' bytes, one after another

It contains no pickle, so that a wrong message cannot run code.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError

MAGIC = b"SHOL"
VERSION = 2
"""The version of this format. Processes with different versions do not work together."""
_HEADER = struct.Struct("<4sHBBIIIQI")
HEADER_BYTES = _HEADER.size
MOST_DESCRIPTION, MOST_BODY = 1 << 28, 1 << 40
"""A header that asks for more than this is not one."""

TASK, OUTCOME, RAISED, END, PROBE, ASK, ANSWER, TENSORS = 1, 2, 3, 4, 5, 6, 7, 8
"""Kinds of messages. Those from RAISED to ANSWER contain text, a probe arbitrary bytes."""
NUM_CODECS = 4
"""The number of codecs that a header may name, see `_codec.py`."""


class WireError(ShoalError):
    """Bytes that are not a complete message of ours."""


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
        if not TASK <= kind <= TENSORS or codec >= NUM_CODECS:
            raise WireError(f"a message has kind {kind} and codec {codec}, which do not exist; it was changed")
        if description > MOST_DESCRIPTION or body > MOST_BODY:
            raise WireError(f"a message says that it has {description + body:,} bytes; it was changed")
        return Header(kind, number, part, description, body, checksum, codec)


@dataclass(slots=True)
class Message:
    """A message: a header, and description and body in one tensor."""

    header: Header
    payload: Tensor
    """A uint8 tensor of one dimension."""

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.payload.numel()

    def check(self) -> None:
        """Raise a WireError if the payload is not what was sent."""
        expected = self.header.description_bytes + self.header.body_bytes
        if self.payload.numel() != expected:
            raise WireError(f"a message has {self.payload.numel():,} of {expected:,} bytes; the rest was lost")
        if _checksum(self.payload) != self.header.checksum:
            raise WireError(f"a message of round {self.header.round} was changed on its way (its checksum is wrong)")

    @property
    def text(self) -> str:
        return bytes(self.payload.numpy()).decode(errors="replace")


def text_message(kind: int, text: str) -> Message:
    """Return a message that contains only text."""
    return make_message(Header(kind), text.encode(), [])


def probe_message(num_bytes: int) -> Message:
    """Return a message for measuring a link."""
    return make_message(Header(PROBE), b"", [torch.zeros(num_bytes, dtype=torch.uint8)])


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data)


def make_message(header: Header, description: bytes, body: Sequence[Tensor]) -> Message:
    """Return a message of these bytes; the header gets their sizes and their checksum."""
    payload = torch.cat([torch.from_numpy(np.frombuffer(bytearray(description), np.uint8)), *body])
    sizes = (len(description), payload.numel() - len(description))
    return Message(Header(header.kind, header.round, header.number, *sizes, _checksum(payload), header.codec), payload)


def tensor_message(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], *, round: int = 0) -> Message:
    """Return a message of named tensors with some numbers, encoded exactly."""
    entries = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    description = json.dumps([dict(numbers), entries], separators=(",", ":")).encode()
    return make_message(Header(TENSORS, round), description, [tensor_bytes(t) for t in tensors.values()])


def read_tensors(message: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors of such a message, which share its memory, or raise a WireError."""
    if message.header.kind != TENSORS:
        raise WireError(f"a message has kind {message.header.kind} where tensors were expected")
    split, tensors = message.header.description_bytes, dict[str, Tensor]()
    with reading():
        numbers, entries = json.loads(bytes(message.payload[:split].numpy()))
        at = split
        for name, dtype_name, shape in entries:
            dtype = getattr(torch, dtype_name)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            if at + size > message.payload.numel():
                raise WireError(f"a message ends inside {name!r}; the rest was lost")
            data = message.payload[at : at + size]
            if data.storage_offset() % dtype.itemsize:  # a view of another type must be aligned
                data = data.clone()
            tensors[name] = data.view(dtype).view(shape)
            at += size
    return dict(numbers), tensors


def tensor_bytes(value: Tensor) -> Tensor:
    """Return a tensor's bytes, on the CPU."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def reading() -> Iterator[None]:
    """Raise a WireError for any error that a changed message causes inside this context."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise WireError(f"a message does not fit this job ({type(error).__name__}: {error})") from error
