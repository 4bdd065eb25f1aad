"""RNN, LSTM and GRU layers and cells: one recurrence in which every product is batched over the members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.engine.rules._linear import affine, widened
from shoal.engine.rules._lstm import lstm
from shoal.engine.rules._pointwise import aligned
from shoal.engine.rules._registry import in_full_precision, numbers_of, once_per_member, rule
from shoal.engine.rules.op_context import NotStackable, OpContext, Run
from shoal.utils.randomness import Draw

aten = torch.ops.aten

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]
"""(gates from the input [M, B, G], gates from the state [M, B, G], state) -> new state. The first entry of the state is
the output."""

_WHOLE = (torch.float32, torch.float64)


def _sigmoid(x: Tensor) -> Tensor:
    return aligned(torch.sigmoid, x)


def _tanh(x: Tensor) -> Tensor:
    return aligned(torch.tanh, x)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = _sigmoid(f) * state[1] + _sigmoid(i) * _tanh(g)
    return _sigmoid(o) * _tanh(c), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    xr, xz, xn = x.chunk(3, -1)
    hr, hz, hn = h.chunk(3, -1)
    r, z = _sigmoid(hr + xr), _sigmoid(hz + xz)
    n = _tanh(hn * r + xn)
    return (n + z * (state[0] - n),)


def _rnn_tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (_tanh(x + h),)


def _rnn_relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


_LAYERS: dict[Any, Cell] = {
    aten.lstm.input: _lstm, aten.gru.input: _gru, aten.rnn_tanh.input: _rnn_tanh, aten.rnn_relu.input: _rnn_relu,
}  # fmt: skip
_CELLS: dict[Any, Cell] = {
    aten.lstm_cell.default: _lstm, aten.gru_cell.default: _gru,
    aten.rnn_tanh_cell.default: _rnn_tanh, aten.rnn_relu_cell.default: _rnn_relu,
}  # fmt: skip


@rule(*_CELLS, steady=in_full_precision)
def cell(ctx: OpContext) -> Run:
    """Stack a single cell step (LSTMCell, GRUCell, RNNCell)."""
    step = _CELLS[ctx.op]
    if ctx.ndim(0) != 2:
        return once_per_member(ctx)
    members = ctx.members
    is_lstm = step is _lstm
    nested = [ctx.carries(v) for v in ctx.args[1]] if is_lstm else [ctx.stacked(1)]
    flags = [value is not None and ctx.stacked(i) for i, value in enumerate(ctx.args)]

    def run(x: Tensor, hx: Any, *weights: Any) -> Any:
        state = tuple(widened(h, f, members) for h, f in zip(hx if is_lstm else (hx,), nested, strict=True))
        w_ih, w_hh, b_ih, b_hh = (
            None if w is None else widened(w, f, members) for w, f in zip(weights, flags[2:], strict=True)
        )
        assert w_ih is not None and w_hh is not None
        out = step(affine(widened(x, flags[0], members), w_ih, b_ih), affine(state[0], w_hh, b_hh), state)
        return out if is_lstm else out[0]

    return run


@rule(*_LAYERS, steady=True)
def layers(ctx: OpContext) -> Run:
    """Stack the multi-layer, bidirectional layers with dropout between them, laid out as in torch."""
    step = _LAYERS[ctx.op]
    is_lstm = step is _lstm
    _, hx, weights, biases, count, rate, training, bidirectional, batch_first = ctx.args
    directions = 2 if bidirectional else 1
    per_cell = 4 if biases else 2
    members = ctx.members
    draws = _between_layers(ctx, numbers_of(rate, max(members, 1)), training, count, directions, batch_first)
    if not members:
        if draws:
            raise NotStackable(f"{ctx.name} with dropout between its layers")
        return ctx.call
    unusual = len(weights) != count * directions * per_cell or ctx.ndim(0) != 3
    if unusual or (ctx.deterministic and not in_full_precision(ctx)):
        if draws:
            raise NotStackable(f"{ctx.name} with dropout between its layers, in half precision or with projections")
        return once_per_member(ctx)
    x_stacked = ctx.stacked(0)
    h_stacked = [ctx.carries(h) for h in hx] if is_lstm else [ctx.stacked(1)]
    w_stacked = [ctx.carries(w) for w in weights]

    def run(x: Tensor, hx: Any, params: list[Tensor], *_: Any) -> Any:
        x = widened(x, x_stacked, members)
        start = [
            widened(h, f, members) for h, f in zip(hx if is_lstm else (hx,), h_stacked, strict=True)
        ]  # [M, L*D, B, H]
        params = [widened(w, f, members) for w, f in zip(params, w_stacked, strict=True)]
        x = x.transpose(1, 2) if batch_first else x  # [M, T, B, I]
        finals: list[State] = []
        for layer in range(count):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                of_cell = params[index * per_cell : (index + 1) * per_cell]
                out, final = _over_time(step, x, tuple(h[:, index] for h in start), of_cell, bool(direction))
                outputs.append(out)
                finals.append(final)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if draws and layer < count - 1:
                x = x * draws[layer]()
        x = x.transpose(1, 2) if batch_first else x
        return (x, *(torch.stack(parts, 1) for parts in zip(*finals, strict=True)))

    return run


def _over_time(step: Cell, x: Tensor, state: State, params: list[Tensor], reverse: bool) -> tuple[Tensor, State]:
    """Run one direction of one layer, and return its outputs [M, T, B, H] and its last state."""
    if step is _lstm and all(value.dtype == x.dtype in _WHOLE for value in (*state, *params)):
        out, cell = lstm(x, state[0], state[1], params, reverse)
        return out, (out[:, 0 if reverse else -1], cell)
    states = _scan(step, x, state, params, reverse)
    return torch.stack([state[0] for state in (states[::-1] if reverse else states)], 1), states[-1]


def _scan(step: Cell, x: Tensor, state: State, params: list[Tensor], reverse: bool) -> list[State]:
    """Run one direction of one layer over time, and return the states in the order of computation."""
    w_ih, w_hh, b_ih, b_hh = (*params, None, None)[:4]
    assert w_ih is not None and w_hh is not None
    members, steps, batch, width = x.shape
    gates = affine(x.reshape(members, steps * batch, width), w_ih, b_ih).view(members, steps, batch, -1)
    states: list[State] = []
    for row in reversed(gates.unbind(1)) if reverse else gates.unbind(1):
        state = step(row, affine(state[0], w_hh, b_hh), state)
        states.append(state)
    return states


def _between_layers(
    ctx: OpContext, rates: tuple[float, ...], training: bool, count: int, directions: int, batch_first: bool
) -> list[Callable[[], Tensor]]:
    """Register a dropout mask for the outputs of every layer but the last. Torch drops them in time-major order."""
    if not training or count < 2 or all(rate == 0 for rate in rates):
        return []
    x = ctx.meta(0)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    hidden = ctx.args[2][1].meta["val"].shape[1] * directions
    shape = (steps, batch, hidden)
    return [ctx.draw(Draw("dropout", shape, x.dtype, None, tuple((rate,) for rate in rates))) for _ in range(count - 1)]
