"""What users write into networks: exact on the stacked tier, or on a lower one with the reason told. Never wrong.

Each case says which of the two it is; the result is that of the reference loop either way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_close, numbers, planned, reasons, train, whole
from torch import Tensor, manual_seed, nn
from torch.utils.checkpoint import checkpoint

import shoal

N, D, C = 20, 6, 3
X, Y, TOKENS = numbers(1, N, D), whole(2, C, N), whole(3, 11, N, 5)


@dataclass(frozen=True)
class Case:
    """A network that is exact when stacked, or (where `reason` is given) rides a lower tier for that reason."""

    models: list[Callable[[], nn.Module]]
    reason: str = ""
    changes: tuple[tuple[str, Any], ...] = ()


class Net(nn.Module):
    """Two layers; what is between them is the case."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 8), nn.Linear(8, C)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class FunctionalDropout(Net):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), self.p, self.training))


class FunctionalBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.batch_norm(self.a(x) - self.a.bias, self.mean, self.var, training=self.training, momentum=0.2)
        return self.b(torch.tanh(h + self.a.bias))


class Noisy(Net):
    """randn and rand in forward, while training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h + 0.1 * torch.randn_like(h) + 0.05 * torch.rand(8, dtype=h.dtype, device=h.device)
        return self.b(torch.tanh(h) * torch.randint(1, 3, (8,), device=h.device))


class Shuffled(Net):
    """mixup: rows mixed with a permutation of themselves."""

    def forward(self, x: Tensor) -> Tensor:
        other = x[torch.randperm(x.shape[0], device=x.device)] if self.training else x
        return self.b(torch.tanh(self.a(0.8 * x + 0.2 * other)))


class Counting(Net):
    """Buffers that forward changes, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(D))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().max()
        return self.b(torch.tanh(self.a((x - self.centre) / self.scale)))


class InPlace(Net):
    """In-place arithmetic, on views too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.mul_(2).add_(1)
        h[:, :4] *= 0.5
        h[:, 0] = h[:, 1].detach()
        h[:, 5].sub_(1)
        F.relu_(h)
        h = h.clone().masked_fill_(h > 3, 3.0)
        out = torch.zeros(len(x), 8, dtype=h.dtype, device=h.device)
        out[:, 2:] = h[:, 2:]
        out.index_add_(1, torch.tensor([0, 1], device=h.device), h[:, :2])
        return self.b(out)


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 4, max_norm=0.8), nn.Linear(4, C)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).mean(1))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True, bias=False), nn.Linear(8, C)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        padding = tokens == 0
        padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], 1)
        causal = torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)
        return self.out(
            self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=False)[0].mean(1)
        )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.out = (
            nn.Embedding(11, 4),
            nn.LSTM(4, 5, 2, dropout=0.2, batch_first=True),
            nn.Linear(5, C),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.table(tokens))
        return self.out(last[-1])


class Tied(nn.Module):
    """One matrix both ways, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.mix, self.out = nn.Linear(D, 8), nn.Linear(8, 8), nn.Linear(8, C)
        self.again = self.mix

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.mix(self.inward(x)))))
        return self.out(h + F.linear(F.linear(h, self.inward.weight.T), self.inward.weight))


class Added(Net):
    """Parameters that are added to each other, and get one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + (self.one + self.other)))


def summed(model: nn.Module, batch: Any) -> Tensor:
    """A parameter whose gradient is one number for all its elements."""
    x, y = batch
    return F.cross_entropy(model(x), y) + 0.1 * model.b.bias.sum() + 0.1 * model.a.weight.mean()  # type: ignore[union-attr, operator]


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.tanh(h) if h.mean() > 0 else torch.sigmoid(h))


class Picking(Net):
    """A shape that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h) * h[h > 0].sum() / N


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) * float(x.abs().max())))


class Double(torch.autograd.Function):
    """Its backward is not that of its forward, which only autograd.Function can say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class StepCounting(Net):
    """A python number that forward changes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.tanh(self.a(x))) * (1 + 1 / (1 + self.calls))


class OutsideRandomness(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * (1 + random.random() + float(np.random.randn()))


class Lost(Net):
    """Reads and writes a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.memory.mul_(0.5).add_(h.detach().mean(0))
        return self.b(torch.tanh(h - self.memory))


class Seeding(Net):
    def forward(self, x: Tensor) -> Tensor:
        manual_seed(3)
        return self.b(F.dropout(self.a(x), 0.5))


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.drop = reentrant, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(checkpoint(lambda h: self.drop(torch.tanh(h)), h, use_reentrant=self.reentrant))


class Penalised(Net):
    """A gradient inside the step."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.b(torch.tanh(self.a(x)))
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out * (1 + grad.square().mean())


def forward_hooked() -> nn.Module:
    model = Net()
    model.a.register_forward_hook(lambda module, args, out: out * 1.5)
    model.b.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
    return model


def backward_hooked() -> nn.Module:
    model = Net()
    model.a.register_full_backward_hook(lambda module, grads, outs: (None,))
    model.b.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    return model


def gradient_hooked() -> nn.Module:
    model = Net()
    model.a.weight.register_hook(lambda grad: grad * 0.5)
    return model


def tensor_hooked() -> nn.Module:
    def between(h: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return torch.tanh(h)

    return Net(between)


def frozen() -> nn.Module:
    model = Net()
    model.a.requires_grad_(False)
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(20, C))


def closure(constant: float) -> Callable[[], nn.Module]:
    return lambda: Net(lambda h: torch.tanh(h * constant) + constant)


def table(seed: int) -> Callable[[], nn.Module]:
    fixed = numbers(seed, 8)
    return lambda: Net(lambda h: torch.tanh(h * fixed.to(h.device)))


def weighted(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (F.cross_entropy(model(x), y, reduction="none") * torch.where(y == 0, 3.0, 0.5)).mean()


READS = (("data", (TOKENS, Y)),)
CLIPPED = (("clip_norm", 0.05), ("optimizer", torch.optim.SGD))
CASES: dict[str, Case] = {
    # The twelve that the mechanism was chosen by.
    "functional dropout with a rate of its own": Case([lambda: FunctionalDropout(0.1), lambda: FunctionalDropout(0.5)]),
    "functional batch norm with running statistics": Case([FunctionalBatchNorm] * 2),
    "LSTM": Case([Recurrent] * 2, changes=READS),
    "attention with masks": Case([Masked] * 2, changes=READS),
    "tied weights": Case([Tied] * 2),
    "Embedding with max_norm": Case([MaxNorm] * 2, changes=READS),
    "a constant that differs in a closure": Case([closure(1.0), closure(0.5), closure(2.0)]),
    "a tensor that differs in a closure": Case([table(1), table(2)]),
    "random numbers in forward": Case([Noisy] * 2),
    "a random permutation in forward": Case([Shuffled] * 2),
    "buffers changed in forward": Case([Counting] * 2),
    "in-place operators": Case([InPlace] * 2),
    "a weighted loss": Case([Net] * 2, changes=(("loss", None), ("step", weighted))),
    "parameters that are added, clipped": Case([Added] * 2, changes=CLIPPED),
    "parameters that are summed up, clipped": Case([Net] * 2, changes=(*CLIPPED, ("loss", None), ("step", summed))),
    "LSTM, clipped": Case([Recurrent] * 2, changes=(*READS, *CLIPPED)),
    "a short last batch": Case([Net] * 2, changes=(("batch_size", 13),)),
    # Bar 9.
    "frozen parameters": Case([frozen] * 2),
    "forward hooks": Case([forward_hooked] * 2),
    "data-dependent control flow": Case([Branching] * 2, "depends on the data"),
    "a shape that depends on the data": Case([Picking] * 2, "depends on the data"),
    "a number read from a tensor": Case([Reading] * 2, "data"),
    "a custom autograd.Function": Case([lambda: Net(Double.apply)] * 2, "custom autograd.Function"),
    "backward hooks": Case([backward_hooked] * 2, "backward hook"),
    "a gradient hook on a parameter": Case([gradient_hooked] * 2, "gradient hook"),
    "a gradient hook on a tensor": Case([tensor_hooked] * 2, "gradient hook"),
    "a python attribute that forward changes": Case([StepCounting] * 2, "changes python attributes"),
    "python's and numpy's random numbers": Case([OutsideRandomness] * 2, "random numbers"),
    "a tensor nobody knows of": Case([Lost] * 2, "neither a parameter nor a buffer"),
    "a seed set in forward": Case([Seeding] * 2, "seeds torch's random numbers"),
    "checkpointed activations": Case([lambda: Checkpointed(False)] * 2),
    "checkpointed activations, the old way": Case([lambda: Checkpointed(True)] * 2, "autograd.Function"),
    "a gradient inside the step": Case([Penalised] * 2, "autograd.grad"),
    "sparse gradients": Case([sparse] * 2, "sparse", changes=(*READS, ("optimizer", torch.optim.SGD))),
    "a TorchScript module": Case([lambda: torch.jit.script(nn.Linear(D, C))] * 2, "TorchScript"),
    "lazily built layers": Case([lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(C))] * 2, "lazily"),
}  # fmt: skip


def jobs(case: Case, steps: int = 50) -> list[shoal.Job]:
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "batch_size": 8} | dict(case.changes)
    return [
        shoal.Job(model=lambda m=model: m().double(), seed=i, name=f"{i}", steps=steps, hparams={"lr": lr}, **settings)
        for i, (model, lr) in enumerate(zip(case.models, (0.01, 0.03, 0.1), strict=False))
    ]


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_exact_or_on_a_lower_tier_with_the_reason(name: str) -> None:
    case = CASES[name]
    pack = jobs(case, 50 if not case.reason else 12)
    assert_as_alone(pack, tier="serial" if case.reason else "stacked", noise=("qkv",))
    if case.reason:
        assert case.reason in reasons(pack)
    else:
        assert len(planned(pack).parts) == 1


def test_a_network_that_cannot_be_stacked_does_not_keep_the_others_from_it() -> None:
    pack = [*jobs(Case([Net] * 3)), *jobs(CASES["data-dependent control flow"], 9)]
    for i, job in enumerate(pack):
        job.name = f"job {i}"
    results = train(pack)
    assert [result.tier for result in results] == ["stacked"] * 3 + ["serial"] * 2
    for result, job in zip(results, pack, strict=True):
        assert_close(result, shoal.solo(job))


def test_weights_that_lie_side_by_side_in_one_storage_are_stacked() -> None:
    """As cuDNN wants the weights of an LSTM on a GPU."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True).double(), nn.Linear(5, 3).double()
            own = list(self.lstm.parameters())
            whole = torch.cat([p.detach().flatten() for p in own])
            for p, piece in zip(own, whole.split([p.numel() for p in own]), strict=True):
                p.data = piece.view_as(p)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x)[0][:, -1])
            return out

    x, y = numbers(1, 24, 6, 4), whole(2, 3, 24)
    jobs = [
        shoal.Job(model=Flat, data=(x, y), loss=F.cross_entropy, batch_size=8, epochs=2, seed=i, name=str(i))
        for i in range(3)
    ]
    results = shoal.train(jobs, device="cpu")
    assert [result.tier for result in results] == ["stacked"] * 3
    for job, result in zip(jobs, results, strict=True):
        assert_close(result, shoal.solo(job))
