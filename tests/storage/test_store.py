"""A state comes back from its file exactly, or the file is refused."""

from __future__ import annotations

import gc
import math
import os
import random
import struct
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import DamagedError, NotStorable, OutError
from shoal.storage import _store


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        layout = a.layout == b.layout and a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        return layout and (a.layout != torch.strided or bits(a) == bits(b))
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
            and getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def through(path: Path, state: Any) -> Any:
    _store.save(path / "x.ckpt", state)
    return _store.load(path / "x.ckpt")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaN and denormal numbers among them."""
    count = math.prod(shape)
    if dtype == torch.bool:
        data = random.Random(seed).choices([0, 1], k=count)
        return torch.tensor(data, dtype=torch.bool).view(shape)
    data = bytearray(random.Random(seed).randbytes(count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype).clone().view(shape) if count else torch.empty(shape, dtype=dtype)


tensors = st.builds(
    random_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 1 << 30),
)
scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text() | st.binary()
    | st.complex_numbers() | st.floats(width=32).map(np.float32) | st.integers(-9, 9).map(np.int64)
)  # fmt: skip
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_comes_back(tmp_path: Path, state: Any) -> None:
    assert same(through(tmp_path, state), state)


def test_what_a_member_holds_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model[0].to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    for _ in range(3):
        model(torch.randn(5, 3, 4, 4)).sum().backward()
        optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.Generator().manual_seed(3).get_state(),
        "history": [{"epoch": 1, "loss": math.nan, "lr": -0.0, "x": -math.inf}],
        "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
    }
    back = through(tmp_path, state)
    assert same(back, state)
    model.load_state_dict(back["model"], strict=True)
    optimizer.load_state_dict(back["optimizer"])
    assert back["model"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert isinstance(back["optimizer"]["state"], dict) and next(iter(back["optimizer"]["state"])) == 0
    assert isinstance(back["optimizer"]["param_groups"][0]["betas"], tuple)


def test_tensors_that_are_views(tmp_path: Path) -> None:
    stack = torch.arange(24, dtype=torch.float32).view(4, 6)
    shared = torch.randn(3)
    state = {
        "slice": stack[1], "column": stack[:, 2], "turned": stack.t(), "wide": torch.randn(3, 1).expand(3, 5),
        "once": shared, "twice": shared, "also": shared.view(3), "part": shared[:2], "one": torch.tensor(2.5),
        "none": torch.empty(0, 3), "flipped": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.randn(2)), "thin": torch.empty_strided((4, 3, 1, 1), (3, 1, 3, 3)).fill_(7),
    }  # fmt: skip
    back = through(tmp_path, state)
    for name, value in state.items():
        assert torch.equal(back[name], value.detach()), name
        assert back[name].untyped_storage().nbytes() <= value.numel() * value.element_size(), name
        assert not back[name].requires_grad
    assert back["once"] is back["twice"] is back["also"], "one tensor before, one tensor after"
    assert back["part"].data_ptr() != back["once"].data_ptr()
    for name in ("turned", "thin", "slice"):
        assert back[name].stride() == state[name].stride(), name
    assert (tmp_path / "x.ckpt").stat().st_size < 6_000, "a view brings only its own part"


def test_notes_are_read_with_the_state(tmp_path: Path) -> None:
    _store.save(tmp_path / "x.ckpt", {"order": torch.arange(5)}, {"number": "7"})
    assert _store.read(tmp_path / "x.ckpt")[1] == {"number": "7"}


def test_large_numbers_may_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    value = random_tensor(torch.complex128, (33,), 0)
    for length in range(1, 40):
        assert same(through(tmp_path, {"x" * length: value}), {"x" * length: value})


def test_names_that_collide_are_kept_apart(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "__metadata__": torch.ones(1), "": torch.ones(3)}
    state |= {"sha256": "x", "tree": "y", "float": "z", "tensor": 3, "dict": {"dict": {"tensor": 0}}}
    assert same(through(tmp_path, state), state)


class Odd:
    """What only its own code can bring back."""


def test_rare_types_and_what_cannot_be_stored(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    back = through(tmp_path, {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "sparse": sparse, "set": {1, 2}})
    assert back["size"] == torch.Size([2, 3]) and back["dtype"] is torch.bfloat16 and back["set"] == {1, 2}
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    (tmp_path / "x.ckpt").unlink()
    loop: list[Any] = []
    loop.append(loop)
    for odd, words in (
        (Odd(), "optimizer.state.0 is a Odd"),
        (lambda: 1, "is a function"),
        (loop, "contains itself"),
        (torch.empty(2, device="meta"), "without memory"),
    ):
        with pytest.raises(NotStorable, match=words):
            through(tmp_path, {"optimizer": {"state": {0: odd}}})
    assert not list(tmp_path.iterdir()), "nothing is written of a state that cannot be"


@pytest.fixture(scope="module")
def good() -> bytes:
    state = {"w": torch.randn(3, 2), "b": torch.arange(3), "text": "so", "x": [1.5, None, (2, True)]}
    return b"".join(_store.freeze(state).seal({"number": "3", "job": "abc"}))


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "x.ckpt"
    path.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        _store.load(path)
    assert isinstance(caught.value, OutError)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_change_in_any_bit_is_noticed(good: bytes) -> None:
    data = bytearray(good)
    assert _store.fault(bytes(data)) is None
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert _store.fault(bytes(data)), (place, bit)
            data[place] ^= 1 << bit


def test_a_file_that_is_cut_zeroed_or_foreign_is_refused(tmp_path: Path, good: bytes) -> None:
    for length in range(len(good)):
        assert _store.fault(good[:length]), length
    assert f"is cut short: {len(good) - 1} of its {len(good)} bytes are left" in refused(tmp_path, good[:-1])
    assert "cut short" in refused(tmp_path, good[:200])
    assert "is empty" in refused(tmp_path, b"")
    assert "nothing but zeros" in refused(tmp_path, bytes(len(good)))
    for first in range(0, len(good), 16):  # a block that never reached the disk
        holed = good[:first] + bytes(len(good[first : first + 64])) + good[first + 64 :]
        assert holed == good or refused(tmp_path, holed)
    assert "checksum" in refused(tmp_path, good + b"\0")
    save_file({"w": torch.randn(2)}, tmp_path / "other.safetensors")
    assert "not a checkpoint of Shoal" in refused(tmp_path, (tmp_path / "other.safetensors").read_bytes())
    assert "not a checkpoint of Shoal" in refused(tmp_path, b"hello")
    with pytest.raises(DamagedError, match="cannot be read"):
        _store.load(tmp_path / "nowhere.ckpt")


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, __import__, subprocess.Popen, torch.load, print])
def test_a_file_that_names_a_function_is_refused(tmp_path: Path, function: Any) -> None:
    """Whoever can write to the folder can write the checksum too: reading must not run what a file names."""
    proof = tmp_path / "ran"
    data = b"".join(_store.Frozen({"model": Calls(function, f"touch {proof}")}).seal({"number": "3"}))
    assert f"names {function.__module__}.{function.__name__}, which no checkpoint does" in refused(tmp_path, data)
    assert not proof.exists()


def test_a_checkpoint_of_the_format_before_is_refused(tmp_path: Path, good: bytes) -> None:
    assert "another version of Shoal (format 1)" in refused(tmp_path, good.replace(b"checkpoint 2", b"checkpoint 1", 1))


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "FORMAT", "9")
    _store.save(tmp_path / "x.ckpt", {})
    monkeypatch.undo()
    with pytest.raises(DamagedError, match="another version of Shoal"):
        _store.load(tmp_path / "x.ckpt")


def test_a_frozen_state_does_not_follow_its_tensors(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    frozen = _store.freeze({"w": weight})
    weight.fill_(1)
    (tmp_path / "x").write_bytes(b"".join(frozen.seal({})))
    assert torch.equal(_store.load(tmp_path / "x")["w"], torch.zeros(3))


def test_a_frozen_state_in_a_reference_cycle_can_be_collected() -> None:
    for _ in range(2):
        held: list[Any] = [_store.freeze({"weight": torch.ones(3)})]
        held.append(held)
        del held
        gc.collect()
