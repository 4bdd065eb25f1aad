"""With `deterministic=True` no bit of a member depends on its companions: every operator that has a rule and many that
have none, at sizes that never fill a vector, among 1, 2, 7 and 33, on the same and on other rows.

One step of each kind is looked at directly, loss, gradients and buffers; some kinds are trained, weights, buffers and
optimizer state. Here are samples; the whole product is with the slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_same_bits, numbers, slowly, train, whole
from tests.engine.rules.odd_sizes import KINDS, B, number, sizes
from tests.engine.rules.stacking import stacked_state
from torch import Tensor, nn

import shoal
from shoal.engine.recipes.program import Program
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tracing.trace import Trace, trace
from shoal.utils.randomness import draw_members

CPU = torch.device("cpu")
COMPANIES = [(2, 1, False), (7, 0, True), (7, 3, False), (33, 32, False), (33, 5, True)]
"""(members, the place of the one that is looked at, whether all read the same rows). Alone, a member has a copy of
itself beside it."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(model: nn.Module, batch: Any) -> Tensor:
    return number(model(*batch))


def built(name: str, size: int, seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[name].make(size).to(dtype).train()


def batch(name: str, size: int, seed: int, dtype: torch.dtype) -> Tensor:
    x = KINDS[name].inputs(size, seed)
    return x.to(dtype) if x.is_floating_point() else x


def recorded(name: str, size: int, dtype: torch.dtype) -> Trace:
    return trace(built(name, size, 0, dtype), call, [batch(name, size, 100, dtype)], twice=False)


def one_step(
    graph: Trace, name: str, size: int, dtype: torch.dtype, members: int, place: int, shared: bool
) -> dict[str, Tensor]:
    """Loss, gradients and buffers of the member of seed 0 that is at this place among so many."""
    seeds = [0 if m == place else 1 + m for m in range(members)] if members > 1 else [0, 0]
    models = [built(name, size, seed, dtype) for seed in seeds]
    batches = [batch(name, size, 100 if shared else 100 + seed, dtype) for seed in seeds]
    program = Program([graph] * len(seeds), device=CPU, stacked_batch=[not shared], deterministic=True)
    state = stacked_state(models, graph)
    noise = draw_members(program.draws, [torch.Generator().manual_seed(seed) for seed in seeds], CPU)
    losses, buffers = program(state, batches[:1] if shared else [torch.stack(batches)], noise.__getitem__)
    grads = torch.autograd.grad(losses.sum(), state[: len(graph.params)], allow_unused=True)
    found = {"loss": losses.detach(), **{f"buffer {key}": value for key, value in buffers.items()}}
    found |= {f"gradient {key}": g for key, g in zip(graph.params, grads, strict=True) if g is not None}
    return {key: value[place] for key, value in found.items()}


def assert_bits(name: str, size: int, dtype: torch.dtype, companies: list[tuple[int, int, bool]]) -> None:
    graph = recorded(name, size, dtype)
    alone = one_step(graph, name, size, dtype, 1, 0, False)
    for members, place, shared in companies:
        found = one_step(graph, name, size, dtype, members, place, shared)
        assert found.keys() == alone.keys()
        for key, value in alone.items():
            same = torch.equal(found[key].nan_to_num(9e9), value.nan_to_num(9e9))
            assert same, f"{name}, size {size}, {key}: place {place} of {members}, shared rows: {shared}"


def sampled() -> list[Any]:
    """Every kind at one size that no vector divides, in full precision of either width by turns."""
    dtypes = (torch.float32, torch.float64)
    return [
        (name, ([s for s in sizes(kind) if s in (5, 7)] or sizes(kind)[-1:])[-1], dtypes[place % 2])
        for place, (name, kind) in enumerate(KINDS.items())
    ]


@pytest.mark.parametrize(("name", "size", "dtype"), sampled())
def test_one_step(name: str, size: int, dtype: torch.dtype) -> None:
    assert_bits(name, size, dtype, COMPANIES[2:4])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, kind in KINDS.items() for size in sizes(kind)])
def test_one_step_at_every_size(name: str, size: int, dtype: torch.dtype) -> None:
    assert_bits(name, size, dtype, COMPANIES)


def step(model: nn.Module, batch: Any) -> Tensor:
    return number(model(batch[0]))


def job(name: str, size: int, seed: int, *, shared: bool, dtype: torch.dtype = torch.float32, **more: Any) -> shoal.Job:
    x = KINDS[name].inputs(size, 100, rows=3 * B - 2)
    settings: dict[str, Any] = {
        "model": lambda: KINDS[name].make(size).to(dtype),
        "data": (x.to(dtype) if x.is_floating_point() else x, torch.arange(len(x))),
        "step": step, "hparams": {"lr": 0.01 * (1 + seed)}, "seed": seed, "data_seed": 5 if shared else None,
        "batch_size": B, "drop_last": True, "epochs": 2, "clip_norm": 1.0, "name": f"{seed}",
    }  # fmt: skip
    return shoal.Job(**(settings | more))


def assert_trained_alike(name: str, size: int, companies: list[int], **more: Any) -> None:
    """The first, one in the middle and the last of a pack have the bits that they have alone, with the same rows."""
    for shared in (False, True):
        alone: dict[int, shoal.Result] = {}
        for members in companies:
            results = train([job(name, size, s, shared=shared, **more) for s in range(members)], deterministic=True)
            for place in {0, members // 2, members - 1}:
                if place not in alone:
                    (alone[place],) = train([job(name, size, place, shared=shared, **more)], deterministic=True)
                assert results[place].tier == alone[place].tier
                assert_same_bits(results[place], alone[place])


TRAINED = [
    ("Linear", 7), ("GELU", 5), ("LayerNorm first", 7), ("BatchNorm1d", 3), ("Conv2d first", 5), ("LSTM", 5),
    ("GRU", 3), ("attention, causal, dropout", 5), ("TransformerEncoderLayer, norm first", 3), ("Embedding", 5),
    ("einsum", 7), ("loss bce with logits", 7), ("loss cross entropy", 5), ("solve", 5), ("rfft", 7),
    ("broadcasting", 5), ("gradients that are one number", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), TRAINED)
def test_training(name: str, size: int) -> None:
    assert_trained_alike(name, size, [7])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, kind in KINDS.items() for size in sizes(kind)[:3]])
def test_training_of_everything(name: str, size: int) -> None:
    assert_trained_alike(name, size, [2, 7, 33])


OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "ASGD", "Rprop"]


@pytest.mark.parametrize("optimizer", slowly(OPTIMIZERS, ("Adam", "NAdam", "ASGD").__contains__))
def test_optimizers_in_float64(optimizer: str) -> None:
    """Powers of the members' numbers are columns of float64: the end of such a column must not be another power."""
    settings = {"optimizer": getattr(torch.optim, optimizer), "dtype": torch.float64, "epochs": 12}
    assert_trained_alike("Linear", 5, [7], **settings)


# --- numbers that differ ----------------------------------------------------------------------------------------------

X, Y = numbers(1, 19, 5, dtype=torch.float32), whole(2, 5, 19)


class Settings(nn.Module):
    """Layers with numbers that jobs of one stack may each have their own of."""

    def __init__(self, p: float, eps: float, slope: float, power: float, smoothing: float) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.LayerNorm(5, eps=eps)
        self.p, self.slope, self.power, self.smoothing = p, slope, power, smoothing

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.a(x)), self.slope)
        h = F.elu(h, self.slope) + h.abs().add(0.1).pow(self.power) * self.power
        q = h.unsqueeze(1)
        h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=self.p if self.training else 0.0)[:, 0]
        out: Tensor = self.b(F.dropout(h, self.p, self.training))
        return out


def settings_step(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=model.smoothing)


@pytest.mark.parametrize("own", [(0.0, 1e-5, 0.1, 2.0, 0.0), (0.3, 1e-3, 0.2, 1.5, 0.1)], ids=["zeros", "numbers"])
def test_numbers_of_the_companions(own: tuple[float, ...]) -> None:
    """Whether a number differs within a stack must make no difference for those that have the usual one."""

    def made(seed: int, *settings: float) -> shoal.Job:
        return shoal.Job(
            model=lambda: Settings(*settings), data=(X, Y), step=settings_step, batch_size=6, epochs=2, seed=seed,
            name=f"{seed}",
        )  # fmt: skip

    (alone,) = train([made(0, *own)], deterministic=True)
    alike = train([made(0, *own), made(1, *own)], deterministic=True)
    others = [made(1 + i, 0.1 * i, 10.0**-i, 0.3, 1.0 + i, 0.2 * i) for i in range(4)]
    unlike = train([*others, made(0, *own)], deterministic=True)
    assert alone.tier == alike[0].tier == unlike[4].tier == "stacked"
    assert_same_bits(alike[0], alone)
    assert_same_bits(unlike[4], alone)


def test_dropout_in_half_precision_is_refused_whatever_the_company() -> None:
    """Attention by hand would round by the shape of the whole stack; in half precision such a job is not stacked."""
    name = "attention, causal, dropout"
    with pytest.raises(NotStackable, match="half precision"):
        one_step(recorded(name, 3, torch.bfloat16), name, 3, torch.bfloat16, 2, 0, True)
