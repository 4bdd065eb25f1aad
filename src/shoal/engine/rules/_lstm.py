"""One direction of an LSTM layer over time, with a hand-written backward pass that needs few operators per time step.

On a CPU a member's matrices are stored feature by feature, [features, B]. A gate is then contiguous, and what a step
reads (its state, its input, and a row of ones for the bias) is one matrix, so all its gates are one product. Every
tensor that goes through an inexact operator is a slice of a wider one, so loops end where the member's own numbers end,
and no bit depends on the other members. Sizes are padded as `_product` requires.

On a GPU and in compiled code the matrices are stored row by row, as torch's fused cell requires.

In backward passes, `of_x` is the gradient of `x`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.rules._product import SIDE

aten = torch.ops.aten


def lstm(x_MTBD: Tensor, h_MBH: Tensor, c_MBH: Tensor, params: list[Tensor], reverse: bool) -> tuple[Tensor, Tensor]:
    """Return outputs [M, T, B, H] and the last cell state. `params` has torch's order: both weights, then both
    biases."""
    kind = Columns if x_MTBD.device.type == "cpu" else Rows
    w_ih, w_hh = params[:2]
    bias = params[2] + params[3] if len(params) == 4 else None
    out: tuple[Tensor, Tensor] = kind.apply(x_MTBD, h_MBH, c_MBH, w_ih, w_hh, bias, reverse)  # type: ignore[no-untyped-call]
    return out


def _round_up(size: int) -> int:
    """Round up to a multiple of `SIDE`."""
    return size + -size % SIDE


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of one layer: members M, time steps T, batch B, input width D, hidden width H.

    K is the number of rows that a step reads (state, input, a one for the bias, padding), and P the number of columns
    (batch, padding). Buffers over time have T+1 entries: a step reads state and input at one entry, and writes its new
    state to the next one, or to the previous one if time runs backwards.
    """

    M: int
    T: int
    B: int
    D: int
    H: int
    has_bias: bool
    reverse: bool

    @property
    def P(self) -> int:
        return _round_up(self.B)

    @property
    def K(self) -> int:
        return _round_up(self.H + self.D + self.has_bias)

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """(time, entry that is read, entry that is written) of each step, in order."""
        times = range(self.T - 1, -1, -1) if self.reverse else range(self.T)
        return [(t, t + self.reverse, t + 1 - self.reverse) for t in times]

    @property
    def read(self) -> slice:
        """The entries that steps read."""
        return slice(int(self.reverse), self.T + self.reverse)

    @property
    def written(self) -> slice:
        """The entries that steps write."""
        return slice(1 - self.reverse, self.T + 1 - self.reverse)


class Columns(torch.autograd.Function):
    """The layer on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        (M, T, B, D), H = x.shape, h.shape[2]
        sizes = _Sizes(M, T, B, D, H, bias is not None, reverse)
        parts = [w_hh, w_ih] if bias is None else [w_hh, w_ih, bias.unsqueeze(2)]
        padding = sizes.K - H - D - len(parts) + 2
        w_MGK = torch.cat([*parts, x.new_zeros(M, 4 * H, padding)] if padding else parts, 2)
        reads = x.new_zeros(T + 1, M, sizes.K, sizes.P)
        cells = x.new_zeros(T + 1, M, 2 * H, sizes.P)  # the cell state and its tanh
        gates = x.new_empty(T, M, 4 * H, sizes.P)
        reads[sizes.read, :, H : H + D, :B] = x.permute(1, 0, 3, 2)
        if bias is not None:
            reads[:, :, H + D] = 1
        first = sizes.steps[0][1]
        reads[first, :, :H, :B] = h.mT
        cells[first, :, :H, :B] = c.mT
        states, cell, cell_tanh = (v.unbind(0) for v in (reads[:, :, :H], cells[:, :, :H], cells[:, :, H:]))
        input_and_forget, o = gates[:, :, : 2 * H].unbind(0), gates[:, :, 3 * H :].unbind(0)
        i, f, g = (gates[:, :, k * H : (k + 1) * H].unbind(0) for k in range(3))
        step_inputs, all_gates = reads.unbind(0), gates.unbind(0)
        for t, old, new in sizes.steps:
            torch.bmm(w_MGK, step_inputs[old], out=all_gates[t])
            input_and_forget[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], cell[old], out=cell[new]).addcmul_(i[t], g[t])
            torch.mul(o[t], torch.tanh(cell[new], out=cell_tanh[new]), out=states[new])
        ctx.save_for_backward(w_MGK, reads, cells, gates)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        last = sizes.steps[-1][2]
        out = reads[sizes.written, :, :H, :B].permute(1, 0, 3, 2).contiguous()
        return out, cells[last, :, :H, :B].mT.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        w_MGK, reads, cells, gates = ctx.saved_tensors
        n: _Sizes = ctx.sizes
        M, H, B = n.M, n.H, n.B
        of_x, of_h, of_c, *of_weights, _ = ctx.needs_input_grad
        slopes, cell_slopes = _slopes(n, cells, gates)
        rows = n.K if of_x else _round_up(H)  # the rows of a step's input whose gradient is needed
        back_MRG = w_MGK[:, :, :rows].mT
        of_reads = reads.new_zeros(n.T + 1, M, rows, n.P)
        of_cell = reads.new_zeros(M, 2 * H, n.P)[:, :H]
        if grads[0] is not None:
            of_reads[n.written, :, :H, :B] = grads[0].permute(1, 0, 3, 2)
        if grads[1] is not None:
            of_cell[:, :, :B] = grads[1].mT
        of_w = torch.zeros_like(w_MGK)
        of_steps, of_states = of_reads.unbind(0), of_reads[:, :, :H].unbind(0)
        of_cells, of_out = slopes[:, :, :3].unbind(0), slopes[:, :, 3].unbind(0)
        of_gates, forget = slopes.flatten(2, 3).unbind(0), gates[:, :, H : 2 * H].unbind(0)
        step_inputs = reads.mT.unbind(0)
        of_cell_wide = of_cell.unsqueeze(1)
        for t, old, new in reversed(n.steps):
            of_cell.addcmul_(of_states[new], cell_slopes[t])
            of_cells[t].mul_(of_cell_wide)
            of_out[t].mul_(of_states[new])
            of_cell.mul_(forget[t])
            of_steps[old].baddbmm_(back_MRG, of_gates[t])
            if any(of_weights):
                of_w.baddbmm_(of_gates[t], step_inputs[old])
        first = n.steps[0][1]
        end = H + n.D
        return (
            of_reads[n.read, :, H:end, :B].permute(1, 0, 3, 2).contiguous() if of_x else None,
            of_reads[first, :, :H, :B].mT.contiguous() if of_h else None,
            of_cell[:, :, :B].mT.contiguous() if of_c else None,
            of_w[:, :, H:end].contiguous() if of_weights[0] else None,
            of_w[:, :, :H].contiguous() if of_weights[1] else None,
            of_w[:, :, end].contiguous() if of_weights[2] else None,
            None,
        )


def _slopes(n: _Sizes, cells: Tensor, gates: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the derivatives of all steps: with respect to each gate [T, M, 4, H, P], and to the new cell [T, M, H, P].

    The first three gates' derivatives are those of the cell, the output gate's is that of the output.
    """
    H = n.H
    i, f, g, o = (gates[:, :, k * H : (k + 1) * H] for k in range(4))
    cell_tanh = cells[n.written, :, H:]
    slopes = torch.empty_like(gates).view(n.T, n.M, 4, H, n.P)
    aten.sigmoid_backward(g, i, grad_input=slopes[:, :, 0])
    aten.sigmoid_backward(cells[n.read, :, :H], f, grad_input=slopes[:, :, 1])
    aten.tanh_backward(i, g, grad_input=slopes[:, :, 2])
    aten.sigmoid_backward(cell_tanh, o, grad_input=slopes[:, :, 3])
    return slopes, aten.tanh_backward(o, cell_tanh).unbind(0)


class Rows(torch.autograd.Function):
    """The layer on a GPU, and while it is traced to be compiled."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        (M, T, B, D), H = x.shape, h.shape[2]
        rows, first = x.reshape(M, T * B, D), h
        inputs = torch.bmm(rows, w_ih.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, w_ih.mT)
        inputs = inputs.view(M, T, B, 4 * H).transpose(0, 1).contiguous()
        ctx.fused = x.device.type == "cuda" and not is_traced() and not isinstance(inputs, FakeTensor)
        w_hh_T = w_hh.mT
        outs, cells, gates = [], [c.contiguous()], []
        for gates_in in reversed(inputs.unbind(0)) if reverse else inputs.unbind(0):
            h, cell, gate = _cell(gates_in, torch.bmm(h, w_hh_T), cells[-1], ctx.fused)
            outs.append(h)
            cells.append(cell)
            gates.append(gate)
        out = torch.stack(outs[::-1] if reverse else outs, 1)
        ctx.reverse, ctx.steps = reverse, T
        ctx.save_for_backward(x, first, w_ih, w_hh, out, *cells, *gates)
        ctx.set_materialize_grads(False)
        return out, cells[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, first, w_ih, w_hh, out, *saved = ctx.saved_tensors
        T, reverse = ctx.steps, ctx.reverse
        cells, gates = saved[: T + 1], saved[T + 1 :]
        of_out = [None] * T if grads[0] is None else list(grads[0].unbind(1))
        of_h: Tensor | None = None
        of_c: Tensor | None = grads[1]
        of_gates: list[Tensor] = []
        for k in reversed(range(T)):
            of_step = of_out[T - 1 - k if reverse else k]
            of_h = of_step if of_h is None else of_h if of_step is None else of_h + of_step
            of_h = torch.zeros_like(first) if of_h is None else of_h
            of_gate, of_c = _cell_backward(of_h, of_c, cells[k], cells[k + 1], gates[k], ctx.fused)
            of_h = torch.bmm(of_gate, w_hh)
            of_gates.append(of_gate)
        of_all_gates = torch.stack(of_gates if reverse else of_gates[::-1], 1)  # [M, T, B, 4H]
        return (*_input_gradients(ctx.needs_input_grad, x, first, w_ih, out, of_all_gates, reverse, (of_h, of_c)), None)


def _input_gradients(
    needed: tuple[bool, ...], x: Tensor, first: Tensor, w_ih: Tensor, out: Tensor, of_gates: Tensor, reverse: bool,
    of_state: tuple[Tensor | None, Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of all inputs from those of the gates, with products over all steps at once."""
    flat = of_gates.flatten(1, 2)
    states = [out[:, 1:], first.unsqueeze(1)] if reverse else [first.unsqueeze(1), out[:, :-1]]
    return [
        torch.bmm(flat, w_ih).view(x.shape) if needed[0] else None,
        of_state[0] if needed[1] else None,
        of_state[1] if needed[2] else None,
        torch.bmm(flat.mT, x.reshape(x.shape[0], -1, x.shape[3])) if needed[3] else None,
        torch.bmm(flat.mT, torch.cat(states, 1).flatten(1, 2)) if needed[4] else None,
        flat.sum(1) if needed[5] else None,
    ]


def _cell(row: Tensor, hidden: Tensor, c: Tensor, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (new state, new cell, gates after their activation) of [M, B, ...]."""
    if fused:
        results = aten._thnn_fused_lstm_cell(row.flatten(0, 1), hidden.flatten(0, 1), c.flatten(0, 1))
        h, cell, gate = (value.view(*c.shape[:2], -1) for value in results)
        return h, cell, gate
    i, f, g, o = (row + hidden).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    cell = f * c + i * g
    return o * torch.tanh(cell), cell, torch.cat([i, f, g, o], -1)


def _cell_backward(
    of_h: Tensor, of_c: Tensor | None, c: Tensor, cell: Tensor, gate: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates before their activation, and of the cell before this step."""
    if fused:
        flat = [None if value is None else value.flatten(0, 1) for value in (of_h, of_c, c, cell, gate)]
        of_gate, of_previous_cell, _ = aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return of_gate.view(gate.shape), of_previous_cell.view(c.shape)
    i, f, g, o = gate.chunk(4, -1)
    cell_tanh = torch.tanh(cell)
    via_output = of_h * o * (1 - cell_tanh * cell_tanh)
    of_cell = via_output if of_c is None else via_output + of_c
    of_gate = torch.cat(
        [
            of_cell * g * i * (1 - i),
            of_cell * c * f * (1 - f),
            of_cell * i * (1 - g * g),
            of_h * cell_tanh * o * (1 - o),
        ],
        -1,
    )
    return of_gate, of_cell * f
