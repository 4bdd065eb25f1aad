"""One state, one file: a checkpoint is a safetensors file that knows its own contents.

The tensors are in it under the names of their places, as any safetensors reader sees them. The tree that holds them and
notes are in its metadata, together with the sha256 of the whole file (taken with zeros where it stands itself). So a
file that was cut short, zeroed or changed in any bit is noticed before anything of it is used. The format is
written here, and not by the safetensors package, for that checksum, and to write tensors without another copy.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import DamagedError
from shoal.storage import _atomic
from shoal.storage._tree import Leaf, decode, encode

FORMAT = "1"
START = b'{"__metadata__":{"sha256":"'
ZEROS = b"0" * 64
SEAL = slice(8 + len(START), 8 + len(START) + 64)
"""Where the checksum stands in the file."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Those of every safetensors reader. Others are written as bytes, and the tree says what they are."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A state at one moment: copies of all it had, ready to be written by anybody at any time."""

    tree: str
    leaves: list[Leaf]

    @property
    def nbytes(self) -> int:
        return len(self.tree) + sum(len(leaf.data) for leaf in self.leaves)

    def seal(self, notes: dict[str, str]) -> list[bytes]:
        """The file's contents."""
        order = sorted(range(len(self.leaves)), key=lambda i: -self.leaves[i].dtype.itemsize)  # aligned, without holes
        head, end = dict[str, Any](), 0
        for i in order:
            leaf = self.leaves[i]
            shape = leaf.shape if leaf.dtype in DTYPES else (len(leaf.data),)
            name = leaf.name
            while name in head or name == "__metadata__":
                name += "'"
            head[name] = {
                "dtype": DTYPES.get(leaf.dtype, "U8"),
                "shape": list(shape),
                "data_offsets": [end, end + len(leaf.data)],
            }
            end += len(leaf.data)
        leaves = json.dumps([[i, *_odd(self.leaves[i])] for i in order])
        metadata = {"sha256": ZEROS.decode(), "format": FORMAT, **notes, "leaves": leaves, "tree": self.tree}
        text = json.dumps({"__metadata__": metadata, **head}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        chunks = [len(text).to_bytes(8, "little"), text, *(self.leaves[i].data for i in order)]
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        chunks[1] = text.replace(ZEROS, digest.hexdigest().encode(), 1)
        return chunks


def freeze(state: Any) -> Frozen:
    """Copy a state; NotStorable where something in it cannot be written."""
    tree, leaves = encode(state)
    return Frozen(json.dumps(tree), leaves)


def save(path: Path, state: Any, notes: dict[str, str] | None = None) -> None:
    """Write a state to one file, in one move."""
    _atomic.write(path, freeze(state).seal(notes or {}))


def load(path: Path) -> Any:
    """The state in a file; DamagedError where the file is not what was written."""
    return read(path)[0]


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """The state in a file, and its notes; DamagedError where the file is not what was written."""
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    wrong = fault(data)
    if wrong:
        raise DamagedError(f"{str(path)!r} {wrong}")
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    metadata = head.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise DamagedError(f"{str(path)!r} was written by another version of Shoal (format {metadata['format']})")
    places = json.loads(metadata["leaves"])
    leaves: list[Any] = [None] * len(places)
    for (i, *odd), entry in zip(places, head.values(), strict=True):
        leaves[i] = _tensor(data, 8 + size, entry, odd)
    notes = {name: text for name, text in metadata.items() if name not in ("sha256", "format", "leaves", "tree")}
    return decode(json.loads(metadata["tree"]), leaves), notes


def fault(data: bytearray) -> str | None:
    """What is wrong with a file's contents, in words; None where they are as they were written."""
    if not any(data):
        return "holds nothing but zeros" if data else "is empty"
    if data[8 : SEAL.start] != START[: max(0, len(data) - 8)] or len(data) < 8:
        return "is no checkpoint of Shoal's, or its beginning is damaged"
    seal, data[SEAL] = bytes(data[SEAL]), ZEROS
    if len(seal) == len(ZEROS) and hashlib.sha256(data).hexdigest().encode() == seal:
        return None
    length = _length(data)
    if length is not None and len(data) < length:
        return f"is cut short: {len(data)} of its {length} bytes are left"
    return "is damaged: its contents do not match their checksum"


def _length(data: bytearray) -> int | None:
    """How long a file should be, as far as its own beginning can be read."""
    size = 8 + int.from_bytes(data[:8], "little")
    if len(data) < size:
        return size
    try:
        entries = list(json.loads(data[8:size]).values())[1:]
        return int(size + max((entry["data_offsets"][1] for entry in entries), default=0))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def peek(path: Path, note: str) -> str | None:
    """A note of a file without reading all of it, so it may be wrong; None where it cannot be found."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError:
        return None
    found = re.search(rb'"%s":"([^"\\]*)"' % note.encode(), head[SEAL.stop :])
    return found[1].decode("ascii", "replace") if found and head[8 : SEAL.start] == START else None


def _odd(leaf: Leaf) -> list[Any]:
    """What the safetensors entry of a leaf does not say."""
    return [] if leaf.dtype in DTYPES else [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]


def _tensor(data: bytearray, base: int, entry: dict[str, Any], odd: list[Any]) -> Tensor:
    """A tensor in memory of its own."""
    dtype = getattr(torch, odd[0]) if odd else _TORCH[entry["dtype"]]
    shape = odd[1] if odd else entry["shape"]
    first, last = entry["data_offsets"]
    if first == last:
        return torch.empty(shape, dtype=dtype)
    # Copied as bytes: the file aligns to 8, and a copy of 16-byte numbers that lie in between ends the process.
    raw = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=base + first)
    return raw.clone().view(dtype).view(shape)


_TORCH = {name: dtype for dtype, name in DTYPES.items()}
