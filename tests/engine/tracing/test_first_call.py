"""What a step's first call leaves behind: a cache, which is filled before the step is recorded, or state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_close, numbers, reasons, train, whole
from torch import Tensor, nn

import shoal
from shoal.engine.python_state import state_walk

X, Y = numbers(1, 20, 6), whole(2, 3, 20)
MASKS: dict[int, Tensor] = {}
BACKENDS: dict[type, str] = {}


@functools.cache
def ramp(rows: int) -> Tensor:
    return torch.linspace(0.5, 1.5, rows, dtype=torch.float64).unsqueeze(1)


class Net(nn.Module):
    """Scales its hidden layer by something that `factor` caches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)
        self.cached: Any = None
        self.register_buffer("shift", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.factor(x) + self.shift)

    def factor(self, x: Tensor) -> Any:
        return 1.0


class Mask(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = torch.linspace(0.0, 1.0, 8, dtype=x.dtype)
        return self.cached


class Flag(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = "a kind of problem"
        return 2.0 if self.cached == "a kind of problem" else 1.0


class Table(Net):
    def factor(self, x: Tensor) -> Any:
        if len(x) not in MASKS:
            MASKS[len(x)] = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype).unsqueeze(1)
        return MASKS[len(x)]


class Cached(Net):
    def factor(self, x: Tensor) -> Any:
        return ramp(len(x))


class FreshList(Net):
    def factor(self, x: Tensor) -> Any:
        self.cached = [x.shape[1], {"rows": "of a batch"}]
        return float(self.cached[0])


class ByClass(Net):
    """As einops does: a table of the classes of tensors that it has seen."""

    def factor(self, x: Tensor) -> Any:
        return 2.0 if BACKENDS.setdefault(type(x), "torch") == "torch" else 1.0


class FromData(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = x.abs().mean()
        return self.cached


class FromWeights(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = self.a.weight.detach().abs().mean()
        return self.cached


class SetsParameters(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = True
            with torch.no_grad():
                self.b.bias.copy_(-x.mean(0)[:3])
        return 1.0


class SetsBuffer(Net):
    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = True
            self.shift.copy_(x.mean().expand(8))
        return 1.0


class SecondCall(Net):
    def factor(self, x: Tensor) -> Any:
        self.cached = min((self.cached or 0) + 1, 2)
        return torch.full((8,), float(self.cached), dtype=x.dtype)


class Counter(Net):
    def factor(self, x: Tensor) -> Any:
        self.cached = (self.cached or 0) + 1
        return 1.0 + 0.1 * self.cached


def jobs(make: Callable[[], nn.Module], **settings: Any) -> list[shoal.Job]:
    common = {"data": (X, Y), "batch_size": 8, "epochs": 3, "loss": F.cross_entropy} | settings
    return [shoal.Job(model=make, seed=seed, hparams={"lr": 0.01 * (seed + 1)}, **common) for seed in range(3)]


@pytest.mark.parametrize("make", [Mask, Flag, Table, Cached, FreshList, ByClass])
def test_a_cache_does_not_keep_a_job_from_being_stacked(make: type[Net]) -> None:
    MASKS.clear()
    BACKENDS.clear()
    ramp.cache_clear()
    assert_as_alone(jobs(make))
    assert not BACKENDS.keys() - {Tensor}  # none of a trace
    values = [*MASKS.values(), ramp(8), ramp(4)]
    assert all(type(value) is Tensor for value in values)  # none without data, from a trace


class FirstRows(Net):
    """Keeps the number of rows of the first batch."""

    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = len(x)
        return self.cached / len(x)


class Grown(Net):
    """Makes its table again where a batch has more rows than any before."""

    def factor(self, x: Tensor) -> Any:
        if self.cached is None or len(self.cached) < len(x):
            self.cached = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)
        return self.cached[: len(x), None]


class FirstMode(Net):
    """Keeps what the mode of its first call asks for."""

    def factor(self, x: Tensor) -> Any:
        if self.cached is None:
            self.cached = 2.0 if self.training else 1.0
        return self.cached


@pytest.mark.parametrize("make", [FirstRows, Grown, FirstMode])
def test_what_depends_on_the_shape_or_mode_of_the_first_call_is_no_cache(make: type[Net]) -> None:
    """Batches have 8 rows and 4, in validation 8 and 2."""
    val = (numbers(3, 10, 6), whole(4, 3, 10))
    expected = "its validation" if make is FirstMode else "its own step does something else"
    assert_as_alone(jobs(make, val=val), tier="serial")
    assert expected in reasons(jobs(make, val=val))
    if make is not FirstMode:  # only validation has a short batch
        even = {"data": (X[:16], Y[:16]), "val": val}
        assert_as_alone(jobs(make, **even), tier="serial")
        assert "its validation" in reasons(jobs(make, **even))


@pytest.mark.parametrize("make", [FromData, FromWeights, SetsParameters, SetsBuffer, SecondCall, Counter])
def test_what_depends_on_data_or_weights_or_goes_on_is_no_cache(make: type[Net]) -> None:
    assert_as_alone(jobs(make), tier="serial")
    assert "change" in reasons(jobs(make))


def test_an_iterator_that_cannot_be_put_back_is_not_moved_before_training() -> None:
    def scales() -> Iterator[float]:
        yield from (1.0 + 0.1 * k for k in range(1000))

    def make(iterator: Iterator[float]) -> Any:
        return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * next(iterator)

    for build in (scales, lambda: iter([1.0 + 0.1 * k for k in range(1000)]), lambda: map(float, itertools.count(1))):
        alone = shoal.solo(jobs(Net, loss=None, step=make(build()))[0])  # type: ignore[operator]
        pack = jobs(Net, loss=None, step=make(build()))[:1]  # type: ignore[operator]
        (result,) = train(pack)
        assert result.tier == "serial"
        for name, value in alone.model.state_dict().items():
            # the serial tier's fused Adam rounds otherwise; a moved iterator changes the loss by a tenth
            torch.testing.assert_close(result.model.state_dict()[name], value, rtol=0, atol=1e-12)


def test_more_python_objects_than_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [[float(k)] for k in range(2000)]
    pack = jobs(Net, loss=None, step=lambda model, batch: F.cross_entropy(model(batch[0]) * table[9][0], batch[1]))
    monkeypatch.setattr(state_walk, "MOST_OBJECTS", 1000)
    assert "reaches more Python objects than can be watched" in reasons(pack)


def test_a_tensor_that_a_module_makes_once_is_in_the_result() -> None:
    first, second = shoal.train(jobs(Mask)[:2], device="cpu")
    assert first.tier == second.tier == "stacked"
    expected = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
    assert torch.equal(first.model.cached, expected) and torch.equal(second.model.cached, expected)
    assert first.model.cached.data_ptr() != second.model.cached.data_ptr(), "each has its own"


def test_an_attribute_that_each_call_replaces_is_named_as_one() -> None:
    class Keeps(Net):
        def factor(self, x: Tensor) -> Any:
            self.cached = x.detach().mean(1, keepdim=True)
            return 1.0

    assert "its forward changes python attributes of the model (model.cached)" in reasons(jobs(Keeps))


def test_a_tensor_whose_data_a_step_replaces_has_its_data_in_training() -> None:
    def counting(seed: int) -> shoal.Job:
        count = torch.zeros((), dtype=torch.float64)

        def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            count.data += 1  # a recording puts a tensor without data there
            return F.cross_entropy(model(batch[0]), batch[1]) * (1 + count)

        return shoal.Job(model=Net, data=(X, Y), step=step, batch_size=8, epochs=2, seed=seed, name=str(seed))

    results = train([counting(seed) for seed in range(2)])
    for seed, result in enumerate(results):
        assert_close(result, shoal.solo(counting(seed)))
