"""Every setting of a job, its own for each member of one stack, against the reference loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_close, numbers, reasons, slowly, train, whole
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as sched

import shoal

N, D, C = 21, 6, 3
X, Y = numbers(1, N, D), whole(2, C, N)


def net() -> nn.Module:
    body = nn.Sequential(nn.Linear(D, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, C))
    return body.double()


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net,
        "data": (X, Y),
        "loss": F.cross_entropy,
        "hparams": {"lr": 0.01},
        "batch_size": 8,
        "steps": 50,
        "name": f"{seed}",
    }
    return shoal.Job(seed=seed, **(settings | changes))


class Lion(optim.Optimizer):
    """A user's own optimizer, of which no rule knows anything."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((m * one + p.grad * (1 - one)).sign(), alpha=-group["lr"])
                m.mul_(two).add_(p.grad, alpha=1 - two)


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], list[dict[str, Any]]]] = {
    "SGD": (optim.SGD, [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.5}]),
    "SGD, momentum": (
        optim.SGD,
        [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.5, "dampening": 0.3, "weight_decay": 0.01}],
    ),
    "SGD, Nesterov": (optim.SGD, [{"lr": 0.1, "momentum": m, "nesterov": True} for m in (0.9, 0.7)]),
    "SGD, maximize": (optim.SGD, [{"lr": lr, "maximize": True} for lr in (1e-3, 1e-4)]),
    "Adam": (optim.Adam, [{"lr": 0.01}, {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}]),
    "Adam, AMSGrad": (
        optim.Adam,
        [{"lr": lr, "amsgrad": True, "betas": (0.9, b)} for lr, b in ((0.01, 0.9), (0.03, 0.999))],
    ),
    "AdamW": (optim.AdamW, [{"lr": 0.01, "weight_decay": w} for w in (0.0, 0.01, 0.3)]),
    "AdamW, AMSGrad": (optim.AdamW, [{"lr": lr, "amsgrad": True} for lr in (0.01, 0.05)]),
    "NAdam": (optim.NAdam, [{"lr": 0.01, "momentum_decay": m} for m in (0.004, 0.1)]),
    "RAdam": (optim.RAdam, [{"lr": 0.01, "betas": (0.9, b), "weight_decay": w} for b, w in ((0.999, 0.0), (0.8, 0.1))]),
    "Adamax": (optim.Adamax, [{"lr": 0.01}, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6}]),
    "Adagrad": (optim.Adagrad, [{"lr": 0.1, "lr_decay": 0.01}, {"lr": 0.05, "initial_accumulator_value": 0.5}]),
    "RMSprop": (optim.RMSprop, [{"lr": 0.01}, {"lr": 0.002, "alpha": 0.5, "weight_decay": 0.1}]),
    "RMSprop, centered, momentum": (
        optim.RMSprop,
        [{"lr": lr, "centered": True, "momentum": 0.8, "eps": 1e-4} for lr in (0.01, 0.003)],
    ),
    "Adadelta": (optim.Adadelta, [{"lr": 1.0}, {"lr": 0.5, "rho": 0.6, "eps": 1e-4}]),
    "ASGD": (optim.ASGD, [{"lr": 0.1, "t0": 20}, {"lr": 0.03, "lambd": 1e-3, "alpha": 0.5, "t0": 5}]),
    "Rprop": (optim.Rprop, [{"lr": 0.01}, {"lr": 0.003, "etas": (0.6, 1.1)}]),
    "Adafactor": (optim.Adafactor, [{"lr": 0.05}, {"lr": 0.02, "weight_decay": 0.1}]),
    "a user's own": (Lion, [{"lr": 1e-3}, {"lr": 1e-2, "betas": (0.5, 0.8)}]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_with_numbers_of_its_own_for_every_member(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    assert_as_alone([job(seed, optimizer=kind, hparams=hparams) for seed, hparams in enumerate(settings)])


def test_different_optimizers_in_one_list() -> None:
    kinds = [optim.SGD, optim.Adam, optim.SGD, Lion, optim.RMSprop]
    assert_as_alone([job(seed, optimizer=kind) for seed, kind in enumerate(kinds)])


def warm(optimizer: optim.Optimizer, first: int) -> sched.LRScheduler:
    return sched.SequentialLR(
        optimizer, [sched.LinearLR(optimizer, 0.1, total_iters=first), sched.CosineAnnealingLR(optimizer, 30)], [first]
    )


SCHEDULES: dict[str, tuple[str, Callable[[float], Callable[[Any], Any]]]] = {
    "a function": ("step", lambda k: lambda t: 1 / (1 + k * t)),
    "a function, by epoch": ("epoch", lambda k: lambda t: k**t),
    "StepLR": ("step", lambda k: lambda o: sched.StepLR(o, 7, k)),
    "MultiStepLR, by epoch": ("epoch", lambda k: lambda o: sched.MultiStepLR(o, [3, 9], k)),
    "ExponentialLR": ("step", lambda k: lambda o: sched.ExponentialLR(o, 0.9 + k / 10)),
    "ExponentialLR, by epoch": ("epoch", lambda k: lambda o: sched.ExponentialLR(o, k)),
    "CosineAnnealingLR": ("step", lambda k: lambda o: sched.CosineAnnealingLR(o, int(60 * k))),
    "CosineAnnealingWarmRestarts": ("step", lambda k: lambda o: sched.CosineAnnealingWarmRestarts(o, int(20 * k))),
    "OneCycleLR": ("step", lambda k: lambda o: sched.OneCycleLR(o, max_lr=0.1 * k, total_steps=60)),
    "CyclicLR": ("step", lambda k: lambda o: sched.CyclicLR(o, 0.001, 0.1 * k, 6, cycle_momentum=False)),
    "PolynomialLR": ("step", lambda k: lambda o: sched.PolynomialLR(o, 60, 1 + k)),
    "SequentialLR": ("step", lambda k: lambda o: warm(o, int(20 * k))),
    "ReduceLROnPlateau": ("epoch", lambda k: lambda o: sched.ReduceLROnPlateau(o, factor=k, patience=0, threshold=0.1)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [optim.AdamW, pytest.param(Lion, marks=pytest.mark.slow)], ids=["rule", "own"])
def test_schedule_of_its_own_for_every_member(name: str, kind: type[optim.Optimizer]) -> None:
    every, make = SCHEDULES[name]
    assert_as_alone(
        [job(seed, optimizer=kind, schedule=make(k), schedule_every=every) for seed, k in ((1, 0.3), (2, 0.8))]
    )


def test_some_members_have_a_schedule_and_some_none() -> None:
    cosine = SCHEDULES["CosineAnnealingLR"][1](1.0)
    halving = SCHEDULES["a function, by epoch"][1](0.5)
    by_epoch = {"schedule": halving, "schedule_every": "epoch"}
    assert_as_alone([job(1), job(2, schedule=cosine), job(3, **by_epoch), job(4, schedule=lambda t: 0.5**t)])


def groups(model: Any) -> list[dict[str, Any]]:
    """Two groups in another order than the model's, and one parameter that no group has."""
    return [{"params": model[4].parameters(), "lr": 0.001}, {"params": [model[0].weight], "weight_decay": 0.5}]


def groups_by(decay: float) -> Callable[[Any], list[dict[str, Any]]]:
    return lambda model: [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


def steady() -> nn.Module:
    """A network whose batch norm is frozen, as in fine-tuning."""
    model = net()
    model[1].eval()
    return model


class Tied(nn.Module):
    """A language model whose output weights are its embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(tokens))))


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    (tokens,) = batch
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return loss, {"perplexity": loss.exp(), "rows": len(tokens), "half": 0.5}


def dict_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    hit = (out.argmax(1) == batch["y"]).double().mean()
    return F.cross_entropy(out, batch["y"]), {"accuracy": hit, "size": out.detach().square().mean()}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return (self.a(x) * self.b(extra)).sum(1)


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "clip_norm": [{"clip_norm": 0.1}, {"clip_norm": None}, {"clip_norm": 2.0}],
    "clip_norm with a user's own optimizer": [{"clip_norm": c, "optimizer": Lion} for c in (0.1, 2.0)],
    "accumulate": [{"accumulate": 2, "clip_norm": 0.5}, {"accumulate": 2}],
    "accumulate, epochs": [{"accumulate": 2, "epochs": 9, "steps": None}] * 2,
    "batch sizes": [{"batch_size": 8}, {"batch_size": 6}, {"batch_size": 8}, {"batch_size": 30}, {"batch_size": 7}],
    "drop_last": [{"drop_last": True}] * 2,
    "drop_last for some": [{"drop_last": True}, {"drop_last": False}, {"drop_last": True}],
    "lengths": [{"steps": 1}, {"steps": 50}, {"steps": 0}, {"steps": 17}, {"epochs": 4, "steps": None}],
    "groups": [
        {"params": groups, "hparams": {"lr": 0.02}},
        {"params": groups, "hparams": {"lr": 0.1, "weight_decay": 0.1}},
    ],
    "groups by decay": [{"params": groups_by(d)} for d in (0.01, 0.3)],
    "frozen weights": [{"model": frozen}] * 2,
    "frozen in one": [{"model": frozen}, {}],
    "frozen batch norm": [{"model": steady}, {"model": steady}],
    "tied weights": [
        {"model": lambda: Tied().double(), "loss": None, "step": next_token, "data": (whole(3, 11, N, 5),)}
    ]
    * 2,
    "data of its own": [{"data": (numbers(s, N, D), whole(s, C, N))} for s in (1, 2, 3)],
    "data of another length": [{"data": (X[:n], Y[:n])} for n in (16, 21, 16)],
    "one order": [{"data_seed": 5}] * 3,
    "in order": [{"shuffle": False}] * 2,
    "one order for some": [{"data_seed": 5}, {"data_seed": 5}, {"data_seed": 6}],
    "dict data, own step, logs": [{"data": {"x": X, "y": Y}, "loss": None, "step": dict_step}] * 2,
    "two inputs, regression": [
        {"model": lambda: TwoInputs().double(), "data": (X, X[:, :2] ** 2, X[:, 0]), "loss": F.mse_loss}
    ]
    * 2,
    "sum": [{"loss": lambda o, y: F.cross_entropy(o, y, reduction="sum")}] * 2,
    "weighted loss": [{"loss": lambda o, y: F.cross_entropy(o, y, WEIGHT.to(o.device), label_smoothing=0.1)}] * 2,
    "weights by row": [
        {
            "data": (X, (Y, numbers(4, N).abs())),
            "loss": lambda o, y: (F.cross_entropy(o, y[0], reduction="none") * y[1]).mean(),
        }
    ]
    * 2,
    "ignored targets": [{"data": (X, torch.where(Y == 2, -100, Y))}] * 2,
    "soft targets": [{"data": (X, numbers(5, N, C).softmax(1))}] * 2,
    "validated": [{"val": (X[:9], Y[:9]), "metrics": {"top": lambda o, y: (o.argmax(1) == y).double().mean()}}] * 2,
    "best": [{"val": (X[:9], Y[:9]), "keep": "best", "hparams": {"lr": lr}} for lr in (0.3, 0.01)],
    "stopped early": [{"stop": shoal.EarlyStop("loss", patience=1, min_delta=d)} for d in (0.5, 0.0, 0.05)],
    "a module": [{"model": net()}] * 2,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_of_its_own_for_every_member(name: str) -> None:
    assert_as_alone([job(seed, **changes) for seed, changes in enumerate(SETTINGS[name], 1)])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda o, y: F.smooth_l1_loss(o, y, beta=0.3),
    "huber": lambda o, y: F.huber_loss(o, y, reduction="sum"),
    "bce": lambda o, y: F.binary_cross_entropy(o.sigmoid(), y),
    "bce with logits": lambda o, y: F.binary_cross_entropy_with_logits(o, y, pos_weight=y.new_tensor([1.0, 2.0, 0.5])),
    "kl": lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "poisson": F.poisson_nll_loss,
    "hinge": lambda o, y: F.hinge_embedding_loss(o, y.round() * 2 - 1),
    "margin": lambda o, y: F.multi_margin_loss(o, y.argmax(1)),
    "multilabel": lambda o, y: F.multilabel_soft_margin_loss(o, y.round()),
    "cosine": lambda o, y: F.cosine_embedding_loss(o, y, y.new_ones(1)),
    "triplet": lambda o, y: F.triplet_margin_loss(o, y, -y),
    "norm of outputs": lambda o, y: (o - y).norm() + o.logsumexp(1).var() + o.abs().max(),
}


# These look at numbers in Python (is a variance negative, how long is a row), which a graph does not have.
READS_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gaussian": lambda o, y: F.gaussian_nll_loss(o, y, o.exp()),
    "ctc": lambda o, y: F.ctc_loss(
        o.log_softmax(1)[:, None], torch.ones(1, 2, dtype=torch.long), torch.tensor([len(o)]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", slowly(LOSSES, {"mse", "bce with logits", "kl", "norm of outputs"}.__contains__))
def test_loss(name: str) -> None:
    target = numbers(9, N, C).sigmoid()
    jobs = [job(seed, data=(X, target), loss=LOSSES[name], hparams={"lr": lr}) for seed, lr in ((1, 0.01), (2, 0.03))]
    assert_as_alone(jobs)


@pytest.mark.parametrize("name", READS_NUMBERS)
def test_a_loss_that_reads_numbers_rides_a_lower_tier(name: str) -> None:
    jobs = [job(seed, data=(X, numbers(9, N, C).sigmoid()), loss=READS_NUMBERS[name], steps=9) for seed in (1, 2)]
    assert_as_alone(jobs, tier="serial", tolerance=1e-14)  # Adam's update is fused
    assert "depends on the data" in reasons(jobs)


def test_an_optimizer_that_evaluates_the_loss_itself_is_not_stacked() -> None:
    jobs = [
        job(s, optimizer=optim.LBFGS, hparams={"lr": 0.1}, model=lambda: nn.Linear(D, C).double(), steps=5)
        for s in (1, 2)
    ]
    assert_as_alone(jobs, tier="serial", tolerance=1e-15)
    assert "evaluates the loss itself" in reasons(jobs)


class OwnRate(Lion):
    """Finds its rate itself, and says None for it, as Adafactor of transformers does by default."""

    def __init__(self, params: Iterable[Tensor], scale: float = 1.0) -> None:
        super().__init__(params, lr=scale)
        self.scale = scale
        for group in self.param_groups:
            group["lr"] = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["lr"] = self.scale * float(group["params"][0].square().mean().sqrt()) / 100
        super().step()
        for group in self.param_groups:
            group["lr"] = None


@pytest.mark.parametrize("tier", ["stacked", "serial"])
def test_an_optimizer_without_a_learning_rate_of_its_own(tier: str) -> None:
    loss = F.cross_entropy if tier == "stacked" else lambda o, y: F.cross_entropy(o, y) * (1 + float(o.mean() > 9))
    jobs = [job(s, optimizer=OwnRate, hparams={"scale": s}, loss=loss, steps=9) for s in (1, 2)]
    assert_as_alone(jobs, tier=tier)
    assert math.isnan(train(jobs)[0].history[-1]["lr"])


def test_jobs_that_cannot_ride_together_form_stacks_of_their_own() -> None:
    wide = [job(s, model=lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, C)).double()) for s in (1, 2)]
    mixed = [job(3), wide[0], job(4, batch_size=6), wide[1], job(5)]
    results = train(mixed)
    assert {r.tier for r in results} == {"stacked"}
    for result, own in zip(results, mixed, strict=True):
        assert_close(result, shoal.solo(own))
        assert math.isfinite(result.history[-1]["loss"])
