"""Convert tasks and outcomes to messages and back; the units that a part keeps take one bit each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.net.messages import HEADER_BYTES, OUTCOME, TASK, Header, Message, WireError, make_message, reading
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.net._codec import CODECS, EXACT, Codec, for_moments, for_weights

_PART_FIELDS = ("role", "shard", "start", "steps", "seed")
_OUTCOME_FIELDS = ("rows", "seconds", "peak_bytes")


def to_message(content: Task | Outcome, codec: Codec = EXACT) -> Message:
    """Return a task or an outcome as a message."""
    kind, number = (TASK, content.part.number) if isinstance(content, Task) else (OUTCOME, content.number)
    header = Header(kind, content.round, number, codec=list(CODECS).index(codec.name))
    body = [_codec_for(codec, section, t.dtype).encode(t) for section, _, t in _tensors(content)]
    return make_message(header, _description(content), body)


def message_bytes(content: Task | Outcome, codec: Codec = EXACT) -> int:
    """Return the length of the message, from types and shapes alone, so that tensors may be on the meta device."""
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
    """Yield all tensors of a message: section, name, tensor."""
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
    """Return a bit for each unit up to the last that is kept."""
    bits = np.zeros(int(units[-1]) + 1 if len(units) else 0, dtype=bool)
    bits[units.numpy()] = True
    return torch.from_numpy(np.packbits(bits))


def _from_bits(groups: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy()))) for name, bits in groups.items()}


def read_task(message: Message) -> Task:
    """Return the task in a message, or raise a WireError."""
    with reading():
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
    """Return the outcome in a message, or raise a WireError."""
    with reading():
        numbers, sections = _unpack(message)
        losses: list[float] = sections["losses"][""].tolist()
        return Outcome(
            round=message.header.round, number=message.header.number, losses=tuple(losses),
            tensors=sections["tensors"], moments=sections["moments"], extras=sections["extras"],
            **{name: numbers[name] for name in _OUTCOME_FIELDS},
        )  # fmt: skip


def _unpack(message: Message) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """Return the numbers of a message, and its tensors by section and name."""
    split = message.header.description_bytes
    numbers, entries = json.loads(bytes(message.payload[:split].numpy()))
    body, codec, at = message.payload[split:], list(CODECS.values())[message.header.codec], 0
    sections: dict[str, Tensors] = {name: {} for name in ("tensors", "moments", "extras", "keep", "learn", "losses")}
    for section, name, dtype_name, shape in entries:
        dtype = getattr(torch, dtype_name)
        tensor_codec = _codec_for(codec, section, dtype)
        size = tensor_codec.size(tuple(shape), dtype)
        if at + size > body.numel():
            raise WireError(f"a message ends inside {name!r}; the rest was lost")
        sections[section][name] = tensor_codec.decode(body[at : at + size], tuple(shape), dtype)
        at += size
    if at != body.numel():
        raise WireError(f"a message has {body.numel() - at:,} bytes too many; it was changed")
    return numbers, sections
