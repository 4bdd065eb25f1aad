"""One test against each mistake of the public systems of this family (those of tuning are tested with it)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, distance, distances, numbers, optimizer_tensors, planned, train, whole
from torch import Tensor, nn

import shoal

N, D, C = 24, 6, 3
X, Y = numbers(1, N, D), whole(2, C, N)


class Net(nn.Module):
    """A user's own class, with keys of its own."""

    def __init__(self, p: float = 0.0, momentum: float = 0.1) -> None:
        super().__init__()
        self.encode = nn.Linear(D, 8, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(8, momentum=momentum), nn.Dropout(p)
        self.decode = nn.ModuleDict({"head": nn.Linear(8, C)})

    def forward(self, x: Tensor) -> Tensor:
        out = self.decode["head"](self.drop(torch.relu(self.norm(self.encode(x)))))
        assert isinstance(out, Tensor)
        return out


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": lambda: Net().double(),
        "data": (X, Y),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD,
        "hparams": {"lr": 0.1},
        "batch_size": 8,
        "steps": 12,
        "name": f"{seed}",
    }
    return shoal.Job(seed=seed, **(settings | changes))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_members_gradient_is_not_divided_by_the_size_of_the_pack(size: int) -> None:
    """The sum over members is the right loss; their mean divides every gradient by their number."""
    start = Net().double()
    twin = copy.deepcopy(start)
    (expected,) = torch.autograd.grad(F.cross_entropy(twin(X[:8]), Y[:8]), [twin.encode.weight])
    pack = [job(s, model=start, shuffle=False, steps=1, hparams={"lr": 1.0}) for s in range(size)]
    for result in train(pack):
        assert result.tier == "stacked"
        assert distance(start.encode.weight - result.model.encode.weight, expected) < 1e-9


def test_running_statistics_are_updated_and_each_members_own() -> None:
    shifted = [job(s, data=(X + 10 * s, Y), name=f"{s}") for s in range(3)]
    results = train(shifted)
    means = [result.model.norm.running_mean for result in results]
    tracked = [int(result.model.norm.num_batches_tracked) for result in results]
    assert tracked == [12, 12, 12]
    for mean, own in zip(means, shifted, strict=True):
        assert distance(mean, shoal.solo(own).model.norm.running_mean) < 1e-9
    assert distance(means[0], means[2]) > 0.5


def test_one_members_weight_decay_or_learning_rate_touches_nobody_else() -> None:
    heavy = {"lr": 0.1, "weight_decay": 5.0}
    results = train([job(0), job(1, hparams=heavy), job(2, hparams={"lr": 0.0})])
    assert_close(results[0], shoal.solo(job(0)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        untouched = Net().double()
    assert torch.equal(results[2].model.encode.weight, untouched.encode.weight)


def test_a_member_with_a_smaller_batch_sees_all_of_its_rows() -> None:
    """Every row exactly once an epoch, whatever the others' batches are: counted in a buffer."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, C)
            self.register_buffer("seen", torch.zeros(N))

        def forward(self, rows: Tensor) -> Tensor:
            if self.training:
                self.seen += F.one_hot(rows, N).sum(0)
            return self.inner(rows[:, None].double())

    rows = torch.arange(N)
    sizes = (3, 5, 8, 24, 100)
    pack = [
        job(s, model=lambda: Counts().double(), data=(rows, Y), batch_size=b, epochs=3, steps=None)
        for s, b in enumerate(sizes)
    ]
    for result in train(pack):
        assert result.tier == "stacked"
        assert result.model.seen.tolist() == [3.0] * N


def test_python_attributes_are_each_members_own_not_the_firsts() -> None:
    rates = (0.0, 0.5, 0.9)
    pack = [job(s, model=lambda p=p, s=s: Net(p, momentum=0.1 + 0.3 * s).double()) for s, p in enumerate(rates)]
    results = train(pack)
    assert {r.tier for r in results} == {"stacked"}
    for result, own, p in zip(results, pack, rates, strict=True):
        assert_close(result, shoal.solo(own))
        assert result.model.drop.p == p


def times(factor: float) -> Any:
    return lambda outputs, targets: F.cross_entropy(outputs, targets) * factor


def rows_backwards(model: nn.Module, batch: Any) -> Tensor:
    """The same batch with its rows in another order, and so its sums."""
    x, y = batch
    return F.cross_entropy(model(x.flip(0)), y.flip(0)) * 0.5


def test_one_overflow_skips_nobody_elses_step() -> None:
    half = {"precision": "fp16", "model": lambda: Net().float(), "data": (X.float(), Y), "optimizer": torch.optim.Adam}
    pack = [job(0, loss=times(0.5), **half), job(1, loss=times(1e4), **half)]
    assert len(planned(pack).parts) == 1
    quiet, loud = train(pack)
    steps = [float(optimizer_tensors(r).get("encode.weight/step", 0.0)) for r in (quiet, loud)]
    assert steps[1] < steps[0] == 12
    alone, backwards = shoal.solo(pack[0]), shoal.solo(job(0, **half, loss=None, step=rows_backwards))
    rounding = max(2.0**-10, *distances(backwards, alone).values())
    assert_close(quiet, alone, tolerance=10 * rounding)


def test_saving_one_member_writes_one_member() -> None:
    """A slice of a stack shares its storage: torch.save would write all of it."""
    wide = {"model": lambda: nn.Sequential(nn.Linear(D, 400), nn.Linear(400, C)), "data": (X.float(), Y)}
    results = train([job(s, **wide) for s in range(8)])
    single = sum(p.numel() * p.element_size() for p in results[3].model.parameters())
    for part in (results[3].model.state_dict(), results[3].model, results[3].optimizer_state):
        file = io.BytesIO()
        torch.save(part, file)
        assert len(file.getvalue()) < 1.5 * single + 20_000
    for tensor in results[3].model.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_weights_load_into_the_users_class_and_members_share_no_memory() -> None:
    results = train([job(s, optimizer=torch.optim.Adam, hparams={"lr": 0.01}) for s in range(3)])
    for result in results:
        assert type(result.model) is Net
        fresh = Net().double()
        fresh.load_state_dict(result.model.state_dict(), strict=True)
        optimizer = torch.optim.Adam(fresh.parameters(), lr=0.5)
        optimizer.load_state_dict(result.optimizer_state)
        assert optimizer.param_groups[0]["lr"] == 0.01
        F.cross_entropy(fresh(X), Y).backward()
        optimizer.step()
        assert float(optimizer.state[fresh.encode.weight]["step"]) == 13
    before = results[1].model.encode.weight.clone()
    with torch.no_grad():
        for p in results[0].model.parameters():
            p.zero_()
    assert torch.equal(results[1].model.encode.weight, before)


def test_trained_weights_can_be_trained_on() -> None:
    """Out and in again: a warm start from a member's weights is a job like any other."""
    first = train([job(s) for s in range(2)])
    again = [job(s, model=first[s].model) for s in range(2)]
    for result, own in zip(train(again), again, strict=True):
        assert_close(result, shoal.solo(own))
        assert result.model is not own.model


def test_the_users_own_module_is_never_trained() -> None:
    model = Net().double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train([job(s, model=model) for s in range(2)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_results_come_back_in_the_order_of_the_jobs() -> None:
    """Grouped by what they compute, but never pinned on another job."""
    rates = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    pack = [job(i, hparams={"lr": lr}, batch_size=(8, 6)[i % 2], steps=12 - i) for i, lr in enumerate(rates)]
    for result, own, lr in zip(train(pack), pack, rates, strict=True):
        assert (result.name, result.job, result.history[-1]["lr"]) == (own.name, own, lr)
        assert_close(result, shoal.solo(own))
