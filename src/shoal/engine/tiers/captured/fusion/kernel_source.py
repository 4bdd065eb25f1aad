"""C source of elementwise operators: each operator is an expression, and a group of them is a kernel.

A value in half precision is rounded wherever the operator itself would round it, so that a group gives the results of
its operators one by one, up to the last digit of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shoal.engine.kernels.elements import HALF_PRECISION

aten = torch.ops.aten

PRELUDE = (
    HALF_PRECISION
    + """
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
struct alignas(4) vec_bool { bool v[4]; };
struct alignas(8) vec_half_bits { half_bits v[4]; };
struct alignas(16) vec_float { float v[4]; };
struct alignas(16) vec_int { int v[4]; };
struct alignas(16) vec_double { double v[4]; };
struct alignas(16) vec_llong { long long v[4]; };
typedef long long llong;
template <typename T, int n> struct alignas(sizeof(T) * n) joined_word { T v[n]; };
__device__ inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }
__device__ inline float round_f16(float x) { return from_f16(to_f16(x)); }
template <typename T> __device__ inline T sigmoid_(T x) { return T(1) / (T(1) + exp(-x)); }
template <typename T> __device__ inline T max_(T a, T b) { return (a != a || a > b) ? a : b; }
template <typename T> __device__ inline T min_(T a, T b) { return (a != a || a < b) ? a : b; }
template <typename T> __device__ inline T sign_(T x) { return T((x > T(0)) - (x < T(0))); }
template <typename T> __device__ inline T gelu_erf(T x) {
  return x * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
}
template <typename T> __device__ inline T gelu_erf_backward(T g, T x) {
  T cdf = T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
  return g * (cdf + x * exp(x * x * T(-0.5)) * T(0.39894228040143267794));
}
template <typename T> __device__ inline T gelu_tanh(T x) {
  return T(0.5) * x * (T(1) + tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
}
template <typename T> __device__ inline T gelu_tanh_backward(T g, T x) {
  T y = tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
  T inner = T(0.79788456080286535588) * (T(1) + T(3 * 0.044715) * x * x);
  return g * (T(0.5) * (T(1) + y) + T(0.5) * x * (T(1) - y * y) * inner);
}
"""
)

STORED = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "half_bits", torch.float16: "half_bits",
    torch.bool: "bool", torch.int64: "llong", torch.int32: "int",
}  # fmt: skip
"""The C type of an element in memory."""
COMPUTED = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "float", torch.float16: "float",
    torch.bool: "bool", torch.int64: "llong", torch.int32: "llong",
}  # fmt: skip
"""The C type in which an element is computed."""
_HALF = {torch.bfloat16: "bf16", torch.float16: "f16"}


def load(dtype: torch.dtype, element: str) -> str:
    return f"from_{_HALF[dtype]}({element})" if dtype in _HALF else f"({COMPUTED[dtype]})({element})"


def store(dtype: torch.dtype, value: str) -> str:
    return f"to_{_HALF[dtype]}({value})" if dtype in _HALF else f"({STORED[dtype]})({value})"


def rounded(dtype: torch.dtype, value: str) -> str:
    """Return the expression of a value rounded as by an operator that returns this dtype."""
    if dtype == torch.int32:
        return f"(llong)(int)({value})"
    return f"round_{_HALF[dtype]}({value})" if dtype in _HALF else f"({COMPUTED[dtype]})({value})"


def literal(value: Any, kind: str) -> str:
    """Return a Python number as a C literal."""
    if isinstance(value, bool):
        if kind == "bool":
            return "true" if value else "false"
        value = int(value)
    if isinstance(value, int) and kind in ("llong", "bool"):
        return f"{value}LL"
    value = float(value)
    if math.isnan(value):
        return f"({kind})NOT_A_NUMBER"
    if math.isinf(value):
        return f"({kind})({'-' if value < 0 else ''}INF)"
    return f"({kind})({value!r})"


def _power(x: str, exponent: Any, kind: str) -> str:
    named = {2: f"({x} * {x})", 3: f"({x} * {x} * {x})", 0.5: f"sqrt({x})", -1: f"({kind}(1) / {x})", 1: x}
    return named.get(exponent, f"pow({x}, {literal(exponent, kind)})")


# Expressions of the arguments in the schema's order; {kind} is the type that is computed in.
_EXPRESSIONS: dict[Any, str] = {
    aten.mul: "({0} * {1})", aten.div: "({0} / {1})", aten.neg: "(-{0})", aten.relu: "max_({0}, {kind}(0))",
    aten.add: "({0} + {2} * {1})", aten.sub: "({0} - {2} * {1})", aten.rsub: "({1} - {2} * {0})",
    aten.tanh: "tanh({0})", aten.sigmoid: "sigmoid_({0})", aten.exp: "exp({0})", aten.log: "log({0})",
    aten.sqrt: "sqrt({0})", aten.rsqrt: "rsqrt({0})", aten.abs: "fabs({0})", aten.erf: "erf({0})",
    aten.sin: "sin({0})", aten.cos: "cos({0})", aten.log1p: "log1p({0})", aten.reciprocal: "({kind}(1) / {0})",
    aten.square: "({0} * {0})", aten.sign: "sign_({0})", aten.sgn: "sign_({0})",
    aten.tanh_backward: "({0} * ({kind}(1) - {1} * {1}))",
    aten.sigmoid_backward: "({0} * ({kind}(1) - {1}) * {1})",
    aten.threshold_backward: "({1} <= {2} ? {kind}(0) : {0})",
    aten.silu: "({0} * sigmoid_({0}))",
    aten.silu_backward: "({0} * sigmoid_({1}) * ({kind}(1) + {1} * ({kind}(1) - sigmoid_({1}))))",
    aten.leaky_relu: "({0} > {kind}(0) ? {0} : {0} * {1})",
    aten.leaky_relu_backward: "({1} > {kind}(0) ? {0} : {0} * {2})",
    aten.maximum: "max_({0}, {1})", aten.minimum: "min_({0}, {1})", aten.clamp_min: "max_({0}, {1})",
    aten.where: "({0} ? {1} : {2})", aten.masked_fill: "({1} ? {2} : {0})",
    aten.eq: "({0} == {1})", aten.ne: "({0} != {1})", aten.gt: "({0} > {1})", aten.ge: "({0} >= {1})",
    aten.lt: "({0} < {1})", aten.le: "({0} <= {1})",
    aten.logical_not: "(!{0})", aten.bitwise_not: "(!{0})",
    aten.logical_and: "({0} && {1})", aten.bitwise_and: "({0} && {1})",
    aten.logical_or: "({0} || {1})", aten.bitwise_or: "({0} || {1})",
    aten._to_copy: "{0}", aten.clone: "{0}",
}  # fmt: skip
_COMPARED = (aten.eq, aten.ne, aten.gt, aten.ge, aten.lt, aten.le, aten.logical_not, aten.logical_and, aten.logical_or)
_ORDERED = _COMPARED[:6]
ROUNDED_FIRST = (*_ORDERED, aten.threshold_backward)
"""Operators that round a plain number to their tensors' dtype before they use it."""
_BOOLEAN = (aten.bitwise_not, aten.bitwise_and, aten.bitwise_or)
_CONDITIONS = {aten.where: 0, aten.masked_fill: 1}
"""The index of an operator's condition, which is not a number."""
_PACKETS = {*_EXPRESSIONS, aten.pow, aten.gelu, aten.gelu_backward}


def has_expression(func: Any, dtypes: Sequence[torch.dtype], out: torch.dtype, arguments: Sequence[Any]) -> bool:
    """Return whether an operator on tensors of these dtypes can be written in C."""
    packet = func.overloadpacket
    if packet not in _PACKETS or func._schema.is_mutable or not {*dtypes, out} <= {*STORED}:
        return False
    if packet in (aten._to_copy, aten.clone):
        return True
    if packet in _BOOLEAN:
        return all(dtype == torch.bool for dtype in (*dtypes, out))
    if packet in _ORDERED and not _compared_as_they_are(dtypes, arguments):
        return False
    if packet in _COMPARED or packet in _CONDITIONS:
        return True
    if packet is aten.div and len(arguments) > 2 and arguments[2] is not None:
        return False
    if packet is aten.pow and func is not aten.pow.Tensor_Scalar:
        return False
    return out.is_floating_point


def _compared_as_they_are(dtypes: Sequence[torch.dtype], arguments: Sequence[Any]) -> bool:
    """Return whether tensors and numbers are compared in the tensors' own dtype."""
    if len(set(dtypes)) > 1:  # the common dtype depends on the tensors' dimensions
        return False
    whole = not dtypes[0].is_floating_point and dtypes[0] != torch.bool
    return not (whole and any(type(argument) is float for argument in arguments))


def kind_of(func: Any, dtypes: Sequence[torch.dtype], out: torch.dtype) -> str:
    """Return the C type in which an operator computes."""
    if func.overloadpacket in _COMPARED:
        common = dtypes[0]
        for dtype in dtypes[1:]:
            common = torch.promote_types(common, dtype)
        return "float" if common == torch.bool else COMPUTED[common]
    return COMPUTED[out]


def expression(func: Any, arguments: Sequence[Any], kind: str) -> str:
    """Return the operator as a C expression.

    Args:
        arguments: Tensors are expressions (`str`) already, converted to `kind` except for a condition; the others are
            Python values.
    """
    packet = func.overloadpacket
    if packet is aten.pow:
        return _power(arguments[0], arguments[1], kind)
    if packet in (aten.gelu, aten.gelu_backward):
        tensors = ", ".join(a for a in arguments[:-1])
        backward = "_backward" if packet is aten.gelu_backward else ""
        return f"gelu_{'tanh' if arguments[-1] == 'tanh' else 'erf'}{backward}<{kind}>({tensors})"
    written = [_written(a, kind) for a in arguments]
    if packet in (aten.add, aten.sub, aten.rsub) and arguments[2] == 1:
        return {aten.add: "({0} + {1})", aten.sub: "({0} - {1})", aten.rsub: "({1} - {0})"}[packet].format(*written)
    return _EXPRESSIONS[packet].format(*written, kind=kind)


class Operand(str):
    """The name of a variable that contains a tensor's element."""

    __slots__ = ()


def condition_at(func: Any) -> int | None:
    return _CONDITIONS.get(func.overloadpacket)


def _written(argument: Any, kind: str) -> str:
    if isinstance(argument, Operand):
        return argument
    return literal(argument, kind) if isinstance(argument, int | float) else ""
