"""Jobs whose training changes state that no state_dict has, one of each kind. Every call builds them anew."""

from __future__ import annotations

import array
import collections
import copy
import functools
import itertools
import queue
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shoal

G = torch.Generator().manual_seed(11)
X, Y = torch.randn(40, 4, generator=G, dtype=torch.float64), torch.randn(40, 1, generator=G, dtype=torch.float64)
CALLS = 0
Changes = dict[str, Any]


def linear() -> nn.Module:
    return nn.Linear(4, 1).double()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Counting(nn.Module):
    """A counter, a list and a hidden state among its attributes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = linear(), kind
        self.count, self.seen, self.hidden = 0, list[float](), torch.zeros(1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if not self.training:
            return out
        if self.kind == "counter":
            self.count += 1
            return out * (1 + 0.01 * self.count)
        if self.kind == "list":
            self.seen.append(float(out.detach().mean()))
            return out + 0.1 * sum(self.seen[-5:])
        out = out + 0.3 * self.hidden
        self.hidden = out.detach().mean(0)
        return out


class NotPersistent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("large", torch.ones(20_000, dtype=torch.float64), persistent=False)
        self.register_buffer("constant", torch.ones(20_000, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.large += 0.01
        return self.inner(x) * (1 + 0.01 * self.count) * self.large[7] * self.constant[3]


class ClassCounter(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += self.training
        return self.inner(x) * (1 + 0.01 * type(self).calls)


class Slowing(torch.optim.SGD):
    """Counts its steps by itself."""

    t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        self.param_groups[0]["lr"] = 0.05 / (1 + 0.1 * self.t)
        return super().step(closure)


class Inside(torch.optim.Optimizer):
    """Another optimizer inside, and slow weights beside the fast ones."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.Adam(self.param_groups, lr=lr)
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.taken += 1
        if self.taken % 3 == 0:
            for p, slow in self.slow.items():
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class Signs(torch.optim.Optimizer):
    """All its state is in its state_dict."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Wandering(lr_scheduler.LRScheduler):
    """A schedule with random numbers and a list of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.source, self.past = np.random.default_rng(3), list[float]()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.past.append(float(self.source.uniform(0.5, 1.0)))
        return [rate * float(np.mean(self.past[-4:])) for rate in self.base_lrs]


class Forgetful(Wandering):
    """Its state_dict says less than there is."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]


class Average:
    """The average of a model's weights, written through `.data`."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if name not in self.shadow:
                self.shadow[name] = p.data.clone()
            self.shadow[name].data.mul_(0.9).add_(0.1 * p.data)

    def distance(self, model: nn.Module) -> Tensor:
        return sum(((p - self.shadow[n]) ** 2).sum() for n, p in model.named_parameters())  # type: ignore[return-value]


class Moment(NamedTuple):
    x: Tensor
    weight: float


@dataclass
class Memory:
    size: int
    moments: list[Moment] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


class Slotted:
    __slots__ = ("best", "count")

    def __init__(self) -> None:
        self.count, self.best = 0, (0.0, None)


class Running:
    """A loss that divides by the average of those before it."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out, y)
        now = loss.detach()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return loss / (0.5 + self.mean)


# --- steps with state in their closures ------------------------------------------------------------------------------


def target_network() -> Changes:
    torch.manual_seed(5)
    target = linear()

    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for a, b in zip(target.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
            aim = target(batch[0])
        return loss_of(model, batch) + F.mse_loss(model(batch[0]), aim)

    return {"step": step}


def target_made_on_the_way() -> Changes:
    target: nn.Module | None = None

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal target
        if target is None:
            target = copy.deepcopy(model)
        with torch.no_grad():
            for a, b in zip(target.parameters(), model.parameters(), strict=True):
                a.data.lerp_(b.data, 0.1)
            aim = target(batch[0])
        return loss_of(model, batch) + F.mse_loss(model(batch[0]), aim)

    return {"step": step}


def random_numbers(draw: Callable[[], float]) -> Changes:
    return {"step": lambda model, batch: loss_of(model, batch) * (0.5 + draw())}


def torch_generator() -> Changes:
    source = torch.Generator().manual_seed(1)
    return random_numbers(lambda: float(torch.rand((), generator=source)))


def numpy_generator() -> Changes:
    source = np.random.default_rng(1)
    return random_numbers(lambda: source.random())


def numpy_state() -> Changes:
    source = np.random.RandomState(1)
    return random_numbers(lambda: source.rand())


def python_generator() -> Changes:
    source = random.Random(1)
    return random_numbers(source.random)


def module_random() -> Changes:
    return random_numbers(lambda: random.random())


def numpy_random() -> Changes:
    return random_numbers(lambda: np.random.beta(0.5, 0.5))


def dict_in_closure() -> Changes:
    state: dict[str, Any] = {"n": 0, "last": None}

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch) * (1 + 0.01 * state["n"]) + (0 if state["last"] is None else state["last"])
        state["n"] += 1
        state["last"], state[state["n"] % 3] = 0.1 * loss.detach(), state["n"]
        return loss

    return {"step": step}


def nonlocal_counter() -> Changes:
    count = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        return loss_of(model, batch) * (1 + 0.01 * count)

    return {"step": step}


def global_counter() -> Changes:
    global CALLS
    CALLS = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        global CALLS
        CALLS += 1
        return loss_of(model, batch) * (1 + 0.01 * CALLS)

    return {"step": step}


def class_counter() -> Changes:
    ClassCounter.calls = 0
    return {"model": ClassCounter}


def function_attribute() -> Changes:
    def step(model: nn.Module, batch: Any) -> Tensor:
        step.count += 1  # type: ignore[attr-defined]
        return loss_of(model, batch) * (1 + 0.01 * step.count)  # type: ignore[attr-defined]

    step.count = 0  # type: ignore[attr-defined]
    return {"step": step}


def mutable_default() -> Changes:
    def step(model: nn.Module, batch: Any, seen: list[float] = []) -> Tensor:  # noqa: B006
        seen.append(0.01 * len(seen))
        return loss_of(model, batch) * (1 + seen[-1])

    own = functools.partial(step, seen=[])
    return {"step": lambda model, batch: own(model, batch)}


def average() -> Changes:
    ema = Average()

    def step(model: nn.Module, batch: Any) -> Tensor:
        ema.update(model)
        return loss_of(model, batch) + ema.distance(model)

    return {"step": step}


def replay() -> Changes:
    past: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)

    def step(model: nn.Module, batch: Any) -> Tensor:
        past.append((batch[0][:2].clone(), batch[1][:2].clone()))
        return loss_of(model, batch) + sum(loss_of(model, old) for old in past)

    return {"step": step}


def objects() -> Changes:
    memory, slotted = Memory(4), Slotted()

    def step(model: nn.Module, batch: Any) -> Tensor:
        memory.moments.append(Moment(batch[0][:1].clone(), 0.1 * len(memory.moments)))
        memory.names.add(f"m{len(memory.moments)}")
        del memory.moments[: -memory.size]
        slotted.count += 1
        slotted.best = max(slotted.best, (slotted.count, memory.moments[0]), key=lambda pair: pair[0])
        old = slotted.best[1]
        assert isinstance(old, Moment)
        return loss_of(model, batch) + old.weight * model(old.x).square().mean() * len(memory.names)

    return {"step": step}


def tables() -> Changes:
    counts: collections.Counter[str] = collections.Counter()
    lists: defaultdict[int, list[float]] = defaultdict(list)
    array, many = np.zeros(3), list[float]()

    def step(model: nn.Module, batch: Any) -> Tensor:
        counts["steps"] += 1
        lists[counts["steps"] % 2].append(0.01 * counts["steps"])
        array[counts["steps"] % 3] += 0.1
        many.extend([0.001 * counts["steps"]] * 40)
        return loss_of(model, batch) * (1 + sum(map(sum, lists.values())) + float(array.sum()) + sum(many[-50:]))

    return {"step": step}


def iterators() -> Changes:
    weights, turns, number = iter([0.01 * i for i in range(500)]), itertools.cycle([0.1, 0.5, 0.9]), itertools.count(1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch) * (1 + next(weights)) * next(turns) + 1e-3 * next(number)

    return {"step": step}


def second_optimizer() -> Changes:
    torch.manual_seed(6)
    critic = linear()
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.05)

    def step(model: nn.Module, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            (critic(batch[0]) - model(batch[0]).detach()).square().mean().backward()
        optimizer.step()
        return loss_of(model, batch) + 0.1 * critic(batch[0]).detach().mean() * model(batch[0]).mean()

    return {"step": step}


def asked_schedule() -> Changes:
    asked = 0

    def schedule(step: int) -> float:
        nonlocal asked
        asked += 1
        return 1 / (1 + 0.1 * asked)

    return {"schedule": schedule}


def shared_with_schedule() -> Changes:
    state = {"factor": 1.0}

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        state["factor"] = 0.95 * state["factor"] + 0.01 * float(loss.detach())
        return loss

    return {"step": step, "schedule": lambda step: state["factor"]}


def holder_of_optimizer() -> Changes:
    held: dict[str, Any] = {"n": 0}

    def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
        held["optimizer"] = torch.optim.SGD(params, **settings)
        optimizer: torch.optim.Optimizer = held["optimizer"]
        return optimizer

    def step(model: nn.Module, batch: Any) -> Tensor:
        held["n"] += 1
        held["optimizer"].param_groups[0]["lr"] = 0.1 / (1 + 0.1 * held["n"])
        return loss_of(model, batch)

    return {"step": step, "optimizer": make}


def spectral_norm() -> Changes:
    """Its vectors are buffers; a counter makes it a job that cannot be traced."""
    count = [0]

    def step(model: nn.Module, batch: Any) -> Tensor:
        count[0] += 1
        return loss_of(model, batch) * (1 + 0.01 * count[0])

    def model() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4).double()), nn.Linear(4, 1).double()
        )

    return {"step": step, "model": model}


def counting_lambda(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """The function that counts is made with the scheduler."""
    seen: list[int] = []

    def factor(step: int) -> float:
        seen.append(step)
        return 0.9 ** len(seen)

    return lr_scheduler.LambdaLR(optimizer, factor)


def counting_scale(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    calls = itertools.count()
    warm = lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    cyclic = lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, 3, cycle_momentum=False, scale_fn=lambda x: 1 / (1 + next(calls))
    )
    return lr_scheduler.SequentialLR(optimizer, [warm, cyclic], [3])


def milestones(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Its state_dict has a Counter."""
    return lr_scheduler.MultiStepLR(optimizer, [3, 6, 11], 0.5)


def buffers_and_a_queue() -> Changes:
    numbers, text, waiting = array.array("d", [0.0]), bytearray(), queue.Queue[float]()

    def step(model: nn.Module, batch: Any) -> Tensor:
        numbers[0] += 0.01
        numbers.append(numbers[-1])
        text.append(1)
        waiting.put(0.001)
        return loss_of(model, batch) * (1 + numbers[0] + 0.001 * len(numbers) + 0.01 * len(text) + sum(waiting.queue))

    return {"step": step}


def lazy_network() -> nn.Module:
    layers = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))
    return layers.double()


def groups_by_ndim(model: nn.Module) -> list[dict[str, Any]]:
    """Without weight decay on vectors; a lazy parameter is a vector until the first batch."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.3}]
    groups.append({"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


KINDS: dict[str, Callable[[], Changes]] = {
    "counter": lambda: {"model": lambda: Counting("counter")},
    "list": lambda: {"model": lambda: Counting("list")},
    "hidden state": lambda: {"model": lambda: Counting("hidden")},
    "target network": target_network,
    "target made on the way": target_made_on_the_way,
    "buffer that is not persistent": lambda: {"model": NotPersistent},
    "optimizer's attribute": lambda: {"optimizer": Slowing, "hparams": {"lr": 0.05}},
    "optimizer inside another": lambda: {"optimizer": Inside, "hparams": {"lr": 0.05}},
    "torch generator": torch_generator,
    "numpy generator": numpy_generator,
    "numpy state": numpy_state,
    "python generator": python_generator,
    "module random": module_random,
    "module numpy.random": numpy_random,
    "dict in a closure": dict_in_closure,
    "nonlocal counter": nonlocal_counter,
    "global counter": global_counter,
    "class attribute": class_counter,
    "function attribute": function_attribute,
    "mutable default": mutable_default,
    "average of weights": average,
    "replay buffer": replay,
    "objects": objects,
    "tables": tables,
    "iterators": iterators,
    "second optimizer": second_optimizer,
    "schedule of its own": lambda: {"schedule": Wandering},
    "schedule that forgets": lambda: {"schedule": Forgetful},
    "schedule that counts": asked_schedule,
    "schedule and step share": shared_with_schedule,
    "holder of the optimizer": holder_of_optimizer,
    "loss with a mean": lambda: {"loss": Running()},
    "spectral norm": spectral_norm,
    "optimizer of its own, milestones": lambda: {"optimizer": Signs, "schedule": milestones},
    "optimizer inside another, milestones": lambda: {"optimizer": Inside, "schedule": milestones},
    "function of a scheduler": lambda: {"schedule": counting_lambda},
    "function of a scheduler, every epoch": lambda: {"schedule": counting_lambda, "schedule_every": "epoch"},
    "function of a scheduler in another": lambda: {"schedule": counting_scale},
    "buffers and a queue": buffers_and_a_queue,
    "lazy modules": lambda: {"model": lazy_network, "average": shoal.EMA(decay=0.9, use_buffers=True)},
    "lazy modules, groups": lambda: {"model": lazy_network, "params": groups_by_ndim},
    "lazy modules, optimizer of its own": lambda: {"model": lazy_network, "optimizer": Slowing},
}


def job(kind: str, **more: Any) -> shoal.Job:
    """A job of this kind, with objects of its own."""
    settings: Changes = {
        "model": linear,
        "data": (X, Y),
        "hparams": {"lr": 0.02},
        "batch_size": 8,
        "epochs": 4,
        "name": kind,
    }
    changes = KINDS[kind]()
    if "step" not in changes and "loss" not in changes:
        changes["loss"] = F.mse_loss
    return shoal.Job(**(settings | changes | more))
