"""What a hostile user found: state that Python keeps, memory under two names, optimizers that are not what they seem.

Each case is what the reference loop makes of it, on whatever tier; `reason` is why it is not stacked, where it is not.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_same_bits, numbers, reasons, train, whole
from torch import Tensor, nn

import shoal

N, D, C = 20, 6, 3
X, Y = numbers(1, N, D), whole(2, C, N)
STATE = "changes python state"


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 8), nn.Linear(8, C)
        self.between = between
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def jobs(model: Callable[[], nn.Module] = Net, **changes: Any) -> list[shoal.Job]:
    """Two jobs; a change that is a list has one value for each."""
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "steps": 8}
    settings |= {"optimizer": torch.optim.SGD, "hparams": [{"lr": 0.05}, {"lr": 0.1}]} | changes
    if "step" in changes:
        settings["loss"] = None
    own = [{k: v[i] if isinstance(v, list) else v for k, v in settings.items()} for i in range(2)]
    return [shoal.Job(model=lambda: model(), seed=i, name=f"{i}", **own[i]) for i in range(2)]


@dataclass(frozen=True)
class Case:
    make: Callable[[], list[shoal.Job]]
    reason: str = ""


class Buffered(Net):
    """A buffer that forward replaces by something else."""

    def __init__(self, first: Tensor, after: Callable[[Buffered, Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("now", first)
        self.register_buffer("old", first.clone())
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = self.b(torch.tanh(h - self.now - self.old))
        self.after(self, h.detach())
        return out


def swapped(model: Buffered, h: Tensor) -> None:
    model.old = model.now
    model.now = h.mean(0)


def same_twice(model: Buffered, h: Tensor) -> None:
    model.now.add_(h.mean(0))
    model.old = model.now


def other_dtype(model: Buffered, h: Tensor) -> None:
    model.now = model.now + 0.5


def other_shape(model: Buffered, h: Tensor) -> None:
    model.now = h.mean()


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, C))
    model.double()
    model[4].weight.data = model[2].weight.data
    return model


class LiveView(Net):
    """A view of a weight, as a buffer or as a plain attribute: it moves with the weight."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("view", self.a.weight.detach())
        else:
            self.view = self.a.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + F.linear(x, self.view)))


class NamedTwice(Net):
    """Whole numbers that are a buffer and an attribute; with a step of its own they become others."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(6))
        self.other, self.step = self.order, step

    def forward(self, x: Tensor) -> Tensor:
        self.order.add_(self.step) if self.step else None
        return super().forward(x[:, self.other % 6])


class MakesBuffer(Net):
    """A buffer that is made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.ones(6, dtype=x.dtype), persistent=False)
        return super().forward(x + self.bias)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


class Queue:
    def __init__(self) -> None:
        self.queue: deque[int] = deque(maxlen=9)

    def __next__(self) -> int:
        self.queue.append(1)
        return len(self.queue)


class Stateful(Net):
    """Python state that shows in the numbers only after some calls."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if next(self.state) < 5 else 2.0)


class Dropping(Net):
    """A layer is left out at times, by a generator of the model's own."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.source.random() < 0.2 else 1.0)


class NumpyNoise(Net):
    def __init__(self) -> None:
        super().__init__()
        self.source = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + torch.from_numpy(self.source.normal(size=8))))


def counted_closure() -> nn.Module:
    calls = 0

    def between(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(h) * (1.0 if calls < 5 else 2.0)

    return Net(between)


def counting_step() -> Any:
    calls = [0]

    def step(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * (1.0 if calls[0] < 5 else 2.0)

    return step


class Centred(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(C, dtype=torch.float64))
        self.in_place = in_place

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out - self.centre, y)
        if self.in_place:
            self.centre.mul_(0.9).add_(out.detach().mean(0))
        else:
            self.centre = 0.9 * self.centre + out.detach().mean(0)
        return loss


def patched(params: Any, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=lr)
    step = optimizer.step

    def halved(closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        return step()

    optimizer.step = halved  # type: ignore[method-assign]
    return optimizer


def with_state(params: Any, lr: float) -> torch.optim.Optimizer:
    """As after loading a checkpoint."""
    optimizer = torch.optim.Adam(params, lr=lr)
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(param, 0.1),
            "exp_avg_sq": torch.full_like(param, 0.2),
        }
    return optimizer


def counting_schedule(optimizer: torch.optim.Optimizer) -> Any:
    calls = [0]

    def factor(step: int) -> float:
        calls[0] += 1
        return 0.9 ** calls[0]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class ByWeights(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's own that reads the weights."""

    def get_lr(self) -> list[float]:
        groups = zip(self.base_lrs, self.optimizer.param_groups, strict=True)
        return [float(base) / (1 + float(group["params"][0].detach().norm())) for base, group in groups]


def numpy_logs(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]), {"numpy": np.float64(2), "flag": True, "whole": 3}


def masked(h: Tensor) -> Tensor:
    h = torch.tanh(h) * 1
    h[h > 0.5] = 0.0
    return h


def into(h: Tensor) -> Tensor:
    room = torch.empty(h.shape, dtype=h.dtype)
    torch.mul(h.detach(), 2, out=room)
    return torch.tanh(h + room)


def asserting(h: Tensor) -> Tensor:
    torch._assert_async((h.abs() < 1e9).all())
    return torch.tanh(h)


def forking(h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return h * torch.rand_like(h)


def between(function: Callable[[Tensor], Tensor], **changes: Any) -> Callable[[], list[shoal.Job]]:
    return lambda: jobs(lambda: Net(function), **changes)


def buffered(first: Tensor, after: Any) -> Callable[[], list[shoal.Job]]:
    return lambda: jobs(lambda: Buffered(first.clone(), after))


ROW, ONE = torch.zeros(8, dtype=torch.float64), torch.zeros((), dtype=torch.long)
CASES: dict[str, Case] = {
    "a scheduler that reads weights": Case(lambda: jobs(schedule=ByWeights)),
    "one buffer handed on to another": Case(buffered(ROW, swapped), "another name"),
    "two buffers become one": Case(buffered(ROW, same_twice), "another name"),
    "a buffer of another dtype": Case(buffered(ONE, other_dtype), "shape or dtype"),
    "a buffer of another shape": Case(buffered(ROW, other_shape), "shape or dtype"),
    "weights tied through .data": Case(lambda: jobs(tied_by_data), "same memory"),
    "a buffer that is a view of a weight": Case(lambda: jobs(lambda: LiveView(True)), "same memory"),
    "an attribute that is a view of a weight": Case(lambda: jobs(lambda: LiveView(False)), "another name of a.weight"),
    "an attribute that is a buffer": Case(lambda: jobs(lambda: NamedTwice(0))),
    "an attribute that is a buffer and changes": Case(lambda: jobs(lambda: NamedTwice(1)), "another name of order"),
    "a buffer that the first call makes": Case(lambda: jobs(MakesBuffer), "makes or removes buffer bias"),
    "an iterator": Case(lambda: jobs(lambda: Stateful(iter(list(range(99))))), STATE),
    "itertools.count": Case(lambda: jobs(lambda: Stateful(itertools.count())), STATE),
    "a deque": Case(lambda: jobs(lambda: Stateful(Queue())), STATE),
    "an object with slots": Case(lambda: jobs(lambda: Stateful(Slotted())), STATE),
    "a random.Random": Case(lambda: jobs(lambda: Dropping(random.Random(0))), STATE),
    "a numpy generator": Case(lambda: jobs(lambda: Dropping(np.random.default_rng(3))), STATE),
    "noise from a numpy generator": Case(lambda: jobs(NumpyNoise), STATE),
    "a counter in the model's closure": Case(lambda: jobs(counted_closure), "changes python"),
    "a counter in the step's closure": Case(lambda: jobs(step=[counting_step(), counting_step()]), STATE),
    "a loss that replaces its buffer": Case(lambda: jobs(loss=[Centred(False), Centred(False)]), STATE),
    "a loss that changes its buffer": Case(lambda: jobs(loss=[Centred(True), Centred(True)]), "changes"),
    "random numbers in a fork": Case(between(forking), "random numbers"),
    "a result written to out=": Case(between(into), "out="),
    "an assertion": Case(between(asserting), "gives no tensor"),
    "torch.func": Case(between(lambda h: torch.vmap(lambda row: row * row.sum())(h)), "torch.func"),
    "a patched optimizer": Case(lambda: jobs(optimizer=patched)),
    "an optimizer that has begun": Case(lambda: jobs(optimizer=with_state)),
    "a schedule that counts its calls": Case(lambda: jobs(schedule=counting_schedule)),
    "logs of numpy": Case(lambda: jobs(step=numpy_logs)),
    "writing through a mask": Case(between(masked)),
    "select_scatter": Case(between(lambda h: torch.tanh(torch.select_scatter(h, h[:, 0] * 2, 1, 3)))),
    "dropout of an expanded tensor": Case(between(lambda h: torch.tanh(F.dropout(h[:, :1].expand(-1, 8), 0.4) + h))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_alone_or_on_a_lower_tier_with_the_reason(name: str) -> None:
    case = CASES[name]
    alone = [shoal.solo(job) for job in case.make()]  # jobs with state of their own are made anew for every run
    pack = case.make()
    told = reasons(pack)  # planning leaves no trace in that state
    results = train(pack)
    assert {result.tier for result in results} == {"serial" if case.reason else "stacked"}, told
    assert case.reason in told
    for result, solo in zip(results, alone, strict=True):
        assert (result.status, result.error) == ("done", None)
        for key, value in solo.model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[key], value, rtol=1e-9, atol=1e-12)
        assert result.history[-1]["loss"] == pytest.approx(solo.history[-1]["loss"], rel=1e-9)


def test_a_learning_rate_that_is_a_tensor_stays_the_users() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    pack = jobs(optimizer=torch.optim.Adam, hparams={"lr": rate}, schedule=lambda step: 0.9**step)
    assert_as_alone(pack)
    assert float(rate) == 0.1


def test_a_backward_pass_that_raises_ends_its_own_member() -> None:
    broken = between(lambda h: h // 0.3 + h)()
    fine = jobs()
    for i, job in enumerate(fine):
        job.name = f"fine {i}"
    results = train([*broken, *fine])
    assert [result.status for result in results] == ["failed", "failed", "done", "done"]
    assert "floor_divide" in str(results[0].error)


def test_a_batch_that_members_share_gives_the_bits_of_a_batch_of_ones_own() -> None:
    for size in (20, 10, 7):
        pack = jobs(batch_size=size, shuffle=False)
        together = train(copy.copy(pack))
        assert_same_bits(train([pack[0]])[0], together[0])
