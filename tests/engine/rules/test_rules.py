"""Rules that are written by hand, in corners that ordinary layers do not reach: each against torch's own operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import First, assert_as_alone, numbers, whole
from tests.engine.rules.stacking import Stacked, assert_stacks, distance, gradients, stacked_state, weighed
from torch import Tensor, nn

import shoal
from shoal.engine.recipes.program import Program
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tracing.trace import trace
from shoal.utils.randomness import draw_members

Q, K, V = numbers(1, 2, 3, 4, 8), numbers(2, 2, 3, 5, 8), numbers(3, 2, 3, 5, 7)
BLIND = torch.ones(4, 5, dtype=torch.bool).index_fill(0, torch.tensor([1]), False)
"""The second query sees nothing."""
attend = F.scaled_dot_product_attention

ATTENTION: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "plain": (attend, [Q, K, V], "ppp"),
    "dropout": (lambda q, k, v: attend(q, k, v, dropout_p=0.3), [Q, K, V], "ppp"),
    "values of the batch": (lambda q, k, v: attend(q, k, v, dropout_p=0.3), [Q, K, V], "ppx"),
    "no batch": (lambda q, k, v: attend(q, k, v, dropout_p=0.3), [Q[0, 0], K[0, 0], V[0, 0]], "ppp"),
    "a row that sees nothing": (lambda q, k, v: attend(q, k, v, BLIND), [Q, K, V], "ppp"),
    "a row that sees nothing, dropout": (lambda q, k, v: attend(q, k, v, BLIND, 0.3), [Q, K, V], "ppp"),
    "keys for all rows": (attend, [Q, K[:1], V[:1]], "ppp"),
    "keys for all rows, dropout": (lambda q, k, v: attend(q, k, v, dropout_p=0.3), [Q, K[:1], V[:1]], "ppp"),
    "queries for all rows, dropout": (lambda q, k, v: attend(q, k, v, dropout_p=0.3), [Q[:1], K, V], "ppp"),
    "grouped queries": (lambda q, k, v: attend(q, k, v, enable_gqa=True), [Q, K[:, :1], V[:, :1]], "ppp"),
    "grouped queries, dropout": (
        lambda q, k, v: attend(q, k, v, dropout_p=0.3, enable_gqa=True), [Q, K[:, :1], V[:, :1]], "ppp"
    ),
    "causal, scaled, dropout": (
        lambda q, k, v: attend(q, k, v, is_causal=True, dropout_p=0.3, scale=0.7), [Q, K, V], "ppp"
    ),
    "a mask that is trained": (lambda q, k, v, m: attend(q, k, v, m, 0.3), [Q, K, V, numbers(4, 3, 4, 5)], "pppp"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention(name: str, deterministic: bool) -> None:
    function, tensors, kinds = ATTENTION[name]
    assert_stacks(function, tensors, kinds, deterministic=deterministic)


W, X = numbers(5, 3, 5), numbers(6, 3, 5)

OTHERS: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "ELU in place": (lambda w: F.elu(w * 1, inplace=True), [W], "p"),
    "tanh, exp, sigmoid in place": (lambda w: (w * 1).tanh_() + (w * 2).exp_() + (w * 3).sigmoid_(), [W], "p"),
    "pow, cumprod in place": (lambda w: (w.abs() + 1).pow_(1.5) + (w * 1).cumprod_(1), [W], "p"),
    "a view that is written to": (lambda w: _written(w * 1), [W], "p"),
    "no columns": (lambda w, x: x[:, :0] @ w[:0], [W, X], "px"),
    "no rows": (lambda w, x: F.linear(x[:0].unsqueeze(0), w), [W, X], "px"),
    "roll of one number": (lambda w: w.sum().roll(1), [W], "p"),
    "as_strided": (lambda w: (w * 1).as_strided((2, 3), (2, 1), 1), [W], "p"),
    "mixed dtypes side by side": (lambda w, x: torch.cat([w, x.float()]), [W, X], "px"),
}


def _written(x: Tensor) -> Tensor:
    x[1:].exp_()
    return x


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_others(name: str, deterministic: bool) -> None:
    function, tensors, kinds = OTHERS[name]
    assert_stacks(function, tensors, kinds, shared=False, deterministic=deterministic)


def test_targets_that_members_share_take_the_dtype_of_their_outputs() -> None:
    assert_stacks(lambda w, x: x.type_as(w).sum(1, keepdim=True) * w, [W, X], "px")
    assert_stacks(lambda w, x: x.long().type_as(w).mul_(w), [W, X], "px")


REFUSED: dict[str, Callable[..., Any]] = {
    "as_strided_scatter": lambda w: torch.as_strided_scatter(w, w[0] * 2, (5,), (1,), 3),
    "as_strided of a transposed tensor": lambda w: w.t().as_strided((2, 2), (1, 2)),
    "as_strided in place": lambda w: (w * 1).as_strided_((2, 2), (1, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_as_it_happens_to_lie_is_refused(name: str) -> None:
    with pytest.raises(NotStackable, match="as_strided"):
        Stacked(REFUSED[name], [W], "p", shared=True, members=2).run()


def test_projections_with_dropout_between_layers_are_as_alone() -> None:
    """The operator draws inside itself, from a stream that is no member's."""
    x, y = numbers(7, 12, 5, 6), whole(8, 3, 12)
    jobs = [
        shoal.Job(
            model=lambda: nn.Sequential(
                First(nn.LSTM(6, 4, 2, proj_size=3, dropout=0.5, batch_first=True)), nn.Flatten(), nn.Linear(15, 3)
            ).double(),
            data=(x, y), loss=F.cross_entropy, epochs=2, batch_size=5, seed=seed,
        )
        for seed in range(2)
    ]  # fmt: skip
    assert_as_alone(jobs, tier="serial")


# --- numbers of the members' own --------------------------------------------------------------------------------------

NUMBERS = (0.0, 0.3, 1.0, 0.5)

LIFTED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alpha_dropout": lambda w, p: F.alpha_dropout(w, p, True),
    "feature_alpha_dropout": lambda w, p: F.feature_alpha_dropout(w.unsqueeze(2).expand(-1, -1, 3), p, True),
    "dropout": lambda w, p: F.dropout(w, p, True),
    "normal_": lambda w, p: w * torch.empty_like(w).normal_(p, p + 1),
    "uniform_": lambda w, p: w * torch.empty_like(w).uniform_(-p, p + 1),
    "exponential_": lambda w, p: w * torch.empty_like(w).exponential_(p + 1),
    "bernoulli_": lambda w, p: w * torch.empty_like(w).bernoulli_(p),
    "attention, scale and rate": lambda w, p: attend(w, w, w, dropout_p=p / 2, scale=p + 0.5),
    "attention, scale": lambda w, p: attend(w, w, w, scale=p + 0.5),
    "cross_entropy": lambda w, p: F.cross_entropy(w, torch.tensor([1, 2, 0]), label_smoothing=p),
    "cross_entropy, each": lambda w, p: F.cross_entropy(
        w, torch.tensor([1, 2, 0]), label_smoothing=p, reduction="none"
    ),
    "layer_norm": lambda w, p: F.layer_norm(w, (5,), eps=p + 0.1),
    "leaky_relu and pow": lambda w, p: F.leaky_relu(w, p) + w.abs() ** (p + 1),
    "add, scaled": lambda w, p: torch.add(w, w, alpha=p) + torch.addcmul(w, w, w, value=p),
    "smooth_l1": lambda w, p: F.smooth_l1_loss(w, w.detach() * 2, beta=p + 0.1),
}


class WithNumber(nn.Module):
    def __init__(self, function: Callable[[Tensor, float], Tensor], number: float) -> None:
        super().__init__()
        self.w, self.function, self.number = nn.Parameter(W * (1 + number)), function, number

    def forward(self) -> Tensor:
        return self.function(self.w, self.number)


@pytest.mark.parametrize("name", LIFTED)
@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_that_differ(name: str, deterministic: bool) -> None:
    """Each member has its own number, those at which torch draws nothing among them; streams end where they should."""
    models = [WithNumber(LIFTED[name], number) for number in NUMBERS]
    traces = [trace(model, lambda model, _: model(), [], twice=False) for model in models]
    cpu = torch.device("cpu")
    program = Program(traces, device=cpu, stacked_batch=[], deterministic=deterministic)
    state = stacked_state(models, traces[0])
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(models))]
    noise = draw_members(program.draws, generators, cpu)
    out, _ = program(state, [], noise.__getitem__)
    (grads,) = gradients(sum(weighed([row]) for row in out), state)
    assert grads is not None
    for seed, (model, generator) in enumerate(zip(models, generators, strict=True)):
        torch.manual_seed(seed)
        value = model()
        (grad,) = gradients(weighed([value]), list(model.parameters()))
        assert distance(out[seed], value) < 1e-9 and distance(grads[seed], grad) < 1e-9
        assert torch.equal(torch.get_rng_state(), generator.get_state())
