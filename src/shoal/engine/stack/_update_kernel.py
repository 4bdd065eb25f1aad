"""Adam, AdamW and SGD on a GPU with two kernels for all parameters of a group, instead of a dozen passes over memory
for each.

The arithmetic is that of the rules (`optim/_adam.py`, `optim/_sgd.py`), in the same order. The first kernel, `tick`,
advances the clocks and computes the step's coefficients; the second, `update`, changes weights and state. Members
outside `active` are left unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from shoal.engine.kernels import parts
from shoal.engine.kernels.elements import HALF_PRECISION
from shoal.engine.optim.hparams import RULES
from shoal.engine.optim.rule import HALF, Rule
from shoal.utils import cuda_kernels

THREADS, MOST_BLOCKS, MOST_ROWS, WIDTH = 256, 512, 65_535, 4
_KINDS = {torch.float32: "float", torch.float64: "double"}
_HALF_KINDS = {torch.bfloat16: "from_bf16", torch.float16: "from_f16"}

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

_KERNELS = """
typedef {value_kind} T;
typedef {grad_kind} G;
struct alignas(16) values {{ T v[WIDTH]; }};
struct alignas(sizeof(G) == 2 ? 8 : 16) gradients {{ G v[WIDTH]; }};
extern "C" __global__ void tick({tick_parameters}) {{
  for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < n; row += gridDim.x * blockDim.x) {{
    const double {columns};
    const double step = p_step[row] + 1;
    {setup}
    {coefficients}
    if (active[row]) {{ p_step[row] = step; {clocks} }}
  }}
}}
extern "C" __global__ void update({update_parameters}) {{
  const unsigned row = blockIdx.y;
  if (!active[row]) return;
  {selection}
  const T {held};
  const bool wide = n % WIDTH == 0 && ({addresses}) % 16 == 0 && (unsigned long long)p_grad % alignof(gradients) == 0;
  const unsigned width = wide ? WIDTH : 1;
  for (unsigned i = (block * blockDim.x + threadIdx.x) * width; i < (unsigned)n; i += blocks * blockDim.x * width) {{
    const long long at = (long long)row * n + i;
    values {vectors};
    gradients v_grad;
    if (wide) {{ {wide_loads} }} else {{ {loads} }}
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {{
      if (j > 0 && !wide) break;
      T {elements};
      {body}
      {results}
    }}
    if (wide) {{ {wide_stores} }} else {{ {stores} }}
  }}
}}
"""


def suits(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether there are kernels for parameters [M, ...] of one group."""
    if type(rule) not in _ARITHMETIC or not params or not on_gpu(params):
        return False
    first = params[0]
    same_layout = all(p.dtype == first.dtype and _is_dense_per_member(p) and p[0].numel() < 2**31 for p in params)
    if not same_layout or first.dtype not in _KINDS or len(first) > MOST_ROWS:
        return False
    names = rule.buffers()
    return all(states[0][name].is_contiguous() for name in rule.clock) and all(
        state["step"] is states[0]["step"] and all(state[name].stride() == param.stride() for name in names)
        for param, state in zip(params, states, strict=True)
    )


def on_gpu(params: Sequence[Tensor]) -> bool:
    """Return whether kernels can be compiled for these parameters."""
    return all(p.is_cuda and cuda_kernels.has_memory(p) for p in params) and cuda_kernels.available()


def _is_dense_per_member(param: Tensor) -> bool:
    """Return whether members lie one after the other, and the elements of each have no gaps, in any order."""
    return param.is_contiguous() or (
        param.dim() == 5
        and param.stride(0) == param[0].numel()
        and param[0].is_contiguous(memory_format=torch.channels_last)
    )


def _prepared(grad: Tensor, param: Tensor) -> Tensor:
    """Return the gradient in the memory layout of its parameter, and in a dtype that the kernel reads."""
    dtype = grad.dtype if _reads_half(grad.dtype, param.dtype) else param.dtype
    if grad.dtype == dtype and grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=dtype).copy_(grad)


def _reads_half(grad: torch.dtype, param: torch.dtype) -> bool:
    """Return whether gradients in half precision are read as they are."""
    return grad in HALF and param == torch.float32


@torch.no_grad()
def prepare(rule: Rule, params: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> None:
    """Start to compile the kernels of a group's parameters, whose gradients have these dtypes."""
    by_dtype: dict[torch.dtype, int] = {}
    for param, dtype in zip(params, dtypes, strict=True):
        read = dtype if dtype is not None and _reads_half(dtype, param.dtype) else param.dtype
        by_dtype[read] = by_dtype.get(read, 0) + (param.numel() > 0)
    with cuda_kernels.current_device(params[0].device):
        for read, count in by_dtype.items():
            cuda_kernels.compile_ahead(_source(rule, params[0].dtype, read, _places(rule, count)))


@torch.no_grad()
def update(
    rule: Rule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    h: Mapping[str, Tensor],
    active: Tensor | None,
) -> None:
    """Take one optimizer step of a group's parameters. Gradients may be in half precision."""
    first, rows = params[0], len(params[0])
    if active is None:
        active = torch.ones(rows, dtype=torch.bool, device=first.device)
    given: dict[torch.dtype, list[parts.Part]] = {}
    for param, grad, state in zip(params, grads, states, strict=True):
        grad, n = _prepared(grad, param), param[0].numel()
        per_block = THREADS * (WIDTH if n % WIDTH == 0 else 1)
        tensors = [param.detach(), grad, *(state[name] for name in rule.buffers())]
        if n:
            given.setdefault(grad.dtype, []).append(parts.Part(tensors, n, min(-(-n // per_block), MOST_BLOCKS)))
    coefficients = torch.empty(len(_COEFFICIENTS[type(rule)](rule.flags)), rows, dtype=first.dtype, device=first.device)
    columns = [h[name].to(torch.float64).contiguous() for name in rule.columns]
    clocks = [states[0][name] for name in rule.clock]
    with cuda_kernels.current_device(first.device):
        for index, (dtype, all_parts) in enumerate((given or {first.dtype: []}).items()):
            places = _places(rule, len(all_parts))
            tick, kernel = cuda_kernels.load(_source(rule, first.dtype, dtype, places), ["tick", "update"])
            if index == 0:
                inputs = [*columns, *clocks, active, coefficients, rows]
                tick(grid=(-(-rows // THREADS), 1, 1), block=(THREADS, 1, 1), args=inputs)
            for start in range(0, len(all_parts), places):
                arguments, blocks = parts.arguments(all_parts[start : start + places], places)
                kernel(grid=(blocks, rows, 1), block=(THREADS, 1, 1), args=[*arguments, active, coefficients])


def _pointers(rule: Rule) -> list[tuple[str, str]]:
    return [("T*", "p_param"), ("const G*", "p_grad"), *(("T*", f"p_{name}") for name in rule.buffers())]


def _places(rule: Rule, count: int) -> int:
    return parts.places(count, len(_pointers(rule)))


def _source(rule: Rule, dtype: torch.dtype, grad_dtype: torch.dtype, places: int) -> str:
    """Return the CUDA source of the kernels, with room for so many parameters in a launch of `update`."""
    return _written(type(rule), rule.flags, dtype, grad_dtype, places)


@cache
def _written(kind: type[Rule], flags: frozenset[str], dtype: torch.dtype, grad_dtype: torch.dtype, places: int) -> str:
    rule = kind(flags)
    pointers = _pointers(rule)
    updated = ["param", *rule.buffers()]
    coefficients = _COEFFICIENTS[kind](flags)
    convert = _HALF_KINDS.get(grad_dtype, "")
    body = ["grad = -grad;"] if "maximize" in flags else []
    if "shrink" in coefficients:
        body.append("param = param * c_shrink;")
    elif "weight_decay" in flags:
        body.append("grad = grad + param * c_weight_decay;")
    body.append(_ARITHMETIC[kind](flags))
    setup, clocks = _STARTED if "started" in rule.clock and "momentum" in flags else ("", "")
    clock_kinds = {"started": "bool"}
    vectors = dict.fromkeys(updated, "values") | {"grad": "gradients"}
    return cuda_kernels.constants({"WIDTH": WIDTH}) + HALF_PRECISION + _KERNELS.format(
        value_kind=_KINDS[dtype],
        grad_kind="half_bits" if convert else _KINDS[dtype],
        tick_parameters=", ".join([
            *(f"const double* __restrict__ h_{name}" for name in rule.columns),
            *(f"{clock_kinds.get(name, 'double')}* __restrict__ p_{name}" for name in rule.clock),
            "const bool* __restrict__ active", "T* __restrict__ coefficients", "int n",
        ]),
        columns=", ".join(f"{name} = h_{name}[row]" for name in rule.columns),
        setup=setup,
        coefficients=" ".join(f"coefficients[{i} * n + row] = (T)({c});" for i, c in enumerate(coefficients.values())),
        clocks=clocks,
        update_parameters=", ".join([
            *parts.parameters(pointers, places),
            "const bool* __restrict__ active", "const T* __restrict__ coefficients",
        ]),
        selection=parts.selection(pointers, places),
        held=", ".join(f"c_{name} = coefficients[{i} * gridDim.y + row]" for i, name in enumerate(coefficients)),
        addresses=" | ".join(f"(unsigned long long)p_{name}" for name in updated),
        vectors=", ".join(f"v_{name}" for name in updated),
        wide_loads=" ".join(f"v_{name} = *(const {kind}*)(p_{name} + at);" for name, kind in vectors.items()),
        loads=" ".join(f"v_{name}.v[0] = p_{name}[at];" for name in vectors),
        elements=", ".join([*(f"{name} = v_{name}.v[j]" for name in updated), f"grad = {convert}(v_grad.v[j])"]),
        body="\n      ".join(body),
        results=" ".join(f"v_{name}.v[j] = {name};" for name in updated),
        wide_stores=" ".join(f"*(values*)(p_{name} + at) = v_{name};" for name in updated),
        stores=" ".join(f"p_{name}[at] = v_{name}.v[0];" for name in updated),
    )  # fmt: skip


def _adam(flags: frozenset[str]) -> str:
    return _ADAM.format(amsgrad=_AMSGRAD if "amsgrad" in flags else "")


def _adam_coefficients(flags: frozenset[str]) -> dict[str, str]:
    """Return the coefficients of `Adam.tick_` by name, computed from the hyper-parameters and the new `step`."""
    decay = {}
    if "weight_decay" in flags:
        decoupled = "decoupled_weight_decay" in flags
        # products that are rounded before they are used
        decay = {"shrink": "1 - __dmul_rn(lr, weight_decay)"} if decoupled else {"weight_decay": "weight_decay"}
    return {
        "take1": "1 - beta1", "beta2": "beta2", "take2": "1 - beta2", "eps": "eps", **decay,
        "neg_step_size": "-(lr / (1 - pow(beta1, step)))", "root2": "sqrt(1 - pow(beta2, step))",
    }  # fmt: skip


def _sgd(flags: frozenset[str]) -> str:
    if "momentum" not in flags:
        return _SGD.format(momentum="")
    ahead = "grad = grad + momentum_buffer * c_momentum;" if "nesterov" in flags else "grad = momentum_buffer;"
    return _SGD.format(momentum=f"{_MOMENTUM} {ahead}")


_STARTED = (
    "const bool has_buffer = p_started[row] && momentum != 0;",
    "p_started[row] = p_started[row] || momentum != 0;",
)


def _sgd_coefficients(flags: frozenset[str]) -> dict[str, str]:
    """Return the coefficients of `SGD.tick_` by name."""
    c = {"neg_lr": "-lr"}
    if "weight_decay" in flags:
        c["weight_decay"] = "weight_decay"
    if "momentum" in flags:
        c |= {"keep": "has_buffer ? momentum : 0", "take": "has_buffer ? 1 - dampening : 1", "momentum": "momentum"}
    return c


_ARITHMETIC = {
    RULES[torch.optim.Adam]: _adam,
    RULES[torch.optim.AdamW]: _adam,
    RULES[torch.optim.SGD]: _sgd,
}
_COEFFICIENTS = {
    RULES[torch.optim.Adam]: _adam_coefficients,
    RULES[torch.optim.AdamW]: _adam_coefficients,
    RULES[torch.optim.SGD]: _sgd_coefficients,
}
