"""Adam, AdamW and SGD on a GPU with one kernel for each parameter of all members, instead of a dozen passes over
memory.

The arithmetic is that of the rules (`optim/_adam.py`, `optim/_sgd.py`), in the same order. The coefficients come from
`Rule.coefficients_`. Members outside `active` are left unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.engine.optim.hparams import RULES
from shoal.engine.optim.rule import Rule
from shoal.utils import cuda_kernels

THREADS, MOST_BLOCKS, MOST_ROWS = 256, 512, 65_535
_KINDS = {torch.float32: "float", torch.float64: "double"}

_ADAM = """
  T w = c_take1, d = grad - exp_avg;
  exp_avg = w < T(0.5) ? exp_avg + w * d : grad - d * (T(1) - w);
  exp_avg_sq = exp_avg_sq * c_beta2 + (grad * c_take2) * grad;
  T square = exp_avg_sq;
  {amsgrad}
  param = param + exp_avg / (sqrt(square) / c_root2 + c_eps) * c_neg_step_size;
"""
_AMSGRAD = """if (max_exp_avg_sq > square || max_exp_avg_sq != max_exp_avg_sq) square = max_exp_avg_sq;
  max_exp_avg_sq = square;"""
_SGD = "{momentum}\n  param = param + grad * c_neg_lr;"
_MOMENTUM = "momentum_buffer = momentum_buffer * c_keep + grad * c_take;"

_KERNEL = """
typedef {kind} T;
extern "C" __global__ void update({parameters}) {{
  const int row = blockIdx.y;
  if (!active[row]) return;
  {coefficients}
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < (unsigned)n; i += gridDim.x * blockDim.x) {{
    const long long at = (long long)row * n + i;
    {loads}
    {body}
    {stores}
  }}
}}
"""


def suits(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether there is a kernel for parameters [M, ...] of one group."""
    if type(rule) not in _ARITHMETIC or not params or not all(p.is_cuda and cuda_kernels.has_memory(p) for p in params):
        return False
    first = params[0]
    same_layout = all(p.dtype == first.dtype and _is_dense_per_member(p) and p[0].numel() < 2**31 for p in params)
    if not same_layout or first.dtype not in _KINDS or len(first) > MOST_ROWS or not cuda_kernels.available():
        return False
    names = rule.buffers()
    return all(
        state["step"] is states[0]["step"] and all(state[name].stride() == param.stride() for name in names)
        for param, state in zip(params, states, strict=True)
    )


def _is_dense_per_member(param: Tensor) -> bool:
    """Return whether members lie one after the other, and the elements of each have no gaps, in any order."""
    return param.is_contiguous() or (
        param.dim() == 5
        and param.stride(0) == param[0].numel()
        and param[0].is_contiguous(memory_format=torch.channels_last)
    )


def _in_layout_of(grad: Tensor, param: Tensor) -> Tensor:
    """Return the gradient in the dtype and memory layout of its parameter."""
    if grad.dtype == param.dtype and grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


@torch.no_grad()
def prepare(rule: Rule, params: Sequence[Tensor], state: Mapping[str, Tensor], h: Mapping[str, Tensor]) -> None:
    """Start to compile the kernel of a group's parameters, from the state of the first."""
    names = rule.buffers()
    clocks = {name: value.clone() for name, value in state.items() if name not in names}
    c = rule.coefficients_(params[0], {**state, **clocks}, h, None)
    with cuda_kernels.current_device(params[0].device):
        cuda_kernels.compile_ahead(_source(rule, params[0].dtype, tuple(c)))


@torch.no_grad()
def update(
    rule: Rule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    h: Mapping[str, Tensor],
    active: Tensor | None,
) -> None:
    """Take one optimizer step of a group's parameters."""
    first, names = params[0], rule.buffers()
    clocks = {name: value for name, value in states[0].items() if name not in names}
    previous = {name: value.clone() for name, value in clocks.items()}
    c = rule.coefficients_(first, states[0], h, None)
    if active is None:
        active = torch.ones(len(first), dtype=torch.bool, device=first.device)
    for name, value in clocks.items():
        value.copy_(torch.where(active, value, previous[name]))
    with cuda_kernels.current_device(first.device):
        (kernel,) = cuda_kernels.load(_source(rule, first.dtype, tuple(c)), ["update"])
        columns = [value.contiguous() for value in c.values()]
        for param, grad, state in zip(params, grads, states, strict=True):
            count = param[0].numel()
            blocks = min(-(-count // THREADS), MOST_BLOCKS)
            buffers = [state[name] for name in names]
            tensors = [param.detach(), _in_layout_of(grad, param), *buffers, *columns, active]
            if count:
                kernel(grid=(blocks, len(param), 1), block=(THREADS, 1, 1), args=[*tensors, count])


def _source(rule: Rule, dtype: torch.dtype, columns: Sequence[str]) -> str:
    """Return the CUDA source of the kernel. `columns` are the names of the coefficients."""
    names, flags = rule.buffers(), rule.flags
    updated = ["param", *names]
    parameters = [
        "T* __restrict__ p_param", "const T* __restrict__ p_grad", *(f"T* __restrict__ p_{name}" for name in names),
        *(f"const T* __restrict__ p_{name}" for name in columns), "const bool* __restrict__ active", "int n",
    ]  # fmt: skip
    body = ["grad = -grad;"] if "maximize" in flags else []
    if "shrink" in columns:
        body.append("param = param * c_shrink;")
    elif "weight_decay" in flags:
        body.append("grad = grad + param * c_weight_decay;")
    body.append(_ARITHMETIC[type(rule)](flags))
    return _KERNEL.format(
        kind=_KINDS[dtype],
        parameters=", ".join(parameters),
        coefficients=" ".join(f"const T c_{name} = p_{name}[row];" for name in columns),
        loads=" ".join(f"T {name} = p_{name}[at];" for name in [*updated, "grad"]),
        body="\n  ".join(body),
        stores=" ".join(f"p_{name}[at] = {name};" for name in updated),
    )


def _adam(flags: frozenset[str]) -> str:
    return _ADAM.format(amsgrad=_AMSGRAD if "amsgrad" in flags else "")


def _sgd(flags: frozenset[str]) -> str:
    if "momentum" not in flags:
        return _SGD.format(momentum="")
    ahead = "grad = grad + momentum_buffer * c_momentum;" if "nesterov" in flags else "grad = momentum_buffer;"
    return _SGD.format(momentum=f"{_MOMENTUM} {ahead}")


_ARITHMETIC = {
    RULES[torch.optim.Adam]: _adam,
    RULES[torch.optim.AdamW]: _adam,
    RULES[torch.optim.SGD]: _sgd,
}
