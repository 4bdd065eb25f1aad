"""Messages between processes: what arrives is what was sent, whatever kind of tensor it is."""

from __future__ import annotations

import os
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.engine.processes import _messages
from shoal.utils.weights import load_weights

LARGE = _messages.LARGE // 4
VALUES = {
    "small": torch.arange(5),
    "large": torch.randn(LARGE),
    "several dimensions": torch.randn(3, LARGE, 2, dtype=torch.float64),
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.randn(2 * LARGE).bfloat16(),
    "bool": torch.rand(4 * LARGE) > 0.5,
    "complex": torch.randn(LARGE, dtype=torch.complex64),
    "conjugate": torch.randn(LARGE, dtype=torch.complex64).conj(),
    "transposed": torch.randn(LARGE, 2).T,
    "channels last": torch.randn(4, 8, 16, LARGE // 64).contiguous(memory_format=torch.channels_last),
    "small, channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "part of another": torch.randn(4 * LARGE)[:LARGE],
    "expanded": torch.randn(1).expand(LARGE),
    "sparse": torch.eye(5).to_sparse(),
    "a parameter": nn.Parameter(torch.randn(LARGE)),
    "of several, one": torch.randn(LARGE + 1, dtype=torch.float16),
}


def _sent(value: Any) -> Any:
    here, there = Pipe()
    pid = os.fork()
    if not pid:
        try:
            _messages.send(there, ("event", value, value))
        finally:
            os._exit(0)
    there.close()
    message = _messages.receive(here)
    os.waitpid(pid, 0)
    kind, first, second = message.load()
    assert kind == "event" and first is second
    return first


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    value = VALUES[name]
    arrived = _sent(value)
    assert type(arrived) is type(value) and arrived.requires_grad == value.requires_grad
    torch.testing.assert_close(arrived, value, rtol=0, atol=0)
    if arrived.layout == torch.strided and arrived.numel():
        assert arrived.stride() == value.stride()
        if name != "expanded":
            arrived.detach().zero_()  # it is the receiver's to write to


def test_many_at_once_and_no_memory_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: value for name, value in VALUES.items() if value.layout == torch.strided}
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(_messages, "_write_shared", lambda *_: None)
        arrived = _sent(state)
        for name, value in state.items():
            torch.testing.assert_close(arrived[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["large", "channels last"])
def test_large_tensors_are_not_in_the_message_itself(name: str) -> None:
    here, there = Pipe()
    _messages.send(there, VALUES[name])
    assert len(_messages.receive(here).data) < 1000


def test_what_arrives_is_apart_from_what_a_later_child_writes() -> None:
    arrived = _sent(torch.zeros(LARGE))
    pid = os.fork()
    if not pid:
        arrived.fill_(1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not arrived.any()


def test_descriptors_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [_sent(torch.randn(LARGE)) for _ in range(5)]
    assert len(held) == 5 and len(os.listdir("/proc/self/fd")) <= before + 10  # the ends of five pipes, not collected


def test_a_model_takes_memory_that_nobody_else_uses() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Linear(100, 100))
    weight, seen = model[0].weight, model[2].weight.detach().numpy()
    state = {name: torch.randn(value.shape).to(value.dtype) for name, value in model.state_dict().items()}
    expected = {name: value.clone() for name, value in state.items()}
    load_weights(model, state, give=True)
    torch.testing.assert_close(dict(model.state_dict()), expected)
    assert model[0].weight is weight and weight.data_ptr() == state["0.weight"].data_ptr()
    assert (seen == expected["2.weight"].numpy()).all()  # somebody looks at it: what he sees is the model's
    torch.testing.assert_close(state["2.weight"], expected["2.weight"])


def test_memory_of_others_is_written_to() -> None:
    """An array, another process or whoever keeps the storage sees what the model learned."""
    array = np.zeros((100, 100), dtype=np.float32)
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    model[0].weight = nn.Parameter(torch.from_numpy(array))
    kept = model[1].weight.untyped_storage()
    model[2].share_memory()
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    load_weights(model, {name: value.clone() for name, value in state.items()}, give=True)
    assert (array == state["0.weight"].numpy()).all()
    assert torch.equal(torch.tensor(kept.tolist(), dtype=torch.uint8), state["1.weight"].view(-1).view(torch.uint8))
    assert model[2].weight.is_shared()
    torch.testing.assert_close(dict(model.state_dict()), state)
