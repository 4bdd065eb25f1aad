"""A task or an outcome as bytes, and back.

    header        32 bytes: magic, version, kind, codec, round, part, bytes of description and body, checksum
    description   what the part is: numbers, and one bit for each unit of the groups that it keeps
    table         names and types of the tensors, in their order; only when it is new to this connection
    body          the tensors' bytes, one after another, without names or shapes

Both sides know the network and the method, so a tensor's shape follows from its name and the part, and only data
travels. There is no pickle in it: a message can be wrong, but it cannot run anything.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.net._codec import CODECS, EXACT, Codec, Shape, for_moments, for_weights

MAGIC = b"SHOL"
VERSION = 1
"""Of this format. Processes with different ones do not work together."""
_HEADER = struct.Struct("<4sHBBIIIQI")
HEADER_BYTES = _HEADER.size
_PART = struct.Struct("<IIIQI9sB")
_OUTCOME = struct.Struct("<QdQI")
OUTCOME_BYTES, LOSS_BYTES = _OUTCOME.size, 8
"""Of an outcome's description, and of each of its losses."""
_COUNT = struct.Struct("<H")
_GROUP = struct.Struct("<BI")
_TABLE = struct.Struct("<II")
TABLE_BYTES = _TABLE.size
"""Of naming a table that the other side knows."""
MOST_DESCRIPTION, MOST_BODY = 1 << 28, 1 << 40
"""A header that asks for more than this is not one."""

TASK, OUTCOME, RAISED, END, PROBE = 1, 2, 3, 4, 5
"""Kinds of messages. The last three hold text, text and bytes of no meaning."""

Shapes = Callable[[Part], Mapping[str, Shape]]
"""The shapes of a part's tensors, by name."""
SECTIONS = ("tensors", "moments", "extras")


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
        if kind not in (TASK, OUTCOME, RAISED, END, PROBE) or codec >= len(CODECS):
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
    lead = (
        torch.frombuffer(bytearray(description), dtype=torch.uint8)
        if description
        else torch.empty(0, dtype=torch.uint8)
    )
    payload = torch.cat([lead, *body])
    size = payload.numel() - len(description)
    header = Header(
        header.kind, header.round, header.number, len(description), size, _checksum(payload), header.codec
    )  # fmt: skip
    return Message(header, payload)


@dataclass(slots=True)
class Wire:
    """One side of a connection: how it writes and reads, and which tables it has sent and seen."""

    codec: Codec = EXACT
    _sent: set[int] = field(default_factory=set)
    _seen: dict[int, Any] = field(default_factory=dict)

    def task(self, task: Task) -> Message:
        """A task as a message."""
        shapes = {name: tuple(t.shape) for name, t in task.tensors.items()}
        return self._pack(TASK, task.round, task.part.number, part_bytes(task.part), task, shapes)

    def outcome(self, outcome: Outcome) -> Message:
        """An outcome as a message."""
        fixed = _OUTCOME.pack(outcome.rows, outcome.seconds, outcome.peak_bytes, len(outcome.losses))
        description = fixed + np.asarray(outcome.losses, dtype="<f8").tobytes()
        shapes = {name: tuple(t.shape) for name, t in outcome.tensors.items()}
        return self._pack(OUTCOME, outcome.round, outcome.number, description, outcome, shapes)

    def _pack(
        self, kind: int, number: int, part: int, description: bytes, what: Task | Outcome, shapes: Mapping[str, Shape]
    ) -> Message:
        table = [
            [[name, str(t.dtype).removeprefix("torch."), _told(section, name, t, shapes)] for name, t in held.items()]
            for section, held in _sections(what)
        ]
        text = table_bytes(table)
        key = zlib.crc32(text)
        told = b"" if key in self._sent else text
        self._sent.add(key)
        body = [
            chosen(self.codec, t.dtype, section).encode(t) for section, held in _sections(what) for t in held.values()
        ]
        header = Header(kind, number, part, codec=list(CODECS).index(self.codec.name))
        return _message(header, _TABLE.pack(key, len(told)) + told + description, body)

    def read_task(self, message: Message, shapes: Shapes) -> Task:
        """The task in a message; WireError where it is none."""
        with _readable():
            table, rest = self._table(message)
            part = _part_from(rest, message.header.number)
            tensors, moments, extras = _unpack(message, table, shapes(part))
        return Task(round=message.header.round, part=part, tensors=tensors, moments=moments, extras=extras)

    def read_outcome(self, message: Message, shapes: Mapping[str, Shape]) -> Outcome:
        """The outcome in a message; WireError where it is none."""
        with _readable():
            table, rest = self._table(message)
            rows, seconds, peak, steps = _OUTCOME.unpack_from(rest)
            losses = np.frombuffer(rest, dtype="<f8", offset=_OUTCOME.size)
            if len(losses) != steps:
                raise WireError(f"an outcome has {len(losses)} of {steps} losses; it was changed")
            tensors, moments, extras = _unpack(message, table, shapes)
        return Outcome(
            round=message.header.round, number=message.header.number, tensors=tensors, moments=moments, extras=extras,
            losses=tuple(losses.tolist()), rows=rows, seconds=seconds, peak_bytes=peak,
        )  # fmt: skip

    def _table(self, message: Message) -> tuple[Any, bytes]:
        """What the tensors are called, and what follows in the description."""
        description = bytes(message.payload[: message.header.description_bytes].numpy())
        key, size = _TABLE.unpack_from(description)
        text = description[_TABLE.size : _TABLE.size + size]
        if size:
            if zlib.crc32(text) != key:
                raise WireError("a message's table of names was changed on its way")
            self._seen[key] = json.loads(zlib.decompress(text))
        if key not in self._seen:
            raise WireError("a message names a table that was never sent; the connection began somewhere else")
        return self._seen[key], description[_TABLE.size + size :]


class _readable:
    """Inside: what a changed message can break is told as a WireError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        broken = (struct.error, ValueError, KeyError, IndexError, TypeError, RuntimeError, zlib.error, AttributeError)
        if isinstance(error, broken):
            raise WireError(f"a message does not fit this job ({type(error).__name__}: {error})") from error


def chosen(codec: Codec, dtype: torch.dtype, section: str) -> Codec:
    """How one tensor of a message travels."""
    return for_moments(codec, dtype) if section == "moments" else for_weights(codec, dtype)


def _sections(what: Task | Outcome) -> Iterator[tuple[str, Tensors]]:
    return ((section, getattr(what, section)) for section in SECTIONS)


def table_bytes(table: Any) -> bytes:
    """The table of a message: for each section its tensors' names, types and, where they must be told, shapes."""
    return zlib.compress(json.dumps(table, separators=(",", ":")).encode())


def _told(section: str, name: str, tensor: Tensor, shapes: Mapping[str, Shape]) -> list[int] | None:
    """A shape, where it does not follow from the part."""
    shape = tuple(tensor.shape)
    if section == "tensors" or (section == "moments" and shapes.get(name.rpartition("/")[0]) == shape):
        return None
    return list(shape)


def _unpack(message: Message, table: Any, shapes: Mapping[str, Shape]) -> list[Tensors]:
    body = message.payload[message.header.description_bytes :]
    codec = list(CODECS.values())[message.header.codec]
    at, found = 0, []
    for section, entries in zip(SECTIONS, table, strict=True):
        held: Tensors = {}
        for name, kind, told in entries:
            dtype = getattr(torch, kind)
            shape = (
                tuple(told) if told is not None else shapes[name if section == "tensors" else name.rpartition("/")[0]]
            )
            how = chosen(codec, dtype, section)
            size = how.size(shape, dtype)
            if at + size > body.numel():
                raise WireError(f"a message ends inside {name!r}; the rest was lost")
            held[name] = how.decode(body[at : at + size], shape, dtype)
            at += size
        found.append(held)
    if at != body.numel():
        raise WireError(f"a message has {body.numel() - at:,} bytes too many; the two sides mean different networks")
    return found


def part_bytes(part: Part) -> bytes:
    """What a part is, without what it starts from."""
    role = part.role.encode()
    fixed = _PART.pack(*part.shard, part.steps, part.start, len(role), _seed_bytes(part.seed), part.learn is not None)
    return fixed + role + _groups_bytes(part.keep) + (b"" if part.learn is None else _groups_bytes(part.learn))


def _seed_bytes(seed: int) -> bytes:
    """Nine bytes: a seed has 64 bits, with or without a sign."""
    return seed.to_bytes(9, "little", signed=True)


def _part_from(data: bytes, number: int) -> Part:
    shard, shards, steps, start, role_bytes, seed, learns = _PART.unpack_from(data)
    at = _PART.size + role_bytes
    role = data[_PART.size : at].decode()
    keep, at = _groups_from(data, at)
    learn, at = _groups_from(data, at) if learns else (None, at)
    if at != len(data):
        raise WireError("a part's description has bytes too many; it was changed")
    return Part(
        number=number, keep=keep, learn=learn, role=role, shard=(shard, shards), start=start, steps=steps,
        seed=int.from_bytes(seed, "little", signed=True),
    )  # fmt: skip


def _groups_bytes(groups: Mapping[str, Tensor]) -> bytes:
    """Each group: its name, and a bit for each unit up to the last that is kept."""
    pieces = [_COUNT.pack(len(groups))]
    for name, kept in groups.items():
        bits = np.zeros(int(kept[-1]) + 1 if len(kept) else 0, dtype=bool)
        bits[kept.numpy()] = True
        told = name.encode()
        pieces += [_GROUP.pack(len(told), len(bits)), told, np.packbits(bits).tobytes()]
    return b"".join(pieces)


def _groups_from(data: bytes, at: int) -> tuple[dict[str, Tensor], int]:
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    groups = {}
    for _ in range(count):
        name_bytes, size = _GROUP.unpack_from(data, at)
        at += _GROUP.size
        name = data[at : at + name_bytes].decode()
        at += name_bytes
        packed = np.frombuffer(data, dtype=np.uint8, count=-(-size // 8), offset=at)
        at += len(packed)
        groups[name] = torch.from_numpy(np.flatnonzero(np.unpackbits(packed, count=size)))
    return groups, at
