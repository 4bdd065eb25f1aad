"""Steps that write where one might not expect it: in validation, to their batch, to gradients, to buffers' shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from tests.engine.proof.steps.compare import differences
from torch import Tensor, nn

import shoal
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.state import load_optimizer

N, D, C = 18, 6, 3
X, Y = numbers(1, 25, D), whole(2, C, 25)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, C)
        self.register_buffer("n", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def jobs(model: Callable[[], nn.Module] = Net, step: Any = plain, **changes: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {"data": (X[:N], Y[:N]), "val": (X[N:], Y[N:]), "optimizer": torch.optim.SGD}
    settings |= {"batch_size": 5, "epochs": 2} | changes
    rates = (0.1, 0.03, 0.05)
    return [shoal.Job(model=model, step=step, hparams={"lr": lr}, seed=i, **settings) for i, lr in enumerate(rates)]


class Limited(Net):
    """An embedding that scales rows down when they are read, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(5, D, max_norm=1.0).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e((x[:, 0].abs() * 2).long().clamp(max=4)))


def clipped(model: nn.Module, batch: Any) -> Tensor:
    """Clips weights, in validation too; the checks of a distribution keep validation from being one program."""
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.3, 0.3)
    return -torch.distributions.Normal(model(batch[0]), 1.0).log_prob(F.one_hot(batch[1], C).double()).mean()


def counted(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model.n, Tensor)
    model.n += 1
    return plain(model, batch) * (1 + model.n)


@pytest.mark.parametrize("model,step", [(Limited, plain), (Net, clipped), (Limited, clipped), (Net, counted)])
def test_what_validation_writes_stays_written(model: Callable[[], nn.Module], step: Any) -> None:
    optimizer = lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)  # noqa: E731
    assert_as_alone(jobs(model, step, optimizer=optimizer), tier=None)


def test_a_validation_that_is_begun_again_writes_once() -> None:
    """One member's metric raises; the others are validated a second time, without it."""

    def metric(limit: float) -> Callable[[Tensor, Tensor], float]:
        def measure(outputs: Tensor, targets: Tensor) -> float:
            if limit > 0:
                raise RuntimeError("this metric cannot be measured")
            return 1.0

        return measure

    made = [*jobs(step=counted, metrics={"m": metric(0)}), *jobs(step=counted, metrics={"m": metric(1)})[:1]]
    for i, job in enumerate(made):
        job.name = str(i)
    results = assert_as_alone(made[:3], tier="stacked")
    results = shoal.train([made[3], *made[:3]], device="cpu")
    assert [result.status for result in results] == ["failed", "done", "done", "done"]
    for result, job in zip(results[1:], made[:3], strict=True):
        assert torch.equal(result.model.n, shoal.solo(job).model.n)


def halved(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    x *= 0.5
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("draws", [False, True])
def test_a_step_may_write_to_its_batch(draws: bool) -> None:
    """`draws`: members whose evaluation draws are validated one by one."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return halved(model, batch) + (0 * torch.rand(()) if draws else 0)

    assert_as_alone(jobs(step=step), tier="stacked")
    assert torch.equal(X, numbers(1, 25, D))


class Conjugate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x[:, :3], x[:, 3:]) @ self.c.conj().t()
        return super().forward(torch.view_as_real(z).flatten(1))


def test_gradients_may_be_conjugated_views() -> None:
    made = jobs(Conjugate)
    for job in made:
        job.hparams = {**job.hparams, "momentum": 0.9}
    assert_as_alone(made)


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_adagrad_has_state_for_parameters_that_are_not_trained(start: float) -> None:
    def frozen() -> nn.Module:
        model = Net()
        model.a.requires_grad_(False)
        return model

    made = jobs(frozen, optimizer=torch.optim.Adagrad)
    for job in made:
        job.hparams = {**job.hparams, "initial_accumulator_value": start}
    results = assert_as_alone(made)
    assert float(results[0].optimizer_state["state"][0]["sum"].max()) == start


class Growing(Net):
    """A bank that grows with every batch, and a loss that is not finite at the sixth."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, D).double())

    def forward(self, x: Tensor) -> Tensor:
        self.bank = torch.cat([self.bank, x[:1]])
        self.n += 1
        return super().forward(x) / (self.n < 6)


def test_buffers_that_grew_are_put_back_when_a_loss_is_not_finite() -> None:
    for result, job in zip(shoal.train(jobs(Growing, val=None), device="cpu"), jobs(Growing, val=None), strict=True):
        assert (result.status, len(result.model.bank)) == ("diverged", 6)
        assert not differences(result, shoal.solo(job))


class Hooked(Net):
    """A hook that is a closure over the network: that of a copy writes into the original."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda module, inputs, output: self.seen.update(out=output))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen.pop("out")[:, :C]


def test_a_hook_over_the_network_is_not_refused() -> None:
    assert_as_alone(jobs(Hooked), tier=None)


def test_a_mistake_is_still_refused_when_the_network_is_built_again() -> None:
    with pytest.raises(shoal.JobError, match="TypeError"):
        shoal.train(jobs(step=lambda model, batch: batch["missing"]), device="cpu")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_a_step_reads(accumulate: int) -> None:
    """The second batch of a group finds those of the first, and validation those of the last step."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        known = [(p * p.grad).sum() for p in model.parameters() if p.grad is not None]
        return plain(model, batch) + 0.1 * sum(known)

    assert_as_alone(jobs(step=step, accumulate=accumulate), tier="serial")


def test_weights_that_a_step_writes_are_put_back_where_it_raises() -> None:
    """The stacked step raises for one member and is taken again by its own code, which writes a second time."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert isinstance(model, Net)
        with torch.no_grad():
            model.a.weight.mul_(0.9)
        h = torch.tanh(model.a(x))
        k = h.t() @ h / len(h) - 3e-4 * torch.eye(D).double()
        try:
            h = h @ torch.linalg.cholesky(k)
        except RuntimeError:
            h = h @ torch.linalg.cholesky(k + torch.eye(D).double())
        return F.cross_entropy(model.b(h), y)

    results = assert_as_alone(jobs(step=step, batch_size=9, epochs=4, val=None), tier=None)
    assert {result.tier for result in results} == {"stacked", "serial"}


def test_weights_that_a_step_writes_are_put_back_where_a_check_fails() -> None:
    """A distribution's check fails for one member, which takes the batch again by itself, and ends there."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert isinstance(model, Net)
        with torch.no_grad():
            model.a.weight.mul_(0.9)
        model.n += 1
        scale = 1.0 - (model.n > 4) * (model.b.bias.detach()[0] > 0).double()
        return -torch.distributions.Normal(model(x), scale).log_prob(F.one_hot(y, C).double()).mean()

    made = jobs(step=step, val=None)
    results = shoal.train(made, device="cpu")
    alone = [shoal.solo(job) for job in made]
    assert {result.status for result in alone} == {"done", "failed"}
    assert not [line for a, b in zip(results, alone, strict=True) for line in differences(a, b)]


class Layers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(D).double(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(self.norm(x)))


def test_what_a_step_sets_in_modules_is_set_in_the_results() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Layers)
        model.norm.eval()
        model.drop.p = 0.4
        return plain(model, batch)

    results = assert_as_alone(jobs(Layers, step=step))
    for result in results:
        assert result.model.drop.p == 0.4


def test_numbers_of_an_optimizer_keep_their_dtype_when_they_are_loaded() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    first, second = torch.optim.NAdam([param]), torch.optim.NAdam([param])
    param.grad = torch.ones_like(param)
    first.step()
    load_optimizer(second, first.state_dict())
    for name, value in first.state[param].items():
        assert second.state[param][name].dtype == value.dtype, name


def test_an_update_that_breaks_off_ends_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights have moved and others not; to go on would be to train something else."""
    calls = [0]
    update = Rule.update_all_

    def breaks_off(self: Rule, params: Any, *others: Any) -> None:
        calls[0] += 1
        update(self, params, *others)
        if calls[0] == 3:
            raise RuntimeError("the update cannot go on")

    monkeypatch.setattr(Rule, "update_all_", breaks_off)
    monkeypatch.setattr("shoal.engine.stack.stacked_optimizer._fast_update", lambda *_: None)
    monkeypatch.setattr("shoal.engine.stack._flat_state.suits_copies", lambda *_: False)
    results = shoal.train(jobs(), device="cpu")
    assert {(result.status, result.tier) for result in results} == {("failed", "stacked")}
    assert "cannot go on" in str(results[0].error)
