"""EMA and SWA of weights: as torch.optim.swa_utils has them, in every tier, wherever a member goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, assert_close, assert_same_bits, distance, numbers, train, whole
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.engine.planning.liveness import average_bytes, stacked_step
from shoal.engine.planning.memory import step_bytes
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.units.arrange import why_not
from shoal.preparation.checks import prepare
from shoal.reference import solo

N, D, C = 22, 6, 3
X, Y = numbers(1, N, D), whole(2, C, N)


def net() -> nn.Module:
    body = nn.Sequential(nn.Linear(D, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, C))
    return body.double()


class Branch(nn.Module):
    """Goes by the data, so it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def job(seed: int, average: shoal.EMA | shoal.SWA | None, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "val": (X[:9], Y[:9]), "loss": F.cross_entropy, "hparams": {"lr": 0.02},
        "batch_size": 4, "epochs": 4, "name": f"{seed}",
    }  # fmt: skip
    return shoal.Job(seed=seed, average=average, **(settings | changes))


AVERAGES = [
    shoal.EMA(decay=0.9),
    shoal.EMA(decay=0.6, every=3, start=5),
    shoal.EMA(decay=0.3, every="epoch"),
    shoal.EMA(decay=0.0),
    shoal.EMA(decay=1.0),
    shoal.SWA(),
    shoal.SWA(start_epoch=2),
    shoal.SWA(start_epoch=1, every=2),
]


def assert_both_weights(result: shoal.Result, alone: shoal.Result) -> None:
    """The averages and, beside them, the weights in training."""
    assert_close(result, alone)
    assert result.training_weights.keys() == alone.training_weights.keys() != set()
    for name, value in alone.training_weights.items():
        assert distance(result.training_weights[name], value) < 1e-9, name


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("swa", [False, True])
def test_the_reference_is_torchs_averaged_model_in_a_plain_loop(swa: bool, use_buffers: bool) -> None:
    ema = shoal.EMA(decay=0.8, use_buffers=use_buffers)
    average = shoal.SWA(start_epoch=1, use_buffers=use_buffers) if swa else ema
    result = solo(job(0, average, optimizer=torch.optim.SGD))
    torch.manual_seed(0)
    model = net()
    multi = get_swa_multi_avg_fn() if swa else get_ema_multi_avg_fn(0.8)  # type: ignore[no-untyped-call]

    def without_counts(averages: Any, values: Any, count: Any) -> None:  # torch has no mean of batch norm's count
        if averages[0].is_floating_point():
            multi(averages, values, int(count))  # of a tensor, 1 / (count + 1) would be a float32

    averaged = AveragedModel(model, multi_avg_fn=without_counts, use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    order = torch.Generator().manual_seed(0)
    losses = []
    for epoch in range(4):
        for rows in torch.randperm(N, generator=order).split(4):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            if not swa:
                averaged.update_parameters(model)
        if swa and epoch >= 1:
            averaged.update_parameters(model)
        chosen = averaged if epoch >= 1 or not swa else model
        chosen.eval()
        with torch.no_grad():
            batches = zip(X[:9].split(4), Y[:9].split(4), strict=True)
            losses.append(sum(float(F.cross_entropy(chosen(x), y)) * len(x) for x, y in batches) / 9)
        model.train()
    assert [row["val_loss"] for row in result.history] == pytest.approx(losses, rel=1e-12)
    for name, value in averaged.module.state_dict().items():
        if value.is_floating_point():
            assert distance(result.model.state_dict()[name], value) < 1e-12, name
    for name, param in model.named_parameters():
        assert distance(result.training_weights[name], param) < 1e-12, name


def test_members_with_averages_of_their_own_in_one_stack() -> None:
    jobs = [job(seed, average) for seed, average in enumerate(AVERAGES)]
    results = train(jobs)
    assert {result.tier for result in results} == {"stacked"}
    for result, one in zip(results, jobs, strict=True):
        assert_both_weights(result, solo(one))
    shown = shoal.explain(jobs, device="cpu")
    assert len(shown.plan.parts) == 1, shown


def test_an_average_by_the_epoch_is_updated_at_the_ends_of_epochs_only() -> None:
    """An epoch has six steps: one that begins after the eighth has its first update after the twelfth."""
    rules = [shoal.EMA(decay=0.5, every="epoch", start=start) for start in (6, 8, 11, 12)]
    after_6, after_8, after_11, after_12 = train([job(0, rule, name=str(rule)) for rule in rules])
    assert_same_bits(after_8, after_6)
    assert_same_bits(after_11, after_6)
    assert distance(after_12.model.state_dict()["0.weight"], after_6.model.state_dict()["0.weight"]) > 1e-6


def test_decays_of_nothing_and_of_all() -> None:
    rules = [None, shoal.EMA(decay=0.0), shoal.EMA(decay=1.0)]
    plain, latest, first = train([job(0, rule, name=str(rule)) for rule in rules])
    one_step = solo(job(0, None, epochs=None, steps=1, val=None))
    for result, same in ((latest, plain), (first, one_step)):
        for a, b in zip(result.model.parameters(), same.model.parameters(), strict=True):
            assert distance(a, b) < 1e-12


def test_alone_in_a_plain_loop() -> None:
    jobs = [job(seed, average, model=Branch) for seed, average in enumerate(AVERAGES)]
    for result, one in zip(train(jobs), jobs, strict=True):
        assert result.tier == "serial"
        assert_both_weights(result, solo(one))


def test_averaged_buffers() -> None:
    jobs = [job(0, shoal.EMA(decay=0.7, use_buffers=True)), job(1, shoal.SWA(use_buffers=True))]
    jobs += [job(2, shoal.EMA(decay=0.7, use_buffers=True), model=Branch), job(3, shoal.EMA(decay=0.7))]
    for result, one in zip(train(jobs), jobs, strict=True):
        assert_both_weights(result, solo(one))
    averaged, own = (train([job(0, shoal.EMA(decay=0.7, use_buffers=use))])[0].model for use in (True, False))
    assert not torch.equal(averaged[1].running_mean, own[1].running_mean)
    assert torch.equal(averaged[1].num_batches_tracked, own[1].num_batches_tracked)


def test_batch_norm_is_estimated_again_as_in_torch() -> None:
    result = train([job(0, shoal.SWA(start_epoch=1))])[0]
    update_bn(list(X.split(4)), result.model)
    alone = solo(job(0, shoal.SWA(start_epoch=1)))
    update_bn(list(X.split(4)), alone.model)
    assert_close(result, alone)


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(D, D).double(), nn.Linear(D, D).double()
        self.out.weight = self.embed.weight
        self.head = nn.Linear(D, C).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.out(torch.tanh(self.embed(x)))))
        return out


class Bounded(Tied):
    """Goes by the data, so it has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


SETTINGS: dict[str, dict[str, Any]] = {
    "frozen": {"model": frozen},
    "tied": {"model": Tied},
    "accumulate": {"accumulate": 4},
    "best": {"keep": "best", "hparams": {"lr": 0.3}},
    "stops early": {"keep": "best", "stop": shoal.EarlyStop(patience=1), "hparams": {"lr": 0.5}, "epochs": 8},
    "within epochs": {"val_every_steps": 2, "keep": "best"},
    "steps": {"epochs": None, "steps": 15},
    "schedule": {"schedule": lambda step: 1 / (1 + step)},
    "clip": {"clip_norm": 0.1},
    "no rule": {"optimizer": torch.optim.Adamax, "hparams": {"lr": 0.02, "maximize": True}},
    "complex": {"model": lambda: nn.Sequential(nn.Linear(D, C, dtype=torch.complex128)), "data": (X.cdouble(), Y),
                "val": (X[:9].cdouble(), Y[:9]), "loss": lambda out, y: F.cross_entropy(out.abs(), y)},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_with_other_settings(setting: str) -> None:
    averages = [shoal.EMA(decay=0.8), shoal.EMA(decay=0.5, every=2), shoal.SWA(every=1)]
    jobs = [job(seed, average, **SETTINGS[setting]) for seed, average in enumerate(averages)]
    results = assert_as_alone(jobs)
    for result, one in zip(results, jobs, strict=True):
        assert_both_weights(result, solo(one))


def test_a_frozen_weight_is_in_no_average() -> None:
    member = prepare([job(0, shoal.EMA(), model=frozen)], torch.device("cpu"))[0]
    trained = sum(p.nbytes for p in member.model.parameters() if p.requires_grad)
    assert average_bytes(member) == trained < sum(p.nbytes for p in member.model.parameters())
    assert "0.weight" not in train([job(0, shoal.EMA(decay=0.5), model=frozen)])[0].training_weights


def test_a_member_that_diverges_keeps_the_average_from_before() -> None:
    jobs = [job(seed, shoal.EMA(decay=0.8), hparams={"lr": lr}, optimizer=torch.optim.SGD, clip_norm=clip, model=Tied)
            for seed, (lr, clip) in enumerate([(0.01, None), (1e308, None), (0.02, 1.0)])]  # fmt: skip
    results = train(jobs)
    assert [(r.status, r.tier) for r in results] == [("done", "stacked"), ("diverged", "stacked"), ("done", "stacked")]
    for result, one in zip(results, jobs, strict=True):
        alone = solo(one)
        assert (result.status, result.steps) == (alone.status, alone.steps)
        for name, value in (alone.model.state_dict() | alone.training_weights).items():
            assert distance((result.model.state_dict() | result.training_weights)[name], value) < 1e-9, name
    failed = train([job(0, shoal.EMA(decay=0.8), model=Bounded, hparams={"lr": 1e308}, optimizer=torch.optim.SGD)])[0]
    assert failed.status == "diverged"
    assert all(torch.isfinite(p).all() for p in failed.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_as_torch_averages_them(dtype: torch.dtype) -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(D, C)).to(dtype)

    data, val = (X.to(dtype), Y), (X[:9].to(dtype), Y[:9])
    jobs = [
        job(seed, shoal.EMA(decay=decay), model=small, data=data, val=val, optimizer=torch.optim.SGD, epochs=1)
        for seed, decay in enumerate([0.9, 0.3, 0.99])
    ]
    for result, one in zip(train(jobs), jobs, strict=True):
        alone = solo(one)
        for name, value in alone.model.state_dict().items():
            assert value.dtype == dtype and distance(result.model.state_dict()[name], value) < 2e-2, name


def test_an_average_that_never_begins_is_said() -> None:
    jobs = [job(0, shoal.EMA(start=24)), job(1, shoal.EMA(start=23, decay=0.1)), job(2, shoal.SWA(start_epoch=4))]
    with pytest.warns(shoal.ShoalWarning, match="comes after step (25|30), and the job has 24 steps") as said:
        results = shoal.train(jobs, device="cpu")
    assert len(said) == 2
    assert [bool(r.training_weights) for r in results] == [False, True, False]
    for result, one in zip(results, jobs, strict=True):
        assert_close(result, solo(one))


def test_the_same_bits_with_and_without_others() -> None:
    jobs = [job(seed, average) for seed, average in enumerate(AVERAGES)]
    together = train(jobs, deterministic=True)
    for result, one in zip(together, jobs, strict=True):
        assert_same_bits(result, train([one], deterministic=True)[0])


def test_worker_processes() -> None:
    jobs = [job(seed, average) for seed, average in enumerate(AVERAGES)]
    for result, one in zip(shoal.train(jobs, device="cpu", threads=2), jobs, strict=True):
        assert_both_weights(result, solo(one))


def test_killed_and_resumed(tmp_path: Path) -> None:
    def run(out: Path | None, kill_after: int = 0) -> shoal.Results:
        written = 0

        def kill(event: shoal.Event) -> None:
            nonlocal written
            written += event.kind == "checkpoint"
            if written == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        jobs = [job(seed, average, epochs=6) for seed, average in enumerate(AVERAGES)]
        jobs += [job(10 + seed, average, epochs=6, keep="best") for seed, average in enumerate(AVERAGES)]
        jobs.append(job(9, shoal.EMA(decay=0.8), epochs=6, model=Branch))
        return shoal.train(
            jobs, device="cpu", threads=1, out=out, checkpoint_every=0.001, deterministic=True,
            events=kill if kill_after else None,
        )  # fmt: skip

    pid = os.fork()
    if pid == 0:
        try:
            run(tmp_path, 3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    unfinished = shoal.load(tmp_path)
    assert any(result.status == "unfinished" and result.steps for result in unfinished)
    assert not any(result.training_weights for result in unfinished if result.status == "unfinished")
    for resumed, left_alone in zip(run(tmp_path), run(None), strict=True):
        assert_same_bits(resumed, left_alone)
        for name, value in left_alone.training_weights.items():
            assert torch.equal(resumed.training_weights[name], value), name
    loaded = shoal.load(tmp_path)
    assert loaded["1"].job.average == AVERAGES[1]
    (tmp_path / "results.json").unlink()
    for other in (loaded, shoal.load(tmp_path)):  # with results.json, and from the checkpoints alone
        for result, left_alone in zip(other, run(None), strict=True):
            assert result.training_weights.keys() == left_alone.training_weights.keys()
            for name, value in left_alone.training_weights.items():
                assert torch.equal(result.training_weights[name], value), name


def test_the_copy_of_the_weights_is_counted() -> None:
    with_one, without = prepare([job(0, shoal.EMA()), job(1, None)], torch.device("cpu"))
    cache = TraceCache()
    recipes = [cache.recipe(member) for member in (with_one, without)]
    rows = 64
    weights = rows * sum(p.nbytes for p in with_one.model.parameters())
    more = stacked_step(recipes[0], rows).state - stacked_step(recipes[1], rows).state
    assert weights <= more <= weights + 512 * 8
    assert step_bytes(with_one, recipes[0]).optimizer - step_bytes(without, recipes[1]).optimizer == weights / rows
    assert step_bytes(with_one, None).optimizer > step_bytes(without, None).optimizer
    assert why_not(recipes[0]) == "it averages its weights"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: shoal.EMA(decay=1.5), "EMA: decay is 1.5; use a number from 0 to 1"),
        (lambda: shoal.EMA(decay="x"), "EMA: decay is 'x'"),
        (lambda: shoal.EMA(start=-1), "EMA: start is -1; use a whole number, 0 or more"),
        (lambda: shoal.EMA(every=0), "EMA: every is 0; use 'epoch', or a whole number of optimizer steps, 1 or more"),
        (lambda: shoal.SWA(every="step"), "SWA: every is 'step'"),
        (lambda: shoal.SWA(start_epoch=1.5), "SWA: start_epoch is 1.5"),
        (lambda: shoal.SWA(use_buffers=1), "SWA: use_buffers is 1; use True or False"),
        (lambda: job(0, 0.9), "average is 0.9; use shoal.EMA"),
    ],
)
def test_what_no_average_can_be(make: Any, words: str) -> None:
    with pytest.raises(shoal.JobError, match=words.replace("(", "\\(")):
        make()


def test_a_split_and_a_placed_training_refuse_it() -> None:
    with pytest.raises(shoal.JobError, match=r"average is set.*leave it out under a split"):
        shoal.split.local_sgd(job(0, shoal.EMA()), workers=2)


class Endless(IterableDataset[Any]):
    """A stream that does not say how long it is."""

    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_averages_over_a_data_loader() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    rules = (shoal.SWA(start_epoch=1), shoal.EMA(decay=0.7, every="epoch"), shoal.EMA(decay=0.5, every=2))
    jobs = [job(seed, rule, data=loader, data_seed=3) for seed, rule in enumerate(rules)]
    assert_as_alone(jobs)
    stream = DataLoader(Endless(), batch_size=4)
    with pytest.raises(shoal.JobError, match=r"counts epochs, and the loader does not say how many batches"):
        shoal.train([job(0, shoal.SWA(), data=stream)], device="cpu")
    assert_as_alone([job(0, shoal.SWA(every=3), data=stream), job(1, shoal.EMA(), data=stream)])
