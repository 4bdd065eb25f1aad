"""Recurrent layers whose backward pass is by hand: both forms of it against torch's own layer, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import First, assert_as_alone, distance, numbers
from tests.engine.rules.layers import INPUTS
from tests.engine.rules.test_layers import jobs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engine.rules._lstm import Columns, Rows

M, T, D, H = 3, 5, 6, 7
"""Members, steps, width of the input, width of the state: nothing fills a vector to its end."""


def inputs(batch: int, bias: bool) -> list[Tensor]:
    """The input, both first states, both weights and the bias, of all members."""
    shapes = [(M, T, batch, D), (M, batch, H), (M, batch, H), (M, 4 * H, D), (M, 4 * H, H), (M, 4 * H)]
    return [numbers(i, *shape).requires_grad_() for i, shape in enumerate(shapes if bias else shapes[:-1])]


def by_torch(values: list[Tensor], reverse: bool) -> tuple[Tensor, Tensor]:
    """The layer, member by member and step by step, by autograd."""
    x, h, c, w_ih, w_hh, *bias = values
    outs: list[Tensor] = [x] * T
    for t in reversed(range(T)) if reverse else range(T):
        states = [
            torch.lstm_cell(x[m, t], (h[m], c[m]), w_ih[m], w_hh[m], *[b[m] for b in bias], *[b[m] * 0 for b in bias])
            for m in range(M)
        ]
        h, c = torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])
        outs[t] = h
    return torch.stack(outs, 1), c


def ours(kind: Any, values: list[Tensor], reverse: bool) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = kind.apply(*values, *[None] * (6 - len(values)), reverse)
    return found


@pytest.mark.parametrize("kind", [Columns, Rows])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_gradient_is_torchs(kind: Any, reverse: bool, bias: bool, batch: int) -> None:
    values = inputs(batch, bias)
    found, wanted = ours(kind, values, reverse), by_torch(values, reverse)
    weights = [numbers(20 + i, *value.shape) for i, value in enumerate(wanted)]
    for used in ((0,), (1,), (0, 1)):  # of the outputs, those that the loss reads
        mine, torchs = (
            torch.autograd.grad([out[k] for k in used], values, [weights[k] for k in used], retain_graph=True)
            for out in (found, wanted)
        )
        assert max(map(distance, [*found, *mine], [*wanted, *torchs])) < 1e-12


@pytest.mark.parametrize("kind", [Columns, Rows])
@pytest.mark.parametrize("needed", [(0,), (1, 2), (3,), (4,), (5,), (0, 4)])
def test_gradients_of_some_inputs_only(kind: Any, needed: tuple[int, ...]) -> None:
    values = inputs(4, True)
    for place, value in enumerate(values):
        value.requires_grad_(place in needed)
    chosen = [values[place] for place in needed]
    found, wanted = (
        torch.autograd.grad((out[0] * out[0]).sum() + out[1].sum(), chosen)
        for out in (ours(kind, values, False), by_torch(values, False))
    )
    assert max(map(distance, found, wanted)) < 1e-12


@pytest.mark.parametrize("kind", [Columns, Rows])
def test_recorded_with_its_backward_pass(kind: Any) -> None:
    def step(*values: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in values]
        out, cell = ours(kind, leaves, True)
        return list(torch.autograd.grad((out * out).sum() + cell.sum(), leaves))

    values = [value.detach() for value in inputs(3, True)]
    graph = make_fx(step, tracing_mode="fake")(*values)
    other = [numbers(40 + i, *value.shape) for i, value in enumerate(values)]
    assert max(map(distance, graph(*other), step(*other))) < 1e-12


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("reverse", [pytest.param(value, marks=ON_A_GPU) for value in (False, True)])
def test_fused_cell(reverse: bool) -> None:
    """Of torch, on a GPU; memory is predicted without data, which that cell does not know."""
    values = [value.detach().cuda().requires_grad_() for value in inputs(5, True)]
    found, wanted = ours(Rows, values, reverse), by_torch(values, reverse)
    for used in ((0,), (1,), (0, 1)):
        mine, torchs = (
            torch.autograd.grad([(out[k] ** 2).sum() for k in used], values, retain_graph=True)
            for out in (found, wanted)
        )
        assert max(map(distance, [*found, *mine], [*wanted, *torchs])) < 1e-12
    with FakeTensorMode():
        fakes = [torch.empty(value.shape, device="cuda", requires_grad=True) for value in values]
        grads = torch.autograd.grad(ours(Rows, fakes, reverse)[0].sum(), fakes)
    assert [grad.shape for grad in grads] == [value.shape for value in values]


class Carried(nn.Module):
    """First states that are the network's own, one learned and one computed from the input; last states are used."""

    def __init__(self, bias: bool, batch_first: bool, **settings: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 3, 2, bias, batch_first, bidirectional=True, **settings)
        self.start, self.first = nn.Linear(6, 3), nn.Parameter(numbers(9, 4, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.lstm.batch_first else x.transpose(0, 1)
        rows = x[:, 0] if self.lstm.batch_first else x[0]
        start = self.start(rows).expand(4, -1, -1)
        out, (h, c) = self.lstm(x, (self.first.expand_as(start).contiguous(), start.contiguous()))
        found: Tensor = out.mean(1 if self.lstm.batch_first else 0) + torch.cat([h[-1] * c[0], c[-1]], 1)
        return found


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_states_of_its_own(bias: bool, batch_first: bool) -> None:
    assert_as_alone(jobs(lambda: Carried(bias, batch_first, dropout=0.2 * bias), INPUTS["sequence"]))


def test_frozen_weights() -> None:
    """The input's gradient goes through layers of which nothing, or a part, is trained."""

    def body() -> nn.Module:
        lstm = nn.LSTM(4, 3, 3, batch_first=True)
        for name, value in lstm.named_parameters():
            value.requires_grad_("l0" not in name and name not in ("weight_ih_l1", "bias_hh_l2"))
        return nn.Sequential(nn.Linear(6, 4), First(lstm))

    assert_as_alone(jobs(body, INPUTS["sequence"]))


def test_the_last_output_alone() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = F.relu(self.lstm(x)[0][:, -1])
            return out

    assert_as_alone(jobs(Last, INPUTS["sequence"]))
