"""Data for job files: the digits of scikit-learn, and files of arrays, tables and text."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import JobError
from shoal.utils.numpy_values import tensor_of

FORMS = ("flat", "image", "rows")
WRITERS = {
    ".npz": "numpy.savez",
    ".safetensors": "safetensors.torch.save_file",
    ".pt": "torch.save({'x': x, 'y': y}, file)",
}


def digits(form: str = "flat", side: int = 8) -> tuple[Tensor, Tensor]:
    """Return 1797 images of digits, scaled to 0 to 1, as flat [64], image [1, 8, 8], or rows [8, 8] for sequences."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("'digits' comes with scikit-learn: pip install 'shoal[demo]'") from None
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; use one of {', '.join(FORMS)}")
    if not 1 <= side <= 256:
        raise ValueError(f"side is {side}; use 1 to 256 pixels")
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    if side != 8:
        x = F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
    x = x if form == "image" else x.squeeze(1) if form == "rows" else x.flatten(1)
    return x.contiguous(), torch.tensor(classes, dtype=torch.int64)


def arrays(file: Path, inputs: str | list[str] = "x", target: str | None = "y", dtype: str | None = None) -> Any:
    """Return arrays by name, (*inputs, target), from .npz, .safetensors or .pt. A .pt may also hold a tuple of
    tensors."""
    content = _read_arrays(file)
    if not isinstance(content, Mapping):
        if isinstance(content, (tuple, list)) and content and all(isinstance(t, Tensor) for t in content):
            return tuple(content)
        raise ValueError(f"it holds a {type(content).__name__}; save a dict or a tuple of tensors")
    input_names = [inputs] if isinstance(inputs, str) else list(inputs)
    names = [*input_names, *([] if target is None else [target])]
    for name in names:
        if name not in content:
            available = ", ".join(map(str, content)) or "nothing"
            raise ValueError(f"it has no {name!r}; it has {available}: say which with inputs and target")
    return tuple(_convert(_tensor(name, content[name]), dtype if name in input_names else None) for name in names)


def _read_arrays(file: Path) -> Any:
    """Return the contents of a file, or raise a ValueError if it is not of the type that its name says or not only
    numbers."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".npz":
            with np.load(file, allow_pickle=False) as held:
                return {name: held[name] for name in held.files}
        if suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that it cannot read, which are reported below
            return torch.load(file, map_location="cpu", weights_only=True)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"it is not a {suffix} file of plain arrays; write it with {WRITERS[suffix]}") from error


def _tensor(name: str, value: Any) -> Tensor:
    """Return an array as a tensor, with large unsigned integers as int64."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{name!r} holds a {type(value).__name__}; save numbers")
    if value.dtype.kind == "u" and value.dtype.itemsize > 1:
        value = value.astype(np.int64)
    try:
        return tensor_of(value)
    except JobError as error:
        raise ValueError(f"{name!r} {error}") from None


def _convert(tensor: Tensor, dtype: str | None) -> Tensor:
    """Convert to `dtype`, or by default float64 to float32 and small integers to int64."""
    if dtype is not None:
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise ValueError(f"dtype is {dtype!r}; use float32, float64, int64 or the like")
        return tensor.to(torch_dtype)
    if tensor.dtype == torch.float64:
        return tensor.float()
    small_integers = tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    return tensor.long() if small_integers else tensor


def table(
    file: Path,
    target: str | None = None,
    inputs: list[str] | None = None,
    classes: bool | None = None,
    delimiter: str = ",",
) -> tuple[Tensor, Tensor]:
    """Read a .csv with a header line. The target is the last column by default; words and whole numbers are classes."""
    if len(delimiter) != 1:
        raise ValueError(f"delimiter is {delimiter!r}; use one character")
    rows = _rows(file, delimiter)
    if len(rows) < 2:
        raise ValueError("it has no rows below its header line")
    head, body = [name.strip() for name in rows[0][1]], rows[1:]
    if len(set(head)) < len(head):
        raise ValueError("two of its columns have one name")
    for line, row in body:
        if len(row) != len(head):
            raise ValueError(f"line {line} has {len(row)} cells, its header has {len(head)}")
    target_column = head[-1] if target is None else target
    chosen = [name for name in head if name != target_column] if inputs is None else inputs
    for name in (target_column, *chosen):
        if name not in head:
            raise ValueError(f"it has no column {name!r}; it has {', '.join(head)}")
    if not chosen:
        other = next((sign for sign in ";\t|" if sign in head[0]), None)
        hint = "" if other is None else f"; set delimiter = {json.dumps(other)}, which is in its head line"
        raise ValueError(f"it has one column only; inputs and a target are needed{hint}")
    indices = [head.index(name) for name in chosen]
    x = torch.tensor([[_number(row[i], line, head[i]) for i in indices] for line, row in body], dtype=torch.float32)
    return x, _target([(line, row[head.index(target_column)].strip()) for line, row in body], target_column, classes)


def _rows(file: Path, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the non-empty lines, each with its number."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text, delimiter=delimiter)
            return [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8; save it as UTF-8") from None
    except (csv.Error, TypeError) as error:
        raise ValueError(f"it cannot be read as a .csv file ({error})") from None


def _number(cell: str, line: int, column: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"line {line} has {cell[:40]!r} in column {column!r}; it must be a number") from None


def _target(cells: list[tuple[int, str]], column: str, classes: bool | None) -> Tensor:
    """Return classes as whole numbers [N], or numbers [N, 1]. Words are classes, in alphabetical order."""
    try:
        numbers = [float(cell) for _, cell in cells]
    except ValueError:
        if classes is False:
            return torch.tensor([[_number(cell, line, column)] for line, cell in cells])
        class_of = {name: i for i, name in enumerate(sorted({cell for _, cell in cells}))}
        return torch.tensor([class_of[cell] for _, cell in cells])
    all_integers = all(number.is_integer() for number in numbers)
    if classes and not all_integers:
        raise ValueError(f"column {column!r} must hold classes, but has numbers that are not whole")
    if classes or (classes is None and all_integers):
        return torch.tensor([int(number) for number in numbers])
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def text(file: Path, tokens: int = 128) -> tuple[Tensor, Tensor]:
    """Read a .txt as sequences of bytes: inputs [N, tokens], and the same one byte later as targets."""
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; use 1 or more")
    content = torch.from_numpy(np.fromfile(file, dtype=np.uint8)).long()
    rows = (len(content) - 1) // tokens
    if rows < 1:
        raise ValueError(f"it has {len(content)} bytes; a sequence of {tokens} tokens needs {tokens + 1}")
    inputs, targets = content[: rows * tokens], content[1 : rows * tokens + 1]
    return inputs.view(rows, tokens), targets.reshape(rows, tokens)


BUILT_IN: dict[str, Callable[..., Any]] = {"digits": digits}
READERS: dict[str, Callable[..., Any]] = {
    ".npz": arrays,
    ".pt": arrays,
    ".safetensors": arrays,
    ".csv": table,
    ".txt": text,
}
"""The function that reads a file, by the end of its name."""
