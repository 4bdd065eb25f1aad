"""With `deterministic=True` a member's bits are its own: on CPU with one thread it does not matter which other jobs run
beside it, how many, or how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine import equality
from tests.engine.equality import First, assert_same_bits, numbers, slowly, whole
from torch import Tensor, nn

import shoal

N, D, W, C = 31, 5, 7, 3
"""Odd sizes: no vector register is ever filled to its end."""
X, Y = numbers(1, N, D, dtype=torch.float32), whole(2, C, N)
IMAGES = numbers(3, N, 3, 7, 7, dtype=torch.float32)
TOKENS = whole(4, 11, N, 5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


train = partial(equality.train, deterministic=True)


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def mlp() -> nn.Module:
    body = [nn.Linear(D, W), nn.GELU(), nn.LayerNorm(W), nn.Dropout(0.2), nn.Linear(W, W), nn.Tanh(), nn.SiLU()]
    return nn.Sequential(*body, nn.Linear(W, C))


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ELU(), nn.MaxPool2d(2), nn.Dropout2d(0.1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(20, C))


def lstm() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 3), First(nn.LSTM(3, W, 2, dropout=0.1, batch_first=True)), Last(), nn.Linear(W, C)
    )


def gru() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 3), First(nn.GRU(3, 5, bidirectional=True, batch_first=True)), Last(), nn.Linear(10, C)
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, W, dropout=0.1, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Embedding(11, 6), layer, Last(), nn.Linear(6, C))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, W, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(11, 6), layer, nn.TransformerEncoderLayer(6, 3, W, 0.0, batch_first=True), Last(), nn.Linear(6, C)
    )


class Odds(nn.Module):
    """Operators that have no rule of their own, or one for reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.pair = nn.Linear(D, W), nn.Linear(W, C), nn.Bilinear(W, D, W)
        self.scale = nn.Parameter(torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        h = self.pair(self.a(x), x)
        h = torch.einsum("bi,bj->bij", h, h * self.scale).cumsum(1).logsumexp(2)
        h = (
            F.normalize(h) * h.var(1, keepdim=True).sqrt()
            + h.exp().mean()
            + (h.norm(dim=1, keepdim=True) * self.scale).pow(1.5)
        )
        h = h + torch.cdist(h.unsqueeze(0), h.unsqueeze(0))[0].mean(1, keepdim=True) + h.sort(1).values.log1p().sum()
        return self.b(h / (1 + h.abs().amax()))


def sigmoids() -> nn.Module:
    acts = [
        nn.Sigmoid(),
        nn.Softplus(),
        nn.Mish(),
        nn.Softmax(1),
        nn.LogSigmoid(),
        nn.RMSNorm(W),
        nn.PReLU(),
        nn.CELU(),
    ]
    return nn.Sequential(nn.Linear(D, W), *acts, nn.Linear(W, C))


def norms() -> nn.Module:
    body = [
        nn.Conv2d(3, 6, 3),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.InstanceNorm2d(6),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
    ]
    return nn.Sequential(*body, nn.AvgPool2d(2), nn.Flatten(), nn.LogSoftmax(1), nn.Linear(54, C))


NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "MLP": (mlp, X),
    "CNN": (cnn, IMAGES),
    "LSTM": (lstm, TOKENS),
    "transformer": (transformer, TOKENS),
    "GRU": (gru, TOKENS),
    "attention": (attention, TOKENS),
    "odds": (Odds, X),
    "sigmoids": (sigmoids, X),
    "norms": (norms, IMAGES),
}


MAIN = ["MLP", "CNN", "LSTM", "transformer"]


def job(net: str, seed: int, **changes: Any) -> shoal.Job:
    model, data = NETS[net]
    settings: dict[str, Any] = {
        "model": model,
        "data": (data, Y),
        "loss": F.cross_entropy,
        "hparams": {"lr": 0.01 + 0.003 * seed},
        "batch_size": 13,
        "epochs": 2,
        "name": f"{seed}",
        "clip_norm": 1.0,
        "val": (data[:9], Y[:9]),
    }
    return shoal.Job(seed=seed, **(settings | changes))


def assert_bits_alone(pack: list[shoal.Job], *places: int) -> None:
    """These members have the bits they have alone."""
    results = train(pack)
    for place in places:
        (alone,) = train([pack[place]])
        assert results[place].tier == alone.tier == "stacked"
        assert_same_bits(results[place], alone)


def company() -> list[Any]:
    """Networks and numbers of companions; what is left out of the fast tests is among the slow ones."""
    pairs = [(net, count) for net in NETS for count in (1, 2, 31)]
    fast = [("MLP", 1), ("MLP", 2), ("MLP", 31), ("CNN", 1), ("CNN", 31), ("LSTM", 31), ("transformer", 1), ("GRU", 1)]
    return [pytest.param(*pair, marks=[] if pair in fast else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("net", "count"), company())
def test_alone_and_in_company(net: str, count: int) -> None:
    """First, in the middle and last in the pack: a vector's tail falls on the last."""
    pack = [job(net, seed) for seed in range(count + 1)]
    assert_bits_alone(pack, 0, count) if count < 3 else assert_bits_alone(pack, 0, 17, count)


@pytest.mark.parametrize("net", slowly(MAIN, ("MLP", "CNN").__contains__))
def test_company_that_reads_the_same_rows(net: str) -> None:
    """A batch that all share is read once and has no member axis; alone it is the member's own."""
    assert_bits_alone([job(net, seed, data_seed=5) for seed in range(3)], 2)
    (alone,) = train([job(net, 1, data_seed=5)])
    others = [job(net, 1, data_seed=5), job(net, 2, data_seed=6), job(net, 3, data_seed=5)]
    assert_same_bits(train(others)[0], alone)


@pytest.mark.parametrize("net", slowly(MAIN, ("MLP", "CNN").__contains__))
def test_company_that_leaves_early(net: str) -> None:
    lengths = [{"epochs": 1}, {}, {"epochs": None, "steps": 2}, {"epochs": 3}, {"epochs": None, "steps": 7}]
    assert_bits_alone([job(net, seed, **changes) for seed, changes in enumerate(lengths)], *range(5))


@pytest.mark.parametrize("net", slowly(MAIN, ("MLP", "transformer").__contains__))
def test_company_that_diverges(net: str) -> None:
    pack = [job(net, 0), job(net, 1, hparams={"lr": 1e38}, clip_norm=None), job(net, 2)]
    results = train(pack)
    assert [r.status for r in results] == ["done", "diverged", "done"]
    assert_bits_alone(pack, 0, 1, 2)


def test_company_that_fails() -> None:
    """A token that the table does not have, in rows that are read in the second epoch only."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    bad = TOKENS.clone()
    bad[30, 2] = 99
    order = {"loss": None, "step": step, "val": None}
    pack = [job("LSTM", 0, **order), job("LSTM", 1, **order, data=(bad, Y)), job("LSTM", 2, **order)]
    results = train(pack)
    assert [r.status for r in results] == ["done", "failed", "done"]
    assert results[1].error is not None and "out of range" in results[1].error
    assert_bits_alone(pack, 0, 2)
    (alone,) = train(pack[1:2])  # its own step has the last word, outside the stack
    assert (alone.status, alone.error) == (results[1].status, results[1].error)
    assert_same_bits(results[1], alone)


def test_company_that_stops_early_and_company_with_other_settings() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"stop": shoal.EarlyStop("loss", patience=1, min_delta=0.5)},
        {"clip_norm": None},
        {"schedule": lambda t: 0.9**t},
        {"keep": "best"},
        {"batch_size": 8},
        {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1, "momentum": 0.9}},
        {"hparams": {"lr": 0.02, "weight_decay": 0.3}},
        {"model": lambda: nn.Sequential(*list(mlp())[:3], nn.Dropout(0.6), *list(mlp())[4:])},
        {"data": (X + 1, Y)},
    ]
    assert_bits_alone([job("MLP", seed, **change) for seed, change in enumerate(changes)], *range(len(changes)))


@pytest.mark.parametrize(
    "kind",
    slowly(
        ["SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "ASGD", "Rprop"],
        ("SGD", "Adam", "NAdam").__contains__,
    ),
)
def test_optimizers_in_company(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)
    pack = [job("MLP", seed, optimizer=optimizer, hparams={"lr": 0.01 * (seed + 1)}) for seed in range(5)]
    assert_bits_alone(pack, 0, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 16, 17, 31, 64])
@pytest.mark.slow
def test_batches_and_widths_of_every_kind(size: int) -> None:
    x, y = numbers(5, 70, size, dtype=torch.float32), whole(6, C, 70)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size), nn.Linear(size, C))

    for batch in (1, 5, size, 70):
        pack = [
            job("MLP", s, model=net, data=(x, y), batch_size=batch, epochs=None, steps=5, val=None) for s in range(6)
        ]
        assert_bits_alone(pack, 0, 3, 5)
