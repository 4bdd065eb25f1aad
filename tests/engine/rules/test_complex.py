"""Complex weights: every product's gradient takes the other operand conjugated, as torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers
from tests.engine.rules.stacking import assert_stacks
from torch import Tensor, nn

import shoal


def complex_numbers(seed: int, *shape: int) -> Tensor:
    return torch.complex(numbers(seed, *shape), numbers(seed + 100, *shape))


W, B, X, SQUARE, IMAGES = (
    complex_numbers(1, 8, 3),
    complex_numbers(2, 3),
    complex_numbers(3, 5, 8),
    complex_numbers(4, 3, 3),
    complex_numbers(5, 5, 2, 4, 4),
)

FUNCTIONS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "linear": (lambda w, b, x: F.linear(x, w.mT, b), [W, B, X]),
    "linear without bias": (lambda w, x: F.linear(x, w.mT), [W, X]),
    "matmul": (lambda w, x: x @ w, [W, X]),
    "matmul of stacks": (lambda w, x: torch.stack([x, 2 * x]) @ torch.stack([w, w.conj()]), [W, X]),
    "matmul with a vector": (lambda w, x: x @ w[:, 0], [W, X]),
    "addmm": (lambda w, b, x: torch.addmm(b, x, w), [W, B, X]),
    "einsum": (lambda w, x: torch.einsum("bi,ij->bj", x, w), [W, X]),
    "tensordot": (lambda w, x: torch.tensordot(x, w, 1), [W, X]),
    "conv2d": (lambda w, x: F.conv2d(x, w), [complex_numbers(6, 3, 2, 2, 2), IMAGES]),
    "conv1d": (lambda w, x: F.conv1d(x.flatten(2), w), [complex_numbers(7, 3, 2, 2), IMAGES]),
    "adjoint": (lambda w, x: w.adjoint() @ x.mT, [W, X]),
    "mH, conj, resolve_conj": (lambda w, x: w.mH @ x.mH + (x.conj() @ w.resolve_conj()).mT, [W, X]),
    "vdot": (lambda w, x: torch.vdot(w[:, 0], x[0]), [W, X]),
    "outer": (lambda w, x: torch.outer(w[:, 0], x[0]), [W, X]),
    "abs and angle": (lambda w, x: (x @ w).abs() + (x @ w).angle(), [W, X]),
    "real and imag": (lambda w, x: (x @ w).real - (x @ w).imag, [W, X]),
    "view_as_real": (lambda w, x: torch.view_as_real(x @ w), [W, X]),
    "polar": (lambda w, x: torch.polar(w.abs(), w.angle()), [W, X]),
    "tanh, exp, sigmoid": (lambda w, x: torch.tanh(x @ w) + torch.exp(w[:5]) + torch.sigmoid(w[:5]), [W, X]),
    "prod, cumsum, cumprod": (lambda w, x: (w.prod(1) + w.cumsum(1)[:, 1]) * w.cumprod(0)[:, 2], [W, X]),
    "norm and var": (lambda w, x: torch.linalg.vector_norm(x @ w, dim=1) + (x @ w).var(1), [W, X]),
    "solve and svd": (lambda w, x: torch.linalg.solve(w, x[:3, :3]).abs() + torch.linalg.svdvals(w), [SQUARE, X]),
    "fft": (lambda w, x: torch.fft.ifft(torch.fft.fft(w) * 2).abs(), [W, X]),
    "a number without dimensions": (lambda w, x: w[0, 0] * x.real + w[0, 1] * x, [W, X]),
    "l1_loss": (lambda w, x: F.l1_loss(x @ w, x[:, :3]), [W, X]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("own", ["parameters and a shared batch", "parameters and batches", "parameters alone"])
def test_functions(name: str, own: str) -> None:
    function, tensors = FUNCTIONS[name]
    kinds = "p" * len(tensors) if own == "parameters alone" else "p" * (len(tensors) - 1) + "x"
    assert_stacks(function, tensors, kinds, shared=own != "parameters and batches")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_number_of_a_lower_kind_keeps_the_dtype(dtype: torch.dtype) -> None:
    """A tensor without dimensions does not widen complex64, with or without a member axis."""
    assert_stacks(lambda t, x: x * t, [numbers(1), X.to(dtype)], "px", tolerance=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4, dtype=torch.complex128)
        self.outer = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x).abs())
        return out


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_training(optimizer: type[torch.optim.Optimizer]) -> None:
    x, y = complex_numbers(8, 32, 8), numbers(9, 32, 1)
    assert_as_alone(
        [
            shoal.Job(
                model=Net, data=(x, y), loss=F.mse_loss, epochs=10, batch_size=13, seed=seed, name=f"{seed}",
                optimizer=optimizer, hparams={"lr": 0.01 * (seed + 1)},
            )
            for seed in range(3)
        ]
    )  # fmt: skip
